"""One end of a transfer: a replica without an engine, as a Ray actor, whose stages run together or alone."""

import asyncio
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.transfer.ports import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    ActorPeer,
    Cache,
    Mark,
    ProcessSpan,
    SingleRequestHost,
    pieces,
)
from deployments.config import MigrationSettings
from deployments.replica.transports import make_slots, make_transport
from migration.kv.staging import HEADER
from migration.protocol.continuing import plain_spec
from migration.protocol.messages import Adopt, Chunk, CopyRound, PathRequest, Prepare, Prepared, SlotRef
from migration.protocol.record import Outcome
from migration.protocol.rounds import CopyLimits
from migration.protocol.sizing import MIB, StagingSizes
from migration.run.slots import Lease
from migration.run.source import Order, SourceRun
from migration.run.target import TargetRun
from migration.run.world import MigrationLimits, MigrationWorld
from policies.model import SOLE_POOL, Blocks, Bytes, ReplicaId
from policies.plan import Path, Reason

SLOTS = 4
LIMIT_S = 120.0
LIMITS = MigrationLimits(LIMIT_S, LIMIT_S, LIMIT_S, LIMIT_S, CopyLimits(final_blocks=0))
SOURCE, TARGET = ReplicaId("source"), ReplicaId("target")


class TransferEnd:
    """The source or the target. The source migrates with the serving code; the target receives `Peer`'s calls."""

    def __init__(self, name: ReplicaId, transport: str, size: int, device: str, slot_mib: int) -> None:
        torch.set_num_threads(1)
        config = MigrationSettings(transport=transport, transfer_timeout_s=LIMIT_S)
        sizes = StagingSizes(workers=1, count=SLOTS, slot_bytes=slot_mib * MIB)
        self._name = name
        self._slot_bytes = sizes.slot_bytes
        self._cache = Cache(size // BLOCK_BYTES, name, device, sizes.slot_bytes)
        self._slots = make_slots(config, sizes)
        (self._cache.segments.own,) = self._slots.segments
        self._transport = make_transport(config, sizes)
        self._coming: TargetRun | None = None
        self._held: list[Lease] = []
        self._chunks: list[Mark] = []
        self._buffers = [torch.ones(size, dtype=torch.uint8) for _ in range(2)]
        self._copied = [buffer.to(device) for buffer in self._buffers]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connection: socket.socket | None = None

    async def fill(self, seed: int | None) -> None:
        """See `Cache.fill`."""
        self._cache.fill(seed)

    async def digest(self, blocks: int) -> str:
        """See `Cache.digest`."""
        return self._cache.digest(blocks)

    # --- the pipeline ---------------------------------------------------------------------------------

    async def move(self, target: Any, blocks: int) -> ProcessSpan:
        """Migrate a request of `blocks` full blocks; the span from the first gather to the last confirmation."""
        prompt = (0,) * (blocks * BLOCK_SIZE + 1)
        spec = plain_spec("moved", prompt, 1)
        peer, cache = ActorPeer(TARGET, target), self._cache
        world = MigrationWorld(
            self._name,
            SOLE_POOL,
            SingleRequestHost(spec),
            cache,
            self._transport,
            self._slots,
            LIMITS,
            time.perf_counter,
            time.time,
        )
        cache.gathers.clear()
        record = await SourceRun(Order(secrets.token_hex(8), spec.id, PathRequest.KV, Reason.MANUAL), peer, world).run()
        if (record.outcome, record.path, record.blocks) != (Outcome.COMMITTED, Path.KV, blocks):
            raise RuntimeError(f"the blocks did not arrive: {record}")
        return ProcessSpan(cache.gathers[0], peer.confirmed[-1])

    async def prepare(self, message: Prepare) -> Prepared:
        """See `Peer`."""
        host = SingleRequestHost(message.spec)
        self._coming = TargetRun(
            message, host, self._cache, self._transport, self._slots, LIMIT_S, on_end=lambda migration: None
        )
        self._chunks.clear()
        return self._coming.prepare()

    async def load(self, message: CopyRound) -> None:
        """See `Peer`."""
        assert self._coming is not None
        await self._coming.load(message)

    async def receive(self, message: Chunk) -> None:
        """See `Peer`."""
        assert self._coming is not None
        self._chunks.append(Mark.now())
        await self._coming.receive(message)
        self._chunks.append(Mark.now())

    async def received(self) -> ProcessSpan:
        """The span from the first chunk's message to the end of the last chunk's load."""
        return ProcessSpan(self._chunks[0], self._chunks[-1])

    async def adopt(self, message: Adopt) -> None:
        """See `Peer`; the request's reader attaches at once."""
        assert self._coming is not None
        await self._coming.adopt(message)
        self._coming.attach()

    # --- the stages alone -----------------------------------------------------------------------------

    async def gather(self, blocks: int) -> ProcessSpan:
        """Gather into the slots in turn, without sending."""
        await self._lease_all()
        began = Mark.now()
        for i, (low, high) in enumerate(pieces(blocks, self._slot_bytes)):
            await self._cache.gather("key", low, high, self._held[i % SLOTS].slots)
        span = ProcessSpan(began, Mark.now())
        await self.release()
        return span

    async def hold(self, blocks: int) -> list[SlotRef]:
        """Stage the first blocks in every slot, until `release`."""
        await self._lease_all()
        _, last = next(pieces(blocks, self._slot_bytes))
        staged = [await self._cache.gather("key", Blocks(0), last, lease.slots) for lease in self._held]
        return [shard.slot for (shard,) in staged]

    async def _lease_all(self) -> None:
        self._held = [await self._slots.lease(LIMIT_S) for _ in range(SLOTS)]

    async def release(self) -> None:
        """Free all slots."""
        for lease in self._held:
            lease.end()

    async def scatter(self, refs: Sequence[SlotRef], blocks: int) -> ProcessSpan:
        """Load staged slots in turn."""
        began = Mark.now()
        for i, (low, high) in enumerate(pieces(blocks, self._slot_bytes)):
            await self._cache.put("", low, high, [refs[i % SLOTS]])
        return ProcessSpan(began, Mark.now())

    async def channels(self, count: int) -> list[str]:
        """The channels of the next `count` transfers from this source to the target."""
        return [self._transport.channel(self._name, TARGET, 0) for _ in range(count)]

    async def send_alone(self, channels: list[str], blocks: int) -> ProcessSpan:
        """Send a slot through each channel, after a send of one header that waits for the other end."""
        lease = await self._slots.lease(LIMIT_S)
        await self._transport.send(channels[0], lease.slots[0], Bytes(HEADER))
        began = Mark.now()
        for channel, (low, high) in zip(channels[1:], pieces(blocks, self._slot_bytes), strict=True):
            await self._transport.send(channel, lease.slots[0], Bytes(HEADER + (high - low) * BLOCK_BYTES))
        lease.end()
        return ProcessSpan(began, Mark.now())

    async def receive_alone(self, channels: list[str], blocks: int) -> ProcessSpan:
        """Receive a slot through each channel: the other end of `send_alone`."""
        ref, lease = SlotRef("", 0, 1), await self._slots.lease(LIMIT_S)
        await self._transport.receive(channels[0], ref, Bytes(HEADER), lease.slots[0])
        began = Mark.now()
        for channel, (low, high) in zip(channels[1:], pieces(blocks, self._slot_bytes), strict=True):
            await self._transport.receive(channel, ref, Bytes(HEADER + (high - low) * BLOCK_BYTES), lease.slots[0])
        lease.end()
        return ProcessSpan(began, Mark.now())

    # --- the yardsticks -------------------------------------------------------------------------------

    async def memcpy(self, size: int) -> ProcessSpan:
        """Copy between two tensors."""
        source, target = (tensor[:size] for tensor in self._copied)
        began = Mark.now()
        target.copy_(source)
        if target.is_cuda:
            torch.cuda.synchronize()
        return ProcessSpan(began, Mark.now())

    async def port(self) -> int:
        """The port on which this end listens for `connect`."""
        port: int = self._listener.getsockname()[1]
        return port

    async def connect(self, port: int) -> None:
        """Connect to the other end, which takes the connection in its next `tcp_receive`."""
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def tcp_send(self, size: int) -> ProcessSpan:
        """Send one buffer as soon as the other end is ready."""
        return await asyncio.to_thread(self._tcp_send, memoryview(self._buffers[0].numpy())[:size])

    def _tcp_send(self, data: memoryview) -> ProcessSpan:
        assert self._connection is not None
        self._connection.recv(1)
        began = Mark.now()
        self._connection.sendall(data)
        return ProcessSpan(began, Mark.now())

    async def tcp_receive(self, size: int) -> ProcessSpan:
        """Receive one buffer."""
        return await asyncio.to_thread(self._tcp_receive, memoryview(self._buffers[1].numpy())[:size])

    def _tcp_receive(self, data: memoryview) -> ProcessSpan:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
        self._connection.sendall(b"r")
        began = Mark.now()
        while data:
            data = data[self._connection.recv_into(data) :]
        return ProcessSpan(began, Mark.now())
