"""The scheduler between its epochs: where it places requests, and what it answers to operators."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from deployments.calls import PlaceCall
from deployments.config import SchedulerConfig
from deployments.control import MoveAccepted, MoveRejected
from deployments.report import ReplicaReport
from deployments.scheduler import _RECORDS, EpochScheduler
from migration.errors import PeerLost, Refused, RequestGone
from migration.messages import Path, PathRequest
from migration.record import MigrationRecord, Outcome
from policies.events import Arrival
from policies.ledger import Ledger
from policies.model import Phase, ReplicaId, ReplicaLoad, RequestId, RequestLoad, Tokens
from policies.placement import NoReplica, Place, Queue
from policies.registry import policy
from tests.deployments.test_cluster import Answers, Running, make_report

AUTO = PathRequest.AUTO


def make_record(name: str = "m1", outcome: Outcome | None = None, at: float = 0.0) -> MigrationRecord:
    a, b = ReplicaId("a"), ReplicaId("b")
    return MigrationRecord(name, RequestId("r"), "label", a, b, Path.KV, "test", "copy", outcome, started_at=at)


def running(name: str, label: str = "") -> RequestLoad:
    return RequestLoad(RequestId(name), label or name, Tokens(10), Phase.DECODE, 1.0, 0)


class Reports:
    """A cluster that reports what it is told to."""

    def __init__(self, *reports: ReplicaReport) -> None:
        self.reports = {report.load.id: report for report in reports}
        self.fault: Exception | None = None
        self.starting: tuple[ReplicaLoad, ...] = ()

    async def gather(self, fence: int, timeout_s: float | None = None) -> dict[ReplicaId, ReplicaReport]:
        if self.fault:
            raise self.fault
        return self.reports

    async def others(self) -> tuple[ReplicaLoad, ...]:
        return self.starting


class Scheduler(EpochScheduler):
    """The scheduler, with its parts put together by hand: the constructor finds them in a Serve cluster."""

    def __init__(self, cluster: Reports, replicas: Answers, config: SchedulerConfig) -> None:
        self._config = config
        self._policy = policy(config.policy)
        self._ledger = Ledger(config.placement_ttl_s)
        self._replicas = replicas
        self._membership = self.members = Running("".join(cluster.reports))
        self._cluster: Any = cluster
        self._fence = 3
        self._reports = {}
        self._others = ()
        self._records = {}
        self._as_of = 0.0
        self._last_epoch = time.monotonic()
        self._gathered = asyncio.Event()
        self._loop = asyncio.create_task(asyncio.sleep(0))

    def __del__(self) -> None:
        pass


async def make_scheduler(*reports: ReplicaReport, headroom: int = 0, epochs: int = 1, **answers: Any) -> Scheduler:
    """A scheduler after its first epoch. `answers` are what replicas say to the order to move."""
    config = SchedulerConfig(headroom=Tokens(headroom), epoch_s=0.01)
    scheduler = Scheduler(Reports(*(reports or (make_report("a"), make_report("b", 5)))), Answers(**answers), config)
    for _ in range(epochs):
        await scheduler._epoch()
    return scheduler


async def place(scheduler: Scheduler, tokens: int, name: str = "x", exclude: str = "") -> Any:
    call = PlaceCall(Arrival(RequestId(name), Tokens(tokens)), "label", tuple(map(ReplicaId, exclude)))
    (decision,) = await scheduler.place((call,))
    return decision


# --- placing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "exclude", "decision"),
    [
        (20, "", Place(ReplicaId("b"))),
        (21, "", Place(ReplicaId("a"))),
        (41, "", Queue(ReplicaId("a"))),
        (20, "b", Place(ReplicaId("a"))),
        (20, "ab", NoReplica()),
    ],
    ids=["fullest that fits", "next one", "none fits", "excluded", "all excluded"],
)
async def test_a_request_goes_where_the_policy_says(tokens: int, exclude: str, decision: Any) -> None:
    assert await place(await make_scheduler(), tokens, exclude=exclude) == decision


async def test_requests_that_come_together_are_placed_one_after_the_other() -> None:
    scheduler = await make_scheduler()
    calls = tuple(PlaceCall(Arrival(RequestId(name), Tokens(20)), name, ()) for name in "xyz")
    assert [decision.replica for decision in await scheduler.place(calls)] == ["b", "a", "a"]  # type: ignore[union-attr]


async def test_a_replica_that_left_since_its_report_gets_nothing() -> None:
    scheduler = await make_scheduler()
    scheduler.members.running = (ReplicaId("a"),)
    assert await place(scheduler, 20) == Place(ReplicaId("a"))


async def test_before_the_first_report_a_request_waits() -> None:
    scheduler = await make_scheduler(epochs=0)
    placing = asyncio.create_task(place(scheduler, 20))
    await asyncio.sleep(0.01)
    assert not placing.done()
    await scheduler._epoch()
    assert await placing == Place(ReplicaId("b"))


async def test_the_view_holds_what_was_placed() -> None:
    scheduler = await make_scheduler()
    await place(scheduler, 20, "x")
    assert [(replica.id, request.id) for replica, request in (await scheduler.view()).requests()] == [("b", "x")]


# --- operators ----------------------------------------------------------------------------------------


async def move(scheduler: Scheduler, reference: str = "r", target: str | None = None) -> Any:
    return await scheduler.migrate(reference, target, AUTO)


def on_a(*requests: RequestLoad) -> tuple[ReplicaReport, ReplicaReport]:
    return make_report("a", requests=requests), make_report("b")


@pytest.mark.parametrize("reference", ["r", "mine"], ids=["by id", "by label"])
@pytest.mark.parametrize("target", ["b", None], ids=["to b", "anywhere"])
async def test_a_request_is_ordered_to_move(reference: str, target: str | None) -> None:
    scheduler = await make_scheduler(*on_a(running("r", "mine")), a=make_record())
    answer = await move(scheduler, reference, target)
    ((replica, method, order, to, fence),) = scheduler._replicas.asked  # type: ignore[attr-defined]
    assert (replica, method, order.request, order.path, to, fence) == ("a", "move", "r", AUTO, "b", 3)
    assert answer == MoveAccepted(order.id)


@pytest.mark.parametrize("reference", ["x", "", "R"])
async def test_what_does_not_run_cannot_move(reference: str) -> None:
    answer = await move(await make_scheduler(*on_a(running("r", "mine"))), reference)
    assert isinstance(answer, MoveRejected) and answer.status == 404 and repr(reference) in answer.message


async def test_of_two_requests_of_one_name_none_moves() -> None:
    scheduler = await make_scheduler(*on_a(running("r1", "mine"), running("r2", "mine")))
    answer = await move(scheduler, "mine")
    assert answer.status == 409 and [c["id"] for c in answer.details["candidates"]] == ["r1", "r2"]


async def test_an_unknown_target_is_told_with_those_there_are() -> None:
    answer = await move(await make_scheduler(*on_a(running("r"))), target="z")
    assert answer.status == 422 and answer.details == {"replicas": ["a", "b"]}


async def test_the_only_replica_has_nowhere_to_move_to() -> None:
    answer = await move(await make_scheduler(make_report("a", requests=(running("r"),))))
    assert answer.status == 422 and "no other replica" in answer.message


@pytest.mark.parametrize(
    ("fault", "status"),
    [(PeerLost("dead"), 503), (Refused("it moves already"), 422), (RequestGone("it ended"), 422)],
    ids=["dead", "refusing", "gone"],
)
async def test_a_source_that_will_not_is_told(fault: Exception, status: int) -> None:
    answer = await move(await make_scheduler(*on_a(running("r")), a=fault))
    assert (answer.status, answer.message) == (status, str(fault))


# --- what is known ------------------------------------------------------------------------------------


async def test_the_newest_word_on_a_migration_is_kept() -> None:
    scheduler = await make_scheduler()
    for outcome in (None, Outcome.COMMITTED, None):
        await scheduler.record(make_record(outcome=outcome))
    (record,) = (await scheduler.migrations())["migrations"]
    assert record["outcome"] == "committed"


async def test_migrations_are_told_newest_first() -> None:
    scheduler = await make_scheduler(replace(make_report("a"), records=(make_record("m1", at=1),)))
    await scheduler.record(make_record("m3", at=3))
    await scheduler.record(make_record("m2", at=2))
    assert [record["id"] for record in (await scheduler.migrations())["migrations"]] == ["m3", "m2", "m1"]


async def test_old_migrations_are_forgotten() -> None:
    scheduler = await make_scheduler()
    for n in range(_RECORDS + 10):
        await scheduler.record(make_record(f"m{n}"))
    assert len(scheduler._records) == _RECORDS and "m9" not in scheduler._records


async def test_the_state_shows_replicas_that_only_serve_knows() -> None:
    scheduler = await make_scheduler(make_report("b", requests=(running("r", "mine"),)))
    scheduler._cluster.starting = (make_report("a").load,)
    await scheduler._epoch()
    state = await scheduler.state()
    assert [(r["id"], r["pids"]) for r in state["replicas"]] == [("a", []), ("b", [1, 2, 3])]
    assert [r["label"] for r in state["replicas"][1]["requests"]] == ["mine"]


# --- the loop -----------------------------------------------------------------------------------------


async def test_an_epoch_that_fails_is_followed_by_another() -> None:
    scheduler = await make_scheduler()
    scheduler._cluster.fault = RuntimeError("broken")
    loop = asyncio.create_task(scheduler._run())
    await asyncio.sleep(0.02)
    failed_at, scheduler._cluster.fault = scheduler._last_epoch, None
    await asyncio.sleep(0.05)
    assert scheduler._last_epoch > failed_at
    loop.cancel()


async def test_a_scheduler_that_was_replaced_stops() -> None:
    scheduler = await make_scheduler()
    scheduler._cluster.fault = Refused("newer")
    async with asyncio.timeout(1):
        await scheduler._run()


async def test_a_scheduler_whose_epochs_stopped_is_unhealthy() -> None:
    scheduler = await make_scheduler()
    scheduler._loop = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
    await scheduler.check_health()
    scheduler._last_epoch -= 30 * 0.01 + 1.1
    with pytest.raises(RuntimeError, match="no epoch"):
        await scheduler.check_health()
    scheduler._loop.cancel()
