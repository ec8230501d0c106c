"""The copier's thread and its client over a real socket; the cache is a tensor, and the test makes the steps."""

import asyncio
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import uvloop

from migration.kv.copier.client import CopierClient, Copiers
from migration.kv.copier.copier import Copier
from migration.kv.copier.sending import Sending
from migration.kv.copier.tables import BlockLoad, BlockLoads, BlockTables, TableChange
from migration.kv.copier.wire import GatherCall, Gathered, ScatterCall, SendCall, Taker, decode, encode
from migration.kv.layout import CacheLayout
from migration.kv.staging import HEADER, HostSegment
from migration.protocol.errors import BlocksGone, TransferFailed
from migration.protocol.messages import SlotRef, Tail
from migration.protocol.ports import Slot
from policies.model import Blocks

BLOCK, BLOCKS = 4, 16


@dataclass
class Desk:
    """A worker's half and a replica's half. r.0 runs in blocks 5, 9 and 2, of which two are full; block i holds i."""

    cache: torch.Tensor
    layout: CacheLayout
    tables: BlockTables
    loads: BlockLoads
    tails: dict[str, torch.Tensor]
    halts: deque[str]
    copier: Copier
    client: CopierClient
    segment: HostSegment

    async def staged(self, first: int = 0, last: int = 2) -> SlotRef:
        """Blocks of r.0 in the slot."""
        slot, _ = await self.client.gather("r.0", first, last, self.segment.path, 0)
        return slot

    def admit(self, *blocks: int, start: int = 0) -> None:
        """Admit the load "m.1"."""
        self.loads.begin(BlockLoad("m.1", "v1", start, list(blocks)), None)
        self.copier.wake()

    def held(self, *blocks: int) -> list[float]:
        """The content of cache blocks."""
        return [self.cache[block].unique().item() for block in blocks]


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    async with open_desk() as opened:
        yield opened


@contextlib.asynccontextmanager
async def open_desk() -> AsyncGenerator[Desk]:
    """A desk with one connection."""
    cache = torch.zeros(BLOCKS, 2, BLOCK, 3) + torch.arange(BLOCKS).reshape(-1, 1, 1, 1)
    layout, tables, loads = CacheLayout({"layer": cache}, BLOCKS), BlockTables(BLOCK), BlockLoads()
    tables.apply([TableChange("r.0", 10, [5, 9, 2], replace=True, caught_up=True)], None)
    tails: dict[str, torch.Tensor] = {}
    halts: deque[str] = deque()
    copier = Copier(layout, tables, loads, tails, halts)
    with HostSegment.create(1 << 16) as segment:
        client = await CopierClient.connect(copier.address)
        desk = Desk(cache, layout, tables, loads, tails, halts, copier, client, segment)
        yield desk
        client.close()
        desk.copier.close()  # A test may have closed the first one, and put another in its place.


async def test_blocks_move_through_a_slot(desk: Desk) -> None:
    slot, size = await desk.client.gather("r.0", 0, 2, desk.segment.path, 128)
    assert size == HEADER + 2 * desk.layout.block_bytes and slot.offset == 128
    desk.admit(11, 12)
    await desk.client.scatter("m.1", 0, 2, slot)
    assert await desk.client.filled("m.1") == 2
    assert desk.held(11, 12) == [5, 9]
    assert desk.loads.arrived() == ["m.1"]


def hold(desk: Desk, *blocks: int) -> None:
    """Admit the hold "h"."""
    desk.loads.begin(BlockLoad("h", "v1", len(blocks), [15]), None)
    table = TableChange("h", len(blocks) * BLOCK, list(blocks), replace=True, caught_up=True, held=True)
    desk.tables.apply([table], None)
    desk.copier.wake()


async def test_replica_learns_the_number_of_held_blocks_and_gathers_them(desk: Desk) -> None:
    asked = asyncio.create_task(desk.client.held("h"))
    await desk.client.gather("r.0", 0, 1, desk.segment.path, 1024)
    assert not asked.done()
    hold(desk, 5, 9, 2)
    async with asyncio.timeout(5):
        assert await asked == 3
    slot, _ = await desk.client.gather("h", 0, 3, desk.segment.path, 0)
    desk.admit(11, 12, 13)
    await desk.client.scatter("m.1", 0, 3, slot)
    assert desk.held(11, 12, 13) == [5, 9, 2]


async def test_nobody_waits_for_a_hold_that_is_given_up(desk: Desk) -> None:
    asked = asyncio.create_task(desk.client.held("h"))
    await asyncio.sleep(0.05)
    desk.client.forget("h")
    with pytest.raises(TransferFailed, match="has ended"):
        await asked


@pytest.mark.parametrize("key", ["h", "r.0"])
async def test_noise_in_staged_blocks_of_a_hold_is_found(desk: Desk, key: str) -> None:
    """A running request's blocks have no checksum: it would cost time in its pause."""
    hold(desk, 5, 9)
    slot, _ = await desk.client.gather(key, 0, 2, desk.segment.path, 0)
    desk.segment.view(HEADER + 9, 1)[0] ^= 1
    desk.admit(11, 12)
    if key == "h":
        with pytest.raises(TransferFailed, match="checksum"):
            await desk.client.scatter("m.1", 0, 2, slot)
        assert desk.held(11, 12) == [11, 12] and desk.loads.missing("m.1") == 2
    else:
        await desk.client.scatter("m.1", 0, 2, slot)
        assert desk.cache[11].unique().numel() == 2


async def test_replica_learns_when_the_blocks_have_arrived(desk: Desk) -> None:
    """Also of chunks that waited for their load, behind this call."""
    filled = asyncio.create_task(desk.client.filled("m.1"))
    chunk = asyncio.create_task(desk.client.scatter("m.1", 0, 2, await desk.staged()))
    await desk.client.gather("r.0", 0, 1, desk.segment.path, 1024)
    assert not filled.done()
    desk.admit(11, 12)
    async with asyncio.timeout(5):
        await asyncio.gather(filled, chunk)
    assert desk.held(11, 12) == [5, 9]


async def test_replica_learns_how_much_of_a_prefill_is_computed(desk: Desk) -> None:
    assert await desk.client.computed("r.0") == 10
    assert await desk.client.computed("r.0", 9) == 10
    assert await desk.client.computed("r.1") is None


def compute(desk: Desk, key: str, computed: int) -> bool:
    """A step after which a request has that many tokens; True if the copier is woken."""
    awaited = desk.tables.apply([TableChange(key, computed, [7], replace=True, caught_up=False)], None)
    if awaited:
        desk.copier.wake()
    return awaited


async def test_wait_for_more_computed_tokens_ends_with_the_step_that_computes_them(desk: Desk) -> None:
    """Also for a request that has not begun, and one that is preempted meanwhile."""
    for key, before in (("r.0", 10), ("r.1", 0)):
        waiting = asyncio.create_task(desk.client.computed(key, before))
        await desk.client.computed(key)  # calls are served in order
        assert not compute(desk, "r.2", 100)
        if desk.tables.void([key]):
            desk.copier.wake()
        await desk.client.computed(key)
        assert not waiting.done()
        compute(desk, key, before)
        await desk.client.computed(key)
        assert not waiting.done()
        assert compute(desk, key, before + 5)
        assert await waiting == before + 5


async def test_wait_for_computed_tokens_that_is_given_up_is_forgotten(desk: Desk) -> None:
    waiting = asyncio.create_task(desk.client.computed("r.0", 10))
    await desk.client.computed("r.0")
    waiting.cancel()
    await asyncio.wait({waiting})
    await desk.client.computed("r.0")
    assert not desk.copier._waiting
    compute(desk, "r.0", 15)
    assert await desk.client.computed("r.0") == 15


async def test_end_of_a_load_ends_no_wait_for_computed_tokens(desk: Desk) -> None:
    waiting = asyncio.create_task(desk.client.computed("m.1", 0))
    desk.client.forget("m.1")
    await desk.client.computed("r.0")
    assert not waiting.done()
    compute(desk, "m.1", 4)
    assert await waiting == 4


async def test_tail_is_held_until_it_is_taken_or_discarded(desk: Desk) -> None:
    slot, _ = await desk.client.gather("r.0", 1, 3, desk.segment.path, 0, partial=True)
    for tail in ("a", "b"):
        desk.client.expect(tail)
        await desk.client.hold(tail, 2, slot)
    desk.segment.stamp(0, 0)
    desk.layout.place([11], 2, 1, desk.tails.pop("a"))
    assert desk.held(11) == [2]
    for _ in range(2):
        desk.client.discard("b")
    await desk.staged()
    assert desk.tails == {}


@pytest.mark.parametrize("before", [None, "discarded", "taken"])
async def test_tail_that_is_not_expected_is_not_held(desk: Desk, before: str | None) -> None:
    slot, _ = await desk.client.gather("r.0", 1, 3, desk.segment.path, 0, partial=True)
    if before is not None:
        desk.client.expect("a")
    if before == "discarded":
        desk.client.discard("a")
    if before == "taken":
        await desk.client.hold("a", 2, slot)
        desk.tails.pop("a")
    with pytest.raises(TransferFailed, match="not expected"):
        await desk.client.hold("a", 2, slot)
    assert desk.tails == {}


async def test_requests_to_be_halted_reach_the_main_thread_in_order(desk: Desk) -> None:
    desk.client.halt("r.0")
    desk.client.halt("s.1")
    await desk.staged()
    assert list(desk.halts) == ["r.0", "s.1"]


@pytest.mark.parametrize("during", [False, True], ids=["before", "during the copy"])
async def test_tail_in_a_slot_that_was_reused_is_not_held(desk: Desk, during: bool) -> None:
    slot, _ = await desk.client.gather("r.0", 1, 3, desk.segment.path, 0, partial=True)
    if during:
        take = desk.layout.take

        def reused(source: object) -> torch.Tensor:
            taken = take(source)
            desk.segment.stamp(0, 1)
            return taken

        desk.layout.take = reused  # type: ignore[method-assign]
    else:
        await desk.staged()
    desk.client.expect("a")
    with pytest.raises(TransferFailed, match="reused"):
        await desk.client.hold("a", 2, slot)
    assert desk.tails == {}


async def test_replica_learns_when_the_blocks_are_in_the_cache(desk: Desk) -> None:
    loaded = asyncio.create_task(desk.client.loaded("m.1"))
    slot = await desk.staged()
    desk.admit(11, 12)
    await desk.client.scatter("m.1", 0, 2, slot)
    assert not loaded.done()
    desk.loads.cache("m.1")
    desk.copier.wake()
    await loaded


@pytest.mark.parametrize("ended", [False, True], ids=["under way", "ended in vLLM"])
async def test_nothing_waits_for_a_load_that_the_replica_gives_up(desk: Desk, ended: bool) -> None:
    desk.admit(11, 12)
    loaded = asyncio.create_task(desk.client.loaded("m.1"))
    await desk.staged()
    if ended:
        desk.loads.close("m.1")
        desk.copier.wake()
        await desk.staged()
        assert not loaded.done(), "its request may have run: the replica waits for the request's own end"
    desk.client.forget("m.1")
    with pytest.raises(TransferFailed, match="ended"):
        await loaded
    assert desk.copier._waiting == [] and desk.client._calls == {}


def test_connection_works_in_a_loop_of_uvloop() -> None:
    """Ray Serve's replicas run in one."""
    layout = CacheLayout({"layer": torch.zeros(BLOCKS, 2, BLOCK, 3)}, BLOCKS)
    copier = Copier(layout, BlockTables(BLOCK), BlockLoads(), {}, deque())

    async def gather() -> None:
        client = await CopierClient.connect(copier.address)
        with pytest.raises(TransferFailed, match="staging segment"):
            await client.gather("r.0", 0, 1, "", 0)
        client.close()

    try:
        uvloop.run(gather())
    finally:
        copier.close()


async def test_blocks_that_the_cache_holds_are_left_alone(desk: Desk) -> None:
    slot = await desk.staged()
    desk.admit(12, start=1)
    await desk.client.scatter("m.1", 0, 2, slot)
    assert await desk.client.filled("m.1") == 1
    assert desk.held(11, 12) == [11, 9]


async def test_chunk_waits_for_its_load_and_holds_up_no_other_call(desk: Desk) -> None:
    slot = await desk.staged()
    waiting = asyncio.create_task(desk.client.scatter("m.1", 0, 2, slot))
    assert (await desk.client.gather("r.0", 0, 1, desk.segment.path, 1024))[0].ticket
    assert not waiting.done()
    desk.admit(11, 12)
    await waiting
    assert desk.held(11, 12) == [5, 9]


async def test_chunk_of_a_load_that_is_given_up_fails(desk: Desk) -> None:
    waiting = asyncio.create_task(desk.client.scatter("m.1", 0, 2, await desk.staged()))
    await asyncio.sleep(0)
    desk.client.forget("m.1")
    with pytest.raises(TransferFailed, match="ended"):
        await waiting


async def test_every_gather_has_a_new_ticket(desk: Desk) -> None:
    tickets = {(await desk.staged()).ticket for _ in range(8)}
    assert len(tickets) == 8 and 0 not in tickets


@pytest.mark.parametrize(
    ("first", "last", "path", "offset", "error"),
    [
        (0, 3, "", 0, "block 3 is not full"),
        (1, 1, "", 0, "no such KV blocks"),
        (2, 1, "", 0, "lie outside"),
        (0, 2, "", 1 << 16, "lie outside"),
        (0, 2, "/proc/1/fd/999999", 0, "staging segment"),
    ],
    ids=[
        "a block that is not full",
        "no block",
        "a range that runs backwards",
        "outside the segment",
        "a dead process",
    ],
)
async def test_gather_fails_for(desk: Desk, first: int, last: int, path: str, offset: int, error: str) -> None:
    with pytest.raises(TransferFailed, match=error):
        await desk.client.gather("r.0", first, last, path or desk.segment.path, offset)


async def test_gather_of_a_request_without_blocks_says_so(desk: Desk) -> None:
    with pytest.raises(BlocksGone, match="holds no blocks"):
        await desk.client.gather("r.1", 0, 1, desk.segment.path, 0)


async def test_failed_gather_leaves_no_valid_ticket(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a copy on a GPU that runs out of memory."""
    await desk.staged()
    monkeypatch.setattr(desk.layout, "gather", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(TransferFailed, match="no room"):
        await desk.staged()
    assert desk.segment.ticket(0) == 0


async def test_blocks_that_are_reused_during_the_copy_are_not_handed_out(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = desk.layout.gather

    def overtaken(*arguments: Any) -> None:
        gather(*arguments)
        desk.tables.void(["r.0"])

    monkeypatch.setattr(desk.layout, "gather", overtaken)
    with pytest.raises(BlocksGone, match="lost its blocks"):
        await desk.staged()
    assert desk.segment.ticket(0) == 0


@pytest.mark.parametrize("other", ["ticket", "segment", "range"])
async def test_chunk_that_cannot_be_read_fails_and_stays_missing(desk: Desk, other: str) -> None:
    slot = await desk.staged()
    desk.admit(11, 12)
    match other:
        case "ticket":
            slot = SlotRef(slot.segment, slot.offset, slot.ticket + 2)
        case "segment":
            slot = SlotRef("/proc/1/fd/999999", 0, slot.ticket)
    with pytest.raises(TransferFailed):
        await desk.client.scatter("m.1", 0, 3 if other == "range" else 2, slot)
    assert desk.held(11, 12) == [11, 12] and desk.loads.arrived() == []


async def test_slot_that_is_reused_while_it_is_read_fails(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, scatter = await desk.staged(), desk.layout.scatter
    desk.admit(11, 12)

    def overtaken(*arguments: Any) -> None:
        scatter(*arguments)
        desk.segment.stamp(0, 3)

    monkeypatch.setattr(desk.layout, "scatter", overtaken)
    with pytest.raises(TransferFailed, match="reused"):
        await desk.client.scatter("m.1", 0, 2, slot)
    assert desk.loads.arrived() == [], "the blocks may hold anything, and stay missing"


async def test_cancelled_gather_returns_once_the_slot_is_not_written(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        began.set()
        go.wait(5)

    monkeypatch.setattr(desk.layout, "gather", slow)
    gathering = asyncio.create_task(desk.staged())
    await asyncio.to_thread(began.wait, 5)
    gathering.cancel()
    await asyncio.sleep(0.02)
    assert not gathering.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await gathering


async def test_calls_fail_once_the_copier_has_ended(desk: Desk) -> None:
    waiting = asyncio.create_task(desk.client.scatter("m.1", 0, 2, await desk.staged()))
    await asyncio.sleep(0.01)
    await asyncio.to_thread(desk.copier.close)
    with pytest.raises(TransferFailed, match="connection"):
        await waiting
    with pytest.raises(TransferFailed, match="has ended"):
        await desk.staged()
    desk.copier = Copier(desk.layout, desk.tables, desk.loads, desk.tails, desk.halts)


@pytest.mark.parametrize("sent", [b"no message\n", b'{"kind": "Copier"}\n', encode(Gathered(1, 2, 3)), b"{}\n"])
async def test_connection_that_sends_anything_else_is_closed_and_no_other(desk: Desk, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(desk.copier.address)
        other.sendall(sent)
        other.settimeout(5)
        assert await asyncio.to_thread(other.recv, 1) == b""
    assert await desk.staged()


async def test_connection_that_ends_with_a_waiting_chunk_is_forgotten(desk: Desk) -> None:
    slot = await desk.staged()
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(desk.copier.address)
        other.sendall(encode(ScatterCall(1, "m.1", 0, 2, slot.segment, slot.offset, slot.ticket)))
    await desk.staged()
    desk.admit(11, 12)
    await desk.staged()
    assert desk.held(11, 12) == [11, 12]


async def test_other_users_are_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(desk.copier.address)
        other.settimeout(5)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.to_thread(other.recv, 1) == b""


# --- several workers ----------------------------------------------------------------------------------


@dataclass
class Desks:
    """Two workers' halves, and the one replica's half of them."""

    ranks: tuple[Desk, Desk]
    copiers: Copiers

    @property
    def slots(self) -> list[Slot]:
        """A slot of each rank."""
        return [desk.segment.slot(0, 1 << 12) for desk in self.ranks]


@pytest.fixture
async def desks() -> AsyncIterator[Desks]:
    async with open_desk() as zero, open_desk() as one:
        one.cache += 100
        copiers = await Copiers.connect([zero.copier.address, one.copier.address], BLOCK)
        yield Desks((zero, one), copiers)
        copiers.close()


async def test_every_worker_copies_its_shard(desks: Desks) -> None:
    shards = await desks.copiers.gather("r.0", 0, 2, desks.slots)
    assert [shard.slot.segment for shard in shards] == [desk.segment.path for desk in desks.ranks]
    assert len({shard.slot.ticket for shard in shards}) == 2
    for desk in desks.ranks:
        desk.admit(11, 12)
    await desks.copiers.scatter("m.1", 0, 2, [shard.slot for shard in shards])
    assert [desk.held(11, 12) for desk in desks.ranks] == [[5, 9], [105, 109]]


async def test_computed_tokens_are_those_of_the_last_worker(desks: Desks) -> None:
    zero, one = desks.ranks
    waiting = asyncio.create_task(desks.copiers.computed("r.0", 10))
    for desk, computed in ((zero, 20), (one, 15)):
        await desk.client.computed("r.0")
        assert not waiting.done()
        compute(desk, "r.0", computed)
    assert await waiting == 15 == await desks.copiers.computed("r.0")
    one.tables.void(["r.0"])
    assert await desks.copiers.computed("r.0") is None


@pytest.mark.parametrize("rank", [0, 1])
async def test_gather_of_one_worker_fails_all_once_no_slot_is_written(
    desks: Desks, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        began.set()
        go.wait(5)

    monkeypatch.setattr(desks.ranks[1 - rank].layout, "gather", slow)
    desks.ranks[rank].tables.void(["r.0"])
    gathering = asyncio.create_task(desks.copiers.gather("r.0", 0, 2, desks.slots))
    await asyncio.to_thread(began.wait, 5)
    await asyncio.sleep(0.02)
    assert not gathering.done()
    go.set()
    with pytest.raises(BlocksGone, match="holds no blocks"):
        await gathering


@pytest.mark.parametrize("rank", [0, 1])
async def test_stale_ticket_of_one_worker_fails_the_chunk(desks: Desks, rank: int) -> None:
    slots = [shard.slot for shard in await desks.copiers.gather("r.0", 0, 2, desks.slots)]
    for desk in desks.ranks:
        desk.admit(11, 12)
    slots[rank] = replace(slots[rank], ticket=slots[rank].ticket + 2)
    with pytest.raises(TransferFailed, match="reused"):
        await desks.copiers.scatter("m.1", 0, 2, slots)
    assert desks.ranks[rank].loads.arrived() == []


async def test_load_that_the_replica_gives_up_ends_in_every_worker(desks: Desks) -> None:
    slots = [shard.slot for shard in await desks.copiers.gather("r.0", 0, 2, desks.slots)]
    scattering = asyncio.create_task(desks.copiers.scatter("m.1", 0, 2, slots))
    await asyncio.sleep(0.01)
    desks.copiers.forget("m.1")
    with pytest.raises(TransferFailed, match="ended"):
        await scattering
    await desks.copiers.gather("r.0", 0, 2, desks.slots)
    assert [desk.copier._waiting for desk in desks.ranks] == [[], []]


async def test_worker_without_a_copier_closes_the_connections_to_the_others(desks: Desks) -> None:
    with pytest.raises(OSError, match="refused"):
        await Copiers.connect([desks.ranks[0].copier.address, "\0nobody"], BLOCK)


# --- sending to another copier ------------------------------------------------------------------------

LONG = [5, 9, 2, 7, 1, 3, 8, 6, 4, 10]
TAKEN = [15, 14, 13, 12, 11, 10, 9, 8, 7, 6]


@dataclass
class Journey:
    """Two workers: `source` runs r.1 in the blocks `LONG`, and sends through a slot for eight blocks."""

    source: Desk
    target: Desk

    def send(self, first: int = 0, last: int = 10, key: str = "r.1", address: str = "") -> asyncio.Task[int]:
        slot = self.source.segment.slot(0, HEADER + 8 * self.source.layout.block_bytes)
        address = address or self.target.copier.address
        sending = self.source.client.send(key, first, last, [slot], 8, "m.1", [Taker(address)])
        return asyncio.create_task(sending)

    async def waiting(self, chunks: int) -> None:
        """Wait until chunks wait at the target for their load."""
        async with asyncio.timeout(5):
            while len(self.target.copier._waiting) != chunks:
                await asyncio.sleep(0.001)

    @property
    def tickets(self) -> list[int]:
        """The tickets in the slot."""
        offsets = Sending(SendCall(0, "", 0, 1, "", [0], 8, [], ""), self.source.layout.block_bytes).offsets
        return [self.source.segment.ticket(offset) for offset in offsets]


@pytest.fixture
async def journey() -> AsyncIterator[Journey]:
    async with open_desk() as source, open_desk() as target:
        pair = Journey(source, target)
        pair.source.tables.apply([TableChange("r.1", 40, LONG, replace=True, caught_up=True)], None)
        pair.target.cache.zero_()
        yield pair


async def test_blocks_travel_between_workers(journey: Journey) -> None:
    sending = journey.send()
    await journey.waiting(4)
    assert not sending.done()
    await journey.source.client.gather("r.0", 0, 2, journey.source.segment.path, 8192)
    journey.target.admit(*TAKEN)
    async with asyncio.timeout(5):
        size = await sending
        assert await journey.target.client.filled("m.1") == 10
    assert journey.target.held(*TAKEN) == LONG
    assert size == 10 * journey.source.layout.block_bytes + 10 * HEADER


async def test_slot_is_void_once_the_blocks_have_arrived(journey: Journey) -> None:
    journey.target.admit(*TAKEN)
    await journey.send()
    assert journey.tickets == [0] * 4


async def test_two_requests_travel_at_once(journey: Journey) -> None:
    source = journey.source
    journey.target.admit(*TAKEN)
    journey.target.loads.begin(BlockLoad("m.2", "v2", 0, [1, 2]), None)
    slot = source.segment.slot(4096, HEADER + 8 * source.layout.block_bytes)
    other = source.client.send("r.0", 0, 2, [slot], 8, "m.2", [Taker(journey.target.copier.address)])
    await asyncio.gather(journey.send(), other)
    assert journey.target.held(*TAKEN, 1, 2) == [*LONG, 5, 9]


@pytest.mark.parametrize(
    ("key", "first", "address", "error"),
    [
        ("r.9", 0, "", "holds no blocks"),
        ("r.0", 0, "", "block 3 is not full"),
        ("r.1", 0, "\0nobody", "cannot be reached"),
        ("r.1", 4, "", "does not wait for blocks"),
    ],
    ids=["a request without blocks", "a block that is not full", "a lost worker", "blocks that nobody wants"],
)
async def test_sending_fails_for(journey: Journey, key: str, first: int, address: str, error: str) -> None:
    journey.target.admit(*TAKEN[:7])
    with pytest.raises(TransferFailed, match=error):
        await journey.send(first, 10, key, address)
    assert journey.source.copier._sendings == [] and journey.tickets == [0] * 4


async def test_sending_to_a_load_that_is_over_ends_well(journey: Journey) -> None:
    """It may have ended without these blocks; the target knows."""
    sending = journey.send()
    await journey.waiting(4)
    journey.target.client.forget("m.1")
    async with asyncio.timeout(5):
        await sending


async def test_request_that_loses_its_blocks_is_not_sent_on(journey: Journey) -> None:
    sending = journey.send()
    await journey.waiting(4)
    journey.source.tables.void(["r.1"])
    journey.target.admit(*TAKEN)
    with pytest.raises(BlocksGone):
        await sending
    missing = await journey.target.client.missing("m.1")
    assert missing in range(6, 10), "at least the first of the four parts that wait there, since it was answered"


async def test_cancelled_sending_stops_at_both_ends(journey: Journey) -> None:
    sending = journey.send()
    await journey.waiting(4)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert journey.tickets == [0] * 4 and journey.source.copier._sendings == []
    await journey.waiting(0)
    journey.target.admit(*TAKEN)
    assert await journey.target.client.missing("m.1") == 10
    async with asyncio.timeout(5):
        await journey.send()
    assert journey.target.held(*TAKEN) == LONG, "the connection of both workers is as good as before"


async def test_sending_ends_with_its_replica(journey: Journey) -> None:
    sending = journey.send()
    await journey.waiting(4)
    journey.source.client.close()
    await journey.waiting(0)
    assert journey.source.copier._sendings == [] and journey.tickets == [0] * 4
    sending.cancel()


async def test_sending_fails_with_the_other_worker(journey: Journey) -> None:
    sending = journey.send()
    await journey.waiting(4)
    await asyncio.to_thread(journey.target.copier.close)
    with pytest.raises(TransferFailed, match="has ended"):
        await sending
    assert journey.source.copier._links == {}
    target = journey.target
    target.copier = Copier(target.layout, target.tables, target.loads, {}, deque())


async def test_workers_reach_each_other(journey: Journey) -> None:
    address = journey.target.copier.address
    copiers = await Copiers.connect([journey.source.copier.address], BLOCK)
    assert await copiers.reach([address]) and await copiers.reach([address])
    assert not await copiers.reach(["\0nobody"]) and not await copiers.reach([address, "\0nobody"])
    copiers.close()


async def test_moves_that_reach_an_engine_at_once_leave_one_connection(
    journey: Journey, monkeypatch: pytest.MonkeyPatch
) -> None:
    copiers = await Copiers.connect([journey.source.copier.address], BLOCK)
    made: list[Copiers] = []
    connect = Copiers.connect

    async def noted(addresses: Sequence[str], block_size: int) -> Copiers:
        made.append(await connect(addresses, block_size))
        return made[-1]

    monkeypatch.setattr(Copiers, "connect", noted)
    assert all(await asyncio.gather(*(copiers.reach([journey.target.copier.address]) for _ in range(3))))
    await asyncio.sleep(0)
    assert [peer.closed for peer in made] == [False, True, True]
    copiers.close()


async def test_tail_goes_to_the_other_engines_worker(journey: Journey) -> None:
    copiers = await Copiers.connect([journey.source.copier.address], BLOCK)
    address = journey.target.copier.address
    await copiers.reach([address])
    slot, _ = await journey.source.client.gather("r.0", 1, 3, journey.source.segment.path, 0, partial=True)
    tail = Tail("m.tail", Blocks(1), 3 * BLOCK - 1)
    with pytest.raises(TransferFailed, match="not expected"):
        await copiers.hold(tail, [slot], [address])
    journey.target.client.expect("m.tail")
    # The other connection's call could be served first; calls of one connection are served in order.
    assert await journey.target.client.missing("none") is None
    await copiers.hold(tail, [slot], [address])
    assert list(journey.target.tails) == ["m.tail"] and journey.source.tails == {}
    copiers.close()


async def test_lost_worker_is_not_reached_by_its_old_connection(journey: Journey) -> None:
    copiers = await Copiers.connect([journey.source.copier.address], BLOCK)
    target, address = journey.target, journey.target.copier.address
    assert await copiers.reach([address])
    await asyncio.to_thread(target.copier.close)
    async with asyncio.timeout(5):
        while await copiers.reach([address]):
            await asyncio.sleep(0.01)
    copiers.close()
    target.copier = Copier(target.layout, target.tables, target.loads, {}, deque())


def test_messages_round_trip() -> None:
    call = GatherCall(7, "r.0", 0, 2, "/proc/9/fd/3", 64)
    assert decode(encode(call)) == call
