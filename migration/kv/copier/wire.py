"""The messages to the copier of an engine's worker: one line of JSON each, over a socket.

They come from the worker's replica, `ScatterCall` also from copiers of other engines on the node, and `HoldTailCall`
also from replicas of other engines. Each call with a number but `StopCall` is answered once, in any order, under its
number: with the reply of its name, or with `CallFailed`.
"""

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple, get_args

from migration.protocol.layouts import ShardPart


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
class ComputedCall:
    """Count the tokens of the running request `key` whose KV is in its blocks.

    Answer at once, or, with `beyond`, as soon as there are more than that many.
    """

    number: int
    key: str
    beyond: int | None = None


class Taker(NamedTuple):
    """The worker at `address` of another engine, which takes the `part` of a shard; None: all of it."""

    address: str
    part: ShardPart | None = None


@dataclass(frozen=True, slots=True)
class SendCall:
    """Copy full blocks [first, last) of the running request `key` into the load `load` of the workers `takers`.

    They pass through the slots at `offsets` of `segment`, each of which holds `blocks` blocks.
    """

    number: int
    key: str
    first: int
    last: int
    segment: str
    offsets: list[int]
    blocks: int
    takers: list[Taker]
    load: str


@dataclass(frozen=True, slots=True)
class StopCall:
    """Give up the `SendCall`, or the waiting call, with this number: it fails, and uses its slot no more."""

    number: int


@dataclass(frozen=True, slots=True)
class ScatterCall:
    """Copy blocks [first, last) of the load `load` from a slot with this ticket into the cache.

    With a `part`, they are staged as the shard of another worker, of which only that is copied.
    """

    number: int
    load: str
    first: int
    last: int
    segment: str
    offset: int
    ticket: int
    part: ShardPart | None = None


@dataclass(frozen=True, slots=True)
class HeldCall:
    """Answer once vLLM holds the prefix `load` for the replica."""

    number: int
    load: str


@dataclass(frozen=True, slots=True)
class FilledCall:
    """Answer once this worker has all blocks of `load`."""

    number: int
    load: str


@dataclass(frozen=True, slots=True)
class MissingCall:
    """Count the blocks of `load` that this worker lacks."""

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
class ExpectTail:
    """Let `tail` be held, until `DiscardTail`."""

    tail: str


@dataclass(frozen=True, slots=True)
class HoldTailCall:
    """Copy `blocks` staged blocks from a slot with this ticket into memory of the worker, if it expects `tail`.

    With a `part`, as in `ScatterCall`; the worker holds the tail once it has all parts.
    """

    number: int
    tail: str
    blocks: int
    segment: str
    offset: int
    ticket: int
    part: ShardPart | None = None


@dataclass(frozen=True, slots=True)
class DiscardTail:
    """Free `tail`, if it is held, and expect it no more."""

    tail: str


@dataclass(frozen=True, slots=True)
class HaltRun:
    """Have vLLM's scheduler end the running request `key` with one of its next tokens."""

    key: str


@dataclass(frozen=True, slots=True)
class Gathered:
    """The slot holds the blocks under `ticket`; `size` is the transfer in bytes, header included."""

    number: int
    ticket: int
    size: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The number of tokens whose KV is in a request's blocks; None: it holds no blocks."""

    number: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Sent:
    """The other worker has the blocks; `size` is the transfer in bytes, headers included."""

    number: int
    size: int


@dataclass(frozen=True, slots=True)
class Scattered:
    """The cache holds the blocks."""

    number: int


@dataclass(frozen=True, slots=True)
class Held:
    """The number of blocks of the held prefix; they can be gathered under the prefix's name."""

    number: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Filled:
    """This worker has all blocks of the load; `blocks` of them were not in the cache before."""

    number: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Missing:
    """The number of blocks that have not arrived; None if vLLM has not admitted the load, or it is over."""

    number: int
    blocks: int | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The load's blocks are in the prefix cache."""

    number: int


@dataclass(frozen=True, slots=True)
class TailHeld:
    """The worker holds the tail, or the part of it."""

    number: int


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call without effect, for the reason `text`. `gone`: the request holds no blocks. `over`: the load has ended."""

    number: int
    text: str
    gone: bool = False
    over: bool = False


Call = (
    GatherCall
    | ComputedCall
    | SendCall
    | StopCall
    | ScatterCall
    | HeldCall
    | FilledCall
    | MissingCall
    | LoadedCall
    | ForgetLoad
    | ExpectTail
    | HoldTailCall
    | DiscardTail
    | HaltRun
)
Reply = Gathered | Computed | Sent | Scattered | Held | Filled | Missing | Loaded | TailHeld | CallFailed

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
        if members.get("part") is not None:
            members["part"] = ShardPart(*members["part"])
        if "takers" in members:
            members["takers"] = [_taker(*taker) for taker in members["takers"]]
        message: Call | Reply = _KINDS[members.pop("kind")](**members)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no message of a copier: {line[:80]!r}") from error
    return message


def _taker(address: str, part: list[int] | None) -> Taker:
    return Taker(address, None if part is None else ShardPart(*part))
