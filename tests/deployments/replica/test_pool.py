"""The MemPool of a replica on a fake engine: memory under leases, and blocks by their contexts."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from deployments.engine.tokens import expected
from deployments.replica.prefix_cache.pool import ReplicaPool
from migration.kv.cache_events import HostStored, encode_names
from migration.pool import MemPool, PinAnswer, PinRefusal
from migration.protocol.errors import Refused, RequestGone, TransferFailed
from migration.protocol.messages import PathRequest, SlotRef
from migration.protocol.record import Outcome
from migration.run.source import Order
from policies.causes import Cause
from policies.model import Blocks, ReplicaId, RequestId, Tokens
from policies.plan import Reason
from policies.prefix.tree import HeldPrefix
from tests.deployments.engine.fake_engine import prompt_of
from tests.migration.world import Pair, Replica, make_pair, spec

PAGE = Path(__file__).parents[3] / "docs" / "caching.md"

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = make_pair(lease_s=5.0)
    yield made
    for reader in made.readers:
        reader.cancel()


def pool_of(replica: Replica, lease_s: float = 5.0) -> ReplicaPool:
    return ReplicaPool(replica.engine, replica.host, replica.moves, replica.copies, lease_s)


async def staged(pair: Pair, count: int) -> list[SlotRef]:
    """The first blocks of request "r", which runs on replica a, in a slot."""
    with await pair.a.slots.lease() as slots:
        shards = await pair.a.engine.gather("r.0", Blocks(0), Blocks(count), slots)
    return [shard.slot for shard in shards]


# --- memory -------------------------------------------------------------------------------------------


async def test_memory_is_kept_until_it_is_given_back(pair: Pair) -> None:
    pool = pool_of(pair.a)
    pool.alloc_mem("one", Tokens(40))
    assert pair.a.host.reserved_tokens == 40
    pool.free_mem("one")
    assert pair.a.host.reserved_tokens == 0
    pool.free_mem("one")


async def test_memory_becomes_free_with_its_lease(pair: Pair) -> None:
    pool = pool_of(pair.a, lease_s=2.0)
    pool.alloc_mem("one", Tokens(40))
    await asyncio.sleep(1.9)
    assert pair.a.host.reserved_tokens == 40
    await asyncio.sleep(0.2)
    assert pair.a.host.reserved_tokens == 0
    pool.alloc_mem("one", Tokens(40))
    pool.free_mem("one")


async def test_memory_that_is_not_there_is_refused(pair: Pair) -> None:
    pool = pool_of(pair.a)
    pair.a.room = 60
    pool.alloc_mem("one", Tokens(40))
    with pytest.raises(Refused, match="no room for 40 tokens") as full:
        pool.alloc_mem("two", Tokens(40))
    assert full.value.cause is Cause.NO_ROOM
    with pytest.raises(Refused, match="memory of the name 'one' already"):
        pool.alloc_mem("one", Tokens(1))
    assert pair.a.host.reserved_tokens == 40
    pool.free_mem("one")


# --- index --------------------------------------------------------------------------------------------


async def test_inserted_blocks_are_found_by_their_context_until_they_are_deleted(pair: Pair) -> None:
    request, pool = spec(), pool_of(pair.b)
    cursor = pair.submit(request)
    await pair.until(cursor, 2)
    assert pool.match(request) == HeldPrefix(0)
    slots = await staged(pair, 8)
    with pytest.raises(TransferFailed):  # The slot was given back, and has another ticket.
        await pool.insert("i-0", request, (), Blocks(0), slots, Blocks(8))
    with await pair.a.slots.lease() as leased:
        shards = await pair.a.engine.gather("r.0", Blocks(0), Blocks(8), leased)
        await pool.insert("i-1", request, (), Blocks(0), [shard.slot for shard in shards], Blocks(8))
    assert pool.match(request) == HeldPrefix(8)
    assert pool.match(spec("other")) == HeldPrefix(0)
    names = list(pair.b.engine.mirror.hbm.counts)
    assert await pool.delete(names[2:3]) == 1 and pool.match(request) == HeldPrefix(2)
    assert await pool.delete(None) == 7 and pool.match(request) == HeldPrefix(0)


# --- pins ---------------------------------------------------------------------------------------------


def with_host(pair: Pair, names: list[int], blocks: int = 40) -> ReplicaPool:
    """The pool of a replica whose host has blocks of these names, and room for `blocks`."""
    engine = pair.a.engine
    engine.host_blocks = Blocks(blocks)
    engine.mirror.take(engine.mirror.version + 1, [HostStored(encode_names(names))])
    return pool_of(pair.a)


async def test_pin_ends_by_itself_or_by_an_order(pair: Pair) -> None:
    pool = with_host(pair, [1, 2, 3])
    assert await pool.pin([1, 2, 9], 5.0) == PinAnswer(Blocks(2)) and pool.pinned == 2
    assert await pool.pin([1, 2, 3], 1.0) == PinAnswer(Blocks(3)) and pool.pinned == 3, "blocks count once"
    await asyncio.sleep(1.1)
    assert pool.pinned == 2 and len(pair.a.engine.pins) == 1
    assert await pool.pin([1, 2], 0.0) == PinAnswer(Blocks(2))
    assert pool.pinned == 0 and pair.a.engine.pins == {}
    assert (await pool.pin([1, 2], 0.0)).refusal is PinRefusal.UNKNOWN


async def test_pin_is_renewed_by_a_later_one(pair: Pair) -> None:
    pool = with_host(pair, [1, 2])
    await pool.pin([1, 2], 1.0)
    await pool.pin([1, 2], 5.0)
    await asyncio.sleep(2.0)
    assert pool.pinned == 2
    await asyncio.sleep(4.0)
    assert pool.pinned == 0


async def test_nothing_is_pinned_without_a_tier_a_known_block_or_a_budget(pair: Pair) -> None:
    assert (await pool_of(pair.a).pin([1], 5.0)).refusal is PinRefusal.NO_TIER
    pool = with_host(pair, list(range(1, 31)))
    assert (await pool.pin([31, 1], 5.0)).refusal is PinRefusal.UNKNOWN
    await pool.pin(list(range(1, 9)), 5.0)
    refused = await pool.pin(list(range(20, 31)), 5.0)
    assert refused.refusal is PinRefusal.BUDGET and "19 blocks would be pinned, and 10 can be" in refused.why
    assert pool.pinned == 8 and (await pool.pin([20, 21], 5.0)).blocks == 2


async def test_pins_are_forgotten_with_a_reset(pair: Pair) -> None:
    pool = with_host(pair, [1, 2])
    await pool.pin([1, 2], 1.0)

    async def reset() -> str | None:
        pair.a.engine.pins.clear()
        return None

    async def refuse() -> str | None:
        return "a request holds blocks"

    assert await pool.reset(refuse) == "a request holds blocks" and pool.pinned == 2
    assert await pool.reset(reset) is None and pool.pinned == 0
    await pool.pin([1], 5.0)
    await asyncio.sleep(2.0)
    assert pair.a.engine.pins.keys() == {"pin-1"} and pool.pinned == 1


class SlowPins:
    """An engine that carries out orders about pins, and answers a while later; `broken`: with an error."""

    def __init__(self, pins: dict[str, Sequence[int]], broken: bool = False) -> None:
        self._pins = pins
        self._broken = broken

    async def pin(self, pin: str, names: Sequence[int]) -> Blocks:
        self._pins[pin] = names
        await asyncio.sleep(0.02)
        if self._broken:
            raise TransferFailed("the engine does not answer")
        return Blocks(len(names))

    async def unpin(self, pin: str) -> Blocks:
        names = self._pins.pop(pin, ())
        await asyncio.sleep(0.03)
        return Blocks(len(names))


def answering_late(pair: Pair, monkeypatch: pytest.MonkeyPatch, broken: bool = False) -> dict[str, Sequence[int]]:
    """Have the engine answer orders about pins late. Returns the pins that it has."""
    engine = pair.a.engine
    slow = SlowPins(engine.pins, broken)
    monkeypatch.setattr(engine, "pin", slow.pin)
    monkeypatch.setattr(engine, "unpin", slow.unpin)
    return engine.pins


async def test_pins_at_once_keep_to_the_budget_together(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, pins = with_host(pair, list(range(1, 31))), answering_late(pair, monkeypatch)
    answers = await asyncio.gather(*(pool.pin(list(range(at, at + 8)), 9.0) for at in (1, 11, 21)))
    assert [each.refusal for each in answers] == [None, PinRefusal.BUDGET, PinRefusal.BUDGET]
    assert pool.pinned == 8 and sum(map(len, pins.values())) == 8


@pytest.mark.parametrize("after_s", [0.97, 0.99, 1.0, 1.01, 1.02, 1.03])
async def test_a_renewal_that_meets_the_expiry_is_a_pin(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    pool, pins = with_host(pair, [1, 2, 3]), answering_late(pair, monkeypatch)
    began = asyncio.get_running_loop().time()
    await pool.pin([1, 2, 3], 1.0)
    await asyncio.sleep(began + after_s - asyncio.get_running_loop().time())
    assert await pool.pin([1, 2, 3], 5.0) == PinAnswer(Blocks(3))
    await asyncio.sleep(1.0)
    assert pool.pinned == 3 and list(pins.values()) == [(1, 2, 3)]
    await asyncio.sleep(5.0)
    assert pool.pinned == 0 and pins == {}


@pytest.mark.parametrize("ttl_s", [0.001, 0.02, 0.03])
async def test_a_pin_that_expires_before_it_is_answered_ends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, ttl_s: float
) -> None:
    pool, pins = with_host(pair, [1]), answering_late(pair, monkeypatch)
    await pool.pin([1], ttl_s)
    await asyncio.sleep(1.0)
    assert pool.pinned == 0 and pins == {}


async def test_a_deletion_while_pins_end_is_no_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, pins = with_host(pair, [1, 2, 3]), answering_late(pair, monkeypatch)
    await pool.pin([1], 60.0)
    await pool.pin([2], 0.05)
    await asyncio.sleep(0.02)
    ended, deleted, again = await asyncio.gather(pool.pin([1], 0.0), pool.delete(None), pool.delete([1, 2]))
    assert ended == PinAnswer(Blocks(1)) and (deleted, again) == (0, 0)
    await asyncio.sleep(1.0)
    assert pool.pinned == 0 and pins == {}


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_pin_whose_answer_is_lost_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch, cancelled: bool) -> None:
    pool, pins = with_host(pair, [1]), answering_late(pair, monkeypatch, broken=not cancelled)
    pinning = asyncio.create_task(pool.pin([1], 60.0))
    await asyncio.sleep(0.01)
    assert len(pins) == 1
    if cancelled:
        pinning.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else TransferFailed):
        await pinning
    await asyncio.sleep(1.0)
    assert pool.pinned == 0 and pins == {}


async def test_pins_of_deleted_blocks_end(pair: Pair) -> None:
    pool = with_host(pair, [1, 2, 3])
    await pool.pin([1, 2], 5.0)
    await pool.pin([3], 5.0)
    await pool.delete([2])
    assert pool.pinned == 1
    await pool.delete(None)
    assert pool.pinned == 0 and pair.a.engine.pins == {}


# --- transfer -----------------------------------------------------------------------------------------


async def test_transferred_request_goes_on_with_its_blocks(pair: Pair) -> None:
    request = spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pool_of(pair.a).transfer(Order("t", request.id, PathRequest.KV, Reason.MANUAL), pair.b.id)
    record = await pair.settled()
    assert record.outcome is Outcome.COMMITTED and pair.b.engine.blocks_loaded == record.blocks
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


async def test_request_that_is_not_here_is_not_transferred(pair: Pair) -> None:
    with pytest.raises(RequestGone):
        pool_of(pair.a).transfer(Order("t", RequestId("r"), PathRequest.KV, Reason.MANUAL), ReplicaId("b"))


# --- documentation ------------------------------------------------------------------------------------


def test_page_has_exactly_the_calls_of_the_port() -> None:
    section = PAGE.read_text().split("## MemPool")[1].split("\n## ")[0]
    calls = {name for name in vars(MemPool) if not name.startswith("_")}
    assert set(re.findall(r"`([a-z_]+)\(", section)) == calls
