"""Copies of cached prefixes between replicas: why they are ordered, and when they pay.

A prompt of n tokens, of which its replica has m, is computed there in F(n - m, m) seconds (`cost.first_token`). If
another replica, the donor, has the first h > m tokens, the replica can copy what it lacks before it computes the rest:
this takes X(h - m) + F(n - h, h), where X is the line of the link between the two. A copy has to save a share of the
time, `SAVES`: both terms are predictions, and a copy occupies a link that migrations need, and two replicas.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from policies.cost.lines import Line
from policies.model import ReplicaId, Tokens
from policies.prefix.tree import HeldPrefix

SAVES = 0.2
"""The least share of the time to a first token, its wait left out, that a copy has to save."""
_DONORS = 3
"""The number of donors with the longest prefixes that are compared."""

TokenLink = Callable[[ReplicaId, ReplicaId], Line | None]
"""Seconds over the tokens of a copy from one replica to another; None if nothing can or should be copied now."""


class CopyReason(StrEnum):
    """Why a prefix is copied to another replica's cache."""

    MANUAL = "manual"
    """An operator has ordered it."""
    FETCH = "fetch"
    """A request that was placed on the other replica begins with it."""
    EVACUATE = "evacuate"
    """The replica that has it is about to stop."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A copy of the first `tokens` tokens of a prompt from `donor`, before its request runs.

    It is predicted to take `copy_s` seconds, and saves `saves_s` seconds of prefill: the request waits no longer than
    that for the copy.
    """

    donor: ReplicaId
    tokens: Tokens
    copy_s: float
    saves_s: float


@dataclass(frozen=True, slots=True)
class CopyReport:
    """An ended copy of `tokens` tokens that its target lacked. One that is not `done` failed after `took_s` seconds."""

    donor: ReplicaId
    target: ReplicaId
    tokens: Tokens
    took_s: float
    done: bool


def longest(held: Mapping[ReplicaId, HeldPrefix]) -> tuple[tuple[ReplicaId, int], ...]:
    """The replicas with the longest prefixes in HBM, and their numbers of blocks, the longest first."""
    donors = ((replica, prefix.hbm) for replica, prefix in held.items() if prefix.hbm)
    return tuple(sorted(donors, key=lambda donor: (-donor[1], donor[0]))[:_DONORS])


def best_fetch(
    replica: ReplicaId,
    here: Tokens,
    computed_s: float,
    donors: Iterable[tuple[ReplicaId, Tokens]],
    link: TokenLink,
    limit_s: float,
    rest_s: Callable[[Tokens], float],
) -> Fetch | None:
    """The copy with which a prompt's first token comes soonest on `replica`; None if none saves enough.

    The replica has `here` tokens of the prompt, and needs `computed_s` seconds without a copy; `rest_s` is its time
    with that many tokens. `donors` are pairs of a replica and the tokens of the prompt that it has. No copy takes more
    than `limit_s` seconds: this is the boundary of a link.
    """
    found: Fetch | None = None
    best_s = (1 - SAVES) * computed_s
    for donor, tokens in donors:
        if donor == replica or tokens <= here or (line := link(donor, replica)) is None:
            continue
        copy_s, left_s = line.seconds(tokens - here), rest_s(tokens)
        if copy_s <= limit_s and copy_s + left_s <= best_s:
            best_s = copy_s + left_s
            found = Fetch(donor, tokens, copy_s, computed_s - left_s)
    return found
