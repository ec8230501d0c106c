"""The blocks that an engine hands out, of those that it has declared. In EngineCore, between two steps.

vLLM makes its pool once, with all blocks that were declared. This one withholds the upper part of it:

    id 0                       vLLM's null block
    ids 1 .. size              handed out: free, or used by requests
    ids size + 1 .. declared   withheld: neither free nor used, and in no cache. Their memory may be given back.

The pool shrinks from its top down, some ids at a time, while steps run in between. Free blocks leave the prefix cache,
with vLLM's own event, and are withheld. A used block changes places with the pool's next free block: the object keeps
its users, its names and its place in block tables, and gets the id of the free one. No event is published, since the
names stay. The workers have to copy the row and to renumber their tables before the next step (`Renumbering`).

vLLM's own count of blocks follows, so its usage is that of the blocks handed out.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from policies.model import Blocks

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

DECLARED = "mell_declared"
"""The extra setting of the connector with which a pool is elastic: declared blocks per block at the start."""

AT_ONCE = 512
"""The most ids between two steps: about 2 ms of EngineCore's time, with half of them in use (2 cores, 2026-11)."""


@dataclass(frozen=True, slots=True)
class Renumbering:
    """Used blocks that have changed their ids, `moved` as (from, to), in a pool that has `size` blocks now.

    The pool did not shrink if `over` blocks of requests have no place in the size that was asked for.
    """

    size: Blocks
    over: Blocks = Blocks(0)
    moved: tuple[tuple[int, int], ...] = ()

    def renamed(self, ids: Collection[int]) -> set[int]:
        """The new ids of blocks. Those that were free are left out: their ids are other blocks' now."""
        new = dict(self.moved)
        return {new.get(id, id) for id in set(ids).difference(new.values())}


class ElasticPool:
    """vLLM's pool, of which `size` blocks are handed out."""

    def __init__(self, pool: "BlockPool", size: Blocks) -> None:
        """Hand out `size` blocks of a pool of which none is used."""
        self._pool = pool
        self.is_overfull = False
        """True while requests exceed the size that the pool is to shrink to."""
        while self.size > size:
            self.fit(size)

    @property
    def size(self) -> Blocks:
        """The number of blocks that are handed out; vLLM's null block is none of them."""
        return Blocks(self._pool.num_gpu_blocks - 1)

    @property
    def declared(self) -> Blocks:
        """The number of blocks that can be handed out."""
        return Blocks(len(self._pool.blocks) - 1)

    @property
    def used(self) -> Blocks:
        """The number of blocks that belong to requests."""
        return Blocks(self.size - self._pool.get_num_free_blocks())

    def fit(self, size: Blocks, spare: int = 0) -> Renumbering:
        """Shrink towards `size` by at most `AT_ONCE` blocks; nothing happens if the pool is as small.

        Unless requests fit into `size` with `spare` blocks to grow into, the pool stays as it is: a smaller one would
        have vLLM preempt.
        """
        over = self.used + spare - size
        self.is_overfull = self.size > size and over > 0
        if self.size <= size:
            return Renumbering(self.size)
        if over > 0:
            return Renumbering(self.size, Blocks(over))
        top = self._pool.num_gpu_blocks
        low = max(size + 1, top - AT_ONCE)
        used = self._withhold_free(self._pool.blocks[low:top])
        # Every used one finds a place: all requests fit into `size`, so below `low` there are as many free blocks.
        moved = tuple(self._change_places(block) for block in used)
        self._pool.num_gpu_blocks = low
        return Renumbering(self.size, moved=moved)

    def _withhold_free(self, blocks: "Sequence[KVCacheBlock]") -> "list[KVCacheBlock]":
        """Take the free ones of these blocks out of queue and cache; return the used ones."""
        used = []
        for block in blocks:
            if block.ref_cnt:
                used.append(block)
                continue
            self._pool.free_block_queue.remove(block)
            self._pool._maybe_evict_cached_block(block)
        return used

    def _change_places(self, block: "KVCacheBlock") -> tuple[int, int]:
        """Give a used block the id of a free one, which is withheld under the used one's id."""
        pool = self._pool
        (other,) = pool.get_new_blocks(1)
        other.ref_cnt = 0
        before, after = block.block_id, other.block_id
        tokens, hashes = block.block_hash_num_tokens, pool._remove_cached_block_hashes(block)
        block.block_id, other.block_id = after, before
        pool.blocks[after], pool.blocks[before] = block, other
        for key in hashes:
            pool._insert_block_hash(key, block, num_tokens=tokens)
        return before, after

    def grow(self, size: Blocks) -> Blocks:
        """Hand out `size` blocks, unless there are as many now; return the new size.

        New blocks are handed out first, so that no cached block is evicted before them. Raises ValueError if `size` is
        above `declared`.
        """
        if size > self.declared:
            raise ValueError(f"{size} blocks are more than the {self.declared} declared")
        self.is_overfull = False
        low, top = self._pool.num_gpu_blocks, size + 1
        if top > low:
            self._pool.free_block_queue.prepend_n(self._pool.blocks[low:top])
            self._pool.num_gpu_blocks = top
        return self.size

    def filled(self) -> list[int]:
        """The ids of all blocks with KV that may be read: of requests, or in the prefix cache."""
        blocks = self._pool.blocks[1 : self._pool.num_gpu_blocks]
        return [block.block_id for block in blocks if block.ref_cnt or block.block_hash is not None]

    def check_integrity(self) -> None:
        """Raise AssertionError unless each name is at one id, and free, used and withheld blocks are all blocks."""
        pool, top = self._pool, self._pool.num_gpu_blocks
        assert all(block.block_id == id for id, block in enumerate(pool.blocks)), "each block is at its id"
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        used = {block.block_id for block in pool.blocks[1:] if block.ref_cnt}
        withheld = set(range(top, len(pool.blocks)))
        assert len(free) == pool.get_num_free_blocks(), "the queue has as many blocks as it counts"
        assert len(free) + len(used) + len(withheld) == self.declared, "free + used + withheld = all"
        assert free | used | withheld == set(range(1, len(pool.blocks))), "every block is one of the three"
        assert all(pool.blocks[id].block_hash is None for id in withheld), "withheld blocks are in no cache"
        for block in pool.blocks:
            for key in (block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ())):
                assert key is None or pool.cached_block_hash_to_block.contain(key, block.block_id), "names are found"


def declared_times(vllm_config: Any) -> float | None:
    """The declared blocks of an engine per block at its start; None if its pool keeps its size."""
    transfer = vllm_config.kv_transfer_config
    return None if transfer is None else transfer.kv_connector_extra_config.get(DECLARED)


_bound: list[ElasticPool] = []


def bind(pool: "BlockPool", times: float) -> ElasticPool:
    """Have this process, an engine core, hand out its blocks at the start of a pool that declares `times` as many."""
    _bound[:] = [ElasticPool(pool, Blocks(int((pool.num_gpu_blocks - 1) / times)))]
    return elastic_pool()


def elastic_pool() -> ElasticPool:
    """The pool of this process, an engine core."""
    (pool,) = _bound
    return pool
