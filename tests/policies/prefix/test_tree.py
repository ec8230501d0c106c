"""The prompt tree: the union of the replicas' mirrors, and the promises of placements."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.model import ReplicaId
from policies.prefix.change import CacheChange, Tier
from policies.prefix.tree import Generations, HeldPrefix, PromptTree
from tests.counts import scaled

A, B, C = (ReplicaId(name) for name in "abc")
HBM, DRAM = Tier
NAMES = range(1, 9)


def stored(hbm: Sequence[int] = (), dram: Sequence[int] = (), whole: bool = False) -> CacheChange:
    return CacheChange({HBM: tuple(hbm), DRAM: tuple(dram)}, {}, whole)


def removed(hbm: Sequence[int] = (), dram: Sequence[int] = ()) -> CacheChange:
    return CacheChange({}, {HBM: tuple(hbm), DRAM: tuple(dram)}, False)


def tree(**mirrors: CacheChange) -> PromptTree:
    made = PromptTree(promise_s=10.0)
    for name, change in mirrors.items():
        made.apply(ReplicaId(name), change)
    return made


def test_a_prefix_ends_at_the_first_missing_block() -> None:
    made = tree(a=stored([1, 2, 4]), b=stored([2, 3]), c=stored([1, 2, 3, 4]))
    assert made.match([1, 2, 3, 4, 5]) == {A: HeldPrefix(2), C: HeldPrefix(4)}
    assert made.match([1, 2, 3]) == {A: HeldPrefix(2), C: HeldPrefix(3)}
    assert made.match([7]) == made.match([]) == {}


def test_blocks_of_the_host_continue_a_prefix() -> None:
    made = tree(a=stored([1], [2, 3]), b=stored([3], [1, 2]), c=stored([1, 2], [1, 2]))
    assert made.match([1, 2, 3, 4]) == {A: HeldPrefix(1, 2), B: HeldPrefix(0, 3), C: HeldPrefix(2)}
    assert HeldPrefix(1, 2).blocks == 3


def test_a_promise_is_as_good_as_a_block() -> None:
    made = tree(a=stored([1]), b=stored())
    made.promise(A, [2, 3])
    made.promise(B, [1])
    made.promise(C, [1])  # C has no mirror
    assert made.match([1, 2, 3]) == {A: HeldPrefix(3, promised=2), B: HeldPrefix(1, promised=1)}


def test_only_reported_blocks_before_the_first_promise_are_known_to_be_there() -> None:
    made = tree(a=stored([1, 3]), b=stored([1, 2, 4], [3]), c=stored([2]))
    made.promise(A, [2])
    made.promise(B, [4])
    made.promise(C, [1])
    found = made.match([1, 2, 3, 4])
    assert found == {A: HeldPrefix(3, promised=2), B: HeldPrefix(2, 2), C: HeldPrefix(2, promised=2)}
    assert [found[each].reported for each in (A, B, C)] == [1, 4, 0]


def test_a_promise_ends_when_its_block_has_been_there_and_is_removed() -> None:
    made = tree(a=stored(), b=stored())
    made.promise(A, [1])
    made.promise(B, [1])
    made.apply(A, stored([1]))
    made.apply(A, removed([1]))
    assert made.match([1]) == {B: HeldPrefix(1, promised=1)}


def test_a_promise_is_taken_back() -> None:
    made = tree(a=stored([1]), b=stored())
    made.promise(A, [1, 2])
    made.promise(B, [1, 2, 3])
    assert made.promised(A, [1, 2, 3]) == [2], "it has the first one"
    assert made.promised(B, [1, 2, 3]) == [1, 2, 3] and made.promised(C, [1]) == []
    made.withdraw(B, [2, 3])
    made.withdraw(C, [1])
    made.check_integrity()
    assert made.match([1, 2, 3]) == {A: HeldPrefix(2, promised=1), B: HeldPrefix(1, promised=1)}


@given(st.integers(1, 100), st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_promises_last_for_half_of_their_time_at_least_and_not_for_ever(kept_s: int, steps: list[int]) -> None:
    made, now = PromptTree(kept_s), 0.0
    made.apply(A, stored())
    made.expire(now)
    made.promise(A, [1])
    for step in steps:
        now += step
        made.expire(now)
        if now < kept_s / 2:
            assert made.match([1]) == {A: HeldPrefix(1, promised=1)}
    # Two more calls, as late as the generation is old, end it.
    for _ in range(2):
        now += kept_s / 2
        made.expire(now)
    assert made.match([1]) == {}


def test_the_newest_value_counts() -> None:
    recent: Generations[str, int] = Generations(2.0)
    recent.expire(0.0)
    recent.new["key"] = 1
    recent.expire(1.0)
    assert recent.get("key") == 1
    recent.new["key"] = 2
    assert recent.get("key") == 2
    recent.expire(2.0)
    recent.expire(3.0)
    assert recent.get("key") is None


def test_a_removed_replica_has_no_blocks_and_its_bit_is_used_again() -> None:
    made = tree(a=stored([1, 2]), b=stored([1], [2]))
    made.promise(A, [3])
    made.forget(A)
    made.forget(A)
    assert made.match([1, 2, 3]) == {B: HeldPrefix(1, 1)}
    made.apply(C, stored([1]))
    made.check_integrity()
    assert made.match([1, 2, 3]) == {B: HeldPrefix(1, 1), C: HeldPrefix(1)}
    assert made.copies() == (2, 3)


Caches = dict[ReplicaId, dict[Tier, set[int]]]

names = st.sets(st.sampled_from(NAMES), max_size=6)
changes = st.tuples(st.sampled_from([A, B, C]), names, names, names, names, st.booleans())


@settings(max_examples=scaled(600))
@given(
    st.lists(st.one_of(changes, st.sampled_from([A, B, C])), max_size=25),
    st.permutations(NAMES),
    st.dictionaries(st.sampled_from([A, B, C]), names),
)
def test_the_tree_is_the_union_of_the_mirrors(
    history: list[Any], prompt: list[int], promises: dict[ReplicaId, set[int]]
) -> None:
    made, caches = PromptTree(10.0), Caches()
    for event in history:
        if isinstance(event, str):
            made.forget(ReplicaId(event))
            caches.pop(ReplicaId(event), None)
            continue
        replica, hbm, dram, hbm_gone, dram_gone, whole = event
        gone = {HBM: hbm_gone - hbm, DRAM: dram_gone - dram}
        change = CacheChange({HBM: tuple(hbm), DRAM: tuple(dram)}, {t: tuple(n) for t, n in gone.items()}, whole)
        made.apply(replica, change)
        cache = caches.setdefault(replica, {HBM: set(), DRAM: set()})
        for tier, new in (HBM, hbm), (DRAM, dram):
            cache[tier] = set(new) if whole else (cache[tier] - gone[tier]) | new
    for promising, promised in promises.items():
        made.promise(promising, promised)
    made.check_integrity()
    assert made.match(prompt) == {
        r: prefix for r, cache in caches.items() if (prefix := held(cache, promises.get(r, set()), prompt)).blocks
    }
    assert {(r, t): made.blocks(r, t) for r in caches for t in Tier} == {
        (r, t): len(cache[t]) for r, cache in caches.items() for t in Tier
    }
    assert made.copies() == (
        len({name for cache in caches.values() for tier in cache.values() for name in tier}),
        sum(len(tier) for cache in caches.values() for tier in cache.values()),
    )


def held(cache: Mapping[Tier, set[int]], promised: set[int], prompt: Sequence[int]) -> HeldPrefix:
    """The prefix in a cache, block by block."""

    def first_without(names: set[int]) -> int:
        return next((i for i, name in enumerate(prompt) if name not in names), len(prompt))

    hbm, both = cache[HBM] | promised, cache[HBM] | cache[DRAM]
    blocks = first_without(both | promised)
    return HeldPrefix(first_without(hbm), blocks - first_without(hbm), blocks - first_without(both))


@pytest.mark.parametrize("broken", ["holder", "promise"])
def test_a_broken_tree_is_found(broken: str) -> None:
    made = tree(a=stored([1]))
    made.promise(A, [2])
    made.check_integrity()
    if broken == "holder":
        made._holders[HBM][5] = 1
    else:
        made._promises.new[2] = 1 << 7
    with pytest.raises(AssertionError):
        made.check_integrity()
