"""Service classes: the order in which requests are served when replicas are full.

Requests wait in the order of their turns. A request's turn is the time of its arrival, less `overtake_s` seconds for
each step of its class's rank. So of two waiting requests that fit equally, the later one comes first only if its rank
is higher and it has arrived at most

    overtake_s * (higher rank - lower rank)

seconds after the other one: higher ranks wait for lower ones in no other case, and no request waits for ever. Engines
that schedule by priority keep the same order: their priority is the turn.

A rank alone decides where the order is not one of waiting: of the requests of a full replica, the lowest rank is moved
first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.cost.service import ServiceLevel

DEFAULT_CLASS = "default"
"""The class of requests that name none. It always exists; its level is the pool's."""

OVERTAKE_S = 30.0
"""The default of `ServiceClasses.overtake_s`: a few times the wait for an answer to end."""


@dataclass(frozen=True, slots=True)
class Precedence:
    """The facts that decide about a request's turn: its class, and the time of its arrival in seconds of any clock that
    all requests have in common.
    """

    service_class: str = DEFAULT_CLASS
    arrived_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A class of requests: a higher `rank` is served first. `level` is the class's own (None: no level)."""

    rank: int = 0
    level: ServiceLevel | None = None


@dataclass(frozen=True, slots=True)
class ServiceClasses:
    """All classes by name. Without any, requests have no turns: they wait in the order of their arrival."""

    by_name: Mapping[str, ServiceClass] = field(default_factory=dict)
    overtake_s: float = OVERTAKE_S

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all classes: that of the default class, then the others in the order of the settings."""
        return tuple(dict.fromkeys((DEFAULT_CLASS, *self.by_name)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The distinct ranks of all classes, the lowest first."""
        return tuple(sorted({self.rank(name) for name in self.names}))

    @property
    def levels(self) -> Mapping[str, ServiceLevel]:
        """The levels of the classes that have one of their own."""
        return {name: each.level for name, each in self.by_name.items() if each.level is not None}

    def rank(self, name: str) -> int:
        """The rank of a class. A class that no longer exists has that of the default class."""
        found = self.by_name.get(name) or self.by_name.get(DEFAULT_CLASS)
        return found.rank if found is not None else 0

    def turn(self, precedence: Precedence) -> float:
        """The request's turn, in seconds of its arrival's clock: the lowest comes first. 0 for all without classes."""
        if not self.by_name:
            return 0.0
        return precedence.arrived_s - self.overtake_s * self.rank(precedence.service_class)

    def priority(self, precedence: Precedence) -> int | None:
        """The turn as an engine's priority, the lowest of which comes first; None without classes."""
        return round(1e3 * self.turn(precedence)) if self.by_name else None


NO_CLASSES = ServiceClasses()
DEFAULT_PRECEDENCE = Precedence()
