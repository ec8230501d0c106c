"""Gathering reports from replicas of which some are slow, dead, or obey another scheduler."""

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api.report import ReplicaReport
from deployments.scheduler.gatherer import PROBE_S, SILENCE_S, SPACING_S, EngineReporters, Gatherer
from migration.protocol.errors import PeerLost, Refused
from migration.protocol.record import MigrationRecord
from policies.causes import Cause
from policies.cluster.changes import Arrival
from policies.decision.deciding import place
from policies.decision.limits import Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool
from policies.decision.reports import Roster
from policies.model import SOLE_POOL, Phase, ReplicaId, ReplicaLoad, ReplicaState, RequestId, RequestLoad, Tokens
from tests.deployments.scheduler.fakes import Answers, FakeListing, FakeMembership, Reporting, make_report
from tests.virtual_time import VirtualLoop, now

pytestmark = pytest.mark.virtual_time

TIMEOUT_S = 1.0
A, B = ReplicaId("a"), ReplicaId("b")
DEAD = PeerLost("dead")


class Engines:
    """Implements `Reporters`: a replica answers with a report or an error, after `takes_s`, or never ("silent")."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {ReplicaId(name): answer for name, answer in answers.items()}
        self.reporting = Reporting()
        self.takes_s = 0.01
        self.asked: list[tuple[str, float]] = []
        self.forgotten: list[ReplicaId] = []
        self.versions: list[int | None] = []
        self.lost: set[ReplicaId] = set()

    def serving(self) -> Iterable[ReplicaId]:
        return tuple(self.answers)

    async def report(self, replica: ReplicaId, version: int | None) -> ReplicaReport:
        self.asked.append((replica, now()))
        self.versions.append(version)
        await asyncio.sleep(self.takes_s)
        answer = self.answers[replica]
        if answer == "silent":
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        report = self.reporting.report(answer, version, now())
        if replica in self.lost:
            await asyncio.Event().wait()
        return report

    def forget(self, replica: ReplicaId) -> None:
        self.forgotten.append(replica)

    def times(self) -> list[float]:
        """When gatherings began, which ask all replicas that are not silent."""
        return sorted({at for replica, at in self.asked if replica == A})


class Gatherings:
    """A gatherer and what it has gathered."""

    def __init__(self, **answers: Any) -> None:
        self.engines = Engines(**answers)
        self.gathered: list[dict[ReplicaId, ReplicaLoad]] = []
        self.records: list[MigrationRecord] = []
        self.roster = Roster()
        self.gatherer = Gatherer(self.engines, self.roster, now, TIMEOUT_S, self.records.extend, self._gathered)

    def _gathered(self) -> None:
        assert set(self.gatherer.gauges) == set(self.roster.statuses)
        self.gathered.append({replica: self.roster.load(replica) for replica in self.roster.statuses})

    async def gather(self) -> dict[ReplicaId, ReplicaLoad]:
        """The loads after a gathering."""
        await self.gatherer.gather(urgent=True)
        return self.gathered[-1]


async def test_every_replica_is_asked_at_once() -> None:
    world = Gatherings(a=make_report("a"), b=make_report("b"))
    await asyncio.sleep(5.0)
    assert set(await world.gather()) == {"a", "b"}
    assert world.engines.asked == [("a", 5.0), ("b", 5.0)]


async def test_replicas_that_run_and_those_that_stop_are_asked_with_the_fence() -> None:
    report = Reporting().report(make_report("a"), None)
    replicas, listing = Answers(a=report), FakeListing("ab")
    listing.stopping = lambda: (B,)  # type: ignore[method-assign]
    reporters = EngineReporters(replicas, FakeMembership("a"), listing, 7)
    assert tuple(reporters.serving()) == (A, B)
    assert await reporters.report(A, 3) == report
    assert replicas.asked == [("a", "report", 7, 3)]


# --- single flight ------------------------------------------------------------------------------------


async def test_whoever_asks_during_a_gathering_joins_it() -> None:
    world = Gatherings(a=make_report("a"))
    await asyncio.gather(*(world.gatherer.gather() for _ in range(10)))
    assert len(world.engines.asked) == 1 == len(world.gathered)


async def test_however_many_ask_gatherings_are_a_fifth_of_a_second_apart() -> None:
    world = Gatherings(a=make_report("a"))

    async def look() -> None:
        for _ in range(40):
            await world.gatherer.gather()

    await asyncio.gather(*(look() for _ in range(5)))
    times = world.engines.times()
    assert len(times) == 40
    assert all(after - before >= SPACING_S - 1e-9 for before, after in pairwise(times))


async def test_an_epoch_does_not_wait_for_its_turn() -> None:
    world = Gatherings(a=make_report("a"))
    await world.gather()
    looking = asyncio.create_task(world.gatherer.gather())
    await asyncio.sleep(0.02)
    await world.gather()
    await looking
    assert world.engines.times() == [0.0, pytest.approx(0.03)], "and who looks has joined it"


async def test_one_who_leaves_takes_the_gathering_from_nobody() -> None:
    world = Gatherings(a=make_report("a"))
    waiting = [asyncio.create_task(world.gatherer.gather()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await waiting[1]
    assert len(world.gathered) == 1


async def test_who_is_in_a_hurry_has_what_has_arrived() -> None:
    world = Gatherings(a=make_report("a"), b="silent")
    await world.gatherer.gather_within(0.3)
    assert now() == pytest.approx(0.3) and set(world.roster.statuses) == {"a"} and not world.gathered


# --- replicas that do not answer ----------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["silent", DEAD], ids=["silent", "dead"])
async def test_a_replica_that_does_not_report_keeps_its_last_for_a_while(fault: Any) -> None:
    a, b, newer = make_report("a"), make_report("b"), make_report("b", free=5)
    world = Gatherings(a=a, b=b)
    await world.gather()
    world.engines.answers = {A: fault, B: newer}
    assert await world.gather() == {"a": a.load, "b": newer.load}
    await asyncio.sleep(SILENCE_S)
    assert await world.gather() == {"b": newer.load}
    world.gatherer.close()


async def test_only_the_first_gathering_waits_for_a_silent_replica() -> None:
    world = Gatherings(a=make_report("a"), b="silent")
    await world.gather()
    assert now() == TIMEOUT_S
    await world.gather()
    assert now() == pytest.approx(TIMEOUT_S + world.engines.takes_s)
    world.gatherer.close()


async def test_a_silent_replica_is_probed_until_it_reports_again() -> None:
    b = make_report("b")
    world = Gatherings(a=make_report("a"), b=DEAD)
    await world.gather()
    await asyncio.sleep(2.5 * PROBE_S)
    assert [replica for replica, _ in world.engines.asked[2:]] == ["b"] * 2
    world.engines.answers[B] = b
    await asyncio.sleep(PROBE_S)
    assert world.roster.load(B) == b.load
    assert await world.gather() == {"a": make_report("a").load, "b": b.load}
    asked = [replica for replica, _ in world.engines.asked]
    await asyncio.sleep(5 * PROBE_S)
    assert [replica for replica, _ in world.engines.asked] == asked, "its probe has ended"


async def test_a_replica_whose_engine_fails_gets_no_more_requests() -> None:
    world = Gatherings(a=make_report("a"), b=make_report("b"))
    await world.gather()
    world.engines.answers[A] = RuntimeError("the engine died")
    assert set(await world.gather()) == {"b"}


async def test_a_replica_that_never_reported_is_unknown() -> None:
    world = Gatherings(a=make_report("a"), b="silent")
    assert set(await world.gather()) == {"a"}
    world.gatherer.close()


async def test_a_replica_that_serves_no_more_is_forgotten_and_not_probed() -> None:
    world = Gatherings(a=make_report("a"), b=DEAD, c=make_report("c"))
    await world.gather()
    world.engines.answers = {A: make_report("a")}
    assert set(await world.gather()) == {"a"}
    asked = len(world.engines.asked)
    await asyncio.sleep(10 * PROBE_S)
    assert len(world.engines.asked) == asked


async def test_a_newer_scheduler_ends_this_one() -> None:
    world = Gatherings(a=make_report("a"), b=Refused("a newer scheduler is at work", Cause.SUPERSEDED))
    for _ in range(2):
        with pytest.raises(Refused, match="newer"):
            await world.gather()


# --- versions -----------------------------------------------------------------------------------------


def busy(tokens: int) -> tuple[RequestLoad, ...]:
    return (RequestLoad(RequestId("r"), "r", Tokens(tokens), Phase.DECODE, 0.0, 0),)


async def test_replicas_are_asked_for_changes_since_their_last_report() -> None:
    world = Gatherings(a=make_report("a", requests=busy(1)))
    for tokens in (2, 3):
        await world.gather()
        world.engines.answers[A] = make_report("a", requests=busy(tokens))
    assert world.engines.versions == [None, 1]
    assert [q.tokens for q in (await world.gather())[A].requests] == [3]
    assert world.engines.versions == [None, 1, 2]


async def test_after_a_lost_answer_a_replica_sends_a_snapshot() -> None:
    world = Gatherings(a=make_report("a", requests=busy(1)), b=make_report("b"))
    await world.gather()
    world.engines.lost = {A}
    world.engines.answers[A] = make_report("a")
    assert [q.id for q in (await world.gather())[A].requests] == ["r"], "the last report that arrived"
    world.engines.lost = set()
    await asyncio.sleep(2 * PROBE_S)
    assert world.roster.load(A).requests == ()
    world.engines.answers[A] = make_report("a", requests=busy(2))
    assert [q.tokens for q in (await world.gather())[A].requests] == [2]
    assert [
        version
        for version, replica in zip(world.engines.versions, world.engines.asked, strict=True)
        if replica[0] == "a"
    ] == [None, 1, None, 3]


async def test_after_a_lost_answer_of_another_scheduler_a_replica_sends_a_snapshot() -> None:
    world = Gatherings(a=make_report("a", requests=busy(1)))
    await world.gather()
    world.engines.reporting.report(make_report("a"), None)
    assert [q.id for q in (await world.gather())[A].requests] == ["r"]


async def test_changes_since_a_version_that_was_forgotten_are_refused_and_a_snapshot_follows() -> None:
    world = Gatherings(a=make_report("a", requests=busy(1)))
    await world.gather()
    gathering = asyncio.create_task(world.gather())
    await asyncio.sleep(0)
    await asyncio.sleep(world.engines.takes_s / 2)
    world.roster.forget(A)
    assert await gathering == {}
    assert [q.id for q in (await world.gather())[A].requests] == ["r"]


# --- the log ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["silent", DEAD, RuntimeError("the engine died")], ids=["silent", "dead", "failing"])
async def test_the_log_tells_changes_only(fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    world = Gatherings(a=make_report("a"), b=make_report("b"))
    for answer in (make_report("b"), fault, make_report("b")):
        world.engines.answers[B] = answer
        for _ in range(5):
            await world.gather()
            await asyncio.sleep(PROBE_S)
    told = [record.getMessage().split(":")[0] for record in caplog.records]
    failing = isinstance(fault, RuntimeError)
    assert told == ["replica b fails to report" if failing else "replica b does not report", "replica b reports again"]


# --- placements, made at any time ---------------------------------------------------------------------

TTL_S = 10.0


class Town:
    """Replicas that run what is placed on them: a request arrives some time after its placement.

    An epoch observes the newest reports. `check` is called whenever anything has happened.
    """

    def __init__(self, delays: list[float], silent: tuple[float, float]) -> None:
        self.running: dict[ReplicaId, set[RequestId]] = {A: set(), B: set()}
        self.delays = itertools.cycle(delays)
        self.silent = silent
        self.memory = PoolMemory(Terms(mode=Mode.OFF, placement_ttl_s=TTL_S))
        self.roster = Roster()
        self.reporting = Reporting()
        self.gatherer = Gatherer(self, self.roster, now, TIMEOUT_S, lambda _: None, self._gathered)
        self.placed: set[RequestId] = set()
        self.numbers = itertools.count(1)
        self.newest: dict[ReplicaId, int] = {}

    def serving(self) -> Iterable[ReplicaId]:
        return (A, B)

    def forget(self, replica: ReplicaId) -> None:
        pass

    async def report(self, replica: ReplicaId, version: int | None) -> ReplicaReport:
        await asyncio.sleep(next(self.delays))
        if replica == B and self.silent[0] <= now() < self.silent[1]:
            await asyncio.Event().wait()
        requests = (RequestLoad(r, r, Tokens(8), Phase.DECODE, 1.0, 0) for r in self.running[replica])
        present = replace(make_report(replica, free=1000, requests=tuple(requests)), preemptions=next(self.numbers))
        report = self.reporting.report(present, version)
        await asyncio.sleep(next(self.delays))
        return report

    def _gathered(self) -> None:
        for replica, gauges in self.gatherer.gauges.items():
            assert gauges.preemptions >= self.newest.get(replica, 0), "an older report has replaced a newer one"
            self.newest[replica] = gauges.preemptions
        self.check()

    async def place(self, request: RequestId, at_s: float, replica: ReplicaId, way_s: float) -> None:
        """Place a request on a replica that has reported; it arrives there `way_s` later."""
        await asyncio.sleep(at_s)
        if replica in self.memory.cluster.replicas:
            place(self.memory, Arrival(request, Tokens(8)), now(), {A, B} - {replica})
            self.placed.add(request)
            self.check()
            await asyncio.sleep(way_s)
            self.running[replica].add(request)

    async def look(self, at_s: float) -> None:
        """What an operator does."""
        await asyncio.sleep(at_s)
        await self.gatherer.gather_within(0.3)

    async def epochs(self) -> None:
        """What the scheduler does."""
        while True:
            await self.gatherer.gather(urgent=True)
            self.memory.observe(self.roster.observe(Pool(SOLE_POOL)), now())
            self.check()
            await asyncio.sleep(1.0)

    def check(self) -> None:
        """Every request counts, and counts once."""
        seen = {request.id for replica in self.roster.statuses for request in self.roster.load(replica).requests}
        expected = self.memory.locations.placed.items()
        coming = [q for q, placed in expected if not self.roster.holds(q) and placed.expires_at > now()]
        assert sorted([*seen, *coming]) == sorted(self.placed)
        assert sorted(self.memory.cluster.requests) == sorted(self.placed)


seconds = st.floats(0.0, 12.0)


@given(
    st.lists(st.tuples(seconds, st.sampled_from([A, B]), st.floats(0.0, 2.0)), max_size=6),
    st.lists(seconds, max_size=8),
    st.lists(st.floats(0.0, 0.3), min_size=1, max_size=7),
    st.tuples(seconds, st.floats(0.0, 1.5)),
)
def test_no_placement_is_ever_forgotten_or_counted_twice(
    placements: list[tuple[float, ReplicaId, float]],
    looks: list[float],
    delays: list[float],
    silence: tuple[float, float],
) -> None:
    async def live() -> None:
        town = Town(delays, (silence[0], sum(silence)))
        tasks = [town.place(RequestId(f"r{number}"), *placement) for number, placement in enumerate(placements)]
        epochs = asyncio.create_task(town.epochs())
        await asyncio.gather(*tasks, *map(town.look, looks), asyncio.sleep(16.0))
        epochs.cancel()
        town.gatherer.close()
        if epochs.done():
            epochs.result()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(live())


# --- probes that fail, and replicas that stop ---------------------------------------------------------


async def test_a_replica_whose_probe_fails_is_asked_again_by_gatherings() -> None:
    world = Gatherings(a="silent", b=make_report("b"))
    await world.gather()
    faults = [RuntimeError("one bad record")]

    def take(records: Iterable[MigrationRecord]) -> None:
        if faults:
            raise faults.pop()

    world.gatherer._on_records = take
    world.engines.answers[A] = make_report("a")
    await asyncio.sleep(PROBE_S + 0.1)
    assert not faults and not world.gatherer._probes
    before = len(world.engines.asked)
    assert set(await world.gather()) == {"a", "b"}
    assert len(world.engines.asked) == before + 2


@pytest.mark.parametrize(
    ("leaving", "state", "requests", "warned"),
    [
        ((), ReplicaState.DRAINING, 0, False),
        ((), ReplicaState.DRAINING, 1, True),
        ((A,), ReplicaState.RUNNING, 0, False),
        ((A,), ReplicaState.RUNNING, 1, True),
        ((), ReplicaState.RUNNING, 0, True),
    ],
)
async def test_a_replica_that_stops_without_requests_falls_silent_without_a_warning(
    caplog: pytest.LogCaptureFixture,
    leaving: tuple[ReplicaId, ...],
    state: ReplicaState,
    requests: int,
    warned: bool,
) -> None:
    caplog.set_level(logging.WARNING, "ray.serve")
    loads = tuple(RequestLoad(RequestId(f"r{i}"), "", Tokens(8), Phase.DECODE, 1.0, 0) for i in range(requests))
    present = make_report("a", requests=loads)
    world = Gatherings(a=replace(present, load=replace(present.load, state=state)))
    world.gatherer._leaving = lambda: leaving
    await world.gather()
    world.engines.answers[A] = "silent"
    await world.gather()
    assert ("does not report" in caplog.text) is warned
    assert A in world.gatherer._probes
