"""A worker's half of staging as a process: a KV cache, with the copies of `Copier`.

    python -m tests.migration.kv.kv_process cpu|cuda LAYOUT [SEED]

Reads one JSON object per line, answers with one. On "cpu" GPU memory is that of `fake_cupy`.
"""

import hashlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[3]
BLOCKS = 32
BLOCK_BYTES = 12 * 2 * 4 * 6 * 2
"""Bytes of a block of `caches.paged`: layers, heads, tokens, content, bytes of bfloat16."""


class Half:
    """The KV cache and its copies."""

    def __init__(self, device: str, layout: str, seed: int | None) -> None:
        from migration.kv.layout import CacheLayout
        from migration.kv.staging import Segments
        from tests.migration.kv import caches

        self._layout = CacheLayout(caches.paged(layout, BLOCKS, device=device, seed=seed), BLOCKS)
        self._segments = Segments()

    def gather(self, blocks: Sequence[int], segment: str, offset: int) -> dict[str, Any]:
        """See `Copier`."""
        from migration.kv.staging import HEADER

        memory, size = self._segments.get(segment), len(blocks) * self._layout.block_bytes
        memory.stamp(offset, 0)
        self._layout.gather(blocks, memory.view(offset + HEADER, size))
        ticket = secrets.randbits(63) | 1
        memory.stamp(offset, ticket)
        return {"ticket": ticket, "bytes": HEADER + size}

    def scatter(
        self, blocks: Sequence[int], segment: str, offset: int, ticket: int, staged: int, skip: int = 0
    ) -> dict[str, Any]:
        """See `Copier`."""
        from migration.protocol.messages import SlotRef

        slot = SlotRef(segment, offset, ticket)
        payload = self._segments.payload(slot, staged * self._layout.block_bytes)
        self._layout.scatter(blocks, staged, skip, payload)
        self._segments.check(slot)
        return {}

    def digest(self, blocks: Sequence[int]) -> dict[str, Any]:
        """The digest of the blocks' bytes."""
        staged = memoryview(bytearray(len(blocks) * self._layout.block_bytes))
        self._layout.gather(blocks, staged)
        return {"digest": hashlib.sha256(staged).hexdigest()}


class Worker:
    """A client of the worker process. An error there is returned as {"error"}."""

    def __init__(self, device: str, layout: str, seed: int | None = None, gpu: str | None = None) -> None:
        """`gpu` is the only GPU visible to the process; by default all are, and the process uses the first."""
        environment = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        arguments = [device, layout] if seed is None else [device, layout, str(seed)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env=environment,
        )

    def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of `Half`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"do": what, **arguments}), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def segment_path(device: str) -> str:
    """The path of a segment that this process makes."""
    _prepare(device)
    from migration.kv.device import DeviceSegment

    return DeviceSegment.create(1 << 20).path


def _prepare(device: str) -> None:
    if device == "cpu":
        from tests.migration import fake_cupy

        fake_cupy.install()


def main(device: str, layout: str, seed: str | None = None) -> None:
    """Answer calls until the end of the input."""
    _prepare(device)
    half = Half(device, layout, None if seed is None else int(seed))
    for line in sys.stdin:
        order = json.loads(line)
        work: Callable[..., dict[str, Any]] = getattr(half, order.pop("do"))
        try:
            answer = work(**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
