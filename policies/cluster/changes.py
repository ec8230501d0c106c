"""The input of an epoch: the differences between two observations that matter to policies."""

from dataclasses import dataclass
from typing import NamedTuple

from policies.cluster.classes import Kind
from policies.cluster.replica import Replica, Request
from policies.model import AdapterId, RequestId, Tokens
from policies.precedence import DEFAULT_PRECEDENCE, Precedence


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request without a replica. `tokens` is its current size: its prompt, or prompt and output.

    `names` are those of its full KV blocks (`policies.prefix.names`), none if they are not known. Requests of one
    `session` have prompts in common; empty: no session. `adapter` is its LoRA adapter; None: the model alone.
    """

    id: RequestId
    tokens: Tokens
    names: tuple[int, ...] = ()
    session: str = ""
    precedence: Precedence = DEFAULT_PRECEDENCE
    adapter: AdapterId | None = None


class Departure(NamedTuple):
    """The end of a request of class `kind` on `replica`, which still exists."""

    request: RequestId
    kind: Kind
    replica: Replica


class Crossing(NamedTuple):
    """The change of a request's size class by growth or shrinkage; `was` is the former class."""

    request: Request
    was: Kind


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes since the last epoch, in the order of the events; in `waiting` earlier turns come first."""

    departed: tuple[Departure, ...] = ()
    crossed: tuple[Crossing, ...] = ()
    waiting: tuple[Request, ...] = ()
