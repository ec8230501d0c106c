"""`/mell/events`: one look at the cluster per `INTERVAL_S` for all open pages, and none while no page is open.

Every page has a short queue. One that reads too slowly loses what is in it, and gets a snapshot when it reads again: it
misses what happened between, and never holds more than that up.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from app.ingress.picture import Picture, Seen

log = logging.getLogger("ray.serve")

INTERVAL_S = 0.75
"""A page shows the scheduler's last epoch within a second, the look and the drawing included."""
HEARTBEAT_S = 5.0
MAX_PAGES = 64
_BACKLOG = 4
_HEARTBEAT = b": heartbeat\n\n"

Look = Callable[[], Awaitable[Seen]]


class _Page:
    """An open page: what it is to be sent, and whether it has to begin anew."""

    def __init__(self) -> None:
        self.deltas: deque[bytes] = deque()
        self.behind = True
        self.woken = asyncio.Event()

    def push(self, delta: bytes) -> None:
        if len(self.deltas) >= _BACKLOG:
            self.behind = True
        if self.behind:
            self.deltas.clear()
        else:
            self.deltas.append(delta)
        self.woken.set()


class Feed:
    """What open pages are sent. `look` may be slow, and may raise: then the next look comes in its time, too."""

    def __init__(self, look: Look, interval_s: float = INTERVAL_S, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._look = look
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._picture = Picture()
        self._current = False
        self._pages: set[_Page] = set()
        self._poller: asyncio.Task[None] | None = None
        self._updating = asyncio.Lock()
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether no more pages are taken."""
        return self._closed or len(self._pages) >= MAX_PAGES

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of one page: a snapshot, then deltas; heartbeats while there is nothing to tell."""
        page = _Page()
        self._pages.add(page)
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())
        try:
            while not self._closed:
                if page.behind and self._current:
                    yield await self._snapshot(page)
                elif page.deltas:
                    yield page.deltas.popleft()
                elif not await _woken(page, self._heartbeat_s):
                    yield _HEARTBEAT
        finally:
            self._pages.discard(page)

    def close(self) -> None:
        """End all streams, and take no page any more."""
        self._closed = True
        if self._poller is not None:
            self._poller.cancel()
        for page in self._pages:
            page.woken.set()

    async def _snapshot(self, page: _Page) -> bytes:
        # Whatever is pushed from here on comes after this snapshot: the picture is not updated meanwhile.
        async with self._updating:
            page.deltas.clear()
            page.behind = False
            return await asyncio.to_thread(lambda: _event("snapshot", self._picture.snapshot()))

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pages:
            began = loop.time()
            try:
                await self._tell(await self._look())
            except Exception:
                log.exception("there is nothing new for the page")
            await asyncio.sleep(max(0.0, began + self._interval_s - loop.time()))
        self._current = False
        self._poller = None

    async def _tell(self, seen: Seen) -> None:
        # In a thread: with thousands of requests this takes a good part of what is between two tokens.
        async with self._updating:
            delta = await asyncio.to_thread(lambda: _event("delta", self._picture.update(seen)))
            self._current = True
            for page in self._pages:
                page.push(delta)


async def _woken(page: _Page, within_s: float) -> bool:
    """Wait until there is something for that page; False if that takes longer."""
    page.woken.clear()
    try:
        async with asyncio.timeout(within_s):
            await page.woken.wait()
    except TimeoutError:
        return False
    return True


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
