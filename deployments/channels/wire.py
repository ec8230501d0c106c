"""The bytes of a channel: what travels between the end that connects, the caller, and the end that listens.

Calls through Ray cost milliseconds of processor time at both ends where they are rare, and the tokens of every engine
step would be items of a stream.

1. The caller gets a `ChannelOffer` by a call through Ray: the address of the listener, and a ticket that admits one
   connection.
2. The caller connects, and sends the ticket.
3. Both send frames: a length, and as many bytes of MessagePack. Those of the caller are calls: a number, the name of a
   method, and its arguments. Those of the listener are answers, and batches of events if the caller is an ingress. The
   first batch is empty, and so are heartbeats. Length 0 is the end of the events; from the caller, it is an
   acknowledgment of all batches so far, at most one in `ACKNOWLEDGE_S`.

If Ray's calls are encrypted (`RAY_USE_TLS`), so is the connection, by the same certificates.
"""

import asyncio
import inspect
import os
import ssl
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, get_type_hints

import msgspec

from migration.protocol import errors
from migration.protocol.errors import MigrationError, Refused
from migration.protocol.request import StreamEvent
from policies.causes import Cause

TICKET_BYTES = 16
LENGTH_BYTES = 4
END = bytes(LENGTH_BYTES)
"""The last frame of the events."""
ACKNOWLEDGED = bytes(LENGTH_BYTES)
"""The caller's frame that acknowledges events."""
ACKNOWLEDGE_S = 1.0
"""The least time between two acknowledgments, in seconds."""

_KINDS: Mapping[str, type[MigrationError]] = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MigrationError)
}


@dataclass(frozen=True, slots=True)
class ChannelOffer:
    """The address of a listener, and the ticket for one connection."""

    host: str
    port: int
    ticket: bytes


class Failure(msgspec.Struct, array_like=True):
    """A `MigrationError` on its way: its class, text and cause. Other errors are defects, and travel as that class."""

    kind: str
    text: str
    cause: Cause

    @classmethod
    def of(cls, error: Exception) -> Self:
        """An exception as it travels."""
        if isinstance(error, MigrationError):
            return cls(type(error).__name__, str(error), error.cause)
        return cls(MigrationError.__name__, "internal error", Cause.UNEXPECTED)

    def error(self) -> MigrationError:
        """The exception."""
        return _KINDS.get(self.kind, MigrationError)(self.text, self.cause)

    def refusal(self) -> Refused:
        """The exception, if it is a refusal; the refusal that stands for another one."""
        error = self.error()
        return error if isinstance(error, Refused) else Refused(self.text, self.cause)


class CallAnswer(msgspec.Struct, array_like=True, tag=True):
    """The result of the call `number`, or its failure. It has a frame of its own."""

    number: int
    result: msgspec.Raw
    failure: Failure | None = None


Batch = tuple[StreamEvent, ...]
"""The events that a replica publishes to one ingress between two reads."""

Frame = tuple[StreamEvent | CallAnswer, ...]
"""A frame of the listener: a batch, or one answer."""


@dataclass(frozen=True, slots=True)
class Method:
    """A remote method: how its arguments and its result are read."""

    arguments: "msgspec.msgpack.Decoder[tuple[Any, ...]]"
    result: "msgspec.msgpack.Decoder[Any]"


Methods = Mapping[str, Method]


def methods_of(protocol: type) -> Methods:
    """The coroutine methods of a protocol, by their names. Their annotations are the types of arguments and results."""
    made = {}
    for name, function in inspect.getmembers(protocol, inspect.iscoroutinefunction):
        hints = get_type_hints(function)
        result = hints.pop("return")
        made[name] = Method(_decoder(tuple.__class_getitem__(tuple(hints.values()))), _decoder(result))
    return made


def _decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(kind)


def _encodable(value: object) -> object:
    """Any sequence or mapping, such as an array of numbers, as a list or dict."""
    match value:
        case array():
            return value.tolist()
        case Mapping():
            return dict(value)
        case Sequence():
            return list(value)
    raise NotImplementedError(f"{type(value).__name__} cannot travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encodable)
_frames = msgspec.msgpack.Decoder(Frame)
_calls = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_NOTHING = msgspec.Raw(_encoder.encode(None))


def _framed(content: object) -> bytes:
    body = _encoder.encode(content)
    return len(body).to_bytes(LENGTH_BYTES) + body


def encode_batch(batch: Sequence[StreamEvent]) -> bytes:
    """The frame with a batch of events."""
    return _framed(batch)


def encode_call(number: int, method: str, arguments: tuple[object, ...]) -> bytes:
    """The frame with a call."""
    return _framed((number, method, arguments))


def encode_answer(number: int, result: object) -> bytes:
    """The frame with the result of a call; `result` may be an exception."""
    if isinstance(result, Exception):
        return _framed((CallAnswer(number, _NOTHING, Failure.of(result)),))
    return _framed((CallAnswer(number, msgspec.Raw(_encoder.encode(result))),))


async def read_call(
    reader: asyncio.StreamReader, methods: Methods, acknowledged: Callable[[], None]
) -> tuple[int, str, tuple[Any, ...]]:
    """The next call: its number, method and arguments. `acknowledged` is called for acknowledgments before it.

    Raises EOFError at the end, and msgspec.DecodeError for anything but a call of one of the methods.
    """
    while not (size := int.from_bytes(await reader.readexactly(LENGTH_BYTES))):
        acknowledged()
    number, name, arguments = _calls.decode(await reader.readexactly(size))
    if name not in methods:
        raise msgspec.DecodeError(f"there is no method {name!r}")
    return number, name, methods[name].arguments.decode(arguments)


class FrameDecoder:
    """Splits a stream of bytes into a listener's frames. `ended` is true from the last frame on."""

    def __init__(self) -> None:
        self.ended = False
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now. Raises msgspec.DecodeError for anything else than frames."""
        self._partial += data
        frames: list[Frame] = []
        begin = 0
        while len(self._partial) >= begin + LENGTH_BYTES and not self.ended:
            body = begin + LENGTH_BYTES
            size = int.from_bytes(self._partial[begin:body])
            if len(self._partial) < body + size:
                break
            begin = body + size
            if size:
                frames.append(_frames.decode(self._partial[body:begin]))
            self.ended = not size
        del self._partial[:begin]
        return frames


def tls_context(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """The context for one end of a connection, with Ray's certificates; None if Ray's calls are not encrypted.

    Both ends have certificates. That of the listener need not name its address: the ticket shows that it is the right
    one.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return context
