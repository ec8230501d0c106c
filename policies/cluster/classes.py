"""The size classes of the paper (section VI-C): fractions of a replica's KV capacity C.

    LARGE  (C/2, C]     MEDIUM  (C/3, C/2]     SMALL  (C/4, C/3]     TINY  (C/8, C/4]     GRAIN  (0, C/8]

GRAIN is our name for the paper's requests of at most C/8, which it groups into multi-items as large as a TINY request.
"""

from bisect import bisect_left
from enum import IntEnum

from policies.model import Tokens


class Kind(IntEnum):
    """A size class; a larger value is a larger class."""

    GRAIN = 0
    TINY = 1
    SMALL = 2
    MEDIUM = 3
    LARGE = 4


_KINDS = tuple(Kind)


class Classes:
    """The class boundaries for one capacity. A size on a boundary belongs to the smaller class."""

    __slots__ = ("ceilings",)

    def __init__(self, capacity: Tokens) -> None:
        # Sizes are whole tokens, so n <= capacity / k exactly when n <= capacity // k.
        self.ceilings: tuple[float, ...] = (capacity // 8, capacity // 4, capacity // 3, capacity // 2, float("inf"))

    def kind(self, tokens: Tokens) -> Kind:
        """The class of a request of `tokens` tokens."""
        return _KINDS[bisect_left(self.ceilings, tokens)]

    def ceiling(self, kind: Kind) -> float:
        """The largest size in a class, in tokens."""
        return self.ceilings[kind]
