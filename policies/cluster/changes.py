"""What an epoch has to react to: the differences between two observations that policies care about."""

from dataclasses import dataclass

from policies.cluster.classes import Kind
from policies.cluster.replica import Replica, Request
from policies.model import RequestId, Tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that wants a replica; `tokens` is what it holds now (its prompt, or prompt and output)."""

    id: RequestId
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Departure:
    """A request of that class ended on that replica, which is still there."""

    request: RequestId
    kind: Kind
    replica: Replica


@dataclass(frozen=True, slots=True)
class Crossing:
    """A request on a replica has grown into another class, or shrunk into one; `was` is the one it left."""

    request: Request
    was: Kind


@dataclass(frozen=True, slots=True)
class Changes:
    """What an epoch has to react to, in the order of the events. `waiting` holds earlier arrivals first."""

    departed: tuple[Departure, ...] = ()
    crossed: tuple[Crossing, ...] = ()
    waiting: tuple[Request, ...] = ()
