"""The shell of a pool's table on an engine that a test drives, in virtual time."""

import asyncio
import random

import pytest

from migration.memory.run import EngineEnded, Fitted, Resizer, begin
from migration.memory.tables import PoolState
from policies.memory.ledger import MemoryOrder, OrderNumber
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes, ReplicaId
from tests.virtual_time import virtual_loop

pytestmark = pytest.mark.virtual_time
R = ReplicaId("a")


class FakePool:
    """Implements `EngineMemory`: a shrink takes a call of 10 ms for each 4 blocks."""

    def __init__(self, size: int = 20, declared: int = 60) -> None:
        self.model = ModelMemory(Bytes(0), Bytes(0), Bytes(0), Bytes(1), Blocks(4))
        self.declared = Blocks(declared)
        self.start = Blocks(size)
        self.size = self.capacity = self.pages = Blocks(size)
        self.used = Blocks(0)
        self.refuses = False
        self.dead = self.fails = False
        self.calls: list[str] = []

    def announce(self, blocks: Blocks) -> None:
        self.capacity = blocks

    async def fit(self, blocks: Blocks) -> Fitted:
        await self._call(f"fit {blocks}")
        if self.used > blocks:
            return Fitted(self.size, Blocks(self.used - blocks))
        before, self.size = self.size, Blocks(max(blocks, self.size - 4)) if self.size > blocks else self.size
        return Fitted(self.size, moved=Blocks(before - self.size))

    async def release(self, blocks: Blocks) -> str | None:
        await self._call(f"release {blocks}")
        if self.refuses:
            return "the machine does not take it"
        self.pages = Blocks(max(self.size, blocks))
        return None

    async def grow(self, blocks: Blocks) -> None:
        await self._call(f"grow {blocks}")
        self.size = Blocks(max(self.size, blocks))
        self.pages = Blocks(max(self.pages, self.size))

    async def _call(self, what: str) -> None:
        self.calls.append(what)
        await asyncio.sleep(0.01)
        if self.dead:
            raise EngineEnded("it is dead")
        if self.fails:
            raise RuntimeError("unforeseen")


class Ordered:
    """A `Resizer` with its pool; `given` has the blocks that requests were to give back."""

    def __init__(self, **sizes: int) -> None:
        self.pool = FakePool(**sizes)
        self.given: list[int] = []
        self.resizer = Resizer(R, self.pool, virtual_loop().time, self.give_back)
        self._number = 0

    def give_back(self, blocks: Blocks) -> None:
        self.given.append(blocks)
        self.pool.used = Blocks(self.pool.used - blocks)

    def order(self, blocks: int, shrink_s: float = 5.0, number: int | None = None, fence: int = 1) -> None:
        self._number = self._number + 1 if number is None else number
        self.resizer.obey(MemoryOrder(R, OrderNumber(fence, self._number), MemoryPlan(Blocks(blocks))), shrink_s)

    def cause(self) -> str | None:
        return self.resizer.cause

    def at(self) -> tuple[int, int, int, int]:
        """The capacity, the size, the memory, and the memory that is reported."""
        assert self.pool.pages <= self.resizer.held, "no memory is in use that is not reported"
        return self.pool.capacity, self.pool.size, self.pool.pages, self.resizer.held


async def test_a_shrink_is_announced_at_once_and_reported_behind_the_memory() -> None:
    ordered = Ordered()
    ordered.order(8)
    assert ordered.at() == (8, 20, 20, 20) and ordered.resizer.state is PoolState.FITTING
    report = ordered.resizer.report
    assert (report.ordered, report.held) == (MemoryPlan(Blocks(8)), MemoryPlan(Blocks(20)))
    await ordered.resizer.settled()
    assert ordered.at() == (8, 8, 8, 8)
    assert ordered.pool.calls == ["fit 8"] * 3 + ["release 8"]
    counts = ordered.resizer.counts
    assert (counts.shrunk, counts.renumbered) == (1, 12) and counts.seconds == pytest.approx(0.04)


async def test_a_growth_is_reported_at_once_and_announced_behind_it() -> None:
    ordered = Ordered()
    ordered.order(40)
    assert ordered.at() == (20, 20, 20, 40)
    await ordered.resizer.settled()
    assert ordered.at() == (40, 40, 40, 40) and ordered.resizer.counts.grown == 1


async def test_pool_waits_until_requests_fit() -> None:
    ordered = Ordered()
    ordered.pool.used = Blocks(12)
    ordered.order(8)
    await asyncio.sleep(1)
    assert ordered.at() == (8, 20, 20, 20) and ordered.resizer.state in (PoolState.WAITING, PoolState.FITTING)
    ordered.pool.used = Blocks(8)
    await ordered.resizer.settled()
    assert ordered.at() == (8, 8, 8, 8) and not ordered.given


async def test_requests_are_given_back_when_the_time_is_over() -> None:
    ordered = Ordered()
    ordered.pool.used = Blocks(15)
    ordered.order(8, shrink_s=2.0)
    await asyncio.sleep(1.9)
    assert not ordered.given
    await ordered.resizer.settled()
    assert ordered.given == [7] and ordered.at() == (8, 8, 8, 8)
    assert virtual_loop().time() == pytest.approx(2.1, abs=0.1)


async def test_only_the_newest_order_counts() -> None:
    ordered = Ordered()
    ordered.order(8, number=5)
    ordered.order(50, number=4)
    ordered.order(50, number=5)
    assert ordered.resizer.ordered == 8
    ordered.order(30, number=1, fence=2)
    assert ordered.resizer.ordered == 30
    await ordered.resizer.settled()
    assert ordered.at() == (30, 30, 30, 30)


async def test_an_order_between_two_sizes_hands_out_what_was_withheld() -> None:
    ordered = Ordered(size=40)
    ordered.order(10)
    await asyncio.sleep(0.055)
    assert ordered.pool.size < 30
    ordered.order(30)
    await ordered.resizer.settled()
    assert ordered.at() == (30, 30, 30, 30)


async def test_memory_that_the_machine_does_not_take_stays_reported() -> None:
    ordered = Ordered()
    ordered.pool.refuses = True
    ordered.order(8)
    await ordered.resizer.settled()
    assert ordered.at() == (8, 8, 20, 20) and ordered.resizer.state is PoolState.SETTLED
    assert ordered.cause() == "the machine does not take it" and ordered.resizer.counts.failed_shrinks == 1
    ordered.order(20)
    await ordered.resizer.settled()
    assert ordered.at() == (20, 20, 20, 20) and not ordered.cause(), "it holds what it was ordered to"
    ordered.order(8)
    await ordered.resizer.settled()
    ordered.pool.refuses = False
    ordered.order(8)
    await ordered.resizer.settled()
    assert ordered.at() == (8, 8, 8, 8) and not ordered.cause()


@pytest.mark.parametrize("blocks", [8, 40])
async def test_a_call_that_fails_for_an_unknown_reason_is_made_again_by_the_same_order(blocks: int) -> None:
    ordered = Ordered()
    ordered.pool.fails = True
    ordered.order(blocks)
    await ordered.resizer.settled()
    assert ordered.resizer.state is PoolState.SETTLED
    assert (ordered.resizer.counts.failed_shrinks, ordered.resizer.counts.failed_growths) == (blocks < 20, blocks > 20)
    assert (ordered.pool.size, ordered.resizer.held) == (20, max(20, blocks)), "what it may have stays counted"
    assert "RuntimeError('unforeseen')" in (ordered.cause() or "")
    ordered.pool.fails = False
    ordered.order(blocks)
    await ordered.resizer.settled()
    assert ordered.at() == (blocks,) * 4 and not ordered.cause()


async def test_an_operators_order_is_marked_until_one_of_a_division() -> None:
    ordered = Ordered()
    for number, by_hand in enumerate((True, False), 1):
        ordered.resizer.obey(MemoryOrder(R, OrderNumber(1, number), MemoryPlan(Blocks(8)), by_hand), 5.0)
        assert ordered.resizer.report.by_hand is by_hand
    await ordered.resizer.settled()


async def test_orders_to_a_dead_engine_do_nothing() -> None:
    ordered = Ordered()
    ordered.pool.dead = True
    for blocks in (8, 40, 8):
        ordered.order(blocks)
        await ordered.resizer.settled()
    assert ordered.resizer.state is PoolState.OVER and ordered.pool.calls == ["fit 8"]


@pytest.mark.parametrize("seed", [*range(40)])
async def test_whatever_is_ordered_and_when_the_last_order_is_followed(seed: int) -> None:
    draw, ordered = random.Random(seed), Ordered(size=30)
    for _ in range(30):
        ordered.order(draw.randrange(4, 60), shrink_s=draw.choice([0.0, 0.3]))
        ordered.pool.used = Blocks(draw.randrange(0, ordered.pool.size + 1))
        await asyncio.sleep(draw.choice([0, 0.003, 0.01, 0.05, 0.4]))
        ordered.at()
    await ordered.resizer.settled()
    assert set(ordered.at()) == {ordered.resizer.ordered}
    assert ordered.pool.used <= ordered.pool.size


@pytest.mark.parametrize("blocks", [8, 20, 40])
async def test_a_pool_has_the_size_of_its_start_before_the_first_request(blocks: int) -> None:
    pool = FakePool()
    await begin(pool, Blocks(blocks))
    assert (pool.start, pool.size, pool.capacity, pool.pages) == (blocks,) * 4
