"""The scheduler between its epochs: where it places requests, and what it answers to operators."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected, PlaceCall
from deployments.api.report import ElasticMemory
from deployments.config import MemorySettings, SchedulerConfig, ServiceLevelSettings
from deployments.metrics.exposition import merge
from deployments.metrics.telemetry import Telemetry
from deployments.scheduler.deployment import LiveScheduler, check_epochs
from deployments.scheduler.epochs import EARLIEST_S
from deployments.scheduler.pool import LivePool
from deployments.scheduler.pool_scheduler import PoolPorts
from deployments.scheduler.recorder import FileRecorder
from deployments.scheduler.records import KEPT
from deployments.scheduler.sleepers import Sleeping
from deployments.serve.modes import ModeOrder
from migration.protocol.errors import PeerLost, Refused, RequestGone
from migration.protocol.messages import PathRequest
from migration.protocol.record import MigrationRecord, Outcome
from migration.protocol.request import IngressId
from policies.causes import Cause
from policies.cluster.changes import Arrival
from policies.cluster.decisions import Decisions
from policies.cost.latencies import ERROR, ServiceTimes
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts, proportional
from policies.decision import slices
from policies.decision.deciding import SchedulerMemory
from policies.decision.limits import Mode, Sizes
from policies.decision.locations import Locations
from policies.decision.memory import PoolMemory
from policies.decision.placement import NoReplica, Place, Queue
from policies.decision.recording import LevelsOrdered
from policies.decision.reports import Roster, status_of
from policies.memory.ledger import MemoryReport, OrderNumber
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import (
    SOLE_POOL,
    Blocks,
    Bytes,
    Phase,
    PoolId,
    ReplicaId,
    ReplicaState,
    RequestId,
    RequestLoad,
    Role,
    Tokens,
)
from policies.paths.prices import Profile
from policies.plan import Path as MovePath
from policies.plan import Reason
from policies.precedence import DEFAULT_CLASS
from policies.prefix.names import Naming, default_naming
from policies.prefix.routing import Matched, Routing
from simulator.command.replay import play, replay
from simulator.workload.recording import read_recording
from tests.deployments.metrics.test_exposition import parsed
from tests.deployments.scheduler.fakes import (
    AnsweringReplica,
    Answers,
    FakeClaims,
    FakeLevels,
    FakeListing,
    FakeMembership,
    FakeModes,
    FakeRoles,
    Present,
    Reporting,
    given,
    make_ports,
    make_report,
)
from tests.virtual_time import now

AUTO = PathRequest.AUTO

pytestmark = pytest.mark.virtual_time


def make_record(name: str = "m1", outcome: Outcome | None = None, at: float = 0.0) -> MigrationRecord:
    a, b = ReplicaId("a"), ReplicaId("b")
    return MigrationRecord(
        name, RequestId("r"), "label", a, b, MovePath.KV, "drain", "copy", Reason.DRAIN, outcome, started_at=at
    )


def running(name: str, label: str = "") -> RequestLoad:
    return RequestLoad(RequestId(name), label or name, Tokens(10), Phase.DECODE, 1.0, 0)


class Fleet:
    """Implements `RemoteReplicas[ControlApi]`: replicas that report; their answer to other calls is given by name."""

    def __init__(self, *reports: Present, **answers: Any) -> None:
        self.others = Answers(**answers)
        self.reports = {report.load.id: report for report in reports}
        self.reporting = Reporting()
        self.fault: Exception | None = None
        self.times_asked = 0
        self.silent: set[str] = set()

    @property
    def asked(self) -> list[tuple[Any, ...]]:
        """The other calls."""
        return self.others.asked

    def at(self, replica: ReplicaId, routed: bool = True) -> AnsweringReplica:
        return AnsweringReplica(self, replica)

    def forget(self, replica: ReplicaId) -> None:
        pass

    async def answer(self, replica: ReplicaId, call: str, *args: Any) -> Any:
        if call != "report":
            return await self.others.answer(replica, call, *args)
        _, version = args
        self.times_asked += 1
        await asyncio.sleep(0)
        present: Present = await given("silent" if replica in self.silent else self.fault or self.reports[replica])
        return self.reporting.report(present, version, now())


class FakeScaler:
    """Implements `Scaler`: notes what it is to open, close and drain."""

    def __init__(self, max_replicas: int, min_replicas: int = 1) -> None:
        self.min_replicas, self.max_replicas = min_replicas, max_replicas
        self.scales = True
        self.wanted = 2
        self.opened = 0
        self.closed: list[ReplicaId] = []
        self.drained: list[ReplicaId] = []
        self.sleeping: Sleeping | None = None
        self.fault: Exception | None = None

    def set_bounds(self, bounds: tuple[int, int]) -> None:
        self.min_replicas, self.max_replicas = bounds

    @property
    def opening(self) -> int:
        return 0

    @property
    def closing(self) -> Collection[ReplicaId]:
        return ()

    def put_to_sleep(self, idle: Sequence[ReplicaId], fence: int) -> None:
        raise NotImplementedError

    def spare(self, idle: Sequence[ReplicaId]) -> Sequence[ReplicaId]:
        raise NotImplementedError

    def open(self, count: int) -> None:
        self.opened += count

    def close(self, replicas: Iterable[ReplicaId], fence: int) -> None:
        self.closed += replicas

    def publish(self) -> None:
        pass

    def mark_emptying(self, replicas: Collection[ReplicaId]) -> None:
        pass

    def close_drained(self, empty: Iterable[ReplicaId], fence: int) -> None:
        pass

    def measure_freed(self, filled: Collection[ReplicaId]) -> None:
        pass

    async def drain(self, replica: ReplicaId, fence: int) -> None:
        if self.fault:
            raise self.fault
        self.drained.append(replica)

    def follow_sleep(self) -> None:
        pass

    async def sleep(self, replica: ReplicaId) -> MoveAnswer:
        return MoveAccepted(replica)

    async def wake(self, replica: ReplicaId) -> MoveAnswer:
        return MoveAccepted(replica)


class Scheduler:
    """The scheduler over fakes; `core` is the scheduler itself."""

    def __init__(
        self,
        fleet: Fleet,
        config: SchedulerConfig,
        roles: Mapping[ReplicaId, Role] | None = None,
        modes: FakeModes | None = None,
        levels: FakeLevels | None = None,
    ) -> None:
        self.roles, self.modes, self.levels = FakeRoles(roles), modes or FakeModes(), levels or FakeLevels()
        self.members = FakeMembership(*fleet.reports)
        self.scale, self.fleet, self.listing = FakeScaler(4, config.bounds[0]), fleet, FakeListing(fleet.reports)
        stores = self.roles, self.levels
        self.core = LiveScheduler(
            ReplicaId("s"),
            config,
            3,
            [PoolPorts(SOLE_POOL, fleet, self.members, self.listing, self.scale, *stores, Telemetry(SOLE_POOL))],
            now,
            now,
            self.modes,
            FakeClaims(),
        )

    async def epoch(self) -> None:
        await self.core._epochs.epoch()

    async def counted(self, metric: str) -> float:
        """The sum of a metric over its labels."""
        return sum(parsed(merge([await self.core.metrics()])).get(metric, {}).values())


async def make_scheduler(
    *reports: Present,
    epochs: int = 1,
    mode: Mode = Mode.OFF,
    spec: str = "best_fit",
    routing: Routing = Routing.TREE,
    sizes: Sizes = Sizes.BLIND,
    **answers: Any,
) -> Scheduler:
    """A scheduler after its first epoch. `answers` are what replicas say to the order to move."""
    config = SchedulerConfig.model_construct(
        policy=spec, mode=mode, routing=routing, sizes=sizes, epoch_s=0.0, linger_s=0.0, foresight_s=0.0
    )
    scheduler = Scheduler(Fleet(*(reports or (make_report("a"), make_report("b", 5))), **answers), config)
    for _ in range(epochs):
        await asyncio.sleep(1.0)
        await scheduler.epoch()
    return scheduler


async def place(scheduler: Scheduler, tokens: int, name: str = "x", exclude: str = "") -> Any:
    call = PlaceCall(SOLE_POOL, Arrival(RequestId(name), Tokens(tokens)), "label", tuple(map(ReplicaId, exclude)))
    (decision,) = await scheduler.core.place((call,))
    return decision


async def scheduler_of(fleets: Mapping[PoolId, Fleet]) -> LiveScheduler:
    """A scheduler of several pools after its first epoch."""
    config = SchedulerConfig.model_construct(policy="best_fit", mode=Mode.OFF, epoch_s=0.0)
    ports = [
        make_ports(pool, fleet, fleet.reports, FakeListing(fleet.reports), FakeScaler(4))
        for pool, fleet in fleets.items()
    ]
    core = LiveScheduler(ReplicaId("s"), config, 3, ports, now, now, FakeModes(), FakeClaims())
    await asyncio.sleep(1.0)
    await core._epochs.epoch()
    return core


async def test_a_call_goes_to_the_pool_that_it_names() -> None:
    """Two pools, each with a replica `a` and a request `r` of its own. Only one answers for the other's names."""
    fleets = {
        SOLE_POOL: Fleet(make_report("a", 256, (running("r"),)), a=make_record()),
        PoolId("Other"): Fleet(make_report("a", 5), make_report("b", 256)),
    }
    core = await scheduler_of(fleets)
    calls = tuple(PlaceCall(pool, Arrival(RequestId("x"), Tokens(100)), "x", ()) for pool in fleets)
    assert await core.place(calls) == [Place(ReplicaId("a")), Place(ReplicaId("b"))]
    assert [(await core.view(pool)).replicas.keys() for pool in fleets] == [{"a"}, {"a", "b"}]
    assert [[r["id"] for r in (await core.state(pool))["replicas"]] for pool in fleets] == [["a"], ["a", "b"]]
    await core.record(PoolId("Other"), make_record("m1"))
    assert [len((await core.migrations(pool))["migrations"]) for pool in fleets] == [0, 1]
    answer = await core.migrate(PoolId("Other"), "m2", "r", None, AUTO)
    assert isinstance(answer, MoveRejected) and answer.status == 404
    assert await core.set_role(SOLE_POOL, "b", None) == MoveRejected(
        404, "no replica 'b' is running", {"replicas": ["a"]}
    )
    with pytest.raises(KeyError):
        await core.view(PoolId("none"))


async def test_a_metric_is_one_family_with_the_samples_of_every_pool() -> None:
    core = await scheduler_of({SOLE_POOL: Fleet(make_report("a")), PoolId("Other"): Fleet(*map(make_report, "ab"))})
    families = await core.metrics()
    assert len({family.name for family in families}) == len(families)
    replicas = parsed(merge([families]))["mell_replicas"]
    assert {pool: n for (pool, _, state), n in replicas.items() if state == "RUNNING"} == {SOLE_POOL: 1, "Other": 2}


@pytest.mark.parametrize(("budget_mib", "budgets"), [(None, None), (1000, {("node", "s"): 1000 << 20})])
async def test_the_budget_of_each_node_is_a_metric_if_there_is_one(
    budget_mib: int | None, budgets: dict[tuple[str, ...], float] | None
) -> None:
    memory = MemorySettings(budget_mib=budget_mib)
    config = SchedulerConfig.model_construct(policy="best_fit", mode=Mode.OFF, epoch_s=0.0, memory=memory)
    plan, model = MemoryPlan(Blocks(9)), ModelMemory(Bytes(90), Bytes(10), Bytes(5), Bytes(1), Blocks(2))
    reported = MemoryReport(ReplicaId("a"), OrderNumber(3), plan, plan)
    pool = ElasticMemory(reported, model, Blocks(20), Blocks(9), Blocks(9), Blocks(0), "settled")
    scheduler = Scheduler(Fleet(replace(make_report("a"), memory=pool)), config)
    await scheduler.epoch()
    assert parsed(merge([await scheduler.core.metrics()])).get("mell_memory_budget_bytes") == budgets


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
    calls = tuple(PlaceCall(SOLE_POOL, Arrival(RequestId(name), Tokens(20)), name, ()) for name in "xyz")
    assert [decision.replica for decision in await scheduler.core.place(calls)] == ["b", "a", "a"]  # type: ignore[union-attr]


async def test_a_replica_that_left_since_its_report_gets_nothing() -> None:
    scheduler = await make_scheduler()
    scheduler.members.running = (ReplicaId("a"),)
    assert await place(scheduler, 20) == Place(ReplicaId("a"))


async def test_before_the_first_report_a_request_waits() -> None:
    scheduler = await make_scheduler(epochs=0)
    placing = asyncio.create_task(place(scheduler, 20))
    await asyncio.sleep(0.01)
    assert not placing.done()
    await scheduler.epoch()
    assert await placing == Place(ReplicaId("b"))


async def free(scheduler: Scheduler) -> dict[str, int]:
    """The free tokens of every replica, as ingresses see them."""
    return {replica: seen.free for replica, seen in (await scheduler.core.view(SOLE_POOL)).replicas.items()}


async def test_the_view_holds_what_was_placed() -> None:
    scheduler = await make_scheduler()
    assert await free(scheduler) == {"a": 40, "b": 20}
    await place(scheduler, 12, "x")
    assert await free(scheduler) == {"a": 40, "b": 8}


# --- prefix caches ------------------------------------------------------------------------------------

NAMES = tuple(range(100, 108))


NAMING = default_naming(4)


def caching(b: Naming = NAMING) -> tuple[Present, Present]:
    """Two replicas that run a request each; `b`, the smaller choice of the policy, has four more blocks of a prompt."""
    one, other = make_report("a", 100, (running("p"),), (*NAMES[:4], 7), NAMING), running("q")
    return one, make_report("b", 200, (other,), NAMES, b)


def named(name: str, tokens: int = 33, names: tuple[int, ...] = NAMES, exclude: str = "") -> PlaceCall:
    return PlaceCall(SOLE_POOL, Arrival(RequestId(name), Tokens(tokens), names), "", tuple(map(ReplicaId, exclude)))


async def test_an_arrival_goes_to_the_blocks_of_its_prompt() -> None:
    scheduler = await make_scheduler(*caching())
    assert await place(scheduler, 33) == Place(ReplicaId("a"))
    (decision,) = await scheduler.core.place((named("x"),))
    assert decision == Place(ReplicaId("b"), Matched(Tokens(32), Tokens(32)))
    await scheduler.core.place((named("y", exclude="b"),))
    stages = parsed(merge([await scheduler.core.metrics()]))["mell_cache_tokens_total"]
    assert sorted(stages.values()) == [32.0, 32.0], "a second placement of a request counts no tokens"


async def test_of_arrivals_together_the_one_with_the_most_to_lose_comes_first_and_answers_stay_in_order() -> None:
    scheduler = await make_scheduler(*caching())
    order: list[str] = []
    inner = scheduler.core._epochs.place
    scheduler.core._epochs.place = lambda call, gone: order.append(call.arrival.id) or inner(call, gone)  # type: ignore
    plain, content = named("plain", 33, ()), named("content", 129, (*NAMES, *range(24)))
    decisions = await scheduler.core.place((plain, content))
    assert order == ["content", "plain"]
    assert [decision.replica for decision in decisions] == ["a", "b"]  # type: ignore[union-attr]


async def test_routing_is_in_state_and_the_naming_in_the_view() -> None:
    scheduler = await make_scheduler(*caching())
    assert (await scheduler.core.view(SOLE_POOL)).naming == NAMING
    shown = (await scheduler.core.state(SOLE_POOL))["routing"]
    assert shown == {
        "kind": "tree",
        "names": {"block_size": 4, "algorithm": "sha256", "mark": NAMING.mark},
        "off": None,
        "mirrors": 2,
        "distinct_blocks": 9,
        "copies_per_block": pytest.approx(13 / 9, abs=0.001),
    }


async def test_replicas_that_name_blocks_differently_have_no_common_naming() -> None:
    scheduler = await make_scheduler(*caching(default_naming(8)))
    shown = (await scheduler.core.state(SOLE_POOL))["routing"]
    assert shown["names"] is None and shown["off"] == "the engines of the replicas name KV blocks differently"
    assert (await scheduler.core.view(SOLE_POOL)).naming == shown["off"]
    assert (await scheduler.core.match(SOLE_POOL, named("x").arrival))["routing"]["off"] == shown["off"]


async def test_a_match_is_the_placement_that_would_follow() -> None:
    scheduler = await make_scheduler(*caching())
    found = await scheduler.core.match(SOLE_POOL, named("x").arrival)
    assert (found["prompt_tokens"], found["full_blocks"], found["block_size"]) == (33, 8, 4)
    assert found["routing"] == {"kind": "tree", "off": None}
    assert (found["replica"], found["by"], found["queues"]) == ("b", "content", False)
    assert {replica["id"]: replica["tokens"]["hbm"] for replica in found["replicas"]} == {"a": 16, "b": 32}
    assert await scheduler.core.match(SOLE_POOL, named("x").arrival) == found
    assert (await scheduler.core.place((named("x"),)))[0].replica == "b"  # type: ignore[union-attr]


async def test_a_match_has_the_reason_why_content_does_not_count() -> None:
    scheduler = await make_scheduler(*caching())
    shown = [await scheduler.core.match(SOLE_POOL, call.arrival) for call in (named("x", names=()), named("x", 3, ()))]
    assert "no names for the prompt" in shown[0]["routing"]["off"]
    assert shown[1]["routing"]["off"] is None, "it has no full block"
    blind = await make_scheduler(*caching(), routing=Routing.LEAST_LOAD)
    found = await blind.core.match(SOLE_POOL, named("x").arrival)
    assert found["routing"] == {"kind": "least_load", "off": "scheduler.routing is least_load"}
    assert (found["replica"], found["by"]) == ("a", "policy")


async def test_a_match_leaves_out_replicas_that_have_left_since_the_last_epoch() -> None:
    scheduler = await make_scheduler(*caching())
    scheduler.members.running = (ReplicaId("a"),)
    found = await scheduler.core.match(SOLE_POOL, named("x").arrival)
    assert found["replica"] == "a" and [replica["id"] for replica in found["replicas"]] == ["a"]


# --- operators ----------------------------------------------------------------------------------------


async def move(scheduler: Scheduler, reference: str = "r", target: str | None = None) -> Any:
    return await scheduler.core.migrate(SOLE_POOL, "m1", reference, target, AUTO)


def on_a(*requests: RequestLoad) -> tuple[Present, Present]:
    return make_report("a", requests=requests), make_report("b")


@pytest.mark.parametrize("reference", ["r", "mine"], ids=["by id", "by label"])
@pytest.mark.parametrize("target", ["b", None], ids=["to b", "anywhere"])
async def test_a_request_is_ordered_to_move(reference: str, target: str | None) -> None:
    scheduler = await make_scheduler(*on_a(running("r", "mine")), a=make_record())
    answer = await move(scheduler, reference, target)
    ((replica, method, order, to, fence),) = scheduler.fleet.asked
    assert (replica, method, order.request, to, fence) == ("a", "move", "r", "b", 3)
    assert answer == MoveAccepted(order.id)
    assert order.path is PathRequest.TOKENS, "nothing is known of their caches"


@pytest.mark.parametrize(
    ("asked", "bytes_per_s", "path"),
    [
        (AUTO, 1e6, PathRequest.KV),
        (AUTO, 1.0, PathRequest.TOKENS),
        (PathRequest.KV, 1.0, PathRequest.KV),
        (PathRequest.TOKENS, 1e6, PathRequest.TOKENS),
    ],
)
async def test_where_nothing_is_asked_the_planner_chooses_the_path(
    asked: PathRequest, bytes_per_s: float, path: PathRequest
) -> None:
    profile = Profile("n", "c", 4.0, bytes_per_s)
    reports = [replace(report, profile=profile) for report in on_a(running("r"))]
    scheduler = await make_scheduler(*reports, a=make_record())
    scheduler.core._memory.pool(SOLE_POOL).learned.follow_speed(ReplicaSpeed(StepCosts(proportional(5e-4))))
    await scheduler.core.migrate(SOLE_POOL, "m1", "r", "b", asked)
    ((_, _, order, _, _),) = scheduler.fleet.asked
    assert order.path is path
    assert order.predicted_kv_s > 0 and order.predicted_tokens_s > 0


async def test_an_order_by_the_last_reports_asks_no_replica_and_one_that_fails_by_them_asks_all() -> None:
    scheduler = await make_scheduler(*on_a(running("r")), a=make_record())
    asked = scheduler.fleet.times_asked
    assert isinstance(await move(scheduler), MoveAccepted) and scheduler.fleet.times_asked == asked
    scheduler.fleet.reports[ReplicaId("b")] = make_report("b", requests=(running("new"),))
    scheduler.fleet.others.answers["b"] = make_record("m2")
    assert isinstance(await scheduler.core.migrate(SOLE_POOL, "m2", "new", "a", AUTO), MoveAccepted)
    assert scheduler.fleet.times_asked == asked + 2 and scheduler.fleet.asked[-1][0] == "b"


async def test_an_order_that_has_begun_is_not_given_again() -> None:
    """The source's answer to the first one was lost: it says that the request moves already, and reports the move."""
    source = replace(make_report("a", requests=(running("r"),)), records=(make_record(),))
    scheduler = await make_scheduler(
        make_report("a", requests=(running("r"),)), make_report("b"), a=Refused("it moves", Cause.ALREADY_MOVING)
    )
    scheduler.fleet.reports[ReplicaId("a")] = source
    assert await move(scheduler) == MoveAccepted("m1")
    assert len(scheduler.fleet.asked) == 1


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
    [(PeerLost("dead"), 503), (Refused("it moves already", Cause.ALREADY_MOVING), 422), (RequestGone("it ended"), 422)],
    ids=["dead", "refusing", "gone"],
)
async def test_a_source_that_will_not_is_told(fault: Exception, status: int) -> None:
    answer = await move(await make_scheduler(*on_a(running("r")), a=fault))
    assert (answer.status, answer.message) == (status, str(fault))


# --- what is known ------------------------------------------------------------------------------------


async def test_the_newest_word_on_a_migration_is_kept() -> None:
    scheduler = await make_scheduler()
    for outcome in (None, Outcome.COMMITTED, None):
        await scheduler.core.record(SOLE_POOL, make_record(outcome=outcome))
    (record,) = (await scheduler.core.migrations(SOLE_POOL))["migrations"]
    assert record["outcome"] == "committed"


async def test_migrations_are_told_newest_first() -> None:
    scheduler = await make_scheduler(replace(make_report("a"), records=(make_record("m1", at=1),)))
    await scheduler.core.record(SOLE_POOL, make_record("m3", at=3))
    await scheduler.core.record(SOLE_POOL, make_record("m2", at=2))
    assert [record["id"] for record in (await scheduler.core.migrations(SOLE_POOL))["migrations"]] == ["m3", "m2", "m1"]


async def test_a_migration_is_counted_once() -> None:
    scheduler = await make_scheduler()
    for outcome in (None, Outcome.COMMITTED, Outcome.COMMITTED):
        await scheduler.core.record(SOLE_POOL, make_record(outcome=outcome))
    assert await scheduler.counted("mell_migrations_total") == 1


async def test_what_a_migration_took_counts_once_its_target_has_told() -> None:
    scheduler = await make_scheduler()
    ended = replace(make_record(outcome=Outcome.COMMITTED), duration_s=1.0, pause_s=0.25)
    for record in (ended, replace(ended, resume_s=0.5), replace(ended, resume_s=0.5), ended):
        await scheduler.core.record(SOLE_POOL, record)
    assert await scheduler.counted("mell_migrations_total") == 1
    assert await scheduler.counted("mell_migration_seconds_count") == 1
    assert await scheduler.counted("mell_migration_seconds_sum") == 1.25


async def test_old_migrations_are_forgotten() -> None:
    scheduler = await make_scheduler()
    for n in range(KEPT + 10):
        await scheduler.core.record(SOLE_POOL, make_record(f"m{n}"))
    assert (
        len(scheduler.core._pools[SOLE_POOL]._records) == KEPT and "m9" not in scheduler.core._pools[SOLE_POOL]._records
    )


async def test_a_migration_that_was_forgotten_and_is_told_again_is_not_counted_again() -> None:
    scheduler = await make_scheduler()
    for n in (*range(KEPT + 10), 0):
        await scheduler.core.record(SOLE_POOL, make_record(f"m{n}", Outcome.COMMITTED))
    assert await scheduler.counted("mell_migrations_total") == KEPT + 10


async def test_the_state_shows_replicas_that_only_serve_knows() -> None:
    scheduler = await make_scheduler(make_report("b", requests=(running("r", "mine"),)))
    scheduler.listing.without_room = (status_of(make_report("a").load),)
    await scheduler.epoch()
    state = await scheduler.core.state(SOLE_POOL)
    assert [(r["id"], r["pids"]) for r in state["replicas"]] == [("a", []), ("b", [1, 2, 3])]
    assert [r["label"] for r in state["replicas"][1]["requests"]] == ["mine"]
    assert (state["mode"], state["policy"], state["wanted_replicas"]) == ("off", "best_fit", 2)


@pytest.mark.parametrize(("sizes", "least"), [(Sizes.MARGINAL, 1), (Sizes.BLIND, None)])
async def test_the_state_has_a_bound_where_requests_share_blocks(sizes: Sizes, least: int | None) -> None:
    scheduler = await make_scheduler(make_report("b", requests=(running("r", "mine"),)), sizes=sizes)
    assert (await scheduler.core.state(SOLE_POOL)).get("least_replicas") == least


@pytest.mark.parametrize(("itl_ms", "shown"), [(None, None), (50.0, "measuring")])
async def test_a_service_level_is_in_state_and_metrics(itl_ms: float | None, shown: str | None) -> None:
    slo = ServiceLevelSettings(itl_p99_ms=itl_ms)
    config = SchedulerConfig.model_construct(policy="pack", mode=Mode.ACT, epoch_s=0.0, slo=slo)
    scheduler = Scheduler(Fleet(make_report("a"), make_report("b")), config)
    await scheduler.epoch()
    assert (await scheduler.core.state(SOLE_POOL)).get("service", {}).get("state") == shown
    assert await scheduler.counted("mell_service_state") == (shown is not None)


async def test_the_times_that_clients_got_are_in_state_and_metrics() -> None:
    slo = ServiceLevelSettings(ttft_p99_s=2.0)
    config = SchedulerConfig.model_construct(policy="pack", mode=Mode.ACT, epoch_s=0.0, slo=slo)
    scheduler, times = Scheduler(Fleet(make_report("a")), config), ServiceTimes()
    for _ in range(2):
        await scheduler.core.latencies(SOLE_POOL, IngressId("i"), {DEFAULT_CLASS: times.counts})
        times.ttft.add(1.5)
    await scheduler.core.latencies(SOLE_POOL, IngressId("i"), {DEFAULT_CLASS: times.counts})
    await scheduler.epoch()
    service = (await scheduler.core.state(SOLE_POOL))["service"]
    assert service["target"] == {"ttft_p99_s": 2.0, "itl_p99_ms": None}
    assert service["reached"]["ttft_p99_s"] == pytest.approx(1.5, rel=ERROR) and service["reached"]["first_tokens"] == 2
    exposed = parsed(merge([await scheduler.core.metrics()]))["mell_service_p99_seconds"]
    assert exposed[("reached", SOLE_POOL, "s", "ttft")] == service["reached"]["ttft_p99_s"]


@pytest.mark.parametrize("mode", [Mode.ACT, Mode.OFF])
async def test_the_reasons_for_the_number_of_replicas_are_in_state_and_metrics(mode: Mode) -> None:
    busy = (make_report(name, requests=(running(request),)) for name, request in (("a", "r"), ("b", "s")))
    scheduler = await make_scheduler(*busy, mode=mode)
    shown = (await scheduler.core.state(SOLE_POOL)).get("scaling")
    assert (shown and (shown["up"], shown["kept"])) == ((None, "in_use") if mode is Mode.ACT else None)
    assert await scheduler.counted("mell_replicas_reason") == (mode is Mode.ACT)


async def test_a_look_during_an_epoch_takes_no_placement_from_it() -> None:
    """One silent replica: the epoch's gathering waits for it, while a request is placed and reaches its replica."""
    scheduler = await make_scheduler(make_report("a", 250), make_report("b", 250))
    scheduler.fleet.silent = {"b"}
    epoch = asyncio.create_task(scheduler.epoch())
    await asyncio.sleep(0.1)
    assert await place(scheduler, 20, "x", exclude="b") == Place(ReplicaId("a"))
    scheduler.fleet.reports[ReplicaId("a")] = make_report("a", 245, requests=(running("x"),))
    await scheduler.core.state(SOLE_POOL)
    assert not epoch.done()
    await epoch
    for _ in range(2):
        assert scheduler.core._memory.pool(SOLE_POOL).cluster.requests[RequestId("x")].replica is not None
        assert (await scheduler.core.view(SOLE_POOL)).replicas[ReplicaId("a")].requests == 1
        await scheduler.epoch()


async def test_looks_share_a_gathering_and_the_pages_ask_nobody() -> None:
    scheduler = await make_scheduler(make_report("a"))
    asked = scheduler.fleet.times_asked
    looks = (
        scheduler.core.state(SOLE_POOL),
        scheduler.core.migrations(SOLE_POOL),
        scheduler.core.state(SOLE_POOL),
        move(scheduler),
    )
    await asyncio.gather(*looks)
    assert scheduler.fleet.times_asked == asked + 1
    state, migrations = await scheduler.core.snapshot(SOLE_POOL)
    assert [replica["id"] for replica in state["replicas"]] == ["a"] and migrations == {"migrations": []}
    assert scheduler.fleet.times_asked == asked + 1


async def test_the_number_of_replicas_is_not_waited_for() -> None:
    scheduler = await make_scheduler(epochs=0)
    assert await scheduler.core.wanted(SOLE_POOL) is None
    await scheduler.epoch()
    assert await scheduler.core.wanted(SOLE_POOL) == 2


# --- epochs -------------------------------------------------------------------------------------------


def half_empty() -> tuple[Present, Present]:
    """One of these can be emptied into the other."""
    return make_report("a", 253, requests=(running("p"),)), make_report("b", 253, requests=(running("q"),))


NO_GROWTH = "pack:headroom_s=0,comfort=0,rest=0"


@pytest.mark.parametrize(("mode", "ordered"), [(Mode.ACT, 1), (Mode.OBSERVE, 0), (Mode.OFF, 0)])
async def test_only_a_scheduler_that_acts_moves_requests(mode: Mode, ordered: int) -> None:
    scheduler = await make_scheduler(*half_empty(), mode=mode, spec=NO_GROWTH, a=make_record(), b=make_record())
    await asyncio.sleep(0.01)
    assert len(scheduler.fleet.asked) == ordered


@pytest.mark.parametrize(("mode", "closed"), [(Mode.ACT, ["b"]), (Mode.OBSERVE, []), (Mode.OFF, [])])
async def test_only_a_scheduler_that_acts_closes_replicas(mode: Mode, closed: list[str]) -> None:
    empty, used = make_report("b", 256), make_report("a", 250, requests=(running("p"),))
    assert (await make_scheduler(used, empty, mode=mode)).scale.closed == closed


async def test_a_replica_that_is_to_be_gone_is_evacuated_by_one_that_does_not_act() -> None:
    leaving = make_report("a", 253, requests=(running("p"),))
    leaving = replace(leaving, load=replace(leaving.load, state=ReplicaState.DRAINING))
    scheduler = await make_scheduler(leaving, make_report("b", 256), a=make_record())
    await asyncio.sleep(0.01)
    ((replica, method, order, to, fence),) = scheduler.fleet.asked
    assert (replica, method, order.request, order.reason, to, fence) == ("a", "move", "p", "evacuate", "b", 3)


async def test_epochs_can_be_recorded_and_give_the_same_plans_again(tmp_path: Path) -> None:
    scheduler = await make_scheduler(
        *half_empty(), epochs=0, mode=Mode.ACT, spec=NO_GROWTH, a=make_record("m2"), b=make_record("m3")
    )
    terms = scheduler.core._config.terms
    scheduler.core._epochs._recorder = FileRecorder(tmp_path / "new" / "epochs.jsonl", terms)
    for n in range(3):
        await scheduler.epoch()
        await place(scheduler, 20, f"x{n}")
        await scheduler.core.migrate(SOLE_POOL, f"by-hand-{n}", "q", None, AUTO)
    await scheduler.epoch()
    scheduler.core._epochs._recorder.close()
    read, epochs = read_recording(tmp_path / "new" / "epochs.jsonl")
    assert read == terms
    played = list(play(SchedulerMemory(read), epochs))
    assert [len(epoch.entries) for epoch, _ in played] == [0, 2, 2, 2]
    assert played[0][0].plans[SOLE_POOL][0].moves
    assert all(same for _, same in played)


async def test_requests_are_placed_while_an_epoch_is_decided_and_recorded_where_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE", 1)
    requests = [running(f"r{number}") for number in range(8)]
    scheduler = await make_scheduler(make_report("a", 236, tuple(requests)), make_report("b", 256))
    grown = tuple(replace(request, tokens=Tokens(12)) for request in requests)
    scheduler.fleet.reports[ReplicaId("a")] = make_report("a", 232, grown)
    recorder = scheduler.core._epochs._recorder = FileRecorder(tmp_path / "epochs.jsonl", scheduler.core._config.terms)
    epoch = asyncio.create_task(scheduler.epoch())
    while not scheduler.core._epochs._slices:
        await asyncio.sleep(0)
    assert isinstance(await place(scheduler, 20), Place) and not epoch.done()
    await epoch
    recorder.close()
    _, epochs = read_recording(tmp_path / "epochs.jsonl")
    ((entry,),) = [epoch.entries for epoch in epochs]
    assert 0 < entry.slices < 8
    assert scheduler.core._memory.pool(SOLE_POOL).cluster.requests[RequestId("x")].replica is not None


# --- the dry run --------------------------------------------------------------------------------------


async def test_a_scheduler_that_observes_shows_the_decision_of_act_and_does_nothing() -> None:
    scheduler = await make_scheduler(*half_empty(), epochs=3, mode=Mode.OBSERVE, spec=NO_GROWTH)
    shown = (await scheduler.core.state(SOLE_POOL))["dry_run"]
    assert (shown["replicas_now"], shown["replicas_needed"], shown["moves"]) == (2, 1, 1)
    assert shown["said"].startswith("would run 1 replica instead of 2, with 1 move in ")
    for metric in "mell_dry_run_moves_total", "mell_dry_run_replicas_needed":
        assert await scheduler.counted(metric) == 1
    assert scheduler.fleet.asked == [] == scheduler.scale.closed


@pytest.mark.parametrize("mode", [Mode.ACT, Mode.OFF])
async def test_only_a_scheduler_that_observes_has_a_dry_run(mode: Mode) -> None:
    scheduler = await make_scheduler(*half_empty(), mode=mode, spec=NO_GROWTH, a=make_record(), b=make_record())
    await asyncio.sleep(0.01)
    assert "dry_run" not in await scheduler.core.state(SOLE_POOL)
    assert await scheduler.counted("mell_dry_run_replicas_needed") == 0


async def test_before_any_replica_runs_there_is_no_dry_run() -> None:
    scheduler = await make_scheduler(epochs=0, mode=Mode.OBSERVE)
    assert "dry_run" not in await scheduler.core.state(SOLE_POOL)


# --- draining -----------------------------------------------------------------------------------------


async def test_a_replica_is_drained_at_an_operators_word() -> None:
    scheduler = await make_scheduler()
    assert await scheduler.core.drain(SOLE_POOL, "a") == MoveAccepted("a")
    assert scheduler.scale.drained == ["a"]


async def test_what_does_not_run_is_not_drained() -> None:
    answer = await (await make_scheduler()).core.drain(SOLE_POOL, "z")
    assert isinstance(answer, MoveRejected) and (answer.status, answer.details) == (404, {"replicas": ["a", "b"]})


async def test_the_only_replica_that_there_may_be_is_not_drained() -> None:
    scheduler = await make_scheduler(make_report("a"))
    scheduler.scale.max_replicas = 1
    answer = await scheduler.core.drain(SOLE_POOL, "a")
    assert isinstance(answer, MoveRejected) and answer.status == 422


@pytest.mark.parametrize(("fault", "status"), [(PeerLost("dead"), 503), (Refused("newer", Cause.SUPERSEDED), 422)])
async def test_a_drain_that_does_not_begin_is_told(fault: Exception, status: int) -> None:
    scheduler = await make_scheduler()
    scheduler.scale.fault = fault
    answer = await scheduler.core.drain(SOLE_POOL, "a")
    assert isinstance(answer, MoveRejected) and (answer.status, answer.message) == (status, str(fault))


# --- roles by hand ------------------------------------------------------------------------------------


def three(roles: Mapping[ReplicaId, Role] | None = None, mode: Mode = Mode.ACT) -> Scheduler:
    """A scheduler of three replicas that can exchange KV."""
    config = SchedulerConfig(policy="best_fit", mode=mode, epoch_s=1.0, bounds=(3, 3))
    profile = Profile("node", "cache", 1.0)
    return Scheduler(Fleet(*(replace(make_report(name, 100), profile=profile) for name in "abc")), config, roles)


async def shown(scheduler: Scheduler) -> list[tuple[str, str | None]]:
    """The role of every replica, and the one that an operator has set."""
    return [(r["role"], r["role_by_hand"]) for r in (await scheduler.core.state(SOLE_POOL))["replicas"]]


async def test_an_operators_role_is_in_state_metrics_and_placements_until_it_is_taken_back() -> None:
    scheduler = three()
    await scheduler.epoch()
    assert await scheduler.core.set_role(SOLE_POOL, "b", Role.DECODE) == MoveAccepted("b")
    assert await scheduler.core.set_role(SOLE_POOL, "c", Role.PREFILL) == MoveAccepted("c")
    await scheduler.epoch()
    assert await shown(scheduler) == [("both", None), ("decode", "decode"), ("prefill", "prefill")]
    gauges = parsed(merge([await scheduler.core.metrics()]))["mell_replica_roles"]
    assert sorted(gauges.values()) == [1.0, 1.0, 1.0]
    placed = await place(scheduler, 20)
    assert (placed.replica, placed.then.target) == ("c", "a")
    for name in "bc":
        assert await scheduler.core.set_role(SOLE_POOL, name, None) == MoveAccepted(name)
    await scheduler.epoch()
    assert await shown(scheduler) == [("both", None)] * 3 and scheduler.roles.kept == {}


async def test_the_next_scheduler_has_the_operators_roles() -> None:
    scheduler = three()
    await scheduler.epoch()
    await scheduler.core.set_role(SOLE_POOL, "b", Role.PREFILL)
    successor = three(scheduler.roles.kept | {ReplicaId("gone"): Role.DECODE})
    await successor.epoch()
    assert await shown(successor) == [("both", None), ("prefill", "prefill"), ("both", None)]
    await successor.core.set_role(SOLE_POOL, "a", Role.DECODE)
    assert successor.roles.kept == {"a": "decode", "b": "prefill"}, "what ended meanwhile is left out"


async def test_a_role_is_refused_where_it_would_do_nothing() -> None:
    scheduler = three()
    await scheduler.epoch()
    answer = await scheduler.core.set_role(SOLE_POOL, "z", Role.DECODE)
    assert isinstance(answer, MoveRejected) and (answer.status, answer.details) == (404, {"replicas": ["a", "b", "c"]})
    scheduler = three(mode=Mode.OFF)
    await scheduler.epoch()
    answer = await scheduler.core.set_role(SOLE_POOL, "a", Role.DECODE)
    assert isinstance(answer, MoveRejected) and answer.status == 422 and "scheduler.mode is off" in answer.message


LEVELS = {"slo": {"ttft_p99_s": 2.0}, "classes": {"chat": {"rank": 1, "itl_p99_ms": 50.0}, "batch": {"rank": -1}}}


def targets(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The levels in a state: that of the pool, and that of the class `chat`."""
    return [each["target"] for each in (state["service"], state["service"]["classes"]["chat"])]


async def test_a_level_is_changed_at_run_time(tmp_path: Path) -> None:
    config = SchedulerConfig.model_validate({**LEVELS, "epoch_s": 0.2, "bounds": (1, 4)})
    scheduler = Scheduler(Fleet(make_report("a", 100)), config)
    recording = tmp_path / "epochs.jsonl"
    recorder = scheduler.core._epochs._recorder = FileRecorder(recording, config.terms)
    await scheduler.epoch()
    before = await scheduler.core.state(SOLE_POOL)
    view = await scheduler.core.view(SOLE_POOL)
    assert view.ttft_s == {"default": 2.0, "batch": 2.0}, "a class with a level of its own has only that"
    orders = [("default", 1.5, 0.04), ("chat", 0.5, None)]
    answers = await asyncio.gather(*(scheduler.core.set_level(SOLE_POOL, *order) for order in orders))
    assert answers == [MoveAccepted("Engine")] * 2, "none undoes the other"
    pool, chat = targets(await scheduler.core.state(SOLE_POOL))
    assert targets(before) == [{"ttft_p99_s": 2.0, "itl_p99_ms": None}, {"ttft_p99_s": None, "itl_p99_ms": 50.0}]
    assert (pool, chat) == ({"ttft_p99_s": 1.5, "itl_p99_ms": 40.0}, {"ttft_p99_s": 0.5, "itl_p99_ms": 50.0})
    assert (await scheduler.core.view(SOLE_POOL)).ttft_s == {"default": 1.5, "chat": 0.5, "batch": 1.5}
    for name in ("batch", "other"):
        answer = await scheduler.core.set_level(SOLE_POOL, name, 1.0, None)
        assert isinstance(answer, MoveRejected) and answer.status == 422 and name in answer.message
    await scheduler.epoch()
    recorder.close()
    assert replay(recording).different == ()
    entries = [entry for epoch in read_recording(recording)[1] for entry in epoch.entries]
    assert [entry.levels["default"].ttft_p99_s for entry in entries if isinstance(entry, LevelsOrdered)] == [1.5, 1.5]

    successor = Scheduler(Fleet(make_report("a", 100)), config, levels=scheduler.levels)
    await successor.epoch()
    assert targets(await successor.core.state(SOLE_POOL)) == [pool, chat]


async def test_new_bounds_are_in_the_state() -> None:
    scheduler = three()
    await scheduler.epoch()
    assert await scheduler.core.set_bounds(SOLE_POOL, 1, 5) == MoveAccepted("Engine")
    state = await scheduler.core.state(SOLE_POOL)
    assert (state["min_replicas"], state["max_replicas"]) == (1, 5)


async def test_bounds_are_refused_where_nothing_opens_replicas() -> None:
    scheduler = three(mode=Mode.OFF)
    answer = await scheduler.core.set_bounds(SOLE_POOL, 1, 5)
    assert isinstance(answer, MoveRejected) and answer.status == 422 and "scheduler.mode is off" in answer.message


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
async def test_nothing_falls_asleep_where_no_request_would_wake_it(mode: Mode) -> None:
    answer = await three(mode=mode).core.set_asleep(SOLE_POOL, None, asleep=True)
    assert isinstance(answer, MoveRejected) and answer.status == 422 and f"scheduler.mode is {mode}" in answer.message


async def test_without_a_budget_pools_keep_their_sizes_and_a_replica_awake() -> None:
    scheduler = three()
    bounds = await scheduler.core.set_bounds(SOLE_POOL, 0, 4)
    assert isinstance(bounds, MoveRejected) and "a minimum of 0 needs memory.budget_mib" in bounds.message
    answer = await scheduler.core.set_memory(SOLE_POOL, "a", 100)
    assert answer == MoveRejected(422, "memory.budget_mib is not set: KV pools keep their sizes")
    assert "devices" not in await scheduler.core.state(SOLE_POOL)


# --- the loop -----------------------------------------------------------------------------------------


async def test_an_epoch_that_fails_is_followed_by_another() -> None:
    scheduler = await make_scheduler()
    scheduler.fleet.fault = RuntimeError("broken")
    loop = asyncio.create_task(scheduler.core.run())
    await asyncio.sleep(0.02)
    failed_at, scheduler.fleet.fault = scheduler.core._epochs.last, None
    async with asyncio.timeout(5):
        while scheduler.core._epochs.last == failed_at:
            await asyncio.sleep(0.01)
    loop.cancel()


@pytest.mark.parametrize(
    ("where", "method"),
    [(Locations, "take_replicas"), (Roster, "_settle"), (LivePool, "watch_closing"), (Decisions, "settle")],
)
async def test_the_epoch_after_one_that_failed_decides_on_a_snapshot(
    monkeypatch: pytest.MonkeyPatch, where: type, method: str
) -> None:
    """A replica that has come with the failed epoch is closed by the next, though nothing changes on it."""
    scheduler = await make_scheduler(*half_empty(), mode=Mode.ACT, spec=NO_GROWTH, a=make_record("m2"))
    scheduler.fleet.reports[ReplicaId("c")] = make_report("c", 256)
    scheduler.members.become("a", "b", "c")
    await asyncio.sleep(1.0)
    await fail_in(scheduler, monkeypatch, where, method)
    closed = len(scheduler.scale.closed)
    await asyncio.sleep(1.0)
    await scheduler.epoch()
    assert ReplicaId("c") in scheduler.core._memory.pool(SOLE_POOL).locations.statuses
    assert scheduler.scale.closed[closed:] == ["c"]


async def fail_in(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, where: type, method: str) -> None:
    """Run an epoch that fails in a method."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("once")

    with monkeypatch.context() as patched:
        patched.setattr(where, method, fail)
        with pytest.raises(RuntimeError, match="once"):
            await scheduler.epoch()


async def test_after_a_failed_epoch_replicas_report_their_whole_caches_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = await make_scheduler(make_report("a", blocks=(1, 2)))
    assert scheduler.core._pools[SOLE_POOL]._roster.version(ReplicaId("a")) is not None
    await fail_in(scheduler, monkeypatch, PoolMemory, "_take_caches")
    for _ in range(2):
        await asyncio.sleep(1.0)
        await scheduler.epoch()
    assert scheduler.core._memory.pool(SOLE_POOL).router.tree.copies() == (2, 2)


# --- the mode -----------------------------------------------------------------------------------------


async def test_an_ordered_mode_stops_moves_and_closings_at_once_and_allows_them_again() -> None:
    scheduler = await make_scheduler(*half_empty(), epochs=0, mode=Mode.ACT, spec=NO_GROWTH, a=make_record("m2"))
    assert await scheduler.core.set_mode(Mode.OFF) == MoveAccepted("off")
    await asyncio.sleep(1.0)
    await scheduler.epoch()
    state = await scheduler.core.state(SOLE_POOL)
    assert (state["mode"], state["configured_mode"]) == ("off", "act")
    assert (scheduler.fleet.asked, scheduler.scale.closed, scheduler.scale.scales) == ([], [], False)
    assert await scheduler.core.set_mode(Mode.ACT) == MoveAccepted("act")
    await asyncio.sleep(1.0)
    await scheduler.epoch()
    assert [call for _, call, *_ in scheduler.fleet.asked] == ["move"] and scheduler.scale.scales


async def test_an_order_waits_for_the_epoch_under_way() -> None:
    scheduler = await make_scheduler(*half_empty(), epochs=0, mode=Mode.ACT, spec=NO_GROWTH, a=make_record("m2"))
    epoch = asyncio.create_task(scheduler.epoch())
    await asyncio.sleep(0)
    await scheduler.core.set_mode(Mode.OFF)
    assert epoch.done()


async def test_the_next_scheduler_has_the_ordered_mode_until_the_application_is_deployed_again() -> None:
    def successor(mode: Mode = Mode.ACT) -> Scheduler:
        return Scheduler(Fleet(*half_empty()), SchedulerConfig(mode=mode), modes=first.modes)

    first = await make_scheduler(mode=Mode.ACT)
    first.listing.deployed_at = 5.0
    await first.core.set_mode(Mode.OBSERVE)
    assert first.modes.kept == ModeOrder(Mode.OBSERVE, 5.0)
    second = successor()
    for deployed_at, mode in (None, "observe"), (5.0, "observe"), (6.0, "act"):
        second.listing.deployed_at = deployed_at
        await asyncio.sleep(1.0)
        await second.epoch()
        assert (await second.core.state(SOLE_POOL))["mode"] == mode
    assert (await successor(Mode.OFF).core.state(SOLE_POOL))["mode"] == "observe", "before Serve has answered"


async def test_the_moves_of_an_ordered_dry_run_are_added_to_those_of_the_last_one() -> None:
    scheduler = await make_scheduler(*half_empty(), mode=Mode.OFF, spec=NO_GROWTH)
    moves = []
    for mode in Mode.OBSERVE, Mode.OFF, Mode.OBSERVE:
        await scheduler.core.set_mode(mode)
        for _ in range(2):
            await asyncio.sleep(1.0)
            await scheduler.epoch()
        moves.append((mode in "observe", await scheduler.counted("mell_dry_run_moves_total")))
        assert ("dry_run" in await scheduler.core.state(SOLE_POOL)) is (mode is Mode.OBSERVE)
    first = moves[0][1]
    assert first > 0 and moves == [(True, first), (False, first), (True, 2 * first)]


async def test_act_is_refused_where_serve_decides_on_the_number() -> None:
    config = SchedulerConfig(mode=Mode.OFF, scales=False)
    answer = await Scheduler(Fleet(make_report("a")), config).core.set_mode(Mode.ACT)
    assert isinstance(answer, MoveRejected) and answer.status == 422 and "target_ongoing_requests" in answer.message


async def test_the_reasons_of_a_mode_end_with_it() -> None:
    scheduler = await make_scheduler(make_report("a", requests=(running("r"),)), mode=Mode.ACT)
    assert await scheduler.counted("mell_replicas_reason") == 1
    await scheduler.core.set_mode(Mode.OFF)
    assert await scheduler.counted("mell_replicas_reason") == 0
    assert "scaling" not in await scheduler.core.state(SOLE_POOL)


async def test_early_epochs_come_early_but_not_at_once() -> None:
    config = SchedulerConfig(policy="best_fit", mode=Mode.OFF, epoch_s=60.0)
    scheduler = Scheduler(Fleet(make_report("a")), config)
    loop = asyncio.create_task(scheduler.core.run())
    await scheduler.core._epochs.ready.wait()
    first = scheduler.core._epochs.last
    await scheduler.core.hurry()
    async with asyncio.timeout(10):
        while scheduler.core._epochs.last == first:
            await asyncio.sleep(0.01)
    assert scheduler.core._epochs.last - first == pytest.approx(EARLIEST_S)
    loop.cancel()


@pytest.mark.parametrize("auto", [True, False])
async def test_the_number_of_replicas_for_prefills_is_in_state_if_it_is_decided(auto: bool) -> None:
    config = SchedulerConfig(mode=Mode.ACT, bounds=(2, 2), prefill_replicas=1, auto_prefills=auto)
    scheduler = Scheduler(Fleet(make_report("a"), make_report("b")), config)
    await scheduler.epoch()
    shown = (await scheduler.core.state(SOLE_POOL)).get("disaggregation")
    none = {"prefill_replicas": 0, "at_most": 1, "reason": "measuring", "apart_share": 0.0, "predicted_s": {}}
    assert shown == (none if auto else None)


async def test_a_prefill_is_moved_on_in_an_early_epoch() -> None:
    """From the one replica that is for prefills to one that decodes, if its placement came without this move."""
    config = SchedulerConfig(
        policy="best_fit", mode=Mode.ACT, epoch_s=2.0, bounds=(2, 2), prefill_replicas=1, moves_at_once=1
    )
    profile = Profile("node", "cache", 1.0)
    reports = [replace(make_report(name, free), profile=profile) for name, free in (("a", 200), ("b", 100))]
    scheduler = Scheduler(Fleet(*reports, move=make_record()), config)
    loop = asyncio.create_task(scheduler.core.run())
    await scheduler.core._epochs.ready.wait()
    assert {r["id"]: r["role"] for r in (await scheduler.core.state(SOLE_POOL))["replicas"]} == {
        "a": "prefill",
        "b": "decode",
    }
    began = now()
    assert await place(scheduler, 20, "n") == Place(ReplicaId("a"))
    arrived = replace(running("n", "label"), phase=Phase.PREFILL)
    scheduler.fleet.reports[ReplicaId("a")] = replace(make_report("a", 200, (arrived,)), profile=profile)
    async with asyncio.timeout(10):
        while not scheduler.fleet.asked:
            await asyncio.sleep(0.01)
    assert now() - began < 3 * EARLIEST_S
    (_, call, order, target, _) = scheduler.fleet.asked[0]
    assert (call, target) == ("move", "b")
    assert (order.request, order.path, order.reason) == ("n", PathRequest.KV, Reason.DISAGGREGATE)
    loop.cancel()


async def test_a_scheduler_that_was_replaced_stops() -> None:
    scheduler = await make_scheduler()
    scheduler.fleet.fault = Refused("newer", Cause.SUPERSEDED)
    async with asyncio.timeout(1):
        await scheduler.core.run()


async def test_a_scheduler_whose_epochs_stopped_is_unhealthy() -> None:
    scheduler = await make_scheduler()
    check_epochs(False, scheduler.core.silent_s, 1.0)
    await asyncio.sleep(1.1)
    with pytest.raises(RuntimeError, match="no epoch"):
        check_epochs(False, scheduler.core.silent_s, 1.0)
    with pytest.raises(RuntimeError, match="no epoch"):
        check_epochs(True, 0.0, 1.0)
