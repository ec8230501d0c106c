"""How many moves are begun, which are not, and what counts as under way."""

import asyncio
from dataclasses import replace

import pytest

from deployments.dispatch import Dispatch, Route
from migration.errors import PeerLost, Refused
from migration.protocol.messages import PathRequest
from migration.protocol.record import MigrationRecord, Outcome
from migration.run.source import Order
from policies.causes import Cause
from policies.decision.breaker import Breaker
from policies.decision.observation import Underway
from policies.model import ReplicaId, RequestId, Tokens
from policies.plan import Move, Path, Reason


class Sources:
    """Replicas that obey, or raise."""

    def __init__(self) -> None:
        self.orders: list[tuple[ReplicaId, Order, ReplicaId]] = []
        self.fault: Exception | None = None

    async def move(self, source: ReplicaId, order: Order, target: ReplicaId) -> MigrationRecord:
        self.orders.append((source, order, target))
        if self.fault is not None:
            raise self.fault
        return record(order.id, order.request, source, target)


class World:
    """A dispatch with a clock that stands still."""

    def __init__(self, at_once: int = 32, per_replica: int = 4) -> None:
        self.now = 0.0
        self.sources, self.breaker = Sources(), Breaker(failures=2, rest_s=10.0)
        self.dispatch = Dispatch(self.sources, self.breaker, lambda: self.now, at_once, per_replica)

    async def begin(self, *moves: Move, routes: dict[RequestId, Route] | None = None) -> None:
        self.dispatch.begin(self.dispatch.admissible(moves), routes or {})
        for _ in range(5):
            await asyncio.sleep(0)

    def ended(self, outcome: Outcome, cause: Cause | None = None, took_s: float = 1.0) -> None:
        """The last order has ended."""
        source, order, target = self.sources.orders[-1]
        made = record(order.id, order.request, source, target)
        self.dispatch.heard(replace(made, outcome=outcome, cause=cause, duration_s=took_s))


def record(id: str, request: RequestId, source: ReplicaId, target: ReplicaId) -> MigrationRecord:
    return MigrationRecord(id, request, "", source, target, Path.KV, "drain", "copying", Reason.DRAIN)


def move(name: str, source: str = "a", target: str = "b") -> Move:
    return Move(RequestId(name), ReplicaId(source), ReplicaId(target), Tokens(10), Reason.DRAIN, 0)


async def test_a_move_is_ordered_and_under_way_until_it_ends() -> None:
    world = World()
    await world.begin(move("p"), routes={RequestId("p"): Route(PathRequest.TOKENS, 2.0, 1.0)})
    ((source, order, target),) = world.sources.orders
    assert (source, order.request, order.path, order.reason, target) == ("a", "p", PathRequest.TOKENS, "drain", "b")
    assert (order.predicted_kv_s, order.predicted_tokens_s) == (2.0, 1.0)
    assert world.dispatch.under_way() == (Underway(RequestId("p"), ReplicaId("a"), ReplicaId("b")),)
    world.ended(Outcome.COMMITTED, took_s=3.0)
    assert world.dispatch.under_way() == ()
    assert world.dispatch.take_results() == ((3.0,), ())
    assert world.dispatch.take_results() == ((), ())


@pytest.mark.parametrize(
    ("at_once", "per_replica", "begun"), [(2, 4, "pq"), (32, 1, "ps"), (32, 2, "pqs"), (32, 4, "pqrs")]
)
async def test_so_many_at_a_time(at_once: int, per_replica: int, begun: str) -> None:
    world = World(at_once, per_replica)
    await world.begin(move("p"), move("q", "a", "c"), move("r", "b", "a"), move("s", "d", "c"))
    assert "".join(order.request for _, order, _ in world.sources.orders) == begun


async def test_what_moves_is_not_moved_again() -> None:
    world = World()
    await world.begin(move("p"))
    await world.begin(move("p", "a", "c"), move("q"))
    assert [order.request for _, order, _ in world.sources.orders] == ["p", "q"]


@pytest.mark.parametrize("cause", ["peer_lost", "no_answer", "transfer_failed", "transfer_timeout", "unexpected"])
async def test_a_pair_that_keeps_failing_rests_and_others_do_not(cause: str) -> None:
    world = World()
    for name in "pq":
        await world.begin(move(name))
        world.ended(Outcome.ABORTED, Cause(cause))
    await world.begin(move("r"), move("s", "a", "c"))
    assert [order.request for _, order, _ in world.sources.orders] == ["p", "q", "s"]
    world.now = 10.0
    assert world.dispatch.admissible([move("r")])


@pytest.mark.parametrize(
    "cause", ["no_room", "stopping", "request_ended", "client_gone", "fingerprint", "migration_gone", "already_there"]
)
async def test_what_says_nothing_of_the_pair_is_not_held_against_it(cause: str) -> None:
    world = World()
    for name in "pqr":
        await world.begin(move(name))
        world.ended(Outcome.REFUSED, Cause(cause))
    assert world.dispatch.admissible([move("s")])


async def test_an_evacuation_goes_between_replicas_that_rest() -> None:
    world = World()
    for name in "pq":
        await world.begin(move(name))
        world.ended(Outcome.ABORTED, Cause.PEER_LOST)
    away = replace(move("r"), reason=Reason.EVACUATE)
    assert world.dispatch.admissible([move("s"), away]) == [away]


@pytest.mark.parametrize(
    ("fault", "blocked"),
    [(PeerLost("dead"), True), (Refused("bound here", Cause.IMMOVABLE), False)],
    ids=["lost", "refused"],
)
async def test_an_order_that_does_not_begin_is_not_under_way(fault: Exception, blocked: bool) -> None:
    world = World()
    world.sources.fault = fault
    await world.begin(move("p"))
    await world.begin(move("q"))
    assert world.dispatch.under_way() == ()
    assert world.breaker.blocks((ReplicaId("a"), ReplicaId("b")), 0.0) is blocked


async def test_moves_of_an_earlier_scheduler_are_known_from_reports() -> None:
    world = World()
    running = record("m", RequestId("p"), ReplicaId("a"), ReplicaId("b"))
    world.dispatch.heard(running)
    assert not world.dispatch.admissible([move("p")])
    world.now = 29.0
    world.dispatch.heard(running)
    world.now = 58.0
    assert len(world.dispatch.under_way()) == 1
    world.now = 60.0
    assert world.dispatch.under_way() == (), "nobody has spoken of it for long"


async def test_what_operators_moved_is_told_apart() -> None:
    world = World()
    order = Order("m", RequestId("p"), PathRequest.AUTO, Reason.MANUAL)
    await world.dispatch.order(order, move("p"), by_hand=True)
    world.ended(Outcome.COMMITTED)
    assert world.dispatch.take_results() == ((1.0,), ("p",))
