"""The loop itself with two pools: each has its own reports, moves, arrivals and replicas."""

import pytest

from deployments.api.calls import PlaceCall
from deployments.config import SchedulerConfig
from deployments.metrics.telemetry import Telemetry
from deployments.scheduler.dispatch import Dispatch
from deployments.scheduler.epochs import Epochs
from deployments.scheduler.gatherer import Gatherer
from deployments.scheduler.pool import LivePool
from deployments.scheduler.recorder import Recorder
from deployments.scheduler.records import Records
from migration.protocol.errors import Refused
from migration.protocol.record import MigrationRecord
from migration.run.source import Order
from policies.causes import Cause
from policies.cluster.changes import Arrival
from policies.decision.deciding import SchedulerMemory
from policies.decision.placement import Place, Queue
from policies.decision.recording import Epoch
from policies.decision.reports import Roster
from policies.model import SOLE_POOL, Phase, PoolId, ReplicaId, RequestId, RequestLoad, Role, Tokens
from policies.plan import Move, Open, Plan, Reason
from simulator.command.replay import play
from tests.deployments.scheduler.fakes import FakeListing, Present, make_report
from tests.deployments.scheduler.test_gatherer import Engines
from tests.deployments.scheduler.test_scheduler import FakeScaler
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time

OTHER = PoolId("Other")
CAPACITY = 1024
CONFIG = SchedulerConfig(bounds=(1, 4), linger_s=0.0, foresight_s=0.0)


def replica(name: str, **sizes: int) -> Present:
    """A replica that decodes requests of these sizes."""
    requests = tuple(RequestLoad(RequestId(q), q, Tokens(n), Phase.DECODE, 1.0, 0) for q, n in sizes.items())
    return make_report(name, max(0, CAPACITY - sum(sizes.values())) // 4, requests)


class Watched:
    """One pool, its scaler, and the moves that its replicas were ordered to begin. Implements `Sources`."""

    def __init__(self, pool: PoolId, most: int, *replicas: Present) -> None:
        self.ordered: list[tuple[ReplicaId, RequestId, ReplicaId]] = []
        self.scaler = FakeScaler(most)
        self.engines = Engines(**{str(present.load.id): present for present in replicas})
        self.telemetry = Telemetry(pool)
        roster, dispatch = Roster(), Dispatch(self, Records(self.telemetry))
        gatherer = Gatherer(self.engines, roster, now, 1.0, lambda records: None, lambda: None)
        listing = FakeListing(list(self.engines.answers))
        self.live = LivePool(pool, 1, listing, gatherer, roster, dispatch, self.scaler, self.telemetry)

    async def move(self, source: ReplicaId, order: Order, target: ReplicaId) -> MigrationRecord:
        self.ordered.append((source, order.request, target))
        raise Refused("not in this test", Cause.NOT_BEGUN)


async def epochs(*pools: Watched, recorder: Recorder | None = None) -> Epochs:
    """The loop over these pools after its first epoch, with all orders carried out."""
    made = Epochs(CONFIG, [pool.live for pool in pools], SchedulerMemory(CONFIG.terms), now, recorder)
    await made.epoch()
    for pool in pools:
        await pool.live.gather()
    return made


async def test_an_overload_moves_nothing_to_the_other_pools_free_replicas() -> None:
    """The full pool opens a replica, and the idle one closes its empty one, in the same epoch."""
    full = Watched(SOLE_POOL, 3, replica("a", p=600, q=500), replica("b", r=1000))
    idle = Watched(OTHER, 9, replica("c", s=20), replica("d"))
    await epochs(full, idle)
    assert (full.ordered, full.scaler.opened, full.scaler.closed) == ([], 1, [])
    assert (idle.ordered, idle.scaler.opened, idle.scaler.closed) == ([], 0, ["d"])


async def test_each_pool_cures_its_overload_with_its_own_replicas() -> None:
    """Requests of one id in two pools are two requests."""
    first = Watched(SOLE_POOL, 2, replica("a", p=700, q=400), replica("b", r=20))
    second = Watched(OTHER, 2, replica("c", q=700, p=400), replica("d", r=20))
    await epochs(first, second)
    assert (first.ordered, second.ordered) == ([("a", "q", "b")], [("c", "p", "d")])


async def test_an_arrival_is_placed_in_its_pool() -> None:
    full, idle = Watched(SOLE_POOL, 1, replica("a", p=1000)), Watched(OTHER, 1, replica("b", q=10))
    loop = await epochs(full, idle)
    assert loop.ready.is_set()
    assert loop.place(PlaceCall(SOLE_POOL, Arrival(RequestId("x"), Tokens(500)), "", ()), ()) == Queue(ReplicaId("a"))
    full, idle = Watched(SOLE_POOL, 1, replica("a", p=10)), Watched(OTHER, 1, replica("b", q=5))
    loop = await epochs(idle, full)
    assert loop.place(PlaceCall(SOLE_POOL, Arrival(RequestId("x"), Tokens(500)), "", ()), ()) == Place(ReplicaId("a"))


class Kept:
    """Implements `Recorder`."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []

    def record(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)


async def test_a_replay_enters_what_was_recorded_into_its_pool() -> None:
    """Both pools have a replica and a request of the same names."""
    kept, pools = Kept(), (Watched(SOLE_POOL, 1, replica("a", q=10)), Watched(OTHER, 1, replica("a", q=900)))
    loop = await epochs(*pools, recorder=kept)
    for pool, tokens in ((OTHER, 500), (SOLE_POOL, 20)):
        loop.place(PlaceCall(pool, Arrival(RequestId("x"), Tokens(tokens)), "", ()), ())
        loop.order(pool, Move(RequestId("q"), ReplicaId("a"), ReplicaId("a"), Tokens(10), Reason.MANUAL, 0))
        loop.set_role(pool, ReplicaId("a"), Role.PREFILL)
    await loop.epoch()
    again = SchedulerMemory(CONFIG.terms)
    assert [same for _, same in play(again, iter(kept.epochs))] == [True, True]
    for pool in (SOLE_POOL, OTHER):
        live, replayed = loop._memory.pool(pool), again.pool(pool)
        assert replayed.cluster.requests[RequestId("x")].tokens == live.cluster.requests[RequestId("x")].tokens
        assert replayed.learned.roles_by_hand == live.learned.roles_by_hand == {"a": Role.PREFILL}
        assert replayed.locations.under_way.keys() == live.locations.under_way.keys()


async def test_a_pool_whose_replicas_are_silent_stops_no_other() -> None:
    silent, full = (
        Watched(SOLE_POOL, 1, replica("a")),
        Watched(OTHER, 2, replica("c", p=700, q=400), replica("d", r=20)),
    )
    silent.engines.answers[ReplicaId("a")] = "silent"
    loop = await epochs(silent, full)
    assert loop.ready.is_set() and full.ordered == [("c", "q", "d")]


@pytest.mark.parametrize(("scales", "opened", "closed"), [(True, 1, ["d"]), (False, 0, [])])
async def test_each_kind_of_action_has_its_executor(scales: bool, opened: int, closed: list[str]) -> None:
    pool = Watched(SOLE_POOL, 3, replica("c", s=20), replica("d"))
    move = Move(RequestId("s"), ReplicaId("c"), ReplicaId("d"), Tokens(20), Reason.DRAIN, 1)
    pool.live.carry_out(Plan.of((move,), opened=(Open(ReplicaId("e"), "n"),), closed=(ReplicaId("d"),)), scales)
    await pool.live.gather()
    assert (pool.ordered, pool.scaler.opened, pool.scaler.closed) == ([("c", "s", "d")], opened, closed)
