"""The tier of host memory: vLLM's own offloading of KV blocks, with what Mell needs of it beyond.

vLLM's offloading connector decides, per step, which blocks of requests are stored and loaded. It gets three parts from
an offloading spec (vllm/v1/kv_offload/base.py), of which these are Mell's:

    HostTierSpec       what makes the others
    HostTierManager    scheduler half: the slots of the tier by the blocks' keys; vLLM's, with events and contents by
                       names, and with blocks that turn out to be spoiled
    HostTierWorker     worker half, on the CPU build alone, where vLLM has none: copies within the steps' thread,
                       with checksums (`host_memory`)

On a GPU the worker half is vLLM's own, whose copies go over streams and pinned memory.
"""

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from migration.kv.cache_events import HostRemoved, HostStored, key_name
from migration.kv.host.host_memory import HostBlocks

log = logging.getLogger(__name__)

_NOBODY = ReqContext("")
"""The context of calls that are for no request."""


class NamedSlots(CPULoadStoreSpec):
    """Slots of the tier, and the names of the blocks that belong into them."""

    def __init__(self, slots: list[int], names: list[bytes]) -> None:
        super().__init__(slots)
        self.names = names


class HostTierSpec(CPUOffloadingSpec):
    """vLLM's spec of offloading to host memory, with Mell's manager, and Mell's worker on the CPU build."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._host_manager: HostTierManager | None = None
        self._host_worker: HostTierWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """The scheduler half."""
        if self._host_manager is None:
            self._host_manager = HostTierManager(self.num_chunks, self.kv_events_config.enable_kv_cache_events)
        return self._host_manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker half."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._host_worker is None:
            memory = HostBlocks([each.tensor for each in kv_caches.tensors], self.num_chunks)
            self._host_worker = HostTierWorker(memory)
        return self._host_worker


class IndexedSlots(LRUCachePolicy):
    """The slots of the tier by their blocks' keys, and these keys by name and by slot.

    The tier may have millions of slots, and what looks for some of them does so between two steps of the engine.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.by_name: dict[bytes, OffloadKey] = {}
        self.by_slot: dict[int, OffloadKey] = {}

    def insert(self, key: OffloadKey, chunk: ChunkStatus, *context: ReqContext) -> None:
        """As vLLM's; since 0.33, with the context of the request."""
        super().insert(key, chunk, *context)
        self.by_name[key_name(key)] = self.by_slot[chunk.chunk_id] = key

    def remove(self, key: OffloadKey) -> None:
        """As vLLM's."""
        self._drop(key, self.chunks[key])
        super().remove(key)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """As vLLM's."""
        evicted: list[tuple[OffloadKey, ChunkStatus]] | None = super().evict(n, protected)
        for key, chunk in evicted or ():
            self._drop(key, chunk)
        return evicted

    def clear(self) -> None:
        """As vLLM's."""
        super().clear()
        self.by_name.clear()
        self.by_slot.clear()

    def _drop(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        if self.by_name.get(name := key_name(key)) == key:
            del self.by_name[name]
        if self.by_slot.get(chunk.chunk_id) == key:
            del self.by_slot[chunk.chunk_id]


class HostTierManager(CPUOffloadingManager):
    """The slots of the tier, by the keys of their blocks; the least recently used ones are evicted.

    A block is `spoiled` if a worker could not store it, or found another content than it had stored. Nobody finds it
    any more, and neither does anybody find a block that was deleted: it has left for everybody, and its slot becomes
    free with the last load that has begun.
    """

    def __init__(self, slots: int, has_events: bool) -> None:
        super().__init__(slots, enable_events=has_events)
        self.spoiled: set[OffloadKey] = set()
        self._leaving: set[OffloadKey] = set()
        """Spoiled and deleted blocks that are being stored or loaded, or are pinned."""
        self._pins: dict[str, list[OffloadKey]] = {}
        self._slots = self._policy = IndexedSlots(slots)

    def __contains__(self, name: object) -> bool:
        """True if a block of that name can be loaded."""
        return isinstance(name, bytes) and self._loadable(name) is not None

    def spoil(self, slots: Collection[int]) -> None:
        """Note slots whose content is not that of their block, while a load or a store of them is under way."""
        found = [key for slot in slots if (key := self._slots.by_slot.get(slot)) is not None]
        self.spoiled.update(found)
        self._give_up(found)

    def delete(self, names: Collection[bytes] | None) -> int:
        """Remove the blocks of these names, or all; their number. Loads under way are completed."""
        wanted = self.names() if names is None else set(names)
        found = [key for name in wanted if (key := self._loadable(name)) is not None]
        self._give_up(found)
        return len(found)

    def pin(self, pin: str, names: Sequence[bytes]) -> int:
        """Keep the first of these blocks that are here from eviction, under a name; their number.

        An earlier pin of that name ends.
        """
        self.unpin(pin)
        keys: list[OffloadKey] = []
        for name in names:
            if (key := self._loadable(name)) is None:
                break
            keys.append(key)
        self._prepare_load(keys, _NOBODY, record_access=False)
        self._pins[pin] = keys
        return len(keys)

    def unpin(self, pin: str) -> int:
        """End a pin; the number of its blocks, 0 for an unknown one."""
        keys = self._pins.pop(pin, [])
        self.complete_load(keys, _NOBODY)
        return len(keys)

    def names(self) -> list[bytes]:
        """The names of all blocks that can be loaded."""
        return [key_name(key) for key in self._all_loadable()]

    def changes(self) -> Iterator[HostStored | HostRemoved]:
        """The blocks that came and left since the last call, in this order."""
        for event in self.take_events():
            if getattr(event, "metadata_only", False):
                continue  # Since vLLM 0.33, for blocks whose store failed: they never came.
            names = b"".join(map(key_name, event.keys))
            yield HostRemoved(names) if event.removed else HostStored(names)

    # --- vLLM's calls ---------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """As vLLM's; a block that leaves is missing."""
        return LookupResult.MISS if key in self._leaving else super().lookup(key, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """As vLLM's; a block that leaves is removed with its last load."""
        super().complete_load(keys, req_context)
        self._free([key for key in keys if key in self._leaving])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """As vLLM's; a spoiled block was not stored."""
        failed = self._leaving.intersection(keys)
        super().complete_store([key for key in keys if key not in failed], req_context, success)
        if failed:
            super().complete_store(failed, req_context, success=False)
            self.spoiled -= failed
            self._leaving -= failed

    def reset_cache(self) -> None:
        """As vLLM's, with events."""
        self._note_removed(self._all_loadable())
        super().reset_cache()
        self.spoiled.clear()
        self._leaving.clear()
        self._pins.clear()

    def _get_load_store_spec(self, keys: Iterable[OffloadKey], chunks: Iterable[ChunkStatus]) -> LoadStoreSpec:
        return NamedSlots([chunk.chunk_id for chunk in chunks], [key_name(key) for key in keys])

    def _loadable(self, name: bytes) -> OffloadKey | None:
        """The key of the block of that name, if it is here and stays."""
        key = self._slots.by_name.get(name)
        return None if key is None or key in self._leaving or not self._slots.chunks[key].is_ready else key

    def _all_loadable(self) -> list[OffloadKey]:
        chunks = self._slots.chunks.items()
        return [key for key, status in chunks if status.is_ready and key not in self._leaving]

    def _give_up(self, keys: list[OffloadKey]) -> None:
        """Have nobody find blocks from now on. Those that are in use go later."""
        self._note_removed([key for key in keys if key not in self._leaving and self._slots.chunks[key].is_ready])
        self._leaving.update(keys)
        self._free(keys)

    def _free(self, keys: list[OffloadKey]) -> None:
        """Free the slots of leaving blocks that nothing uses any more."""
        for key in keys:
            status = self._slots.chunks[key]
            if status.ref_cnt == 0:
                self._slots.remove(key)
                self._free_chunk(status)
                self._num_evictable_cache_chunks -= 1
                self.spoiled.discard(key)
                self._leaving.discard(key)

    def _note_removed(self, keys: list[OffloadKey]) -> None:
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(keys=keys, medium=self.medium, removed=True))


class HostTierWorker(OffloadingWorker):
    """The copies of one worker, made when they are submitted: before the next step writes to any block.

    vLLM knows no transfers that fail. Slots whose content is not that of their block are `spoiled` instead.
    """

    def __init__(self, memory: HostBlocks) -> None:
        self._memory = memory
        self._finished: list[TransferResult] = []
        self.spoiled: set[int] = set()
        """Slots that could not be stored or loaded since the set was last emptied."""

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy cache blocks into slots."""
        assert isinstance(dst_spec, NamedSlots)
        blocks, slots, began = src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), time.perf_counter()
        try:
            self._memory.store(blocks, slots, dst_spec.names)
        except Exception:
            log.exception("%d KV blocks could not be stored in host memory", len(slots))
            self.spoiled.update(slots)
        return self._end(job_id, len(blocks), began)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copy slots into cache blocks, as far as they are sound. All are as `expedited` as some are in vLLM 0.33."""
        assert isinstance(src_spec, NamedSlots)
        blocks, slots, began = dst_spec.block_ids.tolist(), src_spec.block_ids.tolist(), time.perf_counter()
        sound = 0
        try:
            sound = self._memory.load(slots, src_spec.names, blocks)
        except Exception:
            log.exception("%d KV blocks could not be loaded from host memory", len(slots))
        if sound < len(slots):
            log.warning("a KV block in host memory is not the one that was stored: it is computed instead")
            self.spoiled.add(slots[sound])
        return self._end(job_id, sound, began)

    def _end(self, job_id: int, blocks: int, began: float) -> bool:
        size = blocks * self._memory.block_bytes
        self._finished.append(TransferResult(job_id, True, size, time.perf_counter() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        """The transfers since the last call: all of them are complete."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return: nothing is under way."""
