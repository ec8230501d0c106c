"""The benchmarks' operator calls to Mell, and streams that are read in the background."""

import asyncio
import time
from typing import Any, Self

from app.client.api import ApiClient
from benchmarks.load import TimedStream, random_prompt, stream
from benchmarks.servers import MODEL

WAIT_S = 30.0


class OpenedStream:
    """A stream that is read in the background, with a label by which it can be moved."""

    def __init__(self, port: int, label: str, prompt: int, output: int) -> None:
        self.label = label
        self.stream = TimedStream()
        tokens = random_prompt(prompt, label)
        self._task = asyncio.create_task(stream(port, MODEL, tokens, output, label, self.stream))

    async def reached(self, chunks: int) -> None:
        """Wait until `chunks` chunks have arrived. Raises RuntimeError if the stream ends before."""
        while len(self.stream.arrivals) < chunks:
            if self._task.done():
                await self._task
                raise RuntimeError(f"{self.label} ended after {len(self.stream.arrivals)} chunks, before {chunks}")
            await asyncio.sleep(0.005)

    async def whole(self) -> TimedStream:
        """Read to the end. Raises RuntimeError if the answer is an error, or incomplete."""
        return await self._task

    async def leave(self) -> bool:
        """Close the connection; True if the stream was still running."""
        running = self._task.cancel()
        await asyncio.wait({self._task})
        return running


class Admin:
    """The /mell calls of one server. Every call raises ClientError."""

    def __init__(self, port: int) -> None:
        self._mell = ApiClient(f"http://127.0.0.1:{port}", timeout_s=WAIT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._mell.aclose()

    async def move(self, label: str, path: str, target: str | None = None) -> str:
        """Order a migration; its id."""
        return await self._mell.move(label, path, target)

    async def drain(self, replica: str) -> None:
        """Order the evacuation and stop of a replica."""
        await self._mell.drain(replica)

    async def record(self, migration: str) -> dict[str, Any]:
        """Wait for the end of a migration; its record. Raises TimeoutError."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for record in await self._mell.migrations():
                if record["id"] == migration and record["outcome"]:
                    return record
            await asyncio.sleep(0.05)
        raise TimeoutError(f"migration {migration} has no outcome after {WAIT_S} s")

    async def record_of(self, label: str, within_s: float) -> dict[str, Any] | None:
        """The record of a request's first migration, once that has ended; None if none is known after `within_s`."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            record: dict[str, Any]
            for record in reversed(await self._mell.migrations()):
                if record["label"] == label and record["outcome"]:
                    return record
            await asyncio.sleep(0.1)
        return None

    async def hosts(self, labels: set[str]) -> dict[str, str]:
        """The replica of each of these requests. Raises TimeoutError if one stays without a replica."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            replicas = (await self._mell.state())["replicas"]
            found = {r["label"]: str(replica["id"]) for replica in replicas for r in replica["requests"]}
            if labels <= found.keys():
                return {label: found[label] for label in sorted(labels)}
            await asyncio.sleep(0.1)
        raise TimeoutError(f"{sorted(labels - found.keys())} are on no replica after {WAIT_S} s")

    async def replicas(self) -> list[str]:
        """The ids of all engine replicas."""
        return sorted(str(replica["id"]) for replica in (await self._mell.state())["replicas"])
