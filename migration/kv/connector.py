"""The vLLM connector: tracks the blocks of every request, and has staged blocks loaded into new requests.

Scheduler side (EngineCore process), in time order; the connector owns no blocks, vLLM frees them as always:
    (compile_by_request          have the engine compile grammars as the frontend has chosen, see `grammars`)
    on_new_request               record the request's key, its output so far and its tail, or the load that it waits
                                 for; name the blocks of the loads that it may use in the prefix cache; delete blocks
                                 from the prefix cache, if the request orders that
    get_num_new_matched_tokens   number of context tokens that the load or the tail covers beyond the local cache
    update_state_after_alloc     record the cache blocks that the load or the tail fills
    build_connector_meta         each step: loads, tails to copy or drop, output to restore, and changes of block tables
    take_events                  each step: if a request has asked for them, the contents of the prefix cache
    update_connector_output      name the blocks of complete loads in the prefix cache, if none needed them before,
                                 have requests end with their next token, and take the names of blocks that failed
    request_finished_all_groups  forget a load that ends; return the number of deleted blocks

Worker side:
    register_kv_caches           record the cache's layout, and start the copier
    handle_preemptions           each step, before it writes to any block: void block tables, begin and end loads, and
                                 drop tails that no request needs
    start_load_kv                before the forward pass of a step with tails: copy these; in any step: restore output,
                                 and drop what requests that left have left behind in vLLM's batch
    get_finished                 at the end of the step: update block tables, report ended loads
    get_block_ids_with_load_errors   at the end of the step: blocks of tails that could not be copied
    build_connector_worker_meta  at the end of the step: the loads whose blocks have all arrived, the requests to halt

A load is a request that vLLM admits and never runs. vLLM allocates the blocks of its whole range at once and has it
wait (WAITING_FOR_REMOTE_KVS) while the copiers fill them, beside the steps of other requests. Once the blocks have
arrived in all workers, the scheduler side names them in the prefix cache, the copiers answer the replica, and the
replica aborts the request: the blocks stay in the cache like those of any ended request. A load that fails is aborted
too. Its blocks were never named, so no step reads them. vLLM frees the blocks of an aborted load once `get_finished`
reports it.

Between two steps the blocks of an elastic pool may get other ids (`pool`): the worker side copies the rows and maps all
its tables (`renumber`). No id is in a message of the scheduler side then.

The scheduler side learns in two ways that blocks have arrived, and acts on the first: from the workers at the end of a
step, or from the replica, which asked the copiers, with the next request. So that request finds the blocks, whatever
step is in flight.

A hold keeps a prefix that the cache has, for a copy of it. It is admitted like a load, by a request whose context ends
with one token behind the prefix: vLLM adds the request to the users of the prefix's blocks, and allocates one block for
that token, which is never filled. So the request computes nothing, costs no step, and is not preempted. The copiers
find the blocks in a table, as those of a running request, and the hold ends with the request.

A tail is the end of a context, with a block that is not full, which vLLM's prefix cache cannot name. The copiers of all
workers hold it before its request comes. vLLM admits the request with the tail as computed tokens, and its first step
copies the tail into the request's blocks before it reads them: that step computes only the tokens behind the tail. If
the copy fails, vLLM ends the request with an error, and its reader submits it again.

A tail belongs to its request as soon as that is added. vLLM names the block that a step fills when it plans the step:
so the step has to find the tail even if its request has been aborted meanwhile. Otherwise the prefix cache would have a
block that nobody has filled. The workers drop the tail of a request that ends before its first step, or needs no tail.

A request is halted by its limit of tokens: the step after the one whose end reports it is its last, and brings its last
token. An abort would discard the token of the step in flight, which computes it beside the target's first step.

vLLM cannot preempt a request that waits for its blocks. Loads and holds under way therefore have at most half of the
cache, except that one is always admitted; the others stay in the queue, without blocks.

All of this is for caches with one block table per request, which only grows (`why_unmovable`). Requests with another
cache run as without Mell, and move by tokens. The connector declares support of vLLM's hybrid KV cache manager for
their sake: without it, layers with a sliding window would keep the KV of whole contexts.

A request's parameters are in `SamplingParams.extra_args["kv_transfer_params"]`: "mell_key": str, Mell's own key of the
run (independent of vLLM's request ids); "mell_output": int, the number of tokens at the end of the prompt that are
output (see `history`); "mell_context": list of int, the context whose last "mell_output" tokens the grammar of a
request accepts that only tries that; "mell_tail": the request's `Tail` as a mapping, if one is held; "mell_load": the
request's `WantedBlocks` as a mapping, if it is a load; "mell_hold": str, its name, if it is a hold; "mell_filled": list
of str, the loads whose blocks have arrived in all workers; "mell_contents": bool, true for the contents of the prefix
cache among its events; "mell_delete": the `DeletedBlocks` as a mapping. The output of a request with an order about
blocks has their number, the reply, in its own parameters as "mell_blocks".
An exception in the worker half would end the engine and every request on it, so none of these functions raises.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec, iter_layer_specs

from migration.kv import history
from migration.kv.cache_events import PoolContents, delete_blocks, pool_contents
from migration.kv.copier.copier import Copier
from migration.kv.copier.tables import BlockLoad, BlockLoads, BlockTables, Fence, TableChange
from migration.kv.device import preload
from migration.kv.grammars import compile_by_request
from migration.kv.layout import CacheLayout, RowsLost
from migration.kv.naps import nap_between_looks
from migration.kv.pages import UntouchedPages
from migration.kv.pool import ElasticPool, bind, declared_times
from migration.protocol.errors import TransferFailed
from migration.protocol.messages import Tail

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_LOADS_HOLD_AT_MOST = 0.5
"""The share of the cache that loads and holds under way have."""


@dataclass(frozen=True, slots=True)
class WantedBlocks:
    """Blocks [first, last) of a context, to be loaded under the name `load`."""

    load: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class DeletedBlocks:
    """Blocks to be deleted from the prefix cache, by their names (`cache_events.encode_names`); None: all."""

    names: bytes | None


@dataclass(frozen=True, slots=True)
class PinnedBlocks:
    """Blocks of a tier of host memory to be kept under the name `pin`, by their names (`cache_events.encode_names`)."""

    pin: str
    names: bytes


@dataclass(frozen=True, slots=True)
class TailLoad:
    """A held tail that a step copies into `blocks`, without its first `skip` blocks, which the cache has."""

    tail: str
    skip: int
    blocks: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The metadata of one step, from the scheduler side to the worker side."""

    changes: list[TableChange] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    """Keys of requests that ended or were preempted: their block tables are void from this step on."""
    held: list[TableChange] = field(default_factory=list)
    """The tables of holds that were admitted."""
    loads: list[BlockLoad] = field(default_factory=list)
    """Loads that were admitted, and holds, as loads of the block behind them."""
    cached: list[str] = field(default_factory=list)
    """Names of loads whose blocks are in the prefix cache."""
    ended: list[str] = field(default_factory=list)
    """Names of loads whose request has ended."""
    tails: list[TailLoad] = field(default_factory=list)
    """Tails of the requests whose first step this is."""
    needless: list[str] = field(default_factory=list)
    """Names of tails that no request needs any more."""
    outputs: dict[str, int] = field(default_factory=dict)
    """Output tokens of each new request to be restored, by vLLM's request id; 0 for a seeded request without output."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """The messages of copiers since the previous step, from the worker side to the scheduler side.

    `arrived`: loads whose blocks have all arrived, and in how many workers. `halts`: keys of requests to be halted.
    """

    arrived: dict[str, int] = field(default_factory=dict)
    halts: frozenset[str] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """The sum of two workers' reports."""
        assert isinstance(other, StepReport)
        return StepReport(dict(Counter(self.arrived) + Counter(other.arrived)), self.halts | other.halts)


@dataclass(slots=True)
class _FillingLoad:
    """A load whose blocks arrive: its request, its context in tokens, and the workers that lack blocks."""

    request: "Request"
    tokens: int
    workers: int


@dataclass(slots=True)
class _KeyedRequest:
    """A request that replicas know by a key; `caught_up` as in its newest `TableChange`."""

    key: str
    request: "Request"
    caught_up: bool = False


_MOVABLE_SPECS = (FullAttentionSpec,)
"""The kinds of layers whose moved blocks are shown to be exact. Kinds that derive from one may free blocks earlier.

Multi-head latent attention keeps its blocks, too, but no moved answer could be compared (docs/limits.md).
"""
_MOVABLE_FORMATS = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
"""The formats of KV whose scales are constants of the model, and not in memory of their own."""


def why_unmovable(groups: "Sequence[KVCacheGroupSpec]") -> str | None:
    """The reason why the blocks of a cache with these groups cannot be moved; None if they can.

    The connector needs one block table per request that only grows. A layer with a sliding window frees the blocks in
    front of it while the request runs, and a state-space layer keeps one block for the whole context.
    """
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups"
    for spec in iter_layer_specs(groups[0].kv_cache_spec):
        if not _is_movable(spec):
            return f"the KV cache has layers of the kind {type(spec).__name__}"
    return None


def _is_movable(spec: "KVCacheSpec") -> bool:
    plain = type(spec) in _MOVABLE_SPECS and spec.kv_quant_mode in _MOVABLE_FORMATS
    return plain and spec.tokens_per_state == 1


def is_quantized(groups: "Sequence[KVCacheGroupSpec]") -> bool:
    """True if KV has scales: with each worker of several, they may be of its own heads."""
    specs = (spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec))
    return any(getattr(spec, "kv_quant_mode", KVQuantMode.NONE) is not KVQuantMode.NONE for spec in specs)


def why_unmirrored(groups: "Sequence[KVCacheGroupSpec]") -> str | None:
    """The reason why the events of a cache with these groups do not show which prefixes it has; None if they do.

    They do if a context needs all blocks of a prefix, and every block has one name.
    """
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups"
    for spec in iter_layer_specs(groups[0].kv_cache_spec):
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
            return f"the KV cache has layers of the kind {type(spec).__name__}"
    return None


def why_without_manager() -> str | None:
    """The reason why no blocks can be named in the prefix cache of this vLLM; None if they can, as since 0.31."""
    if hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"):
        return None
    return "this version of vLLM gives its connector no manager of the KV cache"


class MellConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves of the connector; vLLM creates one instance per role."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.device_config.device_type == "cpu":
            nap_between_looks()
        if role is KVConnectorRole.SCHEDULER:
            compile_by_request()
        self.block_size: int = vllm_config.cache_config.block_size
        self.num_blocks: int = kv_cache_config.num_blocks
        lacks = why_without_manager()
        self.unmovable = lacks or why_unmovable(kv_cache_config.kv_cache_groups)
        self.unmirrored = lacks or why_unmirrored(kv_cache_config.kv_cache_groups)
        self.quantized = is_quantized(kv_cache_config.kv_cache_groups)
        self._workers: int = vllm_config.parallel_config.world_size
        # scheduler side
        self._keyed: dict[str, _KeyedRequest] = {}
        self._tails: dict[str, Tail] = {}
        self._tail_loads: list[TailLoad] = []
        self._needless: list[str] = []
        self._wanted: dict[str, WantedBlocks] = {}
        self._holds: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._held_tables: list[TableChange] = []
        self._admitted: list[BlockLoad] = []
        self._filling: dict[str, _FillingLoad] = {}
        self._cached: list[str] = []
        self._held: dict[str, int] = {}
        self._to_restore: dict[str, tuple[Request, int]] = {}
        self._contents_wanted = False
        self._replies: dict[str, int] = {}
        """The replies to orders, by vLLM's ids of the requests that brought them."""
        self._pool: BlockPool | None = None
        self._declared_times = declared_times(vllm_config)
        self._elastic: ElasticPool | None = None
        # worker side
        self.runner: Any = None
        self.layout: CacheLayout | None = None
        self.unsupported: str | None = None
        self.tables = BlockTables(self.block_size)
        self.loads = BlockLoads()
        self.tails: dict[str, torch.Tensor] = {}
        """Held tails by their names. The copier adds them, the first step of their request takes them."""
        self.halts: deque[str] = deque()
        """Keys of requests to be halted. The copier adds them, the end of a step takes them."""
        self._failed_blocks: set[int] = set()
        self.copier: Copier | None = None

    @property
    def is_elastic(self) -> bool:
        """True if the KV pool grows and shrinks."""
        return self._declared_times is not None

    @property
    def host_blocks(self) -> int:
        """The number of blocks for which a tier of host memory has room; only the worker side knows it."""
        return 0

    # --- scheduler side -------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Have the pool record no events if nobody can use them; withhold what an elastic one does not hand out yet."""
        if self.unmirrored:
            gpu_block_pool.enable_kv_cache_events = False
        self._pool = gpu_block_pool
        if self._declared_times is not None:
            self._elastic = bind(gpu_block_pool, self._declared_times)

    def on_new_request(self, request: "Request") -> None:
        """Record the request's key and its output so far, or its load; name the blocks of loads that have arrived.

        Delete the blocks that it orders to delete.
        """
        params = request.kv_transfer_params or {}
        self._contents_wanted |= params.get("mell_contents", False)
        if delete := params.get("mell_delete"):
            self._replies[request.request_id] = self._delete(DeletedBlocks(**delete).names)
        for name in params.get("mell_filled", ()):
            self._name(name)
        if key := params.get("mell_key"):
            self._keyed[request.request_id] = _KeyedRequest(key, request)
            if tail := params.get("mell_tail"):
                self._tails[request.request_id] = Tail(**tail)
            outputs = params.get("mell_output", 0)
            if outputs or request.sampling_params.seed is not None:
                self._to_restore[request.request_id] = (request, outputs)
        if load := params.get("mell_load"):
            wanted = WantedBlocks(**load)
            self._wanted[request.request_id] = wanted
            self._names[request.request_id] = wanted.load
        if hold := params.get("mell_hold"):
            self._holds[request.request_id] = self._names[request.request_id] = hold

    def _delete(self, names: bytes | None) -> int:
        return delete_blocks(self._kv_cache_manager.block_pool, names)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the local cache that a load or a tail covers; 0 if there is a gap between the two.

        None has vLLM ask again in the next step: other loads hold too many blocks, or the pool shrinks and requests
        exceed its new size. vLLM calls this again also when the request could not be scheduled. After the load, and
        when the request resumes after a preemption, the result is 0.
        """
        if self._must_wait():
            return None, False
        if tail := self._tails.get(request.request_id):
            adjoins = num_computed_tokens >= tail.first * self.block_size
            return max(0, self._tail_end(tail, request) - num_computed_tokens) if adjoins else 0, False
        if request.request_id in self._holds:
            return (1, True) if self._may_hold(num_computed_tokens // self.block_size + 1) else (None, False)
        wanted = self._wanted.get(request.request_id)
        if wanted is None:
            return 0, False
        covered = wanted.last * self.block_size - num_computed_tokens
        if num_computed_tokens < wanted.first * self.block_size or covered <= 0:
            return 0, False
        return (covered, True) if self._may_hold(covered // self.block_size) else (None, False)

    def _must_wait(self) -> bool:
        """True while the pool is to shrink below what requests use, loads and holds aside.

        Else arrivals, and requests that were given back, would use what the others leave, and it would never shrink.
        """
        pool = self._elastic
        return pool is not None and pool.is_overfull and pool.used > sum(self._held.values())

    def _may_hold(self, blocks: int) -> bool:
        """True if loads and holds may have that many more blocks."""
        held = sum(self._held.values())
        size = self.num_blocks if self._pool is None else self._pool.num_gpu_blocks
        return not held or held + blocks <= size * _LOADS_HOLD_AT_MOST

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Record the cache blocks that a load or a tail fills.

        None if the cache has what it covers, or lacks what is before.
        """
        if tail := self._tails.pop(request.request_id, None):
            self._take_tail(tail, request, blocks, num_external_tokens)
        if hold := self._holds.get(request.request_id):
            self._take_hold(hold, request, list(blocks.get_block_ids()[0]), num_external_tokens)
        wanted = self._wanted.pop(request.request_id, None)
        if wanted is None:
            return
        start = wanted.last - num_external_tokens // self.block_size
        filled = list(blocks.get_block_ids()[0][start : wanted.last])
        self._admitted.append(BlockLoad(wanted.load, request.request_id, start, filled))
        if filled:
            self._held[request.request_id] = len(filled)
            self._filling[wanted.load] = _FillingLoad(request, wanted.last * self.block_size, self._workers)

    def _tail_end(self, tail: Tail, request: "Request") -> int:
        """The number of context tokens up to the tail's end; vLLM computes at least one more."""
        known: int = request.num_tokens
        return min(tail.tokens, known - 1)

    def _take_tail(self, tail: Tail, request: "Request", blocks: "KVCacheBlocks", tokens: int) -> None:
        """Record the cache blocks of a request for the last `tokens` tokens of its tail; without any, it needs none."""
        if tokens:
            end = self._tail_end(tail, request)
            start = (end - tokens) // self.block_size
            ids = blocks.get_block_ids()[0][start : -(-end // self.block_size)]
            self._tail_loads.append(TailLoad(tail.name, start - tail.first, list(ids)))
        else:
            self._needless.append(tail.name)

    def _take_hold(self, hold: str, request: "Request", blocks: list[int], tokens: int) -> None:
        """Record the blocks of a hold: those of its prefix, and the one behind them."""
        if not tokens:
            return
        prefix = blocks[:-1]
        self._held[request.request_id] = len(blocks)
        self._admitted.append(BlockLoad(hold, request.request_id, len(prefix), blocks[-1:]))
        computed = len(prefix) * self.block_size
        self._held_tables.append(TableChange(hold, computed, prefix, replace=True, caught_up=True, held=True))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Name the blocks of complete loads in the prefix cache; count those of ended loads as free; halt requests.

        Blocks that could not be filled lose their names: vLLM only takes those of requests that still run.
        """
        if connector_output.invalid_block_ids:
            self._kv_cache_manager.evict_blocks(connector_output.invalid_block_ids)
        for request_id in connector_output.finished_recving or ():
            self._held.pop(request_id, None)
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, StepReport):
            return
        for name, workers in report.arrived.items():
            if filling := self._filling.get(name):
                filling.workers -= workers
                if not filling.workers:
                    self._name(name)
        for keyed in self._keyed.values() if report.halts else ():
            if keyed.key in report.halts:
                request = keyed.request
                request.max_tokens = min(request.max_tokens, request.num_output_tokens + 1)

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """The contents of the prefix cache, if a request has asked for them.

        vLLM calls this right after it has taken the pool's own events, and publishes both in this order.
        """
        wanted, self._contents_wanted = self._contents_wanted, False
        return (self._contents(),) if wanted and not self.unmirrored else ()

    def _contents(self) -> PoolContents:
        return pool_contents(self._kv_cache_manager.block_pool)

    def _name(self, load: str) -> None:
        """Name the blocks of a load in the prefix cache, all of which have arrived; a load that is over has none."""
        if filling := self._filling.pop(load, None):
            self._kv_cache_manager.cache_blocks(filling.request, filling.tokens)
            self._cached.append(load)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a load that ends: its blocks are not named any more. The parameters are the reply to its order."""
        if name := self._names.get(request.request_id):
            self._filling.pop(name, None)
        reply = self._replies.pop(request.request_id, None)
        return False, None if reply is None else {"mell_blocks": reply}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """The step's metadata for the worker."""
        meta = StepMetadata(held=self._held_tables, loads=self._admitted, cached=self._cached, tails=self._tail_loads)
        self._held_tables, self._admitted, self._cached, self._tail_loads = [], [], [], []
        meta.needless, self._needless = self._needless, []
        self._add_gone(scheduler_output, meta)
        self._add_outputs(scheduler_output, meta)
        if self.unmovable:
            return meta
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            if keyed := self._keyed.get(new.req_id):
                computed = new.num_computed_tokens + scheduled[new.req_id]
                meta.changes.append(_change(keyed, computed, list(new.block_ids[0]), replace=True))
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks, before in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            keyed = self._keyed.get(request_id)
            if keyed is None:
                continue
            fresh = list(blocks[0]) if blocks else []
            resumed = request_id in cached.resumed_req_ids
            computed = before + scheduled[request_id]
            completes = scheduled[request_id] > 1 or computed % self.block_size == 0
            # A decode step inside a block completes none: most steps of most requests need no entry.
            if fresh or resumed or completes or not keyed.caught_up:
                meta.changes.append(_change(keyed, computed, fresh, resumed))
        return meta

    def _add_gone(self, scheduler_output: "SchedulerOutput", meta: StepMetadata) -> None:
        """Add the requests that ended or were preempted."""
        for request_id in scheduler_output.finished_req_ids:
            self._wanted.pop(request_id, None)
            self._to_restore.pop(request_id, None)
            if load := self._names.pop(request_id, None):
                meta.ended.append(load)
            if hold := self._holds.pop(request_id, None):
                meta.gone.append(hold)
            if tail := self._tails.pop(request_id, None):
                meta.needless.append(tail.name)
            if keyed := self._keyed.pop(request_id, None):
                meta.gone.append(keyed.key)
        for request_id in scheduler_output.preempted_req_ids or ():
            if keyed := self._keyed.get(request_id):
                meta.gone.append(keyed.key)

    def _add_outputs(self, scheduler_output: "SchedulerOutput", meta: StepMetadata) -> None:
        """Add the first-time scheduled requests whose output or seeded generator the worker has to restore."""
        if not self._to_restore:
            return
        for new in scheduler_output.scheduled_new_reqs:
            request, outputs = self._to_restore.pop(new.req_id, (None, 0))
            if request is not None and history.split(request, outputs, new):
                meta.outputs[new.req_id] = outputs

    # --- worker side ----------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """An elastic pool's memory becomes resident as it is used."""
        return None if self._declared_times is None else UntouchedPages()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Record the cache's layout; a cache that cannot be moved by blocks sets `unsupported` and raises nothing."""
        if self.unmovable:
            self.unsupported = self.unmovable
            return
        try:
            self.layout = CacheLayout(kv_caches, self.num_blocks)
            if self.layout.device.type == "cuda":
                preload()
            self.loads.cells = max(1, self.layout.shape.layers * self.layout.shape.heads)
            self.copier = Copier(self.layout, self.tables, self.loads, self.tails, self.halts)
        except (TransferFailed, OSError) as error:
            self.layout = None
            self.unsupported = str(error)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Void the block tables whose blocks this step may reuse; begin and end loads; drop needless tails."""
        meta = kv_connector_metadata
        assert isinstance(meta, StepMetadata)
        awaited = self.tables.void(meta.gone)
        for name in meta.needless:
            self.tails.pop(name, None)
        if meta.loads:
            fence = self._fence()
            for admitted in meta.loads:
                self.loads.begin(admitted, fence)
        for name in meta.cached:
            self.loads.cache(name)
        for name in meta.ended:
            self.loads.close(name)
        if self.copier is not None and (awaited or meta.loads or meta.cached or meta.ended):
            self.copier.wake()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy tails, restore output, and drop budgets. vLLM calls this before the forward pass if there are tails."""
        meta = self._step()
        for tail in meta.tails:
            self._place(tail)
        for request_id, outputs in meta.outputs.items():
            history.restore(self.runner, request_id, outputs)
        if meta.outputs:
            history.refresh(self.runner)
        history.drop_budgets(self.runner)

    def _place(self, load: TailLoad) -> None:
        try:
            held = self.tails.pop(load.tail)
            assert self.layout is not None, "a tail came by the copier, which has a layout"
            self.layout.place(load.blocks, len(held) // self.layout.block_bytes, load.skip, held)
        except RowsLost:
            log.warning("tail %s could not be copied: the step is lost with the pair", load.tail)
        except Exception:
            log.exception("tail %s could not be copied", load.tail)
            self._failed_blocks.update(load.blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of tails that could not be copied in this step; vLLM ends their request with an error."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Update the block tables, and report ended loads; the forward pass is complete, or launched on a GPU."""
        meta = self._step()
        # The prefix of a hold may have been computed by this very step.
        changes = [*meta.changes, *meta.held]
        awaited = self.tables.apply(changes, self._fence()) if changes else False
        if (awaited or meta.held) and self.copier is not None:
            self.copier.wake()
        return None, self.loads.finished()

    def build_connector_worker_meta(self) -> StepReport | None:
        """The loads whose blocks have all arrived in this worker, and the requests to be halted, each once."""
        arrived, halts = self.loads.arrived(), frozenset(self.halts.popleft() for _ in range(len(self.halts)))
        return StepReport(dict.fromkeys(arrived, 1), halts) if arrived or halts else None

    def renumber(self, moved: Sequence[tuple[int, int]]) -> None:
        """Copy the rows of blocks that have changed their ids, (from, to), and map all tables of this worker.

        Between two steps. A copy under way, at most one part of a slot, ends first: it knows the old ids. What it reads
        stays where it was until the pool grows or `give_back` is called, but what it writes would be lost.
        """
        assert self.layout is not None, "a pool is elastic only if its blocks can be moved"
        with self.tables.copying, self.loads.copying:
            self.layout.move(moved)
            if self.layout.elsewhere is not None:
                self.layout.elsewhere.move_rows(moved)
            ids = np.arange(self.num_blocks, dtype=np.int32)
            before, after = np.array(moved, dtype=np.int32).T
            ids[before] = after
            self.tables.renumber(ids)
            self.loads.renumber(ids)
            for table in self.runner.input_batch.block_table.block_tables:
                rows = table.block_table.np
                rows[...] = ids[rows]
            for request in self.runner.requests.values():
                for blocks in request.block_ids:
                    blocks[:] = ids[blocks].tolist()

    def give_back(self, first: int) -> None:
        """Give the memory of all blocks from `first` on back to the machine. Raises OSError."""
        assert self.layout is not None, "a pool is elastic only if its blocks can be moved"
        with self.tables.copying, self.loads.copying:
            self.tables.lose(range(first, self.num_blocks))
            self.layout.give_back(first)
            if self.layout.elsewhere is not None:
                self.layout.elsewhere.lose_rows(first)

    @contextmanager
    def changing_layers(self) -> Iterator[CacheLayout]:
        """Layers go to another worker, or come back, in the body.

        A copy under way, at most one part of a slot, ends first: it knows where they were.
        """
        assert self.layout is not None, "layers are remote only if their blocks can be moved"
        with self.tables.copying, self.loads.copying:
            yield self.layout

    def _step(self) -> StepMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        return meta

    def _fence(self) -> Fence | None:
        """All work launched so far by this thread, which runs the steps."""
        if self.layout is None or self.layout.device.type != "cuda":
            return None
        event: Any = torch.cuda.Event()
        event.record()
        fence: Fence = event
        return fence

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: no step waits for a load."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """No-op: the copier gathers blocks on demand."""

    def wait_for_save(self) -> None:
        """No-op, as `save_kv_layer`."""

    def shutdown(self) -> None:
        """End the copier."""
        if self.copier is not None:
            self.copier.close()
            self.copier = None


def _change(keyed: _KeyedRequest, computed: int, blocks: list[int], replace: bool) -> TableChange:
    """The change of a request's block table in a step after which `computed` tokens are computed."""
    keyed.caught_up = computed >= keyed.request.num_tokens
    return TableChange(keyed.key, computed, blocks, replace, keyed.caught_up)
