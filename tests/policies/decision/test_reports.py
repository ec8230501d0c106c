"""Snapshots and changes of replicas come to the same observations, and so to the same memory and plans."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.decision.deciding import decide_pool
from policies.decision.limits import LiveLimits, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport
from policies.decision.reports import Report, Reporter, Roster, status_of
from policies.model import SOLE_POOL, Phase, ReplicaId, ReplicaLoad, ReplicaState, RequestId, Tokens
from policies.paths.prices import Profile
from policies.prefix.change import CacheChange, Tier
from policies.rules.registry import POLICIES
from tests.policies.decision.observed import Drawn, observed

STATES = ["", "", "", "", "*", "^"]
MARKS = ["", "", "", "", "?", "~", ">", "!"]


def drawing(draw: random.Random, sizes: dict[str, int]) -> str:
    """A cluster of up to five replicas with those requests; now and then one is on two replicas."""
    replicas = [f"{name}{draw.choice(STATES)}:" for name in "abcde"[: draw.randrange(1, 6)]]
    for name, tokens in sizes.items():
        for index in draw.sample(range(len(replicas)), min(len(replicas), draw.choice([1, 1, 1, 1, 2]))):
            if "*" not in replicas[index]:
                replicas[index] += f" {name}{tokens}{draw.choice(MARKS)}"
    return " | ".join(replicas)


@st.composite
def histories(draw: st.DrawFn) -> list[Drawn]:
    """Requests that come, grow, go, and turn up elsewhere."""
    dice = random.Random(draw(st.integers(0, 1 << 32)))
    sizes: dict[str, int] = {}
    history = []
    for at in range(draw(st.integers(1, 7))):
        for name in dice.sample(sorted(sizes), dice.randrange(0, len(sizes) + 1) // 2):
            del sizes[name]
        sizes = {name: tokens + dice.randrange(0, 9) for name, tokens in sizes.items()}
        sizes |= {dice.choice("pqrst") + dice.choice("uvwxyz"): dice.randrange(1, 60) for _ in range(dice.randrange(5))}
        history.append(observed(drawing(dice, sizes), float(at), most=6))
    return history


class Wire:
    """Replicas that report, and the scheduler's side. `forgets` says when a replica starts anew."""

    def __init__(self, changes: bool, dice: random.Random) -> None:
        self.roster = Roster()
        self.changes = changes
        self.dice = dice
        self.starts = itertools.count(0, 100)
        self.reporters: dict[ReplicaId, Reporter] = {}

    def observe(self, drawn: Drawn) -> PoolReport:
        for replica in sorted(self.roster.statuses.keys() - {load.id for load in drawn.loads}):
            self.roster.forget(replica)
        self.reporters = {replica: r for replica, r in self.reporters.items() if replica in {q.id for q in drawn.loads}}
        for load in drawn.loads:
            self.roster.take(self.report(load))
        return self.roster.observe(Pool(SOLE_POOL, max_replicas=drawn.most))

    def report(self, load: ReplicaLoad) -> Report:
        if not self.changes:
            return Report(0, status_of(load), None, load.requests)
        if self.dice.random() < 0.1:
            self.reporters.pop(load.id, None)
        reporter = self.reporters.setdefault(load.id, Reporter(first=next(self.starts)))
        if self.dice.random() < 0.2:
            self.ask_in_vain(reporter, load)
        report = reporter.report(load, self.roster.version(load.id))
        assert report.since is None or report.since == self.roster.version(load.id)
        return report

    def ask_in_vain(self, reporter: Reporter, load: ReplicaLoad) -> None:
        """The replica answers, to an earlier request of the scheduler's or of another one's; the answer is lost."""
        fewer = replace(load, requests=load.requests[1:])
        reporter.report(fewer, self.dice.choice([None, self.roster.version(load.id)]))


@given(st.sampled_from(sorted(POLICIES)), histories(), st.integers(0, 1 << 32))
def test_changes_and_snapshots_come_to_the_same(name: str, history: list[Drawn], seed: int) -> None:
    wires = [Wire(changes, random.Random(seed)) for changes in (False, True)]
    memories = [PoolMemory(Terms(name, LiveLimits(linger_s=0.0, foresight_s=0.0))) for _ in wires]
    for drawn in history:
        seen = [wire.observe(drawn) for wire in wires]
        assert seen[0] == seen[1]
        first, second = (decide_pool(memory, one, drawn.now) for memory, one in zip(memories, seen, strict=True))
        assert first == second
        places = [{q.id: (q.replica and q.replica.id, q.tokens) for q in m.cluster.requests.values()} for m in memories]
        assert places[0] == places[1]


@given(histories(), st.integers(0, 1 << 32))
def test_what_was_observed_adds_up_to_what_is_there(history: list[Drawn], seed: int) -> None:
    wire = Wire(True, random.Random(seed))
    there: dict[RequestId, tuple[ReplicaId | None, int]] = {}
    for drawn in history:
        seen = wire.observe(drawn)
        for gone in seen.gone:
            del there[gone]
        there |= {resident.load.id: (resident.replica, resident.load.tokens) for resident in seen.requests}
        there |= {name: (there[name][0], tokens) for name, tokens in seen.sizes.items()}
        assert [sizes_of(wire.roster.load(load.id)) for load in drawn.loads] == [sizes_of(load) for load in drawn.loads]
        places = {(load.id, request.id): request.tokens for load in drawn.loads for request in load.requests}
        assert set(there) == {name for _, name in places}
        assert all(places.get((replica or ReplicaId(""), name)) == tokens for name, (replica, tokens) in there.items())


def sizes_of(load: ReplicaLoad) -> tuple[ReplicaLoad, dict[RequestId, int]]:
    return replace(load, requests=()), {request.id: request.tokens for request in load.requests}


def one(drawing: str) -> ReplicaLoad:
    (load,) = observed(drawing).loads
    return load


def test_a_replica_answers_its_last_version_with_changes_and_any_other_with_a_snapshot() -> None:
    reporter = Reporter()
    first = reporter.report(one("a: p10 q20"), None)
    second = reporter.report(one("a: p12 r30"), first.version)
    assert (first.since, [q.id for q in first.requests]) == (None, ["p", "q"])
    assert (second.since, [q.id for q in second.requests]) == (first.version, ["r"])
    assert (dict(second.sizes), second.gone) == ({"p": 12}, ("q",))
    assert reporter.report(one("a: p13"), first.version).since is None
    waiting = reporter.report(one("a: p13?"), reporter._version)
    assert [(q.id, q.phase) for q in waiting.requests] == [("p", Phase.WAITING)]


def test_changes_since_another_version_are_refused() -> None:
    roster, reporter = Roster(), Reporter()
    first = reporter.report(one("a: p10"), None)
    second = reporter.report(one("a: p11"), first.version)
    with pytest.raises(ValueError, match="changes since"):
        roster.take(second)
    roster.take(first)
    roster.take(second)
    assert roster.version(ReplicaId("a")) == second.version


def test_a_snapshot_has_the_profile_which_is_observed_once() -> None:
    profile = Profile("n", "c", 4.0, 1e6)
    roster, reporter, a = Roster(), Reporter(profile), ReplicaId("a")
    first = reporter.report(one("a: p10"), None)
    assert first.profile is profile
    roster.take(first)
    assert roster.observe(Pool(SOLE_POOL)).profiles == {a: profile}
    second = reporter.report(one("a: p11"), roster.version(a))
    assert second.profile is None
    roster.take(reporter.report(one("a: p12"), None))
    assert roster.observe(Pool(SOLE_POOL)).profiles == {}
    roster.forget(a)
    assert roster.version(a) is None
    roster.take(reporter.report(one("a: p12"), None))
    assert roster.observe(Pool(SOLE_POOL)).profiles == {a: profile}


def test_ages_go_on_between_full_reports_of_a_request() -> None:
    roster, reporter, a = Roster(), Reporter(), ReplicaId("a")
    young = one("a: p10")
    roster.take(reporter.report(young, None, at=100.0))
    older = replace(young, requests=(replace(young.requests[0], tokens=Tokens(12), age_s=2.5),))
    report = reporter.report(older, roster.version(a), at=102.5)
    assert report.requests == () and report.sizes == {"p": 12}
    roster.take(report)
    assert roster.load(a) == older
    assert [(replica, q.tokens) for replica, q in roster.find("p")] == [("a", 12)] and roster.find("q") == []


def test_replicas_that_serve_stops_drain_whatever_they_report_and_others_have_no_room() -> None:
    roster, reporter = Roster(), Reporter()
    roster.take(reporter.report(one("a: p10"), None))
    unreported = replace(status_of(one("b:")), capacity=Tokens(0))
    (a, b) = roster.observe(Pool(SOLE_POOL), unreported=[unreported], leaving=[ReplicaId("a"), ReplicaId("z")]).replicas
    assert (a.state, b) == (ReplicaState.DRAINING, unreported)
    assert roster.statuses.keys() == {"a"} and roster.observed == {"a": a, "b": b}
    assert [load.state for load in roster.loads([ReplicaId("a")])] == [ReplicaState.DRAINING]
    assert list(roster.loads()) == [roster.load(ReplicaId("a"))]
    assert [s.state for s in roster.observe(Pool(SOLE_POOL)).replicas] == [ReplicaState.RUNNING]


class KeptNames:
    """A replica's cache, and the source of its changes."""

    def __init__(self) -> None:
        self.names: frozenset[int] = frozenset()
        self._reported: frozenset[int] = frozenset()

    def change(self, whole: bool) -> CacheChange | None:
        before, self._reported = self._reported, self.names
        if whole:
            return CacheChange({Tier.HBM: tuple(self.names)}, {}, True)
        if before == self.names:
            return None
        return CacheChange({Tier.HBM: tuple(self.names - before)}, {Tier.HBM: tuple(before - self.names)}, False)


@given(
    st.lists(
        st.tuples(
            st.frozensets(st.integers(0, 9)), st.sampled_from(["report", "lost", "forget", "restart", "observe"])
        ),
        max_size=20,
    )
)
def test_observed_caches_add_up_to_those_of_the_replicas(history: list[tuple[frozenset[int], str]]) -> None:
    roster, cache, known = Roster(), KeptNames(), frozenset[int]()
    first = itertools.count(0, 100)
    reporter, load = Reporter(first=next(first)), one("a: p10")
    for names, event in [*history, (frozenset({1, 2}), "observe")]:
        cache.names = names
        if event == "lost":
            reporter.report(load, roster.version(load.id), cache=cache.change)
        elif event == "forget":
            roster.forget(load.id)
        elif event == "restart":
            cache, reporter = KeptNames(), Reporter(first=next(first))
        roster.take(reporter.report(load, roster.version(load.id), cache=cache.change))
        if event == "observe":
            change = roster.observe(Pool(SOLE_POOL)).caches.get(load.id)
            if change is not None:
                kept = frozenset() if change.whole else known - frozenset(change.removed.get(Tier.HBM, ()))
                known = kept | frozenset(change.stored.get(Tier.HBM, ()))
            assert known == cache.names
    assert not roster.observe(Pool(SOLE_POOL)).caches, "each change is observed once"
