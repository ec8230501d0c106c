"""Copies of cached prefixes between replicas: why they are ordered, and when they pay.

A prompt of n tokens, of which its replica has m, is computed there in F(n - m, m) seconds. If another replica, the
donor, has the first h > m tokens, the replica can copy what it lacks before it computes the rest: this takes X(h - m) +
F(n - h, h), where X is the line of the link between the two, and L(d) more if the donor has the last d of them only in
DRAM: it loads these first. A copy has to save a share of the time, `SAVES`: all terms are predictions, and a copy
occupies a link that migrations need, and two replicas.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

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
    RETURN = "return"
    """A request that the other replica has prefilled has ended here, and is likely to be continued."""
    EVACUATE = "evacuate"
    """The replica that has it is about to stop."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A copy of the first `tokens` tokens of a prompt from `donor`, before its request runs.

    It is predicted to take `copy_s` seconds. The request waits for it no longer than `within_s`: until its turn in the
    queue of prefills, and for as long as the computation would take that the copy saves.
    """

    donor: ReplicaId
    tokens: Tokens
    copy_s: float
    within_s: float


@dataclass(frozen=True, slots=True)
class CopyReport:
    """An ended copy of `tokens` tokens that its target lacked. One that is not `done` failed after `took_s` seconds."""

    donor: ReplicaId
    target: ReplicaId
    tokens: Tokens
    took_s: float
    done: bool


class Donor(NamedTuple):
    """A replica with the first `tokens` tokens of a prompt, of which it has the last `dram` only in its DRAM."""

    replica: ReplicaId
    tokens: Tokens
    dram: Tokens = Tokens(0)


def longest(held: Mapping[ReplicaId, HeldPrefix], block_tokens: int) -> tuple[Donor, ...]:
    """The replicas that have reported the longest prefixes, the longest first; of equals, that with the most in HBM.

    Blocks that a replica has only promised may still wait there for their computation.
    """
    with_blocks = [item for item in held.items() if item[1].reported]
    ordered = sorted(with_blocks, key=lambda item: (-item[1].reported, -item[1].hbm, item[0]))[:_DONORS]
    return tuple(
        Donor(
            replica,
            Tokens(prefix.reported * block_tokens),
            Tokens(max(0, prefix.reported - prefix.hbm) * block_tokens),
        )
        for replica, prefix in ordered
    )


def best_fetch(
    replica: ReplicaId,
    here: Tokens,
    wait_s: float,
    computed_s: float,
    donors: Iterable[Donor],
    link: TokenLink,
    load: Line,
    limit_s: float,
    rest_s: Callable[[Tokens], float],
) -> Fetch | None:
    """The copy with which a prompt's first token comes soonest on `replica`; None if none saves enough.

    The replica has `here` tokens of the prompt. Its prefill begins after `wait_s` seconds and takes `computed_s`
    without a copy; `rest_s` is its time with that many tokens. `load` is the time to load tokens from DRAM. No copy
    occupies a link for more than `limit_s` seconds.
    """
    found: Fetch | None = None
    best_s, left_s, known = (1 - SAVES) * computed_s, 0.0, None
    for donor, tokens, dram in donors:
        if donor == replica or tokens <= here or (line := link(donor, replica)) is None:
            continue
        if tokens != known:  # Donors often have the same blocks, and this is an inner loop of placements.
            left_s, known = rest_s(tokens), tokens
        link_s = line.seconds(tokens - here)
        copy_s = link_s + (load.seconds(dram) if dram else 0.0)
        if link_s <= limit_s and copy_s + left_s <= best_s:
            best_s = copy_s + left_s
            found = Fetch(donor, tokens, copy_s, wait_s + computed_s - left_s)
    return found
