"""Blocks on their way between engines with unlike numbers of workers: copiers of both, over real sockets."""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest
import torch

from migration.kv.copier.client import Copiers
from migration.kv.copier.copier import Copier
from migration.kv.copier.tables import BlockLoad, BlockLoads, BlockTables, TableChange
from migration.kv.copier.wire import ScatterCall, SendCall, Taker, decode, encode
from migration.kv.layout import CacheLayout
from migration.kv.staging import HEADER, HostSegment
from migration.protocol.errors import TransferFailed
from migration.protocol.layouts import Extent, Resharding, ShardLayout, ShardPart, heads_of, reshard
from migration.protocol.messages import Shard, Tail
from migration.protocol.ports import Slot
from policies.model import Blocks
from tests.migration.kv.caches import paged

BLOCK, BLOCKS, LAYERS = 4, 16, 3
OLD, NEW = [5, 9, 2, 7, 1], [15, 3, 12, 8, 0]
"""The blocks of r.0 at the source, and those of the load "m.1" at the target."""

engines = pytest.mark.parametrize(
    ("workers", "others", "heads"),
    [(1, 2, 2), (2, 1, 2), (2, 4, 4), (4, 2, 8), (1, 4, 2), (4, 1, 2)],
    ids=lambda value: str(value),
)


class Workers:
    """The workers of one engine: caches with their shares of a model's heads, and copiers."""

    def __init__(self, workers: int, model: dict[str, torch.Tensor], filled: bool) -> None:
        heads = next(iter(model.values())).shape[1]
        self.own = [heads_of(rank, workers, heads) for rank in range(workers)]
        self.caches = [paged("LBHNC", BLOCKS, LAYERS, own.size, BLOCK) for own in self.own]
        self.tables = [BlockTables(BLOCK) for _ in self.own]
        self.loads = [BlockLoads() for _ in self.own]
        self.tails: list[dict[str, torch.Tensor]] = [{} for _ in self.own]
        self.layouts = [CacheLayout(cache, BLOCKS) for cache in self.caches]
        self.copiers: list[Copier] = []
        for layout, tables, loads, tails in zip(self.layouts, self.tables, self.loads, self.tails, strict=True):
            loads.cells = layout.shape.layers * layout.shape.heads
            self.copiers.append(Copier(layout, tables, loads, tails, deque()))
        if filled:
            self.fill(model)

    def fill(self, model: dict[str, torch.Tensor]) -> None:
        for own, cache, tables in zip(self.own, self.caches, self.tables, strict=True):
            for name, layer in cache.items():
                layer.copy_(model[name][:, own.first : own.last])
            tables.apply([TableChange("r.0", 18, OLD, replace=True, caught_up=True)], None)

    @property
    def shards(self) -> list[ShardLayout]:
        layers = Extent(0, LAYERS)
        shape = self.layouts[0].shape
        return [
            ShardLayout(layers, own, BLOCK, shape.dtype, shape.order, shape.head_axis, layout.block_bytes)
            for own, layout in zip(self.own, self.layouts, strict=True)
        ]

    def admit(self) -> None:
        for loads, copier in zip(self.loads, self.copiers, strict=True):
            loads.begin(BlockLoad("m.1", "v1", 0, NEW), None)
            copier.wake()

    @property
    def arrived(self) -> list[list[str]]:
        return [loads.arrived() for loads in self.loads]

    def holds(self, model: dict[str, torch.Tensor], new: Sequence[int], old: Sequence[int]) -> bool:
        """True if blocks are the model's, of all heads of all workers."""
        return all(
            torch.equal(
                layer[list(new)].view(torch.int16), model[name][list(old)][:, own.first : own.last].view(torch.int16)
            )
            for own, cache in zip(self.own, self.caches, strict=True)
            for name, layer in cache.items()
        )


class Journey:
    """Blocks of a model with that many heads, from one engine to the other."""

    def __init__(self, stack: contextlib.AsyncExitStack, workers: int, others: int, heads: int) -> None:
        self.model = paged("LBHNC", BLOCKS, LAYERS, heads, BLOCK, seed=heads)
        self.source, self.target = Workers(workers, self.model, True), Workers(others, self.model, False)
        self.segments = [stack.enter_context(HostSegment.create(1 << 16)) for _ in range(workers)]
        for copier in (*self.source.copiers, *self.target.copiers):
            stack.callback(copier.close)
        cuts = reshard(self.source.shards, self.target.shards)
        assert cuts is not None
        self.cuts: Resharding = cuts

    async def connect(self, stack: contextlib.AsyncExitStack) -> None:
        self.here = await Copiers.connect([copier.address for copier in self.source.copiers], BLOCK)
        stack.callback(self.here.close)
        self.there = await Copiers.connect([copier.address for copier in self.target.copiers], BLOCK)
        stack.callback(self.there.close)

    @property
    def slots(self) -> list[Slot]:
        return [segment.slot(0, 1 << 13) for segment in self.segments]

    async def staged(self, first: int, last: int, partial: bool = False) -> list[Shard]:
        """Blocks of r.0, staged by the workers that send."""
        shards = await self.here.gather("r.0", first, last, self.slots, partial)
        return [shards[rank] for rank in self.cuts.senders]


@contextlib.asynccontextmanager
async def journey(workers: int, others: int, heads: int) -> AsyncGenerator[Journey]:
    async with contextlib.AsyncExitStack() as stack:
        opened = Journey(stack, workers, others, heads)
        await opened.connect(stack)
        yield opened


@engines
async def test_blocks_move_through_slots(workers: int, others: int, heads: int) -> None:
    async with journey(workers, others, heads) as moved:
        moved.target.admit()
        for first, last in ((2, 4), (0, 2)):
            slots = [shard.slot for shard in await moved.staged(first, last)]
            await moved.there.scatter("m.1", first, last, slots, moved.cuts)
        assert await moved.there.missing("m.1") == len(moved.target.copiers)
        assert moved.target.holds(moved.model, NEW[:4], OLD[:4])


@engines
async def test_workers_of_one_node_send_blocks_by_themselves(workers: int, others: int, heads: int) -> None:
    async with journey(workers, others, heads) as moved:
        addresses = [copier.address for copier in moved.target.copiers]
        assert await moved.here.reach(addresses)
        sending = asyncio.create_task(moved.here.send("r.0", 0, 4, [moved.slots], 2, "m.1", addresses, moved.cuts))
        moved.target.admit()
        async with asyncio.timeout(10):
            size = await sending
        sent = sum(moved.source.layouts[rank].block_bytes for rank in moved.cuts.senders)
        assert size == 4 * sent + 2 * HEADER * len(moved.cuts.senders), "each head once, in slots for two blocks"
        assert moved.target.holds(moved.model, NEW[:4], OLD[:4])


@engines
async def test_tail_is_held_once_all_its_parts_have_come(workers: int, others: int, heads: int) -> None:
    tail = Tail("t", Blocks(3), 18)
    async with journey(workers, others, heads) as moved:
        shards = await moved.staged(3, 5, partial=True)
        slots = [shard.slot for shard in shards]
        with pytest.raises(TransferFailed, match="not expected"):
            await moved.there.hold(tail, slots, cuts=moved.cuts)
        moved.there.expect("t")
        await moved.there.hold(tail, slots, cuts=moved.cuts)
        with pytest.raises(TransferFailed, match="not expected"):
            await moved.there.hold(tail, slots, cuts=moved.cuts)
        for layout, tails in zip(moved.target.layouts, moved.target.tails, strict=True):
            layout.place(NEW[3:], 2, 0, tails.pop("t"))
        assert moved.target.holds(moved.model, NEW[3:], OLD[3:])


async def test_part_of_a_tail_that_comes_again_is_refused_and_what_has_come_is_discarded() -> None:
    async with journey(2, 1, 2) as moved:
        moved.there.expect("t")
        slots = [shard.slot for shard in await moved.staged(3, 5, partial=True)]
        (client,) = moved.there._clients
        part = moved.cuts.cuts[0].part
        await client.hold("t", 2, slots[0], part)
        assert moved.target.tails == [{}]
        with pytest.raises(TransferFailed, match="arrived before"):
            await client.hold("t", 2, slots[0], part)
        moved.there.discard("t")
        with pytest.raises(TransferFailed, match="not expected"):
            await client.hold("t", 2, slots[1], moved.cuts.cuts[1].part)
        assert moved.target.copiers[0]._partial_tails == {}


async def test_blocks_with_a_missing_part_have_not_arrived() -> None:
    async with journey(2, 1, 2) as moved:
        moved.target.admit()
        slots = [shard.slot for shard in await moved.staged(0, 4)]
        (client,) = moved.there._clients
        for cut in moved.cuts.cuts:
            assert await client.missing("m.1") == 5
            await client.scatter("m.1", 0, 4, slots[cut.shard], cut.part)
        assert await client.missing("m.1") == 1 and moved.target.arrived == [[]]
        with pytest.raises(TransferFailed, match="does not wait"):
            await client.scatter("m.1", 0, 4, slots[0], moved.cuts.cuts[0].part)


@pytest.mark.parametrize(("workers", "others"), [(2, 1), (1, 2)])
async def test_corrupted_shard_changes_the_blocks_that_have_a_part_of_it(workers: int, others: int) -> None:
    draw = random.Random(workers)
    for rank in range(workers):
        async with journey(workers, others, 2) as moved:
            moved.target.admit()
            shards = await moved.staged(0, 4)
            payload = moved.segments[rank].view(HEADER, shards[rank].size - HEADER)
            payload[draw.randrange(len(payload))] ^= 1
            await moved.there.scatter("m.1", 0, 4, [shard.slot for shard in shards], moved.cuts)
            assert not moved.target.holds(moved.model, NEW[:4], OLD[:4])


@pytest.mark.parametrize("shard", [0, 1])
async def test_stale_ticket_of_one_shard_fails_the_chunk(shard: int) -> None:
    async with journey(2, 1, 2) as moved:
        moved.target.admit()
        slots = [shard.slot for shard in await moved.staged(0, 4)]
        slots[shard] = replace(slots[shard], ticket=slots[shard].ticket + 2)
        with pytest.raises(TransferFailed, match="reused"):
            await moved.there.scatter("m.1", 0, 4, slots, moved.cuts)
        assert await moved.there.missing("m.1") == 5


async def test_shard_with_a_checksum_is_caught_once_it_is_corrupted() -> None:
    """Copies of held prefixes have one, over the whole shard, whatever the part that is read."""
    async with journey(1, 2, 2) as moved:
        moved.target.admit()
        table = TableChange("h", 16, OLD[:4], replace=True, caught_up=True, held=True)
        moved.source.tables[0].apply([table], None)
        (shard,) = await moved.here.gather("h", 0, 4, moved.slots)
        moved.segments[0].view(HEADER, shard.size - HEADER)[-1] ^= 1
        with pytest.raises(TransferFailed, match="checksum"):
            await moved.there.scatter("m.1", 0, 4, [shard.slot], moved.cuts)


PART = ShardPart(1, 2, 0, 1, 4, 0, 2, 0, 0)


@pytest.mark.parametrize(
    "call",
    [
        ScatterCall(1, "m.1", 0, 2, "/proc/1/fd/3", 64, 7, PART),
        SendCall(1, "r.0", 0, 2, "/proc/1/fd/3", [0], 8, [Taker("a", PART), Taker("b")], "m.1"),
    ],
    ids=["scatter", "send"],
)
def test_parts_travel_in_messages(call: ScatterCall | SendCall) -> None:
    assert decode(encode(call)) == call
