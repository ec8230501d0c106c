"""A KV pool that shrinks and grows under running requests of a real engine: their tokens are those of a pool that keeps
its size, whatever blocks have changed places.
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.settings import CPU_ENGINE, CPU_ENV
from app.tinymodel import ensure_tiny_model
from deployments.engine.vllm_engine import VllmEngine
from migration.memory.run import Resizer
from migration.memory.tables import PoolState
from policies.memory.ledger import MemoryOrder, OrderNumber
from policies.memory.plan import MemoryPlan
from policies.model import Blocks, ReplicaId
from tests.counts import LONG_ONLY
from tests.integration.models.pair import BLOCK, EnginePair, prompt_of

pytestmark = LONG_ONLY

SIZES: Mapping[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 101, "max_num_seqs": 16}
DECLARED = 3.0
MOST, LEAST, LOW = 302, 150, 40
KINDS: tuple[Mapping[str, Any], ...] = (
    {},
    {},
    {"temperature": 0.9, "seed": 7},
    {"repetition_penalty": 1.3},
    {"logprobs": 2},
    {"structured_outputs": {"regex": "(ab|cd|ef){300}", "_backend": "xgrammar"}},
)
"""Greedy and seeded sampling, penalties, logprobs, and a grammar."""
STREAMS, ROUNDS = 8, 12


class Orders:
    """The orders to one engine, by a `Resizer`."""

    def __init__(self, pair: EnginePair) -> None:
        memory = pair.engine.memory
        assert memory is not None
        self.given_back: list[int] = []
        self.given_up: str | None = None
        self.memory = memory
        self.resizer = Resizer(ReplicaId("a"), memory, time.monotonic, self)
        self._pair = pair
        self._number = 0

    @property
    def is_empty(self) -> bool:
        """See `HostedRequests`."""
        return not any(any(replica.host.loads()) or replica.moves.pending for replica in self._pair.replicas.values())

    def close(self) -> None:
        """See `HostedRequests`. Both replicas are on the engine."""
        for replica in self._pair.replicas.values():
            replica.moves.sleep()

    def open(self) -> None:
        """See `HostedRequests`."""
        for replica in self._pair.replicas.values():
            replica.host.asleep = False

    def give_back(self, blocks: Blocks) -> None:
        """See `HostedRequests`."""
        self.given_back.append(blocks)

    def give_up(self, reason: str) -> None:
        """See `HostedRequests`."""
        self.given_up = reason

    async def obey(self, plan: MemoryPlan, shrink_s: float = 60.0) -> None:
        """Order a plan, and wait until nothing is under way any more."""
        self._number += 1
        self.resizer.obey(MemoryOrder(ReplicaId("a"), OrderNumber(1, self._number), plan), shrink_s)
        async with asyncio.timeout(60):
            await self.resizer.settled()

    async def order(self, blocks: int, shrink_s: float = 60.0) -> None:
        """Order a size, and wait until the pool has it."""
        await self.obey(MemoryPlan(Blocks(blocks)), shrink_s)
        assert self.resizer.state is PoolState.SETTLED and self.resizer.held == self.memory.size == blocks


@asynccontextmanager
async def elastic_pair(
    declared: float = DECLARED, model: Path | None = None, **kwargs: Any
) -> AsyncIterator[EnginePair]:
    """Two replicas on one engine with an elastic pool; by default of the tiny model."""
    os.environ |= {**CPU_ENV, "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    folder = str(model or ensure_tiny_model())
    engine = await VllmEngine.start(folder, {**CPU_ENGINE, **SIZES, **kwargs}, declared=declared)
    pair = EnginePair(engine)
    try:
        yield pair
    finally:
        pair.close()
        engine.shutdown()


async def answers(pair: EnginePair, name: str, moves: Sequence[tuple[int, str]], rounds: int) -> list[tuple[int, ...]]:
    """The outputs of all streams, `STREAMS` at once, each of them with these moves."""

    async def client(number: int) -> list[tuple[int, ...]]:
        found = []
        for turn in range(rounds):
            work = (number + 3 * turn) % 12
            prompt, tokens = prompt_of(60 + 23 * work, f"work {work}"), 100 + 11 * work
            own = [(at + 3 * work, path) for at, path in moves]
            run = f"{name} {number} {turn}"
            output, _ = await pair.run(run, prompt, tokens, own, ignore_eos=True, **KINDS[work % len(KINDS)])
            found.append(output)
        return found

    return [output for each in await asyncio.gather(*map(client, range(STREAMS))) for output in each]


async def resizes(orders: Orders, stop: asyncio.Event) -> int:
    """Random sizes, until `stop`; their number."""
    draw, count = random.Random(5), 0
    while not stop.is_set():
        await orders.order(draw.randrange(LEAST, MOST))
        count += 1
        await asyncio.sleep(draw.uniform(0.0, 0.1))
    return count


@pytest.mark.parametrize("workers", [1, 2])
async def test_streams_under_random_resizes_have_the_tokens_of_a_pool_that_keeps_its_size(workers: int) -> None:
    async with elastic_pair(tensor_parallel_size=workers) as pair:
        orders = Orders(pair)
        assert (orders.memory.size, orders.memory.declared) == (100, MOST)
        await orders.order(MOST)
        want = await answers(pair, "unresized", (), ROUNDS)
        assert len({token for output in want for token in output}) > 200, "the outputs are diverse"
        await pair.engine.delete(None)
        preempted, stop = pair.engine.stats().preemptions, asyncio.Event()
        resizing = asyncio.create_task(resizes(orders, stop))
        got = await answers(pair, "resized", [(15, "kv"), (45, "kv"), (70, "tokens")], ROUNDS)
        stop.set()
        count = await resizing
        assert got == want
        assert count > 10 and orders.resizer.counts.renumbered > 50, (count, orders.resizer.counts)
        assert pair.engine.stats().preemptions == preempted and not orders.given_back
        # Cached blocks, many of which have moved, are still what their names say.
        assert await answers(pair, "cached", (), 1) == want[::ROUNDS]
        await cache_is_followed(pair)


async def cache_is_followed(pair: EnginePair) -> None:
    """The names that the engine has published are those of its pool."""
    assert pair.engine._feed is not None
    pair.engine._feed.resync()
    await asyncio.sleep(0.5)
    mirror = pair.engine.mirror
    assert mirror.exact and mirror.resyncs == {"start": 1} and mirror.checks > 1


async def test_a_pool_shrinks_although_requests_go_on_arriving() -> None:
    async with elastic_pair() as pair:
        orders, stop = Orders(pair), asyncio.Event()
        await orders.order(MOST)

        async def client(number: int) -> None:
            for turn in itertools.count():
                if stop.is_set():
                    return
                name = f"arriving {number} {turn}"
                await pair.run(name, prompt_of(200, name), 50 + 17 * (number % 9), ignore_eos=True)

        # Twice as many as run at once: one always waits for the blocks of another.
        clients = asyncio.gather(*map(client, range(2 * SIZES["max_num_seqs"])))
        while orders.memory.used <= 2 * LOW:
            await asyncio.sleep(0.01)
        await orders.order(LOW)
        assert not orders.given_back
        stop.set()
        await orders.order(MOST)
        await clients


def spoil(worker: Any) -> None:
    """In a worker: noise is written into every block that changes its place."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    layout = get_kv_transfer_group().layout
    assert layout is not None
    moving = layout.move

    def move(moved: Sequence[tuple[int, int]]) -> None:
        moving(moved)
        for layer in layout._layers:
            for _, after in moved:
                layer.blocks[after].normal_()

    layout.move = move


async def test_noise_in_a_block_that_changed_its_place_changes_the_output_and_a_failed_copy_ends_the_engine() -> None:
    async with elastic_pair() as pair:
        orders = Orders(pair)
        await orders.order(MOST)
        want = await answers(pair, "sound", (), 1)
        await pair.engine.delete(None)
        await pair.engine._core.collective_rpc_async(spoil)
        stop = asyncio.Event()
        resizing = asyncio.create_task(resizes(orders, stop))
        got = await answers(pair, "spoiled", (), 1)
        stop.set()
        await resizing
        assert orders.resizer.counts.renumbered and got != want
        await orders.order(MOST)
        await pair.engine._core.collective_rpc_async(refuse)
        lost = asyncio.create_task(answers(pair, "lost", (), 1))
        with pytest.raises(AssertionError):
            await resizes(orders, asyncio.Event())
        assert orders.resizer.state is PoolState.OVER and pair.engine.death is not None
        with pytest.raises(AssertionError, match="was lost: the engine died"):
            await lost


def refuse(worker: Any) -> None:
    """In a worker: no block can be copied to its new place."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    def move(moved: Sequence[tuple[int, int]]) -> None:
        raise MemoryError

    get_kv_transfer_group().layout.move = move


def resident(pair: EnginePair) -> int:
    """The bytes of a worker's mappings in memory that may have its KV pool, by its page maps."""
    (pid,) = pair.engine.processes.workers
    memory = pair.engine.memory
    assert memory is not None
    declared = (memory.declared + 1) * memory.model.block
    # A mapping may have grown by its neighbours.
    return sum(int(each.rss) for each in psutil.Process(pid).memory_maps(grouped=False) if each.size >= declared)


async def fill(pair: EnginePair, name: str, blocks: int) -> None:
    """Have the pool's blocks written: contexts that no other name has."""
    lengths = [900] * (-(-blocks * BLOCK // 900))
    await asyncio.gather(*(pair.run(f"{name} {i}", prompt_of(n, f"{name} {i}"), 1) for i, n in enumerate(lengths)))


async def test_memory_follows_the_size() -> None:
    async with elastic_pair(num_gpu_blocks_override=1001, max_num_batched_tokens=2048) as pair:
        orders = Orders(pair)
        assert (orders.memory.size, orders.memory.declared) == (1000, 3002)
        block, empty = orders.memory.model.block, resident(pair)
        # Some of it is of neighbours in the same mapping.
        assert empty < 0.1 * 3002 * block, "what is declared is not there before it is used"
        for size in (1500, 700, 1100, 100):
            await orders.order(size)
            assert resident(pair) - empty <= 1.1 * size * block
            await fill(pair, f"fill {size}", size)
            assert resident(pair) - empty == pytest.approx(size * block, rel=0.1), size
