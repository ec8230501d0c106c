"""The elastic pool on vLLM's own `BlockPool`: whatever happens to blocks, each name is at one id, and none is lost."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from migration.kv import pool as pools
from migration.kv.pool import ElasticPool
from policies.model import Blocks

DECLARED = 60


class Engine:
    """Requests on a pool: lists of blocks, whose full ones have names, as vLLM's manager keeps them."""

    def __init__(self, size: int = DECLARED, declared: int = DECLARED) -> None:
        self.pool = BlockPool(declared + 1, enable_caching=True, hash_block_size=16, enable_kv_cache_events=True)
        self.elastic = ElasticPool(self.pool, Blocks(size))
        self.requests: list[list[KVCacheBlock]] = []
        self.content: dict[int, int] = {}
        """What the memory of each id holds, as the workers would have it."""
        self.written: dict[int, int] = {}
        """What each block of a request was filled with, by the identity of its object."""
        self.named: dict[int, int] = {}
        """The names that blocks have had since a request got them, by the identity of their objects."""
        self._made = 0

    def scatter(self, seed: int) -> None:
        """Have free blocks be anywhere, as behind many requests."""
        taken = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        random.Random(seed).shuffle(taken)
        self.pool.free_blocks(taken)

    def start(self, blocks: int, named: int) -> None:
        """A request with that many blocks, of which the first `named` are in the cache."""
        if blocks > self.pool.get_num_free_blocks():
            return
        taken = self.pool.get_new_blocks(blocks)
        for index, block in enumerate(taken):
            self._made += 1
            self.content[block.block_id] = self.written[id(block)] = self._made
            self.named.pop(id(block), None)
            if index < named:
                key = make_block_hash_with_group_id(BlockHash(self._made.to_bytes(16, "big")), 0)
                self.pool._insert_block_hash(key, block, num_tokens=16)
                self.named[id(block)] = self._made
        self.requests.append(taken)

    def share(self, request: int) -> None:
        """A request that uses the same named blocks as another one."""
        if self.requests:
            shared = [block for block in self.requests[request % len(self.requests)] if block.block_hash is not None]
            self.pool.touch(shared)
            self.requests.append(shared)

    def end(self, request: int) -> None:
        """The end of a request: its blocks are free, the last first."""
        if self.requests:
            self.pool.free_blocks(reversed(self.requests.pop(request % len(self.requests))))

    def find(self, name: int) -> None:
        """A request that finds a cached block."""
        found = self.pool.get_cached_block(BlockHash(name.to_bytes(16, "big")), [0])
        if found is not None:
            assert self.content[found[0].block_id] == name, "the cache finds what was named"
            self.pool.touch(found)
            self.requests.append(found)

    def fit(self, size: int, spare: int = 0) -> int:
        """One call of a shrink; the workers copy the rows. Returns the blocks over."""
        fitted = self.elastic.fit(Blocks(size), spare)
        before, after = {a for a, _ in fitted.moved}, {b for _, b in fitted.moved}
        assert not before & after, "rows are copied at once: none may be both"
        self.content.update({b: self.content[a] for a, b in fitted.moved})
        assert fitted.size == self.elastic.size
        return fitted.over

    def check(self) -> None:
        """All that must hold between two steps."""
        self.elastic.check_integrity()
        for request in self.requests:
            for block in request:
                assert block.block_id <= self.elastic.size, "a request's block is handed out"
                assert self.pool.blocks[block.block_id] is block
                assert self.content[block.block_id] == self.written[id(block)], "a request reads what it has written"
                if (name := self.named.get(id(block))) is not None:
                    found = self.pool.get_cached_block(BlockHash(name.to_bytes(16, "big")), [0])
                    assert found == [block], "a block of a request keeps its name"
        used = {id(block) for request in self.requests for block in request}
        assert self.elastic.used == len(used)
        assert round(self.pool.get_usage() * self.elastic.size) == len(used), "vLLM's usage is that of the size"


ACTIONS = st.lists(
    st.one_of(
        st.builds(lambda blocks, named: lambda e: e.start(blocks, named), st.integers(1, 12), st.integers(0, 12)),
        st.builds(lambda request: lambda e: e.end(request), st.integers(0, 99)),
        st.builds(lambda request: lambda e: e.share(request), st.integers(0, 99)),
        st.builds(lambda name: lambda e: e.find(name), st.integers(1, 60)),
        st.builds(lambda size, spare: lambda e: e.fit(size, spare), st.integers(1, DECLARED), st.integers(0, 3)),
        st.builds(lambda size: lambda e: e.elastic.grow(Blocks(size)), st.integers(1, DECLARED)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(actions=ACTIONS, at_once=st.sampled_from([1, 5, 512]))
def test_every_name_is_at_one_id_and_every_block_is_free_used_or_withheld(
    actions: list[Callable[[Engine], object]], at_once: int
) -> None:
    before, pools.AT_ONCE = pools.AT_ONCE, at_once
    try:
        engine = Engine()
        engine.scatter(len(actions))
        for act in actions:
            act(engine)
            engine.check()
    finally:
        pools.AT_ONCE = before


def test_pool_hands_out_the_blocks_at_its_start_and_no_more() -> None:
    engine = Engine(size=20)
    assert (engine.elastic.size, engine.elastic.declared, engine.pool.get_num_free_blocks()) == (20, DECLARED, 20)
    engine.check()


def test_shrink_moves_used_blocks_below_the_new_size() -> None:
    engine, rnd = Engine(), random.Random(1)
    for _ in range(9):
        engine.start(6, 4)
    for _ in range(6):
        engine.end(rnd.randrange(9))
    assert max(block.block_id for request in engine.requests for block in request) > 20
    assert engine.fit(20) == 0 and engine.elastic.size == 20
    engine.check()
    assert engine.elastic.used == 18


def test_pool_stays_while_requests_and_their_next_blocks_do_not_fit() -> None:
    engine = Engine()
    engine.start(18, 9)
    assert engine.fit(20, spare=3) == 1 and engine.elastic.size == DECLARED
    assert engine.fit(10) == 8 and engine.elastic.size == DECLARED
    assert engine.fit(20, spare=2) == 0 and engine.elastic.size == 20


def test_pool_is_overfull_while_requests_exceed_the_size_that_it_is_to_have() -> None:
    engine = Engine()
    engine.start(12, 9)
    engine.start(12, 9)

    def overfull() -> bool:
        return engine.elastic.is_overfull

    assert not overfull()
    assert engine.fit(20) == 4 and overfull()
    engine.elastic.grow(engine.elastic.size)
    assert not overfull(), "another order"
    assert engine.fit(20) == 4 and overfull()
    engine.end(0)
    assert engine.fit(20) == 0 and not overfull()


def test_only_free_blocks_leave_the_cache_and_vllm_publishes_that() -> None:
    engine = Engine()
    for _ in range(5):
        engine.start(12, 12)
    for _ in range(4):
        engine.end(0)
    engine.pool.take_events()
    assert engine.fit(20) == 0
    removed = [event for event in engine.pool.take_events() if isinstance(event, BlockRemoved)]
    # 12 of 20 blocks are used, and have been copied over 12 free ones; so 8 named blocks are left of 48.
    assert sum(len(event.block_hashes) for event in removed) == 48 - 8
    assert all(block.block_hash is not None for block in engine.requests[0])


def test_new_blocks_are_handed_out_before_cached_ones_are_lost() -> None:
    engine = Engine(size=20)
    engine.start(20, 20)
    engine.end(0)
    engine.elastic.grow(Blocks(30))
    engine.start(10, 0)
    assert sum(block.block_hash is not None for block in engine.pool.blocks) == 20
    engine.check()


def test_pool_does_not_grow_beyond_what_was_declared() -> None:
    engine = Engine()
    with pytest.raises(ValueError, match="61 blocks are more than the 60 declared"):
        engine.elastic.grow(Blocks(61))
