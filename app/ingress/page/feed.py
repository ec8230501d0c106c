"""`/mell/events`: one poll of the cluster per `INTERVAL_S` for all open pages, and none without an open page.

Every page has a short queue. A page that reads too slowly loses its queue and gets a snapshot at its next read; it
misses the changes in between and never delays other pages.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from app.ingress.page.updates import PageSample, PageState

log = logging.getLogger("ray.serve")

INTERVAL_S = 0.75
"""A page shows the scheduler's last epoch within a second, poll and drawing included."""
HEARTBEAT_S = 5.0
MAX_PAGES = 64
_BACKLOG = 4
_HEARTBEAT = b": heartbeat\n\n"

Poll = Callable[[], Awaitable[PageSample]]


class _PageQueue:
    """The queue of an open page; `behind` means that the page needs a snapshot."""

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
    """Sends events to all open pages. `poll` may be slow and may raise; the next poll follows at its time."""

    def __init__(self, poll: Poll, interval_s: float = INTERVAL_S, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._fetch = poll
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._state = PageState()
        self._current = False
        self._pages: set[_PageQueue] = set()
        self._poller: asyncio.Task[None] | None = None
        self._updating = asyncio.Lock()
        self._closed = False

    @property
    def full(self) -> bool:
        """True if the feed accepts no further page."""
        return self._closed or len(self._pages) >= MAX_PAGES

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of one page: a snapshot, then deltas, and heartbeats when idle."""
        page = _PageQueue()
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
        """End all streams and accept no further page."""
        self._closed = True
        if self._poller is not None:
            self._poller.cancel()
        for page in self._pages:
            page.woken.set()

    async def _snapshot(self, page: _PageQueue) -> bytes:
        # The lock keeps the state unchanged, so that all later deltas apply to this snapshot.
        async with self._updating:
            page.deltas.clear()
            page.behind = False
            return await asyncio.to_thread(lambda: _event("snapshot", self._state.snapshot()))

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        failing = False
        while self._pages:
            began = loop.time()
            try:
                await self._publish(await self._fetch())
                failing = False
            except Exception:
                if not failing:
                    log.exception("the polls for the live page fail")
                failing = True
            await asyncio.sleep(max(0.0, began + self._interval_s - loop.time()))
        self._current = False
        self._poller = None

    async def _publish(self, sample: PageSample) -> None:
        # In a thread: with thousands of requests, this takes a good part of an inter-token time.
        async with self._updating:
            delta = await asyncio.to_thread(lambda: _event("delta", self._state.update(sample)))
            self._current = True
            for page in self._pages:
                page.push(delta)


async def _woken(page: _PageQueue, within_s: float) -> bool:
    """Wait until the page has an event; False if there is none within `within_s`."""
    page.woken.clear()
    try:
        async with asyncio.timeout(within_s):
            await page.woken.wait()
    except TimeoutError:
        return False
    return True


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
