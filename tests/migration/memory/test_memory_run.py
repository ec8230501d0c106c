"""The shell of a pool's table on an engine that a test drives, in virtual time."""

import asyncio
import random

import pytest

from migration.memory.run import EngineEnded, Fitted, Resizer, begin
from migration.memory.tables import PoolState
from policies.memory.ledger import MemoryOrder, OrderNumber
from policies.memory.plan import ASLEEP, MemoryPlan, ModelMemory
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
        self.sleepless: str | None = None
        self.loaded = True
        self.unloadable = 0
        self.calls: list[str] = []

    def measure(self, held: MemoryPlan) -> None:
        self.calls.append(f"measure {held.blocks}")

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

    async def drop(self) -> str | None:
        assert not self.used, "no request computes without parameters"
        await self._call("drop")
        self.size = self.pages = Blocks(0)
        self.loaded = False
        return None

    async def load(self, blocks: Blocks) -> str | None:
        await self._call(f"load {blocks}")
        if self.unloadable > 0:
            self.unloadable -= 1
            return "the file is gone"
        self.size = self.pages = blocks
        self.loaded = True
        return None

    async def _call(self, what: str) -> None:
        self.calls.append(what)
        await asyncio.sleep(0.01)
        if self.dead:
            raise EngineEnded("it is dead")
        if self.fails:
            raise RuntimeError("unforeseen")


class Ordered:
    """A `Resizer` with its pool, and the requests of both. `given` has the blocks that these were to give back."""

    def __init__(self, **sizes: int) -> None:
        self.pool = FakePool(**sizes)
        self.given: list[int] = []
        self.resizer = Resizer(R, self.pool, virtual_loop().time, self)
        self.closed = False
        self.given_up: str | None = None
        self._number = 0

    @property
    def is_empty(self) -> bool:
        return not self.pool.used

    def close(self) -> None:
        self.closed = True

    def open(self) -> None:
        self.closed = False

    def is_open(self) -> bool:
        return not self.closed

    def give_up(self, reason: str) -> None:
        self.given_up = reason

    def give_back(self, blocks: Blocks) -> None:
        self.given.append(blocks)
        self.pool.used = Blocks(max(0, self.pool.used - blocks))

    def order(self, blocks: int | None, shrink_s: float = 5.0, number: int | None = None, fence: int = 1) -> None:
        self._number = self._number + 1 if number is None else number
        plan = MemoryPlan(None if blocks is None else Blocks(blocks))
        self.resizer.obey(MemoryOrder(R, OrderNumber(fence, self._number), plan), shrink_s)

    def cause(self) -> str | None:
        return self.resizer.cause

    def state(self) -> PoolState:
        return self.resizer.state

    def at(self) -> tuple[int, int, int, int]:
        """The capacity, the size, the memory, and the memory that is reported."""
        assert self.pool.pages <= self.resizer.held, "no memory is in use that is not reported"
        assert self.resizer.report.held.is_awake or not self.pool.loaded, "nor parameters"
        assert self.pool.loaded or self.closed, "nothing may come without parameters"
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


async def test_a_replica_sleeps_once_its_requests_have_left_and_wakes() -> None:
    ordered = Ordered()
    ordered.pool.used = Blocks(3)
    ordered.order(None)
    await asyncio.sleep(1)
    assert ordered.state() is PoolState.EMPTYING and not ordered.is_open()
    assert ordered.at() == (0, 20, 20, 20)
    ordered.pool.used = Blocks(0)
    await ordered.resizer.settled()
    assert ordered.state() is PoolState.ASLEEP and ordered.at() == (0, 0, 0, 0)
    assert ordered.resizer.report.held == ASLEEP and ordered.pool.calls == ["drop"]
    ordered.order(30)
    assert ordered.state() is PoolState.LOADING and not ordered.is_open()
    assert ordered.resizer.report.held == MemoryPlan(Blocks(30)), "reported before it is taken"
    await ordered.resizer.settled()
    assert ordered.state() is PoolState.SETTLED and ordered.is_open() and ordered.at() == (30, 30, 30, 30)
    assert ordered.resizer.wakes.done == 1 and ordered.resizer.wakes.seconds == pytest.approx(0.01)


async def test_requests_that_stay_are_given_back_before_a_sleep() -> None:
    ordered = Ordered()
    ordered.pool.used = Blocks(15)
    ordered.order(None, shrink_s=2.0)
    await ordered.resizer.settled()
    assert ordered.given == [60] and ordered.state() is PoolState.ASLEEP
    assert virtual_loop().time() == pytest.approx(2.1, abs=0.1)


async def test_a_replica_that_is_wanted_again_before_it_sleeps_goes_on() -> None:
    ordered = Ordered()
    ordered.pool.used = Blocks(3)
    ordered.order(None)
    await asyncio.sleep(0.1)
    ordered.order(20)
    assert ordered.is_open()
    await ordered.resizer.settled()
    assert ordered.at() == (20, 20, 20, 20) and ordered.pool.calls == ["grow 20"]


async def test_a_load_that_fails_leaves_it_asleep_and_three_in_a_row_give_the_engine_up() -> None:
    ordered = Ordered()
    ordered.order(None)
    await ordered.resizer.settled()
    ordered.pool.unloadable = 2
    for _ in range(3):
        ordered.order(20)
        await ordered.resizer.settled()
    assert ordered.state() is PoolState.SETTLED and ordered.cause() is None, "the third has ended well"
    ordered.order(None)
    await ordered.resizer.settled()
    ordered.pool.fails = True
    ordered.order(20)
    await ordered.resizer.settled()
    assert ordered.state() is PoolState.ASLEEP and "unforeseen" in (ordered.cause() or ""), "it counts, too"
    ordered.pool.fails = False
    ordered.pool.unloadable = 2
    ordered.order(20)
    await ordered.resizer.settled()
    assert ordered.state() is PoolState.ASLEEP and ordered.cause() == "the file is gone"
    ordered.order(None)
    await ordered.resizer.settled()
    assert ordered.resizer.report.held == ASLEEP and ordered.cause() == "the file is gone", "it stays known"
    assert not ordered.is_open() and ordered.given_up is None
    ordered.order(20)
    await ordered.resizer.settled()
    assert ordered.state() is PoolState.OVER and "3 times in a row: the file is gone" in str(ordered.given_up)
    assert ordered.resizer.wakes.failed == 5


@pytest.mark.parametrize("seed", [*range(40)])
async def test_whatever_is_ordered_and_when_the_last_order_is_followed(seed: int) -> None:
    draw, ordered = random.Random(seed), Ordered(size=30)
    for _ in range(30):
        ordered.order(draw.choice([None, *range(4, 60, 4)]), shrink_s=draw.choice([0.0, 0.3]))
        if not ordered.closed:
            ordered.pool.used = Blocks(draw.randrange(0, ordered.pool.size + 1))
        await asyncio.sleep(draw.choice([0, 0.003, 0.01, 0.05, 0.4]))
        ordered.at()
    await ordered.resizer.settled()
    assert set(ordered.at()) == {ordered.resizer.ordered}
    assert ordered.pool.used <= ordered.pool.size and ordered.pool.loaded is ordered.resizer.report.ordered.is_awake


@pytest.mark.parametrize("blocks", [8, 20, 40])
async def test_a_pool_has_the_size_of_its_start_before_the_first_request(blocks: int) -> None:
    pool = FakePool()
    await begin(pool, Blocks(blocks))
    assert (pool.start, pool.size, pool.capacity, pool.pages) == (blocks,) * 4
