"""Keeps the mirror of a vLLM engine: reads the engine's events, and has the mirror repaired and audited.

An engine publishes changes with almost every step, and the event loop's part of a message is dearer than the mirror's.
So events are taken when somebody looks at the mirror, and otherwise once in `CATCH_UP_S`.

vLLM publishes events on a socket (vllm/distributed/kv_events.py) that never makes it wait: a message that finds no room
is dropped. The number of the next message shows that. There is one repair for everything, the contents of the pool,
which the engine publishes on request among its events, and the same request is the audit. vLLM's replay of old messages
is not used: it cannot bring back what is older than its buffer, and costs the engine memory for every token.
"""

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import zmq

from deployments.cache.mirror import Mirror, Resync
from migration.concurrency import repeat
from migration.kv.cache_events import decode_batch

log = logging.getLogger(__name__)

CATCH_UP_S = 0.5
"""The longest time for which an event waits at this end of the socket, in seconds."""

ANSWER_S = 5.0
"""The time after which a request for the pool's contents is made again, in seconds."""

_LOOK_S = 0.01
"""The time between two looks for these contents, in seconds."""

Asking = Callable[[], AbstractAsyncContextManager[None]]
"""Has the engine publish its pool's contents; the request is given up at the end of the context."""


class EventFolder:
    """A folder of this process's user alone, with the address on which an engine publishes its events."""

    def __init__(self) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="mell-"))
        self._there = True
        self.endpoint = f"ipc://{self._path}/events"

    def remove(self) -> None:
        """Remove the folder, once both ends are connected: it would outlive a process that is killed.

        Later calls do nothing: the name may be another engine's by then.
        """
        if self._there:
            self._there = False
            shutil.rmtree(self._path, ignore_errors=True)


class CacheFeed:
    """The connection to one engine's events, from its construction to `close`."""

    def __init__(self, mirror: Mirror, folder: EventFolder, ask: Asking, audit_s: float) -> None:
        """The mirror is compared with the pool every `audit_s` seconds."""
        self._mirror = mirror
        self._folder = folder
        self._ask = ask
        self._audit_s = audit_s
        self._wanted = asyncio.Event()
        self._asking = asyncio.Lock()
        """Held while the engine is asked for the pool's contents, and while it must not be."""
        self._paused = False
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        # Without a limit: events take much less memory than the blocks that they are about.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(folder.endpoint)
        self._tasks = [
            asyncio.create_task(repeat(self._catch_up_late, CATCH_UP_S)),
            asyncio.create_task(repeat(self._keep, 0.0)),
        ]
        self.resync()

    def resync(self) -> None:
        """Have the mirror compared with the pool now."""
        self._wanted.set()

    async def pause(self) -> None:
        """Have the mirror compared with the pool, and then never again until `resume`: the engine makes no steps."""
        if self._paused:
            return
        async with self._asking:
            while self._mirror.off is None and not await self._check():
                pass
            # No task has had a turn since the check.
            self._paused = True

    def resume(self) -> None:
        """Have the mirror compared with the pool now, and from time to time."""
        self._paused = False
        self.resync()

    def close(self) -> None:
        """End the connection."""
        for task in self._tasks:
            task.cancel()
        self._socket.close(linger=0)
        self._folder.remove()

    def catch_up(self) -> None:
        """Apply all events that have arrived."""
        mirror = self._mirror
        for number, payload in self._arrived():
            checks = mirror.checks
            try:
                mirror.take(number, decode_batch(payload))
            except msgspec.DecodeError as error:
                log.exception("the events of the engine's cache cannot be read: there is no mirror of it")
                mirror.give_up(f"the engine's events cannot be read: {error}")
            if mirror.checks == checks and not mirror.exact:
                self._wanted.set()

    def _arrived(self) -> Iterator[tuple[int, bytes]]:
        """The batches that have arrived, encoded, with their numbers."""
        with contextlib.suppress(zmq.Again):
            while self._mirror.off is None and not self._socket.closed:
                _, number, payload = self._socket.recv_multipart(zmq.NOBLOCK)
                yield int.from_bytes(number, "big"), payload

    async def _catch_up_late(self) -> None:
        """Apply the events that nothing has looked for."""
        self.catch_up()

    async def _keep(self) -> None:
        """Have the pool's contents published once: after a loss, or in `audit_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._audit_s):
                await self._wanted.wait()
        self._wanted.clear()
        if self._mirror.off is not None or self._paused:
            return
        arrived = False
        try:
            async with self._asking:
                arrived = self._paused or await self._check()
        finally:
            if not arrived:
                self._wanted.set()
        if arrived:
            self._folder.remove()

    async def _check(self) -> bool:
        """Have the pool's contents published, and wait for them. False if they do not arrive."""
        before, checks = self._mirror.resyncs.copy(), self._mirror.checks
        try:
            async with asyncio.timeout(ANSWER_S), self._ask():
                while self._mirror.checks == checks:
                    await asyncio.sleep(_LOOK_S)
                    self.catch_up()
        except TimeoutError:
            return False
        for reason in self._mirror.resyncs - before:
            if reason is not Resync.START:
                log.warning("the mirror of the engine's cache was replaced by the cache's contents: %s", reason)
        return True
