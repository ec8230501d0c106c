"""The copier: a thread of an engine's worker that copies KV blocks for the replica while the engine's steps run.

It listens on a Unix socket of its own (an abstract name, which ends with the process) and serves the calls of `wire`:
it gathers blocks of running requests into staging slots, scatters staged blocks into blocks that wait for them, and
copies the tails of requests that are about to come into memory of the worker. `tables` defines the blocks that it may
touch, and why no step touches them meanwhile. On a GPU, copies run in a stream of their own.

Between engines of one node, it sends blocks to the other engine's copiers by itself (`sending`), so that no process but
the workers has a part in the copying. If the other engine's workers hold other heads, each takes its part of the staged
blocks; without such parts, copies are of whole blocks, in one pass.

Each worker has a copier, so a replica with several workers has several. An exception in this thread never reaches the
engine: a call that fails is answered with its error.
"""

import contextlib
import itertools
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping

import torch

from migration.kv.copier.sending import Part, Sending
from migration.kv.copier.tables import BlockLoads, BlockTables, Parts
from migration.kv.copier.wire import (
    Call,
    CallFailed,
    Computed,
    ComputedCall,
    DiscardTail,
    ExpectTail,
    Filled,
    FilledCall,
    ForgetLoad,
    GatherCall,
    Gathered,
    HaltRun,
    Held,
    HeldCall,
    HoldTailCall,
    Loaded,
    LoadedCall,
    Missing,
    MissingCall,
    Reply,
    ScatterCall,
    Scattered,
    SendCall,
    Sent,
    StopCall,
    TailHeld,
    decode,
)
from migration.kv.copier.wire import encode as encoded
from migration.kv.device import use
from migration.kv.layout import CacheLayout
from migration.kv.staging import HEADER, Segments
from migration.protocol.errors import BlocksGone, LoadOver, MigrationError, TransferFailed
from migration.protocol.layouts import ShardPart
from migration.protocol.messages import SlotRef

log = logging.getLogger(__name__)

_READ = 1 << 16
_REPLY_S = 5.0
"""The time that a reply may take. The replica reads all the time; one that does not is given up."""
_CREDENTIALS = struct.Struct("3i")
"""SO_PEERCRED: process, user and group of the other end."""


WaitingCall = ScatterCall | HeldCall | FilledCall | LoadedCall | ComputedCall
"""A call that is answered in a certain state of its load, or of its request."""


class Copier:
    """Serves the calls of one replica. `address` is the socket's name."""

    def __init__(
        self,
        layout: CacheLayout,
        tables: BlockTables,
        loads: BlockLoads,
        tails: MutableMapping[str, torch.Tensor],
        halts: deque[str],
    ) -> None:
        """The main thread takes held tails from `tails`, and the keys of requests to be halted from `halts`."""
        self.address = f"\0mell-copier-{os.getpid()}-{secrets.token_hex(8)}"
        self._layout = layout
        self._tables = tables
        self._loads = loads
        self._tails = tails
        self._halts = halts
        self._expected: set[str] = set()
        """Names of tails that may be held, once each."""
        self._partial_tails: dict[str, tuple[torch.Tensor, Parts]] = {}
        """Tails of which parts have arrived, by their names."""
        self._segments = Segments()
        self._waiting: list[tuple[_Connection, WaitingCall]] = []
        self._sendings: list[tuple[_Connection, Sending]] = []
        self._links: dict[str, _Link] = {}
        self._numbers = itertools.count()
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
        """Look at the calls that wait, since what they wait for has changed. Called by the main thread."""
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
                    self._serve(self._selector.select(0 if self._advance() else None))
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
            elif isinstance(key.data, _Link):
                self._take_answers(key.data)
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
            for other, sending in list(self._sendings):
                if other is connection:
                    self._end(sending)
            return
        for call in calls:
            self._take(connection, call)

    def _take(self, connection: "_Connection", call: Call) -> None:
        match call:
            case GatherCall():
                connection.reply(self._gather(call))
            case SendCall():
                self._sendings.append((connection, Sending(call, self._layout.block_bytes)))
            case StopCall(number):
                self._stop(connection, number)
            case ScatterCall() | HeldCall() | FilledCall() | LoadedCall() | ComputedCall():
                self._answer_when_due(connection, call)
            case MissingCall():
                connection.reply(Missing(call.number, self._loads.missing(call.load)))
            case ForgetLoad(load):
                self._forget(load)
            case ExpectTail(tail):
                self._expected.add(tail)
            case HoldTailCall():
                connection.reply(self._hold(call))
            case DiscardTail(tail):
                self._expected.discard(tail)
                self._partial_tails.pop(tail, None)
                self._tails.pop(tail, None)
            case HaltRun(key):
                self._halts.append(key)

    def _forget(self, load: str) -> None:
        self._loads.forget(load)
        self._fail(
            lambda _, call: not isinstance(call, ComputedCall) and call.load == load, "the load has ended", over=True
        )

    def _stop(self, connection: "_Connection", number: int) -> None:
        for other, sending in list(self._sendings):
            if other is connection and sending.call.number == number:
                self._end(sending, CallFailed(number, "the copying was stopped"))
        self._fail(lambda other, call: other is connection and call.number == number, "the copying was stopped")

    def _fail(self, chosen: "Callable[[_Connection, WaitingCall], bool]", text: str, over: bool = False) -> None:
        """Answer the chosen ones of the calls that wait."""
        waiting, self._waiting = self._waiting, []
        for connection, call in waiting:
            if chosen(connection, call):
                if isinstance(call, ComputedCall):
                    self._tables.unwatch(call.key)
                connection.reply(CallFailed(call.number, text, over=over))
            else:
                self._waiting.append((connection, call))

    # --- copies ---------------------------------------------------------------------------------------

    def _gather(self, call: GatherCall) -> Reply:
        try:
            ticket, size = self._stage(call.key, call.first, call.last, call.segment, call.offset, call.partial)
        except Exception as error:
            return _failed(call.number, error)
        return Gathered(call.number, ticket, size)

    def _stage(
        self, key: str, first: int, last: int, segment: str, offset: int, partial: bool = False
    ) -> tuple[int, int]:
        """Gather blocks into a slot; its ticket, and the bytes with the header. Raises MigrationError."""
        memory = self._segments.get(segment)
        size = (last - first) * self._layout.block_bytes
        payload = memory.view(offset + HEADER, size)
        memory.stamp(offset, 0)
        with self._tables.reading(key, first, last, partial) as (blocks, fence):
            if fence is not None:
                fence.wait()
            self._layout.gather(blocks, payload)
        ticket = secrets.randbits(63) | 1
        # The blocks of a copy are for later requests, none of which waits for them: there is time for a checksum.
        memory.stamp(offset, ticket, checked=size if self._tables.held(key) is not None else 0)
        return ticket, HEADER + size

    def _hold(self, call: HoldTailCall) -> Reply:
        slot = SlotRef(call.segment, call.offset, call.ticket)
        try:
            if call.tail not in self._expected:
                raise TransferFailed("the tail is not expected: the target has given the migration up")
            if call.part is not None:
                held = self._hold_part(call, slot, call.part)
            else:
                held = self._layout.take(self._segments.payload(slot, call.blocks * self._layout.block_bytes))
                self._segments.check(slot)
        except Exception as error:
            return _failed(call.number, error)
        if held is not None:
            self._expected.discard(call.tail)
            self._tails[call.tail] = held
        return TailHeld(call.number)

    def _hold_part(self, call: HoldTailCall, slot: SlotRef, part: ShardPart) -> torch.Tensor | None:
        """Take a part of a tail. Returns the tail, once all its parts are there. Raises MigrationError."""
        if call.tail not in self._partial_tails:
            self._partial_tails[call.tail] = self._layout.new_taken(call.blocks), Parts(self._loads.cells)
        taken, parts = self._partial_tails[call.tail]
        if not parts.lack(part):
            raise TransferFailed("this part of the tail has arrived before")
        payload = self._segments.payload(slot, call.blocks * self._layout.staged_bytes(part))
        self._layout.take_part(call.blocks, payload, part, taken)
        self._segments.check(slot)
        parts.add_part(part)
        if not parts.whole:
            return None
        del self._partial_tails[call.tail]
        return taken

    def _answer_when_due(self, connection: "_Connection", call: WaitingCall) -> None:
        """Answer a call that waits for a state of its load or request, or keep it."""
        reply: Reply | None
        match call:
            case ScatterCall():
                reply = self._scatter(call) if self._loads.decided(call.load) else None
            case HeldCall():
                held = self._tables.held(call.load)
                reply = Held(call.number, held) if held is not None else None
            case FilledCall():
                blocks = self._loads.filled(call.load)
                reply = Filled(call.number, blocks) if blocks is not None else None
            case LoadedCall():
                reply = Loaded(call.number) if self._loads.loaded(call.load) else None
            case ComputedCall(number, key, None):
                reply = Computed(number, self._tables.computed(key))
            case ComputedCall(number, key, int(beyond)):
                computed = self._tables.computed_beyond(key, beyond)
                reply = None if computed is None else Computed(number, computed)
        if reply is None:
            self._waiting.append((connection, call))
        else:
            connection.reply(reply)

    def _scatter(self, call: ScatterCall) -> Reply:
        slot, count, part = SlotRef(call.segment, call.offset, call.ticket), call.last - call.first, call.part
        layout = self._layout
        try:
            with self._loads.writing(call.load, call.first, call.last, part) as ((blocks, fence), skip):
                if blocks:
                    size = layout.block_bytes if part is None else layout.staged_bytes(part)
                    payload = self._segments.payload(slot, count * size)
                    if fence is not None:
                        fence.wait()
                    if part is None:
                        layout.scatter(blocks, count, skip, payload)
                    else:
                        layout.scatter_part(blocks, count, skip, payload, part)
                    self._segments.check(slot)
        except Exception as error:
            return _failed(call.number, error)
        return Scattered(call.number)

    # --- sending to another copier --------------------------------------------------------------------

    def _advance(self) -> bool:
        """Gather and send one part of each call under way; True if there is more to gather now."""
        for _, sending in list(self._sendings):
            if sending.ready:
                try:
                    self._send_part(sending)
                except Exception as error:
                    self._end(sending, _failed(sending.call.number, error))
        return any(sending.ready for _, sending in self._sendings)

    def _send_part(self, sending: Sending) -> None:
        call, part = sending.call, sending.take()
        links = [self._link(taker.address) for taker in call.takers]
        ticket, size = self._stage(call.key, part.first, part.last, call.segment, part.offset)
        sending.size += size
        for link, taker in zip(links, call.takers, strict=True):
            number = next(self._numbers)
            link.parts[number] = (sending, part)
            staged = call.segment, part.offset, ticket
            link.send(ScatterCall(number, call.load, part.first, part.last, *staged, taker.part))

    def _link(self, address: str) -> "_Link":
        """The connection to the copier at `address`. Raises TransferFailed if it cannot be reached."""
        if address not in self._links:
            link = _Link(address)
            self._selector.register(link.socket, selectors.EVENT_READ, link)
            self._links[address] = link
        return self._links[address]

    def _take_answers(self, link: "_Link") -> None:
        """Take another copier's answers; a connection that ends, or sends anything else, fails what it was used for."""
        try:
            replies = link.receive()
        except (OSError, ValueError) as error:
            log.warning("a connection between copiers of KV blocks failed: %s", error)
            replies = None
        for reply in replies or ():
            sending, part = link.parts.pop(reply.number)
            if isinstance(reply, CallFailed) and not reply.over:
                self._end(sending, CallFailed(sending.call.number, reply.text))
            else:
                # A load that is over may have ended well: the target's replica knows.
                sending.answered(part)
                if sending.done:
                    self._end(sending, Sent(sending.call.number, sending.size))
        if replies is None:
            self._selector.unregister(link.socket)
            link.socket.close()
            del self._links[link.address]
            for sending, _ in link.parts.values():
                self._end(sending, CallFailed(sending.call.number, "the connection to the target's worker has ended"))

    def _end(self, sending: Sending, reply: Reply | None = None) -> None:
        """Answer a call, if it is under way, and use its slot no more."""
        for connection, other in self._sendings:
            if other is sending:
                self._sendings.remove((connection, other))
                self._give_up(sending)
                if reply is not None:
                    connection.reply(reply)
                return

    def _give_up(self, sending: Sending) -> None:
        """Stop the calls that have not been answered; a copier that reads the slot just now finds its tickets void."""
        with contextlib.suppress(TransferFailed):
            memory = self._segments.get(sending.call.segment)
            for offset in sending.offsets:
                memory.stamp(offset, 0)
            for link in [self._links[taker.address] for taker in sending.call.takers if taker.address in self._links]:
                for number, (other, _) in link.parts.items():
                    if other is sending:
                        link.send(StopCall(number))


class _MessageSocket:
    """A connected socket, and the part of a message that has arrived."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._partial = b""

    def _arrived(self) -> list[Call | Reply] | None:
        """The messages that arrived; None at the end of the connection.

        Raises:
            OSError: the connection failed.
            ValueError: something else than a message arrived.
        """
        arrived = self.socket.recv(_READ)
        if not arrived:
            return None
        *lines, self._partial = (self._partial + arrived).split(b"\n")
        return [decode(line) for line in lines]


class _Connection(_MessageSocket):
    """The connection of a replica, or of another copier."""

    def receive(self) -> list[Call] | None:
        """The calls that arrived; None at the end of the connection.

        Raises:
            OSError: the connection failed.
            ValueError: something else than a call arrived.
        """
        if (messages := self._arrived()) is None:
            return None
        calls: list[Call] = []
        for message in messages:
            if not isinstance(message, Call):
                raise ValueError(f"{message} is no call")
            calls.append(message)
        return calls

    def reply(self, reply: Reply) -> None:
        """Send a reply. A connection that has ended is noticed by the next `receive`."""
        with contextlib.suppress(OSError):
            self.socket.sendall(encoded(reply))


class _Link(_MessageSocket):
    """The connection to another copier, with the parts that it has to answer for, by the numbers of their calls."""

    def __init__(self, address: str) -> None:
        super().__init__(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self.address = address
        self.parts: dict[int, tuple[Sending, Part]] = {}
        self.socket.settimeout(_REPLY_S)
        try:
            self.socket.connect(address)
        except OSError as error:
            self.socket.close()
            raise TransferFailed(f"the target's worker cannot be reached: {error}") from error

    def send(self, call: ScatterCall | StopCall) -> None:
        """Send a call. Raises TransferFailed if the connection has ended."""
        try:
            self.socket.sendall(encoded(call))
        except OSError as error:
            raise TransferFailed(f"the connection to the target's worker has ended: {error}") from error

    def receive(self) -> list[Scattered | CallFailed] | None:
        """The replies that arrived; None at the end of the connection. Raises as `_Connection.receive`."""
        if (messages := self._arrived()) is None:
            return None
        replies: list[Scattered | CallFailed] = []
        for message in messages:
            if not isinstance(message, Scattered | CallFailed) or message.number not in self.parts:
                raise ValueError(f"{message} answers no call")
            replies.append(message)
        return replies


def _failed(number: int, error: Exception) -> CallFailed:
    if not isinstance(error, MigrationError):
        log.exception("copying KV blocks failed")
        return CallFailed(number, f"copying KV blocks failed: {error!r}")
    return CallFailed(number, str(error), isinstance(error, BlocksGone), isinstance(error, LoadOver))
