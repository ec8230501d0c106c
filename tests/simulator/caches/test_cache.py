"""The prefix cache of a simulated replica."""

from hypothesis import given
from hypothesis import strategies as st

from policies.model import ReplicaId, RequestId
from policies.prefix.change import CacheChange, Tier
from policies.prefix.tree import HeldPrefix, PromptTree
from simulator.caches.cache import SimulatedCache

P, Q, R = (RequestId(name) for name in "pqr")


def used(cache: SimulatedCache) -> set[int]:
    """The names of the blocks that requests use."""
    return {name for name, block in cache.blocks.named.items() if block.users}


def test_a_prompt_finds_the_blocks_of_an_earlier_one() -> None:
    cache = SimulatedCache(10)
    assert cache.claim(P, (1, 2, 3), 35) == 0
    cache.fill(P, 29)
    assert cache.claim(Q, (1, 2, 4), 35) == 20
    cache.fill(P, 35)
    cache.release(P)
    cache.release(P)
    assert cache.claim(R, (1, 2, 3), 30) == 20  # the last token is computed
    assert cache.claim(R, (1, 2, 3), 31) == 30


def test_blocks_in_use_are_shared_and_stay() -> None:
    cache = SimulatedCache(10)
    cache.claim(P, (1, 2), 21)
    cache.fill(P, 21)
    cache.claim(Q, (1, 2), 21)
    assert cache.shared_tokens == 20
    cache.trim(0)
    cache.release(P)
    cache.trim(0)
    assert (cache.shared_tokens, used(cache)) == (0, {1, 2})
    cache.release(Q)
    assert list(cache.blocks.idle) == [2, 1]
    cache.trim(10)
    assert list(cache.blocks.idle) == [1]
    cache.trim(9)
    assert not cache.blocks.idle


def test_the_least_recently_used_blocks_are_dropped_first() -> None:
    cache = SimulatedCache(10)
    for request, names in (P, (1, 2)), (Q, (3, 4)), (R, (1, 2)):
        cache.claim(request, names, 21)
        cache.fill(request, 21)
        cache.release(request)
    cache.trim(20)
    assert set(cache.blocks.idle) == {1, 2}


def test_changes_are_those_since_the_last_one_and_the_first_is_whole() -> None:
    cache = SimulatedCache(10)
    assert cache.change() == CacheChange({Tier.HBM: ()}, {}, True)
    assert cache.change() is None
    cache.claim(P, (1, 2), 25)
    cache.fill(P, 25)
    assert cache.change() == CacheChange({Tier.HBM: (1, 2)}, {Tier.HBM: ()}, False)
    cache.release(P)
    cache.trim(10)
    assert cache.change() == CacheChange({Tier.HBM: ()}, {Tier.HBM: (2,)}, False)
    cache.claim(Q, (1, 3), 21)
    cache.fill(Q, 21)
    cache.release(Q)
    cache.trim(10)
    assert cache.change() is None


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(
    # A name stands for all blocks before it.
    lambda parts: tuple(hash(tuple(parts[: i + 1])) for i in range(len(parts)))
)


@given(st.lists(st.tuples(prompts, st.integers(0, 60), st.booleans()), max_size=30))
def test_a_tree_that_follows_the_changes_equals_the_cache(history: list[tuple[tuple[int, ...], int, bool]]) -> None:
    cache, tree, home = SimulatedCache(10), PromptTree(1.0), ReplicaId("a")
    running: list[RequestId] = []
    for number, (names, room, reports) in enumerate(history):
        request = RequestId(str(number))
        hit = cache.claim(request, names, len(names) * 10 + 1)
        cache.fill(request, len(names) * 10)
        assert hit <= len(names) * 10
        running.append(request)
        if number % 2:
            cache.release(running.pop(0))
        cache.trim(room)
        assert len(cache.blocks.idle) * 10 <= room
        assert cache.blocks.named.keys() - used(cache) == cache.blocks.idle.keys()
        users = [block.users for block in cache.blocks.named.values() if block.users]
        assert cache.blocks.shared == sum(users) - len(users)
        if reports and (change := cache.change()) is not None:
            tree.apply(home, change)
    if (change := cache.change()) is not None:
        tree.apply(home, change)
    assert tree.blocks(home, Tier.HBM) == len(cache.blocks.named)
    for names, _, _ in history:
        found = SimulatedCache.claim(cache, RequestId("probe"), names, len(names) * 10 + 1) // 10
        cache.release(RequestId("probe"))
        assert tree.match(names).get(home, HeldPrefix(0)).hbm == found
