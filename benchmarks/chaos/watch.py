"""Watches the cluster during fault injection, and finds leaks afterwards."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import psutil

from app.client.errors import ClientError
from benchmarks.chaos.processes import ENGINE, Processes
from benchmarks.chaos.server import Server

PERIOD_S = 0.5
TWICE = 2


def holdings(replica: Mapping[str, Any]) -> str | None:
    """The resources that a replica holds, from `/mell/state`; None if it holds none.

    `used_tokens` are the tokens of blocks in use and of room reserved for requests that are being moved there.
    """
    held = {
        "requests": len(replica["requests"]),
        "tokens in used blocks or promised room": replica["used_tokens"],
        "staging slots": replica["staging_slots_in_use"],
    }
    return ", ".join(f"{count} {name}" for name, count in held.items() if count) or None


class ClosedReplicas:
    """Finds leaks of replicas that close during the run, and hence are missing from the last look.

    A draining replica without requests holds nothing, except for a moment. If it holds resources in two looks in a row
    and then closes, it has leaked them.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[str]] = {}

    def look(self, state: Mapping[str, Any]) -> None:
        """Record the document at `/mell/state`."""
        for replica in state["replicas"]:
            held = holdings(replica)
            if held and replica["pids"] and replica["state"] == "DRAINING" and not replica["requests"]:
                self._held.setdefault(replica["id"], []).append(held)
            elif replica["pids"]:
                self._held.pop(replica["id"], None)

    def leaks(self) -> list[str]:
        """One line for each replica that closed with resources."""
        return [f"replica {r} closed with {held[-1]}" for r, held in self._held.items() if len(held) >= TWICE]


class ClusterWatch:
    """Polls the cluster's state.

    `state` is the newest answer, possibly from before the scheduler's death; `seen` are all replicas' processes so far.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.state: dict[str, Any] = {"as_of": 0.0, "replicas": []}
        self.closed = ClosedReplicas()
        self.seen: set[psutil.Process] = set()
        self._processes: Processes | None = None

    @property
    def processes(self) -> Processes:
        """The cluster's processes. Raises RuntimeError before the first look at a replica."""
        if self._processes is None:
            raise RuntimeError("no replica has been seen")
        return self._processes

    def running(self) -> list[dict[str, Any]]:
        """The running replicas."""
        return [replica for replica in self.state["replicas"] if replica["state"] == "RUNNING" and replica["pids"]]

    async def look(self) -> None:
        """Look once. Raises ClientError."""
        self.state = await self._server.state()
        self.closed.look(self.state)
        for replica in self.state["replicas"]:
            if replica["pids"]:
                self._remember(replica["pids"][0])

    def _remember(self, pid: int) -> None:
        if self._processes is None:
            with contextlib.suppress(psutil.Error):
                self._processes = Processes(pid)
        if self._processes is not None:
            self.seen.update(self._processes.tree(pid))

    async def keep_looking(self) -> None:
        """Look until cancelled."""
        while True:
            with contextlib.suppress(ClientError):
                await self.look()
            await asyncio.sleep(PERIOD_S)

    async def leaks(self, within_s: float) -> list[str]:
        """The leaks: resources still held `within_s` seconds from now, with no request running."""
        since, deadline = time.time(), time.monotonic() + within_s
        while True:
            with contextlib.suppress(ClientError):
                await self.look()
            found = self._found(since)
            if not found or time.monotonic() > deadline:
                return found + self.closed.leaks()
            await asyncio.sleep(PERIOD_S)

    def _found(self, since: float) -> list[str]:
        if self.state["as_of"] < since:
            return ["the scheduler does not answer with a new state"]
        if not self.running():
            return ["no replica runs"]
        held = ((r["id"], holdings(r)) for r in self.state["replicas"] if r["pids"])
        found = [f"replica {replica} holds {what}" for replica, what in held if what]
        known = {p for r in self.state["replicas"] for pid in r["pids"][:1] for p in self.processes.tree(pid)}
        there = self.seen.union(*(self.processes.tree(p.pid) for p in self.processes.titled(ENGINE)))
        return found + [f"process {p.pid} belongs to no replica" for p in there - known if p.is_running()]
