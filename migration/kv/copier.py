"""The copier: a thread of an engine's worker that copies KV blocks for the replica while the engine's steps run.

It listens on a Unix socket of its own (an abstract name, which ends with the process) and serves the calls of `wire`:
it gathers blocks of running requests into staging slots, scatters staged blocks into blocks that wait for them, and
copies the tails of requests that are about to come into memory of the worker. `tables` defines the blocks that it may
touch, and why no step touches them meanwhile. On a GPU, copies run in a stream of their own.

Each worker has a copier, so a replica with several workers has several. An exception in this thread never reaches the
engine: a call that fails is answered with its error.
"""

import contextlib
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Iterator, MutableMapping

import torch

from migration.kv.device import use
from migration.kv.layout import CacheLayout
from migration.kv.staging import HEADER, Segments
from migration.kv.tables import BlockLoads, BlockTables
from migration.kv.wire import (
    Call,
    CallFailed,
    DiscardTail,
    Filled,
    FilledCall,
    ForgetLoad,
    GatherCall,
    Gathered,
    HoldTailCall,
    Loaded,
    LoadedCall,
    Reply,
    ScatterCall,
    Scattered,
    TailHeld,
    decode,
)
from migration.kv.wire import encode as encoded
from migration.protocol.errors import BlocksGone, MigrationError
from migration.protocol.messages import SlotRef

log = logging.getLogger(__name__)

_READ = 1 << 16
_REPLY_S = 5.0
"""The time that a reply may take. The replica reads all the time; one that does not is given up."""
_CREDENTIALS = struct.Struct("3i")
"""SO_PEERCRED: process, user and group of the other end."""


WaitingCall = ScatterCall | FilledCall | LoadedCall
"""A call that is answered in a certain state of its load."""


class Copier:
    """Serves the calls of one replica. `address` is the socket's name."""

    def __init__(
        self, layout: CacheLayout, tables: BlockTables, loads: BlockLoads, tails: MutableMapping[str, torch.Tensor]
    ) -> None:
        """Tails are put into `tails`, a dictionary from which the main thread takes them."""
        self.address = f"\0mell-copier-{os.getpid()}-{secrets.token_hex(8)}"
        self._layout = layout
        self._tables = tables
        self._loads = loads
        self._tails = tails
        self._segments = Segments()
        self._waiting: list[tuple[_Connection, WaitingCall]] = []
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="mell-copier", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at the calls that wait for a load, since its state has changed. Called by the main thread."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """End the thread and its connections."""
        self._closing = True
        self.wake()
        self._thread.join()
        # Not by the thread: it may see `_closing` before it is woken.
        os.close(self._wakeup)

    # --- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._device():
            while not self._closing:
                try:
                    self._serve(self._selector.select())
                except Exception:
                    log.exception("the copier of KV blocks failed to serve a call")
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    @contextlib.contextmanager
    def _device(self) -> Iterator[None]:
        """The thread's copies go to a stream of its own. vLLM may have made the cache in inference mode."""
        with torch.inference_mode():
            if self._layout.device.type != "cuda":
                yield
                return
            torch.cuda.set_device(self._layout.device)
            use(torch.cuda.current_device())
            with torch.cuda.stream(torch.cuda.Stream(self._layout.device)):
                yield

    def _serve(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
            else:
                self._read(key.data)
        waiting, self._waiting = self._waiting, []
        # Chunks first: they may fill a load that another call waits for.
        for connection, call in sorted(waiting, key=lambda entry: not isinstance(entry[1], ScatterCall)):
            self._answer_when_due(connection, call)

    def _accept(self) -> None:
        accepted, _ = self._listener.accept()
        _, user, _ = _CREDENTIALS.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.getuid():
            log.warning("user %d may not use the copier of KV blocks", user)
            accepted.close()
            return
        accepted.settimeout(_REPLY_S)
        self._selector.register(accepted, selectors.EVENT_READ, _Connection(accepted))

    def _read(self, connection: "_Connection") -> None:
        """Serve the calls that arrived; a connection that ends, or sends anything else, is closed."""
        try:
            calls = connection.receive()
        except (OSError, ValueError) as error:
            log.warning("a connection to the copier of KV blocks failed: %s", error)
            calls = None
        if calls is None:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._waiting = [(other, call) for other, call in self._waiting if other is not connection]
            return
        for call in calls:
            match call:
                case GatherCall():
                    connection.reply(self._gather(call))
                case ScatterCall() | FilledCall() | LoadedCall():
                    self._answer_when_due(connection, call)
                case ForgetLoad(load):
                    self._forget(load)
                case HoldTailCall():
                    connection.reply(self._hold(call))
                case DiscardTail(tail):
                    self._tails.pop(tail, None)

    def _forget(self, load: str) -> None:
        self._loads.forget(load)
        waiting, self._waiting = self._waiting, []
        for connection, call in waiting:
            if call.load == load:
                connection.reply(CallFailed(call.number, "the load has ended"))
            else:
                self._waiting.append((connection, call))

    # --- copies ---------------------------------------------------------------------------------------

    def _gather(self, call: GatherCall) -> Reply:
        try:
            memory = self._segments.get(call.segment)
            size = (call.last - call.first) * self._layout.block_bytes
            payload = memory.view(call.offset + HEADER, size)
            memory.stamp(call.offset, 0)
            with self._tables.reading(call.key, call.first, call.last, call.partial) as (blocks, fence):
                if fence is not None:
                    fence.wait()
                self._layout.gather(blocks, payload)
            ticket = secrets.randbits(63) | 1
            memory.stamp(call.offset, ticket)
        except Exception as error:
            return _failed(call.number, error)
        return Gathered(call.number, ticket, HEADER + size)

    def _hold(self, call: HoldTailCall) -> Reply:
        slot = SlotRef(call.segment, call.offset, call.ticket)
        try:
            held = self._layout.take(self._segments.payload(slot, call.blocks * self._layout.block_bytes))
            self._segments.check(slot)
        except Exception as error:
            return _failed(call.number, error)
        self._tails[call.tail] = held
        return TailHeld(call.number)

    def _answer_when_due(self, connection: "_Connection", call: WaitingCall) -> None:
        """Answer a call that waits for a state of its load, or keep it."""
        match call:
            case ScatterCall():
                reply = self._scatter(call) if self._loads.decided(call.load) else None
            case FilledCall():
                reply = Filled(call.number) if self._loads.filled(call.load) else None
            case LoadedCall():
                reply = Loaded(call.number) if self._loads.loaded(call.load) else None
        if reply is None:
            self._waiting.append((connection, call))
        else:
            connection.reply(reply)

    def _scatter(self, call: ScatterCall) -> Reply:
        slot, count = SlotRef(call.segment, call.offset, call.ticket), call.last - call.first
        try:
            with self._loads.writing(call.load, call.first, call.last) as ((blocks, fence), skip):
                if blocks:
                    payload = self._segments.payload(slot, count * self._layout.block_bytes)
                    if fence is not None:
                        fence.wait()
                    self._layout.scatter(blocks, count, skip, payload)
                    self._segments.check(slot)
        except Exception as error:
            return _failed(call.number, error)
        return Scattered(call.number, len(blocks))


class _Connection:
    """A connection's socket, and the part of a line that has arrived."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self._partial = b""

    def receive(self) -> list[Call] | None:
        """The calls that arrived; None at the end of the connection.

        Raises:
            OSError: the connection failed.
            ValueError: something else than a call arrived.
        """
        arrived = self.socket.recv(_READ)
        if not arrived:
            return None
        *lines, self._partial = (self._partial + arrived).split(b"\n")
        calls = []
        for line in lines:
            message = decode(line)
            if not isinstance(message, Call):
                raise ValueError(f"{message} is no call")
            calls.append(message)
        return calls

    def reply(self, reply: Reply) -> None:
        """Send a reply. A connection that has ended is noticed by the next `receive`."""
        with contextlib.suppress(OSError):
            self.socket.sendall(encoded(reply))


def _failed(number: int, error: Exception) -> CallFailed:
    if not isinstance(error, MigrationError):
        log.exception("copying KV blocks failed")
        return CallFailed(number, f"copying KV blocks failed: {error!r}")
    return CallFailed(number, str(error), isinstance(error, BlocksGone))
