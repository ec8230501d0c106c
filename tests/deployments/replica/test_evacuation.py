"""What a replica remembers of its cache, and the copies that it makes before it stops, with paced engines."""

import asyncio

import pytest

from deployments.replica.prefix_cache.contexts import PastContexts
from deployments.replica.prefix_cache.evacuation import Evacuator, LastCopies
from migration.protocol.continuing import plain_spec
from migration.protocol.errors import PeerLost, Refused
from migration.protocol.record import CopyOutcome, CopyRecord
from migration.protocol.request import RequestSpec
from migration.run.donor import CopyOrder
from policies.causes import Cause
from policies.model import ReplicaId
from policies.prefix.copies import CopyReason
from policies.prefix.evacuation import ContextCopy
from tests.migration.run.test_copies import BLOCK, A, B, CachedReplica, make_cluster

pytestmark = pytest.mark.virtual_time

C = ReplicaId("c")
TOKENS = 41
BLOCKS = 11
"""Those of a prompt of `TOKENS` and its answer of six tokens, of which the last is not computed."""


def request(number: int, tokens: int = TOKENS) -> RequestSpec:
    return plain_spec(f"r{number}", tuple(range(10 * number, 10 * number + tokens)), 6)


def remembering(most_bytes: int = 1 << 20) -> dict[ReplicaId, CachedReplica]:
    cluster = make_cluster()
    for replica in cluster.values():
        replica.host.contexts = PastContexts(lambda: most_bytes, asyncio.get_running_loop().time)
    return cluster


def evacuator(replica: CachedReplica) -> Evacuator:
    return Evacuator(replica.engine, replica.host.contexts, replica.copies.copy, asyncio.get_running_loop().time)


async def serve(replica: CachedReplica, spec: RequestSpec) -> None:
    """Have the replica's host answer a request."""
    replica.host.submit(spec, 0, ())
    async with asyncio.timeout(10):
        while spec.id not in replica.host._ended:
            await asyncio.sleep(0.001)


async def test_contexts_in_the_cache_are_listed_the_hottest_first() -> None:
    a = remembering()[A]
    await serve(a, request(1))
    await asyncio.sleep(5.0)
    await serve(a, request(2))
    second, first = await evacuator(a).cached()
    assert (len(first.names), len(second.names)) == (BLOCKS, BLOCKS), "with the answers"
    assert first.idle_s - second.idle_s > 5.0 and second.idle_s < 1.0
    assert set(first.names) | set(second.names) == set(a.engine.mirror.hbm.counts)
    await a.engine.delete(first.names[3:])
    assert [len(each.names) for each in await evacuator(a).cached()] == [BLOCKS, 3]
    await a.engine.delete(first.names[:1])
    assert [each.number for each in await evacuator(a).cached()] == [second.number]


async def test_request_that_its_reader_ends_is_remembered_and_one_that_moved_away_is_not() -> None:
    a = remembering()[A]
    for number in (1, 2):
        a.host.submit(plain_spec(f"r{number}", tuple(range(number, number + TOKENS)), 100), 0, ())
    await asyncio.sleep(1.0)
    a.host.client_gone(request(1).id)
    a.host.drop(request(2).id, 0)
    (context,) = await evacuator(a).cached()
    assert len(context.names) > TOKENS // BLOCK


async def test_memory_is_bounded_and_the_newest_contexts_stay() -> None:
    contexts = PastContexts(lambda: 5000, lambda: 0.0)
    for number in range(10):
        contexts.add(request(number), range(100))
        assert contexts.bytes <= 5000
    kept = [context.spec.id for context in contexts.newest_first()]
    assert kept == ["r9", "r8", "r7"]
    assert contexts.bytes == sum(context.size for context in contexts.newest_first())
    assert contexts.get(1) is None and contexts.get(10) is not None
    contexts.add(request(11), range(5000))
    assert not list(contexts.newest_first()) and not contexts.bytes, "one that is too large is not kept"
    nothing = PastContexts(lambda: 0, lambda: 0.0)
    nothing.add(request(1), ())
    assert not list(nothing.newest_first())


async def test_copied_contexts_are_found_and_remembered_by_their_targets() -> None:
    cluster = remembering()
    a, b = cluster[A], cluster[B]
    await serve(a, request(1))
    a.host.stopping = True
    (context,) = await evacuator(a).cached()
    assert await evacuator(a).send([ContextCopy(context.number, B)], 10.0) == 1
    assert a.copies.made.ended.total() == 0, "the scheduler counts them"
    (there,) = await evacuator(b).cached()
    assert list(there.names) == list(context.names)
    assert (await b.answer(request(1)))[1] == 40
    assert a.idle and b.idle


@pytest.mark.parametrize("fault", [PeerLost("gone"), "silent"])
async def test_target_that_is_lost_gets_no_more(fault: Exception | str) -> None:
    cluster = remembering()
    for number in (1, 2, 3):
        await serve(cluster[A], request(number))
    cluster[B].faults["prepare"] = fault
    copies = [ContextCopy(context.number, B) for context in await evacuator(cluster[A]).cached()]
    assert await evacuator(cluster[A]).send(copies, 10.0) == 0
    assert len(copies) == 3 and cluster[A].idle


class Recorded:
    """Copies that end as they are told, each after a second."""

    def __init__(self, **causes: Cause) -> None:
        self.causes = causes
        self.orders: list[tuple[CopyOrder, ReplicaId]] = []
        self.under_way = self.most = 0

    async def copy(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        self.orders.append((order, to))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(1.0)
        self.under_way -= 1
        cause = self.causes.get(to)
        if cause is Cause.ALREADY_MOVING:
            raise Refused("too many copies", cause)
        outcome = CopyOutcome.DONE if cause is None else CopyOutcome.ABORTED
        return CopyRecord(order.id, A, to, order.reason, "", outcome, cause=cause)


async def made(copies: Recorded, *targets: ReplicaId, within_s: float = 100.0) -> int:
    """The number of copies that were done, of a context for each of the targets."""
    clock = asyncio.get_running_loop().time
    contexts = PastContexts(lambda: 1 << 20, clock)
    for number in range(len(targets)):
        contexts.add(request(number), (1, 2))
    orders = [ContextCopy(number, target) for number, target in enumerate(targets, 1)]
    return await Evacuator(make_cluster()[A].engine, contexts, copies.copy, clock).send(orders, within_s)


async def test_copies_are_made_in_their_order_and_to_all_targets_at_a_time() -> None:
    copies, began = Recorded(), asyncio.get_running_loop().time()
    assert await made(copies, B, C, B, C, B) == 5
    assert copies.most == 2 and asyncio.get_running_loop().time() - began == pytest.approx(3.0, abs=0.1)
    assert [order.spec.id for order, to in copies.orders if to == B] == ["r0", "r2", "r4"]
    order, _ = copies.orders[0]
    assert order.reason is CopyReason.EVACUATE and order.outputs == (1, 2)


async def test_time_ends_the_copies() -> None:
    copies = Recorded()
    assert await made(copies, *[B] * 10, within_s=2.5) == 3
    assert [order.within_s for order, _ in copies.orders] == pytest.approx([2.5, 1.5, 0.5], abs=0.1)


async def test_few_copies_are_made_at_a_time() -> None:
    copies = Recorded()
    assert await made(copies, *(ReplicaId(f"t{number}") for number in range(9))) == 9
    assert copies.most == 4


@pytest.mark.parametrize(
    ("cause", "orders"), [(Cause.PEER_LOST, 1), (Cause.NO_ROOM, 3), (Cause.ALREADY_MOVING, 3)], ids=str
)
async def test_only_a_lost_target_gets_no_more(cause: Cause, orders: int) -> None:
    copies = Recorded(b=cause)
    assert await made(copies, B, B, B, C) == 1
    assert sum(to == B for _, to in copies.orders) == orders


class Asked:
    """The scheduler, which is `down` for that many attempts, and then has copies made for `takes_s` seconds."""

    def __init__(self, takes_s: float = 3.0, down: int = 0) -> None:
        self.takes_s, self.down = takes_s, down
        self.left_s: list[float] = []

    async def evacuate(self, within_s: float) -> None:
        self.left_s.append(within_s)
        if len(self.left_s) <= self.down:
            raise PeerLost("another one is starting")
        await asyncio.sleep(self.takes_s)


async def over_after(last: LastCopies, empty_after_s: float = 0.0) -> float:
    """The seconds until the replica may end, if its requests have gone after `empty_after_s`."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while not last.over(empty=clock() - began >= empty_after_s):
        await asyncio.sleep(0.1)
    return clock() - began


@pytest.mark.parametrize(
    ("scheduler", "empty_after_s", "grace_s", "left_s", "over_s"),
    [
        (Asked(), 0.0, 60.0, [58.0], 3.0),
        (Asked(), 5.0, 60.0, [53.0], 8.0),
        (Asked(100.0), 5.0, 20.0, [13.0], 18.0),
        (Asked(down=2), 0.0, 60.0, [58.0, 57.5, 57.0], 4.0),
        (Asked(down=99), 0.0, 4.0, [2.0, 1.5, 1.0, 0.5], 2.0),
        (Asked(), 0.0, 2.0, [], 0.0),
        (Asked(), 9.0, 10.0, [], 9.0),
    ],
    ids=[
        "it is idle",
        "its requests come first",
        "the grace period ends the copies",
        "another scheduler starts",
        "no scheduler starts",
        "there is no time",
        "its requests take all the time",
    ],
)
async def test_replica_that_stops_asks_for_its_copies_and_stays_as_long_as_it_may(
    scheduler: Asked, empty_after_s: float, grace_s: float, left_s: list[float], over_s: float
) -> None:
    last = LastCopies(scheduler.evacuate, lambda: True, grace_s, asyncio.get_running_loop().time)
    assert await over_after(last, empty_after_s) == pytest.approx(over_s, abs=0.3)
    assert scheduler.left_s == pytest.approx(left_s, abs=0.2)


async def test_last_replica_ends_at_once() -> None:
    scheduler = Asked()
    last = LastCopies(scheduler.evacuate, lambda: False, 60.0, asyncio.get_running_loop().time)
    assert await over_after(last) < 0.3 and not scheduler.left_s


async def test_copies_that_are_under_way_keep_the_replica() -> None:
    last = LastCopies(Asked(0.0).evacuate, lambda: True, 60.0, asyncio.get_running_loop().time)
    assert await over_after(last, 0.0) < 0.3
    assert not last.over(empty=False)
