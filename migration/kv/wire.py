"""The messages between a replica and the copier of one of its engine's workers: one line of JSON each, over a socket.

Each call but `ForgetLoad` and `DiscardTail` is answered once, in any order, under its number: with `Gathered`,
`Scattered`, `Filled`, `Loaded` or `TailHeld`, or with `CallFailed`.
"""

import json
from dataclasses import asdict, dataclass
from typing import get_args


@dataclass(frozen=True, slots=True)
class GatherCall:
    """Copy blocks [first, last) of the running request `key` into the slot at `offset` of `segment`.

    All of them are full; if `partial`, all but the last, which has the KV of the request's known tokens but the newest.
    """

    number: int
    key: str
    first: int
    last: int
    segment: str
    offset: int
    partial: bool = False


@dataclass(frozen=True, slots=True)
class ScatterCall:
    """Copy blocks [first, last) of the load `load` from a slot with this ticket into the cache."""

    number: int
    load: str
    first: int
    last: int
    segment: str
    offset: int
    ticket: int


@dataclass(frozen=True, slots=True)
class FilledCall:
    """Answer once this worker has all blocks of `load`."""

    number: int
    load: str


@dataclass(frozen=True, slots=True)
class LoadedCall:
    """Answer once the blocks of `load` are in the prefix cache."""

    number: int
    load: str


@dataclass(frozen=True, slots=True)
class ForgetLoad:
    """The replica is done with `load`. Calls that still wait for it fail."""

    load: str


@dataclass(frozen=True, slots=True)
class HoldTailCall:
    """Copy `blocks` staged blocks from a slot with this ticket into memory of the worker, under the name `tail`."""

    number: int
    tail: str
    blocks: int
    segment: str
    offset: int
    ticket: int


@dataclass(frozen=True, slots=True)
class DiscardTail:
    """Free `tail`, if it is held."""

    tail: str


@dataclass(frozen=True, slots=True)
class Gathered:
    """The slot holds the blocks under `ticket`; `size` is the transfer in bytes, header included."""

    number: int
    ticket: int
    size: int


@dataclass(frozen=True, slots=True)
class Scattered:
    """The cache holds the blocks; `blocks` of them were not in it before."""

    number: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Filled:
    """This worker has all blocks of the load."""

    number: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The load's blocks are in the prefix cache."""

    number: int


@dataclass(frozen=True, slots=True)
class TailHeld:
    """The worker holds the tail."""

    number: int


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The call had no effect; `gone` if the request holds no blocks."""

    number: int
    text: str
    gone: bool = False


Call = GatherCall | ScatterCall | FilledCall | LoadedCall | ForgetLoad | HoldTailCall | DiscardTail
Reply = Gathered | Scattered | Filled | Loaded | TailHeld | CallFailed

_KINDS = {kind.__name__: kind for kind in get_args(Call | Reply)}


def encode(message: Call | Reply) -> bytes:
    """The message as a line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Call | Reply:
    """The inverse of `encode`.

    Raises:
        ValueError: the line is no message.
    """
    try:
        members = json.loads(line)
        message: Call | Reply = _KINDS[members.pop("kind")](**members)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no message of a copier: {line[:80]!r}") from error
    return message
