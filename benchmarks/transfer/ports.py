"""A replica without an engine, behind the ports of the migration code: a KV cache, one request, and a peer."""

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self, TypeVar

import torch

from migration.kv.layout import CacheLayout
from migration.kv.staging import HEADER, Segments, Staging
from migration.protocol.errors import TransferFailed
from migration.protocol.layouts import Extent, Resharding, ShardLayout
from migration.protocol.messages import Adopt, Chunk, CopyRound, Fingerprint, Prepare, Prepared, Shard, SlotRef, Tail
from migration.protocol.ports import Hosted, Slot
from migration.protocol.request import Doubt, Moved, Moving, RequestSpec
from policies.model import Blocks, Bytes, ReplicaId, RequestId, Tokens
from policies.prefix.tree import NO_PREFIX, HeldPrefix

LAYERS, BLOCK_SIZE, BLOCK_SHAPE = 4, 32, (2, 32, 128)
"""The tiny model's cache on a CPU: 32 KiB per block and layer."""
BLOCK_BYTES = LAYERS * 2 * 32 * 128 * 4

T = TypeVar("T")


class Mark(NamedTuple):
    """A moment, in seconds: of the clock shared by all processes of a machine, and of this process's CPU time."""

    at: float
    cpu: float

    @classmethod
    def now(cls) -> Self:
        """This moment."""
        return cls(time.perf_counter(), time.process_time())


class ProcessSpan(NamedTuple):
    """A time span of one process."""

    began: Mark
    ended: Mark


def pieces(blocks: int, slot_bytes: int) -> Iterator[tuple[Blocks, Blocks]]:
    """[0, blocks) in ranges that fit into a slot, as in `SourceRun`."""
    size = slot_bytes // BLOCK_BYTES
    for low in range(0, blocks, size):
        yield Blocks(low), Blocks(min(low + size, blocks))


class OwnSegments(Segments):
    """Mapped segments, and one of this process itself, which CUDA does not let it map. In vLLM, workers map all."""

    own: Staging | None = None

    def get(self, path: str) -> Staging:
        """The segment at `path`."""
        return self.own if self.own is not None and path == self.own.path else super().get(path)


class Cache:
    """A `BlockStore` over KV tensors, with one copying thread. All blocks belong to one request."""

    def __init__(self, blocks: int, seed: str, device: str, slot_bytes: int) -> None:
        # As vLLM allocates it: one buffer, hence one copy for all layers.
        layers = torch.zeros((LAYERS, blocks, *BLOCK_SHAPE), device=device)
        self._tensors = {f"layer{i}": layer for i, layer in enumerate(layers)}
        self._layout = CacheLayout(self._tensors, blocks)
        self._table = random.Random(seed).sample(range(blocks), blocks)
        self._device = device
        self._slot_bytes = slot_bytes
        self.segments = OwnSegments()
        self._worker = ThreadPoolExecutor(1)
        self._missing = 0
        self._whole = asyncio.Event()
        self.links = None
        layers, heads, head_axis, dtype, order = self._layout.shape
        shard = ShardLayout(Extent(0, layers), Extent(0, heads), BLOCK_SIZE, dtype, order, head_axis, BLOCK_BYTES)
        self.fingerprint = Fingerprint("tiny", "fp32", BLOCK_SIZE, (shard,))
        self.gathers: list[Mark] = []
        """The beginnings of all gathers."""

    async def gather(self, key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> list[Shard]:
        """See `BlockStore.gather`; works like `Copier`."""
        self.gathers.append(Mark.now())
        (slot,) = slots
        return [await self._in_worker(lambda: self._gather(first, last, slot.segment, slot.offset))]

    def _gather(self, first: int, last: int, segment: str, offset: int) -> Shard:
        memory, size = self.segments.get(segment), (last - first) * BLOCK_BYTES
        memory.stamp(offset, 0)
        self._layout.gather(self._table[first:last], memory.view(offset + HEADER, size))
        ticket = secrets.randbits(63) | 1
        memory.stamp(offset, ticket)
        return Shard(SlotRef(segment, offset, ticket), Bytes(HEADER + size))

    async def computed(self, key: str) -> Tokens:
        """See `BlockStore.computed`; no migration here begins during a prefill."""
        raise NotImplementedError

    async def computed_beyond(self, key: str, tokens: Tokens) -> Tokens:
        """See `BlockStore.computed_beyond`, likewise."""
        raise NotImplementedError

    async def load(self, load: str, spec: RequestSpec, outputs: tuple[int, ...], first: Blocks, last: Blocks) -> None:
        """See `BlockStore.load`."""
        self._missing = last - first
        self._whole.clear()
        await self._whole.wait()

    async def put(
        self, load: str, first: Blocks, last: Blocks, slots: Sequence[SlotRef], cuts: Resharding | None = None
    ) -> None:
        """See `BlockStore.put`; works like `Copier`."""
        (slot,) = slots
        await self._in_worker(lambda: self._put(first, last, slot))
        self._missing -= last - first
        if not self._missing:
            self._whole.set()

    def _put(self, first: int, last: int, slot: SlotRef) -> None:
        staged = self.segments.payload(slot, (last - first) * BLOCK_BYTES)
        self._layout.scatter(self._table[first:last], last - first, 0, staged)
        self.segments.check(slot)

    async def gather_tail(self, key: str, tail: Tail, slots: Sequence[Slot]) -> list[Shard]:
        """See `BlockStore.gather_tail`; no migration here comes to its tail."""
        raise NotImplementedError

    async def hold(self, tail: Tail, slots: Sequence[SlotRef], cuts: Resharding | None = None) -> None:
        """See `BlockStore.hold`; no migration here comes to its tail."""
        raise NotImplementedError

    def present(self, spec: RequestSpec, outputs: tuple[int, ...]) -> HeldPrefix:
        """See `BlockStore.present`: all blocks are sent."""
        return NO_PREFIX

    def expect(self, tail: str) -> None:
        """See `BlockStore.expect`."""

    def discard(self, tail: str) -> None:
        """See `BlockStore.discard`."""

    async def _in_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def fill(self, seed: int | None) -> None:
        """Fill the cache with random values, or with zeros if `seed` is None."""
        for tensor in self._tensors.values():
            if seed is None:
                tensor.zero_()
            else:
                tensor.uniform_(generator=torch.Generator(self._device).manual_seed(seed))

    def digest(self, blocks: int) -> str:
        """The digest of the request's first `blocks` blocks."""
        total, out = hashlib.blake2b(), bytearray(self._slot_bytes)
        for low, high in pieces(blocks, self._slot_bytes):
            part = memoryview(out)[: (high - low) * BLOCK_BYTES]
            self._layout.gather(self._table[low:high], part)
            total.update(part)
        return total.hexdigest()


class SingleRequestHost:
    """A `SourceHost` and `TargetHost` with one request, which never runs and hence emits nothing."""

    def __init__(self, spec: RequestSpec) -> None:
        self._hosted = Hosted(spec, 0, "key", (), decodes=True)

    def snapshot(self, request: RequestId, hop: int | None = None) -> Hosted:
        """See `SourceHost`."""
        return self._hosted

    mute = snapshot

    async def next_output(self, request: RequestId, hop: int) -> None:
        """See `SourceHost`."""

    halt_behind_token = next_output

    def next_hop(self, request: RequestId) -> int:
        """See `SourceHost`."""
        return 1

    def accept(self, message: Prepare) -> Tokens:
        """See `TargetHost`."""
        return Tokens(0)

    async def add(self, spec: RequestSpec, hop: int, outputs: tuple[int, ...], tail: Tail | None) -> None:
        """See `TargetHost`."""

    def announce(self, event: Moving | Moved | Doubt) -> None:
        """See `SourceHost`."""

    def reserve(self, migration: str, tokens: Tokens) -> None:
        """See `TargetHost`."""

    def abort(self, request: RequestId, hop: int) -> None:
        """See `TargetHost`."""

    def unmute(self, request: RequestId, hop: int) -> None:
        """See `SourceHost`."""

    halt = drop = unmute

    def release(self, migration: str) -> None:
        """See `TargetHost`."""


class ActorPeer:
    """A `Peer` behind a Ray actor handle."""

    def __init__(self, replica: ReplicaId, actor: Any) -> None:
        self.id = replica
        self.confirmed: list[Mark] = []
        """The moments at which the peer had loaded each chunk."""
        self._actor = actor

    async def prepare(self, message: Prepare) -> Prepared:
        """See `Peer`."""
        prepared: Prepared = await self._actor.prepare.remote(message)
        return prepared

    async def load(self, message: CopyRound) -> None:
        """See `Peer`."""
        await self._actor.load.remote(message)

    async def receive(self, message: Chunk) -> None:
        """See `Peer`."""
        await self._actor.receive.remote(message)
        self.confirmed.append(Mark.now())

    async def renew(self, migration: str) -> None:
        """See `Peer`; the target has no lease."""

    async def adopt(self, message: Adopt) -> None:
        """See `Peer`."""
        await self._actor.adopt.remote(message)

    async def cancel(self, migration: str) -> None:
        """See `Peer`."""
        raise TransferFailed("the migration failed")

    async def resumed(self, migration: str) -> float | None:
        """See `Peer`; None, since nothing is generated."""
        return None
