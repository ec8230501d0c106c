"""The processes of the GPU benchmark: workers that copy blocks, and replicas that send slots."""

import hashlib
import multiprocessing
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from migration.kv.layout import CacheLayout
from migration.kv.staging import HEADER, Segments
from migration.protocol.messages import SlotRef
from migration.protocol.sizing import StagingSizes
from policies.model import Bytes, ReplicaId


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a KV cache: layers, blocks, KV heads, tokens per block, and K and V values per token and head."""

    layers: int = 32
    blocks: int = 2048
    heads: int = 8
    tokens: int = 16
    content: int = 256

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers, in bfloat16."""
        return self.layers * self.heads * self.tokens * self.content * 2


class Worker:
    """One worker's cache and its half of a move, run in a `WorkerProcess`. Methods return seconds."""

    def __init__(self, shape: CacheShape, device: str, seed: int) -> None:
        axes = (shape.layers, shape.blocks, shape.tokens, shape.heads, shape.content)
        layers = torch.zeros(axes, dtype=torch.bfloat16, device=device).transpose(2, 3)
        self._caches = {f"layers.{i}": layer for i, layer in enumerate(layers)}
        self._layout = CacheLayout(self._caches, shape.blocks)
        self._table = random.Random(seed).sample(range(shape.blocks), shape.blocks)
        self._device = device
        self._segments = Segments()

    def fill(self) -> None:
        """Fill the cache with random values."""
        for layer in self._caches.values():
            layer.uniform_()

    def open(self, path: str) -> float:
        """Map a segment."""
        return _timed(lambda: self._segments.get(path))

    def copy(self, size: int) -> float:
        """Copy one tensor of `size` bytes to another."""
        one, other = (torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2))

        def copied() -> None:
            other.copy_(one)
            if self._device != "cpu":
                torch.cuda.synchronize()

        copied()
        return _timed(copied)

    def gather(self, count: int, path: str) -> tuple[float, int]:
        """Gather blocks as `Copier` does; returns the seconds and the ticket."""
        segment, ticket = self._segments.get(path), secrets.randbits(63) | 1
        payload = segment.view(HEADER, count * self._layout.block_bytes)
        took = _timed(lambda: self._layout.gather(self._table[:count], payload))
        segment.stamp(0, ticket)
        return took, ticket

    def scatter(self, count: int, path: str, ticket: int) -> float:
        """Scatter staged blocks as `Copier` does."""
        ref = SlotRef(path, 0, ticket)
        payload = self._segments.payload(ref, count * self._layout.block_bytes)
        took = _timed(lambda: self._layout.scatter(self._table[:count], count, 0, payload))
        self._segments.check(ref)
        return took

    def digest(self, count: int) -> str:
        """The digest of the table's first `count` blocks."""
        staged = memoryview(bytearray(count * self._layout.block_bytes))
        self._layout.gather(self._table[:count], staged)
        return hashlib.sha256(staged).hexdigest()


class WorkerProcess:
    """A `Worker` in another process, called through a pipe. The process calls `prepare` first."""

    def __init__(self, shape: CacheShape, device: str, seed: int, prepare: Callable[[], object] | None) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, shape, device, seed, prepare), daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, method: str, *arguments: object) -> Any:
        """Call a method of the worker. Raises EOFError if the process died; its error is on stderr."""
        self._pipe.send((method, arguments))
        return self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, shape: CacheShape, device: str, seed: int, prepare: Callable[[], object] | None) -> None:
    if prepare is not None:
        prepare()
    worker = Worker(shape, device, seed)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(worker, method)(*arguments))


class NcclReplica:
    """A replica's end of the NCCL transport, as a Ray actor with its own GPU."""

    def __init__(self, slot_bytes: int) -> None:
        from deployments.config import MigrationSettings
        from deployments.replica.transports import make_slots, make_transport

        config = MigrationSettings(transport="nccl", transfer_timeout_s=60)
        sizes = StagingSizes(workers=1, count=4, slot_bytes=slot_bytes)
        self._transport, self._slots = make_transport(config, sizes), make_slots(config, sizes)
        self._size = HEADER + slot_bytes

    async def channels(self, count: int) -> list[str]:
        """The next channels from source to target."""
        return [self._transport.channel(ReplicaId("source"), ReplicaId("target"), 0) for _ in range(count)]

    async def send(self, channels: Sequence[str]) -> list[float]:
        """Send a slot through each channel; the seconds of each."""
        with await self._slots.lease(1) as (slot,):
            return [await _awaited(self._transport.send(channel, slot, Bytes(self._size))) for channel in channels]

    async def receive(self, channels: Sequence[str]) -> list[float]:
        """Receive a slot through each channel; the seconds of each."""
        with await self._slots.lease(1) as (slot,):
            ref = SlotRef("", 0, 1)
            return [
                await _awaited(self._transport.receive(channel, ref, Bytes(self._size), slot)) for channel in channels
            ]


async def _awaited(work: Any) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
