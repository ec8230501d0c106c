"""What goes wrong, and when: drawn from a seed before anything runs."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done, to a process of Mell's, by a client, or by an operator."""

    KILL = "kill"
    """SIGKILL to a replica."""
    STALL = "stall"
    """SIGSTOP to a replica, and SIGCONT before anybody gives it up."""
    HANG = "hang"
    """SIGSTOP to a replica until it has been given up, then SIGKILL."""
    SCHEDULER = "scheduler"
    """SIGKILL to the Scheduler."""
    CONTROLLER = "controller"
    """SIGKILL to Serve's controller."""
    LEAVE = "leave"
    """A client closes its connection in the middle of its answer."""
    DRAIN = "drain"
    """POST /mell/replicas/{id}/drain."""
    MOVE = "move"
    """POST /mell/migrations, to a target and by a path of the policy's or of chance's choosing."""


ON_REPLICAS = frozenset({Kind.KILL, Kind.STALL, Kind.HANG, Kind.DRAIN})
ON_STREAMS = frozenset({Kind.LEAVE, Kind.MOVE})
LOSES = frozenset({Kind.KILL, Kind.HANG})
"""After these the state of what a replica sampled is lost."""

PATHS = ("auto", "kv", "tokens")
STALL_S = (2.0, 5.0)
"""Below the 10 s after which replicas are given up, by ingresses and by Serve."""
HANG_S = (11.0, 14.0)

_DECK = (*Kind, Kind.LEAVE, Kind.MOVE, Kind.MOVE, Kind.MOVE)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault, `at_s` seconds after the start; a replica stands still for `lasts_s` seconds.

    `pick`, from 0 up to 1, chooses the victim among those that there are by then.
    """

    at_s: float
    kind: Kind
    pick: float
    lasts_s: float = 0.0
    path: str = "auto"


def draw_strikes(seed: object, span_s: float, every_s: float) -> tuple[Strike, ...]:
    """Faults for `span_s` seconds, one every `every_s` seconds on average.

    They come from shuffled decks that hold every kind, so that no kind is missing from a run of a dozen.
    """
    chance = random.Random(f"strikes/{seed}")
    return tuple(_draw(chance, span_s, every_s))


def _draw(chance: random.Random, span_s: float, every_s: float) -> Iterator[Strike]:
    deck: list[Kind] = []
    at_s = 0.0
    while (at_s := at_s + every_s * chance.uniform(0.5, 1.5)) < span_s:
        deck = deck or chance.sample(_DECK, len(_DECK))
        kind = deck.pop()
        lasts_s = chance.uniform(*(HANG_S if kind is Kind.HANG else STALL_S))
        stands = kind in (Kind.STALL, Kind.HANG)
        yield Strike(at_s, kind, chance.random(), lasts_s if stands else 0.0, chance.choice(PATHS))
