"""The mirror of an engine's prefix cache: the names of its blocks in each tier, free of time and input.

Batches of events are numbered without gaps. After a gap the mirror is not exact any more, until the next `PoolContents`
replace it; the changes reported meanwhile are those of the events that have arrived. `PoolContents` that differ from an
exact mirror show a defect. They replace it as well, and the difference is reported like any other change.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import islice, takewhile
from typing import assert_never

from migration.kv.cache_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    HostRemoved,
    HostStored,
    PoolContents,
    decode_names,
)
from policies.prefix.change import CacheChange, NetChanges, Tier, filled
from policies.prefix.tree import HeldPrefix


class Resync(StrEnum):
    """The reason why a mirror was replaced by the contents of the pool."""

    START = "start"
    """It had not been exact before."""
    EVENTS_LOST = "events_lost"
    AUDIT = "audit"
    """It was exact by its events, and differed."""


class TierMirror:
    """The names of the blocks in one tier, each with the number of blocks that have it."""

    def __init__(self) -> None:
        self.blocks = 0
        """The number of blocks with a name."""
        self._counts: dict[int, int] = {}
        self._changed = NetChanges()

    def __contains__(self, name: int) -> bool:
        return name in self._counts

    @property
    def counts(self) -> dict[int, int]:
        """A copy: the number of blocks by name."""
        return dict(self._counts)

    @property
    def has_changed(self) -> bool:
        """True if names have come or left since the last `take`."""
        return bool(self._changed)

    def store(self, names: Sequence[int]) -> None:
        """Add a block for each name."""
        counts = self._counts
        for name in names:
            if name in counts:
                counts[name] += 1
            else:
                counts[name] = 1
                self._changed.toggle(name)
        self.blocks += len(names)

    def remove(self, names: Sequence[int]) -> None:
        """Remove a block for each name, if there is one."""
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

    def replace(self, counts: dict[int, int]) -> None:
        """Have these blocks, and no others."""
        for name in self._counts.keys() ^ counts.keys():
            self._changed.toggle(name)
        self._counts = counts
        self.blocks = sum(counts.values())

    def names(self) -> tuple[int, ...]:
        """All names."""
        return tuple(self._counts)

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The names that have come since the last call, and those that have left."""
        return self._changed.take(self._counts.__contains__)


class Mirror:
    """The names of the blocks in one engine's prefix cache, by tier."""

    def __init__(self, off: str | None = None) -> None:
        """`off` is the reason why there is no mirror: it stays empty, and reports nothing."""
        self.off = off
        self.exact = False
        """True if the mirror equals the cache as of the end of batch `version`."""
        self.version = -1
        """The number of the newest batch; -1 before the first one."""
        self.checks = 0
        """The number of arrivals of the cache's contents."""
        self.resyncs: Counter[Resync] = Counter()
        """The number of times that they have replaced the mirror."""
        self.tiers = {tier: TierMirror() for tier in Tier}
        self.hbm, self.dram = self.tiers[Tier.HBM], self.tiers[Tier.DRAM]

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
                    self.hbm.store(block_hashes)
                case BlocksRemoved(block_hashes):
                    self.hbm.remove(block_hashes)
                case CacheCleared():
                    self.hbm.replace({})
                case HostStored(names):
                    self.dram.store(decode_names(names))
                case HostRemoved(names):
                    self.dram.remove(decode_names(names))
                case PoolContents(names, host):
                    self._check(decode_names(names), decode_names(host))
                case _:
                    assert_never(event)

    def _check(self, pool: Sequence[int], host: Sequence[int]) -> None:
        contents = {self.hbm: dict(Counter(pool)), self.dram: dict(Counter(host))}
        self.checks += 1
        if not self.exact or any(counts != tier.counts for tier, counts in contents.items()):
            self.resyncs[self._reason()] += 1
            for tier, counts in contents.items():
                tier.replace(counts)
        self.exact = True

    def _reason(self) -> Resync:
        if self.exact:
            return Resync.AUDIT
        return Resync.EVENTS_LOST if self.resyncs else Resync.START

    def give_up(self, reason: str) -> None:
        """Turn the mirror off: its events cannot be read."""
        for tier in self.tiers.values():
            tier.replace({})
        self.off, self.exact = reason, False

    # --- contents -------------------------------------------------------------------------------------

    def held(self, names: Sequence[int]) -> HeldPrefix:
        """The number of a prefix's blocks in the accelerator's memory, and of those behind them in the host's."""
        hbm = sum(1 for _ in takewhile(self.hbm.__contains__, names))
        return HeldPrefix(hbm, sum(1 for _ in takewhile(self.dram.__contains__, islice(names, hbm, None))))

    def held_by_host(self, names: Sequence[int]) -> int:
        """The number of a prefix's first blocks that the tier of host memory has."""
        return sum(1 for _ in takewhile(self.dram.__contains__, names))

    def change(self, whole: bool) -> CacheChange | None:
        """Implements `policies.decision.reports.CacheSource`."""
        changed = any(tier.has_changed for tier in self.tiers.values())
        if not changed and (self.off is not None or not whole):
            return None
        stored, removed = {}, {}
        for tier, mirror in self.tiers.items():
            stored[tier], removed[tier] = mirror.take()
        if whole:
            stored, removed = {tier: mirror.names() for tier, mirror in self.tiers.items()}, {}
        return CacheChange(filled(stored), filled(removed), whole)
