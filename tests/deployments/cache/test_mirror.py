"""The mirror of a cache, from events that arrive, are lost, come again, or show another content."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deployments.cache.mirror import Mirror, Resync
from migration.kv.cache_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    HostRemoved,
    HostStored,
    PoolContents,
    decode_names,
    encode_names,
)
from policies.decision.observation import Pool
from policies.decision.reports import Reporter, Roster
from policies.model import SOLE_POOL
from policies.prefix.change import CacheChange, Tier
from policies.prefix.tree import HeldPrefix
from tests.policies.decision.observed import observed

BIG = (1 << 64) - 1


class ScriptedPool:
    """A pool with a tier of host memory, whose changes are drawn. Each is an event; `batch` takes the last ones."""

    def __init__(self) -> None:
        self.names: Counter[int] = Counter()
        self.host: Counter[int] = Counter()
        self.published = 0
        self._events: list[CacheEvent] = []

    def change(self, name: int, kind: str) -> None:
        if kind == "store":
            self.names[name] += 1
            self._events.append(BlocksStored([name]))
        elif kind == "remove" and self.names[name]:
            self.names[name] -= 1
            self._events.append(BlocksRemoved([name]))
        elif kind == "clear":
            self.names.clear()
            self._events.append(CacheCleared())
        elif kind == "store in host":
            self.host[name] += 1
            self._events.append(HostStored(encode_names([name])))
        elif kind == "remove from host" and self.host[name]:
            self.host[name] -= 1
            self._events.append(HostRemoved(encode_names([name])))
        elif kind == "publish":
            self._events.append(PoolContents(*map(encode_names, (self.names.elements(), self.host.elements()))))

    @property
    def counts(self) -> dict[Tier, dict[int, int]]:
        return {Tier.HBM: dict(+self.names), Tier.DRAM: dict(+self.host)}

    def batch(self) -> tuple[int, list[CacheEvent]]:
        events, self._events = self._events, []
        self.published += 1
        return self.published - 1, events


kinds = st.sampled_from(
    [*["store"] * 3, *["remove"] * 2, *["store in host"] * 3, *["remove from host"] * 2, "clear", "publish"]
)
changes = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, BIG]), kinds), max_size=5)
arrivals = st.sampled_from(["arrives", "arrives", "arrives", "is lost", "comes twice"])


@given(st.lists(st.tuples(changes, arrivals), max_size=20))
def test_an_exact_mirror_equals_the_pool_whatever_is_lost(history: list[tuple[list[tuple[int, str]], str]]) -> None:
    pool, mirror = ScriptedPool(), Mirror()
    for steps, fate in history:
        for name, kind in steps:
            pool.change(name, kind)
        number, events = pool.batch()
        if fate == "is lost":
            continue
        mirror.take(number, events)
        if fate == "comes twice":
            mirror.take(number, events)
        assert not mirror.exact or counts(mirror) == pool.counts
        assert all(tier.blocks == sum(tier.counts.values()) for tier in mirror.tiers.values())
        assert Resync.AUDIT not in mirror.resyncs, "events alone explain every difference"
    pool.change(0, "publish")
    mirror.take(*pool.batch())
    assert mirror.exact and counts(mirror) == pool.counts, "the contents repair whatever was lost"


@given(
    st.lists(st.tuples(changes, arrivals, st.sampled_from(["report", "answer lost", "other scheduler"])), max_size=15)
)
def test_the_scheduler_adds_up_the_same_names(history: list[tuple[list[tuple[int, str]], str, str]]) -> None:
    pool, mirror, roster = ScriptedPool(), Mirror(), Roster()
    reporter, known = Reporter(), {tier: frozenset[int]() for tier in Tier}
    (load,) = observed("a: p10").loads
    for steps, fate, asked in history:
        for name, kind in steps:
            pool.change(name, kind)
        batch = pool.batch()
        if fate != "is lost":
            mirror.take(*batch)
        if asked == "answer lost":
            reporter.report(load, roster.version(load.id), cache=mirror.change)
        elif asked == "other scheduler":
            reporter.report(load, None, cache=mirror.change)
        roster.take(reporter.report(load, roster.version(load.id), cache=mirror.change))
        known = after(known, roster.observe(Pool(SOLE_POOL)).caches.get(load.id))
        assert known == {tier: set(names) for tier, names in counts(mirror).items()}


def counts(mirror: Mirror) -> dict[Tier, dict[int, int]]:
    return {tier: names.counts for tier, names in mirror.tiers.items()}


def after(known: dict[Tier, frozenset[int]], change: CacheChange | None) -> dict[Tier, frozenset[int]]:
    """The names that the scheduler knows after a change."""
    if change is None:
        return known
    kept = {} if change.whole else {tier: names - set(change.removed.get(tier, ())) for tier, names in known.items()}
    return {tier: kept.get(tier, frozenset()) | frozenset(change.stored.get(tier, ())) for tier in Tier}


def test_a_prefix_is_held_in_both_tiers() -> None:
    mirror = Mirror()
    host = [HostStored(encode_names([1, 3, 4])), HostStored(encode_names([6]))]
    mirror.take(0, [BlocksStored([1, 2, 5]), *host])
    assert mirror.held([1, 2, 3, 4, 5, 6]) == HeldPrefix(2, 2), "behind a block of the host, only those of the host"
    mirror.take(1, [CacheCleared()])
    assert mirror.held([1, 2]) == HeldPrefix(0, 1), "the host's memory is not the pool's"
    mirror.take(2, [HostRemoved(encode_names([1]))])
    assert mirror.held([1, 2]) == HeldPrefix(0, 0)


def test_two_blocks_of_one_name_are_removed_one_by_one() -> None:
    mirror = Mirror()
    mirror.take(0, [BlocksStored([7, 8]), BlocksStored([7])])
    assert (mirror.hbm.counts, mirror.hbm.blocks) == ({7: 2, 8: 1}, 3)
    mirror.take(1, [BlocksRemoved([7])])
    assert mirror.held([7, 8, 9]).hbm == 2
    mirror.take(2, [BlocksRemoved([7])])
    assert mirror.held([7, 8]).hbm == 0


def test_a_mirror_is_exact_from_the_first_contents_on_and_not_across_a_gap() -> None:
    mirror = Mirror()
    mirror.take(0, [BlocksStored([1])])
    exact = [mirror.exact]  # Events before the first one may have been lost.
    mirror.take(1, [PoolContents(encode_names([1]))])
    exact.append(mirror.exact)
    mirror.take(3, [BlocksStored([3])])
    exact.append(mirror.exact)
    mirror.take(4, [PoolContents(encode_names([1, 2, 3]))])
    assert exact == [False, True, False]
    assert mirror.exact and mirror.resyncs == {Resync.START: 1, Resync.EVENTS_LOST: 1}


def test_the_audit_finds_and_repairs_a_corrupted_mirror() -> None:
    mirror = Mirror()
    mirror.take(0, [PoolContents(encode_names([1, 2]))])
    mirror.change(True)
    mirror.take(1, [PoolContents(encode_names([1, 2]))])
    assert Resync.AUDIT not in mirror.resyncs
    mirror.hbm._counts = {1: 1, 9: 1}
    for name in (2, 9):
        mirror.hbm._changed.toggle(name)
    mirror.take(2, [PoolContents(encode_names([1, 2]))])
    assert mirror.resyncs[Resync.AUDIT] == 1 and mirror.hbm.counts == {1: 1, 2: 1}
    assert mirror.change(False) is None, "the scheduler had not got the wrong names"


def test_changes_are_net_and_whole_on_request() -> None:
    mirror = Mirror()
    assert mirror.change(False) is None
    mirror.take(0, [BlocksStored([1, 2])])
    assert mirror.change(False) == CacheChange({Tier.HBM: (1, 2)}, {}, False)
    mirror.take(1, [BlocksRemoved([1]), BlocksStored([1, 3]), BlocksRemoved([2, 3])])
    assert mirror.change(False) == CacheChange({}, {Tier.HBM: (2,)}, False)
    assert mirror.change(False) is None
    assert mirror.change(True) == CacheChange({Tier.HBM: (1,)}, {}, True)


def test_a_mirror_that_is_off_is_empty_and_reports_nothing() -> None:
    mirror = Mirror("the model has 2 KV cache groups")
    mirror.take(0, [BlocksStored([1])])
    assert (mirror.hbm.blocks, mirror.change(True), mirror.change(False)) == (0, None, None)


def test_a_mirror_that_is_given_up_takes_back_what_it_has_reported() -> None:
    mirror = Mirror()
    mirror.take(0, [BlocksStored([1])])
    mirror.change(True)
    mirror.give_up("the events cannot be read")
    assert mirror.change(False) == CacheChange({}, {Tier.HBM: (1,)}, False)
    assert mirror.change(False) is None


def test_names_of_all_sizes_travel() -> None:
    names = [0, 1, BIG, 1 << 63]
    assert list(decode_names(encode_names(names))) == names
