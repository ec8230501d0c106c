"""Changes of the KV blocks that a replica keeps.

A block's name is vLLM's chained hash of its tokens, of all tokens before them, of the salt and of the adapter: its low
64 bits, as an integer. Equal names stand for equal KV on every replica of a model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """A memory in which a replica keeps KV blocks: that of the accelerator, or that of the host."""

    HBM = "hbm"
    DRAM = "dram"


@dataclass(frozen=True, slots=True)
class CacheChange:
    """The names of blocks that a replica has stored and removed since its previous change, by tier.

    No name of a tier is in both. If the change is `whole`, the replica has the `stored` blocks and no others: earlier
    changes no longer count. A missing tier has no changes.
    """

    stored: Mapping[Tier, tuple[int, ...]]
    removed: Mapping[Tier, tuple[int, ...]]
    whole: bool

    def then(self, later: "CacheChange") -> "CacheChange":
        """This change and a `later` one as one change."""
        if later.whole:
            return later
        stored, removed = {}, {}
        for tier in Tier:
            added, gone = self.stored.get(tier, ()), self.removed.get(tier, ())
            added_later, gone_later = later.stored.get(tier, ()), later.removed.get(tier, ())
            # A block that was removed and stored again is no change, unless nothing is known from before.
            stored[tier] = (*_without(added, gone_later), *_without(added_later, gone))
            removed[tier] = (*_without(gone, added_later), *_without(gone_later, added))
        if self.whole:
            removed = {}
        return CacheChange(filled(stored), filled(removed), self.whole)


def _without(names: tuple[int, ...], others: Iterable[int]) -> tuple[int, ...]:
    excluded = frozenset(others)
    return tuple(name for name in names if name not in excluded) if excluded else names


def filled(names: Mapping[Tier, tuple[int, ...]]) -> dict[Tier, tuple[int, ...]]:
    """Names without the tiers that have none."""
    return {tier: found for tier, found in names.items() if found}


class NetChanges:
    """The names that have come to a cache or left it since the last `take`: one that did both is no change."""

    def __init__(self) -> None:
        self._names: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def toggle(self, name: int) -> None:
        """Note that a name has come, or left."""
        if name in self._names:
            del self._names[name]
        else:
            self._names[name] = None

    def take(self, has: Callable[[int], bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The names that have come, for which `has` is true, and those that have left, in the order of the events."""
        names, self._names = self._names, {}
        stored = tuple(filter(has, names))
        return stored, _without(tuple(names), stored)
