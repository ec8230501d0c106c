"""Pins on an engine with a tier of host memory: what ends them, what they may hold, and calls that meet."""

import asyncio
from collections.abc import Sequence

import pytest

from deployments.api.calls import PinAnswer, PinRefusal
from deployments.replica.prefix_cache.pins import Pins
from migration.kv.cache_events import HostStored, encode_names
from migration.protocol.errors import TransferFailed
from policies.model import Blocks
from tests.deployments.engine.quick_engine import QuickEngine

pytestmark = pytest.mark.virtual_time


class TieredEngine(QuickEngine):
    """An engine that pins what its mirror has in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pins: dict[str, Sequence[int]] = {}

    async def pin(self, pin: str, names: Sequence[int]) -> Blocks:
        self.pins[pin] = names
        return Blocks(self.mirror.held_by_host(names))

    async def unpin(self, pin: str) -> Blocks:
        return Blocks(len(self.pins.pop(pin, ())))


@pytest.fixture
async def engine() -> TieredEngine:
    return TieredEngine()


def with_host(engine: TieredEngine, names: list[int], blocks: int = 40) -> Pins:
    """The pins of an engine whose host has blocks of these names, and room for `blocks`."""
    engine.host_blocks = Blocks(blocks)
    engine.mirror.take(engine.mirror.version + 1, [HostStored(encode_names(names))])
    return Pins(engine)


async def test_pin_ends_by_itself_or_by_an_order(engine: TieredEngine) -> None:
    pool = with_host(engine, [1, 2, 3])
    assert await pool.pin([1, 2, 9], 5.0) == PinAnswer(Blocks(2)) and pool.pinned == 2
    assert await pool.pin([1, 2, 3], 1.0) == PinAnswer(Blocks(3)) and pool.pinned == 3, "blocks count once"
    await asyncio.sleep(1.1)
    assert pool.pinned == 2 and len(engine.pins) == 1
    assert await pool.pin([1, 2], 0.0) == PinAnswer(Blocks(2))
    assert pool.pinned == 0 and engine.pins == {}
    assert (await pool.pin([1, 2], 0.0)).refusal is PinRefusal.UNKNOWN


async def test_pin_is_renewed_by_a_later_one(engine: TieredEngine) -> None:
    pool = with_host(engine, [1, 2])
    await pool.pin([1, 2], 1.0)
    await pool.pin([1, 2], 5.0)
    await asyncio.sleep(2.0)
    assert pool.pinned == 2
    await asyncio.sleep(4.0)
    assert pool.pinned == 0


async def test_nothing_is_pinned_without_a_tier_a_known_block_or_a_budget(engine: TieredEngine) -> None:
    assert (await Pins(engine).pin([1], 5.0)).refusal is PinRefusal.NO_TIER
    pool = with_host(engine, list(range(1, 31)))
    assert (await pool.pin([31, 1], 5.0)).refusal is PinRefusal.UNKNOWN
    await pool.pin(list(range(1, 9)), 5.0)
    refused = await pool.pin(list(range(20, 31)), 5.0)
    assert refused.refusal is PinRefusal.BUDGET and "19 blocks would be pinned, and 10 can be" in refused.why
    assert pool.pinned == 8 and (await pool.pin([20, 21], 5.0)).blocks == 2


async def test_pins_are_forgotten_with_a_reset(engine: TieredEngine) -> None:
    pool = with_host(engine, [1, 2])
    await pool.pin([1, 2], 1.0)

    async def reset() -> str | None:
        engine.pins.clear()
        return None

    async def refuse() -> str | None:
        return "a request holds blocks"

    assert await pool.reset(refuse) == "a request holds blocks" and pool.pinned == 2
    assert await pool.reset(reset) is None and pool.pinned == 0
    await pool.pin([1], 5.0)
    await asyncio.sleep(2.0)
    assert engine.pins.keys() == {"pin-1"} and pool.pinned == 1


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


def answering_late(
    engine: TieredEngine, monkeypatch: pytest.MonkeyPatch, broken: bool = False
) -> dict[str, Sequence[int]]:
    """Have the engine answer orders about pins late. Returns the pins that it has."""
    slow = SlowPins(engine.pins, broken)
    monkeypatch.setattr(engine, "pin", slow.pin)
    monkeypatch.setattr(engine, "unpin", slow.unpin)
    return engine.pins


async def test_pins_at_once_keep_to_the_budget_together(engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, pins = with_host(engine, list(range(1, 31))), answering_late(engine, monkeypatch)
    answers = await asyncio.gather(*(pool.pin(list(range(at, at + 8)), 9.0) for at in (1, 11, 21)))
    assert [each.refusal for each in answers] == [None, PinRefusal.BUDGET, PinRefusal.BUDGET]
    assert pool.pinned == 8 and sum(map(len, pins.values())) == 8


@pytest.mark.parametrize("after_s", [0.97, 0.99, 1.0, 1.01, 1.02, 1.03])
async def test_a_renewal_that_meets_the_expiry_is_a_pin(
    engine: TieredEngine, monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    pool, pins = with_host(engine, [1, 2, 3]), answering_late(engine, monkeypatch)
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
    engine: TieredEngine, monkeypatch: pytest.MonkeyPatch, ttl_s: float
) -> None:
    pool, pins = with_host(engine, [1]), answering_late(engine, monkeypatch)
    await pool.pin([1], ttl_s)
    await asyncio.sleep(1.0)
    assert pool.pinned == 0 and pins == {}


async def test_a_deletion_while_pins_end_is_no_error(engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, pins = with_host(engine, [1, 2, 3]), answering_late(engine, monkeypatch)
    await pool.pin([1], 60.0)
    await pool.pin([2], 0.05)
    await asyncio.sleep(0.02)
    ended, deleted, again = await asyncio.gather(pool.pin([1], 0.0), pool.delete(None), pool.delete([1, 2]))
    assert ended == PinAnswer(Blocks(1)) and (deleted, again) == (0, 0)
    await asyncio.sleep(1.0)
    assert pool.pinned == 0 and pins == {}


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_pin_whose_answer_is_lost_ends(
    engine: TieredEngine, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    pool, pins = with_host(engine, [1]), answering_late(engine, monkeypatch, broken=not cancelled)
    pinning = asyncio.create_task(pool.pin([1], 60.0))
    await asyncio.sleep(0.01)
    assert len(pins) == 1
    if cancelled:
        pinning.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else TransferFailed):
        await pinning
    await asyncio.sleep(1.0)
    assert pool.pinned == 0 and pins == {}


async def test_pins_of_deleted_blocks_end(engine: TieredEngine) -> None:
    pool = with_host(engine, [1, 2, 3])
    await pool.pin([1, 2], 5.0)
    await pool.pin([3], 5.0)
    await pool.delete([2])
    assert pool.pinned == 1
    await pool.delete(None)
    assert pool.pinned == 0 and engine.pins == {}
