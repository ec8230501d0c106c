"""What a request leaves behind."""

from dataclasses import dataclass

from policies.cluster.classes import Kind
from policies.cluster.replica import Replica


@dataclass(frozen=True, slots=True)
class Hole:
    """A request of class `kind` has left the replica, which had that category with it; both are TINY or above.

    A replica that a LARGE request has just activated has a hole of the class LARGE: what could be beside it.
    """

    replica: Replica
    kind: Kind
    category: Kind
