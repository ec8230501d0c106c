"""The output of one run in an engine, for callers that wait for it step by step."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from migration.protocol.messages import Tail
from migration.protocol.ports import Generated, OutputSink
from migration.protocol.request import RequestSpec


class Runner(Protocol):
    """The part of `deployments.engine.port.Engine` that runs requests."""

    def add(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None
    ) -> None:
        """Continue a request after `outputs`; the output goes to `sink`."""
        ...

    def abort(self, key: str) -> None:
        """End a run."""
        ...


class OutputQueue:
    """Implements `OutputSink`: keeps steps until they are read."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Generated | Exception] = asyncio.Queue()

    def take(self, step: Generated) -> None:
        """See `OutputSink.take`."""
        self._queue.put_nowait(step)

    def fail(self, error: Exception) -> None:
        """See `OutputSink.fail`."""
        self._queue.put_nowait(error)

    async def steps(self) -> AsyncIterator[Generated]:
        """The steps up to the last one. Raises the error that ended the run."""
        while True:
            step = await self._queue.get()
            if isinstance(step, Exception):
                raise step
            yield step
            if step.finish is not None:
                return

    async def exhaust(self) -> None:
        """Wait for the last step. Raises the error that ended the run."""
        async for _ in self.steps():
            pass


@contextlib.asynccontextmanager
async def running(
    engine: Runner, key: str, spec: RequestSpec, outputs: tuple[int, ...] = (), tail: Tail | None = None
) -> AsyncGenerator[AsyncIterator[Generated]]:
    """The steps of a run, which is aborted at the end of the context."""
    queue = OutputQueue()
    engine.add(key, spec, outputs, queue, tail)
    try:
        yield queue.steps()
    finally:
        engine.abort(key)
