"""The prompt tree: the replicas, by tier, that have each KV block of the pool, and those that will soon compute it.

A name stands for a block and for all blocks before it, so a map from names to sets of replicas is a tree of prompts
without its edges. A set is the bits of an integer: every replica has a bit while the tree has a mirror of its cache.

    mirrors     as reported: `apply` adds a replica's change, `forget` removes the replica
    promises    of placements: `promise` notes the blocks that a replica will compute for a prompt

A promise lasts until the replica reports the block as removed, until its last prompt has moved away (`withdraw`), or
else for half of its time to all of it: promises are in two generations, of which the older one is dropped when half of
the time has passed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from policies.model import ReplicaId
from policies.prefix.change import CacheChange, Tier

K = TypeVar("K")
V = TypeVar("V")


class HeldPrefix(NamedTuple):
    """The number of a prompt's first blocks in a replica's HBM, and that of the blocks after them in its DRAM.

    The last `promised` blocks of both begin with one that the replica has not reported, but will compute.
    """

    hbm: int
    dram: int = 0
    promised: int = 0

    @property
    def blocks(self) -> int:
        """All blocks that need no computation."""
        return self.hbm + self.dram

    @property
    def reported(self) -> int:
        """The first blocks that the replica has reported."""
        return self.blocks - self.promised


NO_PREFIX = HeldPrefix(0)


class Generations(Generic[K, V]):
    """Values that are forgotten when they are between half of `kept_s` and `kept_s` seconds old."""

    __slots__ = ("_began", "_half_s", "new", "old")

    def __init__(self, kept_s: float) -> None:
        self._half_s = kept_s / 2
        self._began: float | None = None
        self.new: dict[K, V] = {}
        """The values of the newer generation. A writer puts values here."""
        self.old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """The newest value; None if there is none, or no more."""
        return self.new[key] if key in self.new else self.old.get(key)

    def expire(self, now: float) -> None:
        """Forget the older generation, and begin a newer one, if the newer one began half of the time ago."""
        if self._began is None:
            self._began = now
        elif now - self._began >= self._half_s:
            self._began = now
            self.new, self.old = {}, self.new


@dataclass(slots=True, eq=False)
class _Mirror:
    """The blocks of one replica, by tier, and the replica's bit."""

    replica: ReplicaId
    bit: int
    blocks: dict[Tier, set[int]] = field(default_factory=lambda: {tier: set() for tier in Tier})


class PromptTree:
    """The tree of one pool. A promise lasts for `promise_s` seconds of the caller's clock."""

    def __init__(self, promise_s: float) -> None:
        self._mirrors: dict[ReplicaId, _Mirror] = {}
        self._by_bit: dict[int, _Mirror] = {}
        self._holders: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        self._promises: Generations[int, int] = Generations(promise_s)

    # --- changes --------------------------------------------------------------------------------------

    def apply(self, replica: ReplicaId, change: CacheChange) -> None:
        """Add a replica's change to its mirror. The first change of a replica begins its mirror."""
        mirror = self._mirrors.get(replica) or self._begin(replica)
        for tier, blocks in mirror.blocks.items():
            stored = change.stored.get(tier, ())
            if change.whole:
                self._remove(mirror, tier, blocks.difference(stored))
            else:
                self._remove(mirror, tier, change.removed.get(tier, ()))
            holders, bit = self._holders[tier], mirror.bit
            for name in stored:
                holders[name] = holders.get(name, 0) | bit
            blocks.update(stored)

    def promise(self, replica: ReplicaId, names: Iterable[int]) -> None:
        """Note that a replica will compute these blocks. A replica without a mirror keeps none for other prompts."""
        mirror = self._mirrors.get(replica)
        if mirror is not None:
            new, bit = self._promises.new, mirror.bit
            for name in names:
                new[name] = new.get(name, 0) | bit

    def promised(self, replica: ReplicaId, names: Iterable[int]) -> list[int]:
        """Those of the blocks that a replica does not have in HBM, and will compute."""
        mirror = self._mirrors.get(replica)
        if mirror is None:
            return []
        new, old, bit, there = self._promises.new, self._promises.old, mirror.bit, mirror.blocks[Tier.HBM]
        return [name for name in names if name not in there and (new.get(name, 0) | old.get(name, 0)) & bit]

    def withdraw(self, replica: ReplicaId, names: Sequence[int]) -> None:
        """Note that a replica will not compute these blocks."""
        mirror = self._mirrors.get(replica)
        if mirror is not None:
            for promised in (self._promises.new, self._promises.old):
                _clear(promised, mirror.bit, names)

    def expire(self, now: float) -> None:
        """Forget promises that are too old at `now`."""
        self._promises.expire(now)

    def forget(self, replica: ReplicaId) -> None:
        """Remove a replica's mirror and promises."""
        mirror = self._mirrors.pop(replica, None)
        if mirror is None:
            return
        for tier, blocks in mirror.blocks.items():
            self._remove(mirror, tier, blocks.copy())
        for promised in (self._promises.new, self._promises.old):
            _clear(promised, mirror.bit, tuple(promised))
        del self._by_bit[mirror.bit]

    # --- queries --------------------------------------------------------------------------------------

    @property
    def replicas(self) -> Iterable[ReplicaId]:
        """The replicas with a mirror."""
        return self._mirrors.keys()

    def match(self, names: Sequence[int]) -> dict[ReplicaId, HeldPrefix]:
        """The first blocks of a prompt that replicas have, or will have computed: those with at least one."""
        hbm, dram = self._holders[Tier.HBM], self._holders[Tier.DRAM]
        new, old = self._promises.new, self._promises.old
        lengths: dict[int, int] = {}
        reported: dict[int, int] = {}
        found: dict[ReplicaId, HeldPrefix] = {}
        in_hbm = in_reports = in_either = -1
        for count, name in enumerate(names):
            there = hbm.get(name, 0)
            holders = there | new.get(name, 0) | old.get(name, 0)
            there = there | dram.get(name, 0) if dram else there
            either = holders | there
            if left := in_hbm & ~holders:
                lengths.update((bit, count) for bit in _bits(left & either))
                in_hbm &= holders
            if left := in_reports & ~there:
                reported.update((bit, count) for bit in _bits(left & either))
                in_reports &= there
            if left := in_either & ~either:
                if count:
                    self._end(found, left, lengths, reported, count)
                in_either &= either
            if not in_either:
                return found
        if in_either > 0:
            self._end(found, in_either, lengths, reported, len(names))
        return found

    def blocks(self, replica: ReplicaId, tier: Tier) -> int:
        """The number of blocks in a tier of a replica."""
        mirror = self._mirrors.get(replica)
        return 0 if mirror is None else len(mirror.blocks[tier])

    def copies(self) -> tuple[int, int]:
        """The number of different blocks in the mirrors, and that of all their copies; tiers of a replica are two."""
        hbm, dram = self._holders[Tier.HBM], self._holders[Tier.DRAM]
        distinct = len(hbm) + sum(name not in hbm for name in dram)
        return distinct, sum(len(blocks) for mirror in self._mirrors.values() for blocks in mirror.blocks.values())

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the tree is the union of the mirrors."""
        for tier, holders in self._holders.items():
            union: dict[int, int] = {}
            for mirror in self._mirrors.values():
                for name in mirror.blocks[tier]:
                    union[name] = union.get(name, 0) | mirror.bit
            assert holders == union, f"the {tier} blocks are not those of the mirrors"
        known = sum(self._by_bit)
        for promised in (self._promises.new, self._promises.old):
            assert all(0 < bits == bits & known for bits in promised.values()), "a promise of no replica"

    # --- inside ---------------------------------------------------------------------------------------

    def _begin(self, replica: ReplicaId) -> _Mirror:
        """A new mirror, with the lowest free bit: few replicas have short integers."""
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        mirror = self._mirrors[replica] = self._by_bit[bit] = _Mirror(replica, bit)
        return mirror

    def _remove(self, mirror: _Mirror, tier: Tier, names: Collection[int]) -> None:
        """Remove blocks of a tier; those that are not in it, too. A block that leaves HBM is promised no more."""
        _clear(self._holders[tier], mirror.bit, names)
        mirror.blocks[tier].difference_update(names)
        if tier is Tier.HBM:
            _clear(self._promises.new, mirror.bit, names)
            _clear(self._promises.old, mirror.bit, names)

    def _end(
        self,
        found: dict[ReplicaId, HeldPrefix],
        bits: int,
        lengths: Mapping[int, int],
        reported: Mapping[int, int],
        count: int,
    ) -> None:
        """Add the prefixes of these replicas, which end after `count` blocks.

        `lengths` are those of their HBM, `reported` those without promises, of the replicas where they are shorter.
        """
        for bit in _bits(bits):
            hbm = lengths.get(bit, count)
            found[self._by_bit[bit].replica] = HeldPrefix(hbm, count - hbm, count - reported.get(bit, count))


def _bits(bits: int) -> Iterator[int]:
    """The single bits of a positive integer, the lowest first."""
    while bits:
        bit = bits & -bits
        yield bit
        bits ^= bit


def _clear(sets: dict[int, int], bit: int, names: Iterable[int]) -> None:
    """Remove a replica from the sets of these names; empty sets are removed."""
    if not sets:
        return
    for name in names:
        bits = sets.get(name, 0)
        if bits & bit:
            if bits == bit:
                del sets[name]
            else:
                sets[name] = bits ^ bit
