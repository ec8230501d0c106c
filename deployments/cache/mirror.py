"""The mirror of an engine's prefix cache: the names of its blocks, free of time and input.

Batches of events are numbered without gaps. After a gap the mirror is not exact any more, until the next `PoolContents`
replace it; the changes reported meanwhile are those of the events that have arrived. `PoolContents` that differ from an
exact mirror show a defect. They replace it as well, and the difference is reported like any other change.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import assert_never

from migration.kv.cache_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    PoolContents,
    decode_names,
)
from policies.prefix.change import CacheChange, NetChanges, Tier


class Resync(StrEnum):
    """The reason why a mirror was replaced by the contents of the pool."""

    START = "start"
    """It had not been exact before."""
    EVENTS_LOST = "events_lost"
    AUDIT = "audit"
    """It was exact by its events, and differed."""


class Mirror:
    """The names of the blocks in one engine's prefix cache, each with the number of blocks that have it."""

    def __init__(self, off: str | None = None) -> None:
        """`off` is the reason why there is no mirror: it stays empty, and reports nothing."""
        self.off = off
        self.exact = False
        """True if the mirror equals the cache as of the end of batch `version`."""
        self.version = -1
        """The number of the newest batch; -1 before the first one."""
        self.checks = 0
        """The number of arrivals of the pool's contents."""
        self.resyncs: Counter[Resync] = Counter()
        """The number of times that they have replaced the mirror."""
        self.blocks = 0
        """The number of blocks with a name."""
        self._counts: dict[int, int] = {}
        self._changed = NetChanges()

    # --- events ---------------------------------------------------------------------------------------

    def take(self, number: int, events: Iterable[CacheEvent]) -> None:
        """Apply the batch of that number. An old one, which came again, is ignored."""
        if self.off is not None or number <= self.version:
            return
        if number > self.version + 1:
            self.exact = False
        self.version = number
        for event in events:
            match event:
                case BlocksStored(block_hashes):
                    self._store(block_hashes)
                case BlocksRemoved(block_hashes):
                    self._remove(block_hashes)
                case CacheCleared():
                    self._replace({})
                case PoolContents(names):
                    self._check(decode_names(names))
                case _:
                    assert_never(event)

    def _store(self, names: Sequence[int]) -> None:
        counts = self._counts
        for name in names:
            if name in counts:
                counts[name] += 1
            else:
                counts[name] = 1
                self._changed.toggle(name)
        self.blocks += len(names)

    def _remove(self, names: Sequence[int]) -> None:
        counts = self._counts
        for name in names:
            left = counts.get(name, 0) - 1
            if left > 0:
                counts[name] = left
            elif not left:
                del counts[name]
                self._changed.toggle(name)
            else:
                continue  # A block whose event was lost.
            self.blocks -= 1

    def _check(self, names: Sequence[int]) -> None:
        contents = dict(Counter(names))
        self.checks += 1
        if not self.exact or contents != self._counts:
            self.resyncs[self._reason()] += 1
            self._replace(contents)
        self.exact = True

    def _reason(self) -> Resync:
        if self.exact:
            return Resync.AUDIT
        return Resync.EVENTS_LOST if self.resyncs else Resync.START

    def _replace(self, counts: dict[int, int]) -> None:
        for name in self._counts.keys() ^ counts.keys():
            self._changed.toggle(name)
        self._counts = counts
        self.blocks = sum(counts.values())

    def give_up(self, reason: str) -> None:
        """Turn the mirror off: its events cannot be read."""
        self._replace({})
        self.off, self.exact = reason, False

    # --- contents -------------------------------------------------------------------------------------

    @property
    def counts(self) -> dict[int, int]:
        """A copy: the number of blocks by name."""
        return dict(self._counts)

    def leading(self, names: Iterable[int]) -> int:
        """The number of names up to the first one that is missing."""
        return sum(1 for _ in takewhile(self._counts.__contains__, names))

    def change(self, whole: bool) -> CacheChange | None:
        """Implements `policies.decision.reports.CacheSource`."""
        if not self._changed and (self.off is not None or not whole):
            return None
        stored, removed = self._changed.take(self._counts.__contains__)
        if whole:
            return CacheChange({Tier.HBM: tuple(self._counts)}, {}, True)
        return CacheChange(_in_hbm(stored), _in_hbm(removed), False)


def _in_hbm(names: tuple[int, ...]) -> dict[Tier, tuple[int, ...]]:
    return {Tier.HBM: names} if names else {}
