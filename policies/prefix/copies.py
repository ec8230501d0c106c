"""Copies of cached prefixes between replicas: why they are ordered, and when they pay.

**Before a request runs** (`best_fetch`). A prompt of n tokens, of which its replica has m, is computed there in
F(n - m, m) seconds (`cost.first_token`). If another replica, the donor, has the first h > m tokens, the replica can
copy what it lacks before it computes the rest: this takes X(h - m) + F(n - h, h), where X is the line of the link
between the two. A copy has to save a share of the time, `SAVES`: both terms are predictions, and a copy occupies a link
that migrations need, and two replicas.

**Before a replica stops** (`evacuate`). Its prefixes are copied to the replicas that stay, those first with which most
prompts begin. A prefix that u prompts are expected to begin with is worth a copy if u F(missing) > X(missing): the time
of a replica that the copy takes is less than the time of prefills that it saves. A prefix goes only to a replica that
has room for it beside its requests and those prefixes of its own that are as hot: it displaces colder ones. All copies
together end within `EVACUATION_S`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from policies.cost.lines import Line
from policies.model import ReplicaId, Tokens
from policies.prefix.heat import HotPrefix
from policies.prefix.tree import NO_PREFIX, HeldPrefix

SAVES = 0.2
"""The least share of the time to a first token, its wait left out, that a copy has to save."""
EVACUATION_S = 5.0
"""The longest time that a replica stays for the copies of its prefixes, in seconds."""
MOST_PREFIXES = 256
"""The number of a stopping replica's prefixes that are considered."""
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


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """A copy of the blocks of these names, from the first block of a prompt on, which no request waits for.

    The target lacks `tokens` tokens of it, which take `copy_s` seconds by prediction.
    """

    donor: ReplicaId
    target: ReplicaId
    names: tuple[int, ...]
    tokens: Tokens
    copy_s: float
    reason: CopyReason


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """A replica that may get copies, over a link with this line of seconds over tokens.

    Of its `capacity`, `free` tokens belong to no request, and prefixes of at least a rate need `needed(rate)`.
    """

    replica: ReplicaId
    capacity: Tokens
    free: Tokens
    line: Line
    needed: Callable[[float], Tokens]

    def room(self, rate: float) -> int:
        """Tokens of prefixes of that rate that may come."""
        return min(self.free, self.capacity - self.needed(rate))


def evacuate(
    donor: ReplicaId,
    prefixes: Iterable[tuple[HotPrefix, Mapping[ReplicaId, HeldPrefix]]],
    targets: Sequence[CopyTarget],
    block_tokens: int,
    prefill_s: Callable[[Tokens, Tokens], float],
    reuse: float,
    window_s: float,
    within_s: float = EVACUATION_S,
) -> tuple[PrefixCopy, ...]:
    """The copies of a stopping replica's prefixes, in the order in which to make them, one after the other.

    `prefixes` come with the replicas that have them, the hottest first, a prefix before those that begin with it. A
    prefix is expected to be used by its rate over `window_s` seconds, of which the share `reuse` will be used again.
    `prefill_s` is F(p, c), the time to compute p tokens behind c cached ones.
    """
    if not targets:
        return ()
    links = {target.replica: target for target in targets}
    copies: list[PrefixCopy] = []
    coming: dict[ReplicaId, set[int]] = {target: set() for target in links}
    busy_s = dict.fromkeys(links, 0.0)
    taken = dict.fromkeys(links, 0)
    left_s = within_s
    for prefix, held in prefixes:
        count = held.get(donor, NO_PREFIX).hbm
        names = tuple(prefix.names[:count])
        has = {target: _leading(names, held.get(target, NO_PREFIX).blocks, coming[target]) for target in links}
        known = max(has.values())
        if count <= max(known, prefix.before):
            continue
        saved_s = prefill_s(Tokens((count - known) * block_tokens), Tokens(known * block_tokens))
        sizes = {target: Tokens((count - blocks) * block_tokens) for target, blocks in has.items()}
        costs = {target: links[target].line.seconds(size) for target, size in sizes.items()}
        fitting = [target for target in links if taken[target] + sizes[target] <= links[target].room(prefix.rate)]
        target = min(fitting, key=lambda target: (costs[target] + busy_s[target], target), default=None)
        if target is None or costs[target] > left_s:
            continue
        if prefix.rate * window_s * reuse * saved_s <= costs[target]:
            continue
        left_s -= costs[target]
        busy_s[target] += costs[target]
        taken[target] += sizes[target]
        coming[target].update(names[has[target] :])
        copy = PrefixCopy(donor, target, names, sizes[target], costs[target], CopyReason.EVACUATE)
        _add(copies, copy)
    return tuple(copies)


def _leading(names: Sequence[int], held: int, coming: Set[int]) -> int:
    """The number of first blocks that a replica has, or will have: `held` of them, and those behind that come."""
    while held < len(names) and names[held] in coming:
        held += 1
    return held


def _add(copies: list[PrefixCopy], copy: PrefixCopy) -> None:
    """Add a copy, in the place of the one to the same target whose blocks it begins with, if there is one."""
    for place, shorter in enumerate(copies):
        count = len(shorter.names)
        if shorter.target == copy.target and count < len(copy.names) and copy.names[count - 1] == shorter.names[-1]:
            tokens, copy_s = Tokens(copy.tokens + shorter.tokens), copy.copy_s + shorter.copy_s
            copies[place] = replace(copy, tokens=tokens, copy_s=copy_s)
            return
    copies.append(copy)
