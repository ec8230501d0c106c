"""Faults and their times, drawn from a seed before the run."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """The kinds of faults: of a process of Mell's, by a client, or by an operator."""

    KILL = "kill"
    """SIGKILL to a replica."""
    STALL = "stall"
    """SIGSTOP to a replica, and SIGCONT before the others count it as dead."""
    HANG = "hang"
    """SIGSTOP to a replica until the others count it as dead, then SIGKILL."""
    SCHEDULER = "scheduler"
    """SIGKILL to the Scheduler."""
    CONTROLLER = "controller"
    """SIGKILL to Serve's controller."""
    LEAVE = "leave"
    """A client closes its connection in the middle of its answer."""
    DRAIN = "drain"
    """POST /mell/replicas/{id}/drain."""
    MOVE = "move"
    """POST /mell/migrations without a target, by a random path."""


ON_REPLICAS = frozenset({FaultKind.KILL, FaultKind.STALL, FaultKind.HANG, FaultKind.DRAIN})
ON_STREAMS = frozenset({FaultKind.LEAVE, FaultKind.MOVE})
LOSING = frozenset({FaultKind.KILL, FaultKind.HANG})
"""Faults after which a replica's sampling state is lost."""

PATHS = ("auto", "kv", "tokens")
STALL_S = (2.0, 5.0)
"""Below the 10 s after which ingresses and Serve count a replica as dead."""
HANG_S = (11.0, 14.0)

_DECK = (*FaultKind, FaultKind.LEAVE, FaultKind.MOVE, FaultKind.MOVE, FaultKind.MOVE)


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault, `at_s` seconds after the start of the run; a stopped replica stays so for `lasts_s` seconds.

    `pick`, in [0, 1), selects the victim among the candidates at that time.
    """

    at_s: float
    kind: FaultKind
    pick: float
    lasts_s: float = 0.0
    path: str = "auto"


def draw_faults(seed: object, span_s: float, every_s: float) -> tuple[PlannedFault, ...]:
    """Faults for `span_s` seconds, one every `every_s` seconds on average.

    Kinds are dealt from shuffled decks that contain every kind, so a run of a dozen faults has all of them.
    """
    chance = random.Random(f"faults/{seed}")
    return tuple(_draw(chance, span_s, every_s))


def _draw(chance: random.Random, span_s: float, every_s: float) -> Iterator[PlannedFault]:
    deck: list[FaultKind] = []
    at_s = 0.0
    while (at_s := at_s + every_s * chance.uniform(0.5, 1.5)) < span_s:
        deck = deck or chance.sample(_DECK, len(_DECK))
        kind = deck.pop()
        lasts_s = chance.uniform(*(HANG_S if kind is FaultKind.HANG else STALL_S))
        stands = kind in (FaultKind.STALL, FaultKind.HANG)
        yield PlannedFault(at_s, kind, chance.random(), lasts_s if stands else 0.0, chance.choice(PATHS))
