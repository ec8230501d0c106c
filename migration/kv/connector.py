"""The vLLM connector: tracks the blocks of every request, and loads staged blocks into new requests.

Scheduler side (EngineCore process), in time order; the connector owns no blocks, vLLM frees them as always:
    on_new_request               record the request's key, its output so far and its staged blocks, if it has any
    get_num_new_matched_tokens   number of context tokens that the staged blocks cover beyond the local cache
    update_state_after_alloc     record the cache blocks that the staged blocks are loaded into
    build_connector_meta         each step: loads, output to restore, and changes of block tables

Worker side:
    register_kv_caches           record the cache's layout
    start_load_kv                each step, before the forward pass: update block tables, load blocks, restore output
    get_block_ids_with_load_errors   blocks whose load failed; vLLM recomputes them

A request's parameters are in `SamplingParams.extra_args["kv_transfer_params"]`: "mell_key": str, Mell's own key of the
run (independent of vLLM's request ids); "mell_output": int, the number of tokens at the end of the prompt that are
output (see `history`); "mell_load": the request's `StagedBlocks` as a mapping, if it has any.
An exception in the worker half would end the engine and every request on it. A load that fails therefore never raises:
its blocks are reported as failed.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from migration.kv import history
from migration.kv.device import preload
from migration.kv.layout import CacheLayout
from migration.kv.staging import Segments
from migration.protocol.errors import TransferFailed
from migration.protocol.messages import SlotRef

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """Blocks [first, last) of a context, staged in a slot."""

    first: int
    last: int
    slot: SlotRef

    def to_params(self) -> dict[str, Any]:
        """The mapping that a request carries as "mell_load"."""
        slot = self.slot
        return {
            "first": self.first,
            "last": self.last,
            "segment": slot.segment,
            "offset": slot.offset,
            "ticket": slot.ticket,
        }

    @staticmethod
    def from_params(params: Mapping[str, Any]) -> "StagedBlocks":
        """The inverse of `to_params`."""
        slot = SlotRef(params["segment"], params["offset"], params["ticket"])
        return StagedBlocks(params["first"], params["last"], slot)


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Staged blocks, from index `skip` on, to be scattered into the cache blocks `blocks`."""

    staged: StagedBlocks
    skip: int
    blocks: list[int]


@dataclass(slots=True)
class TableChange:
    """The change of one request's block table in one step.

    `computed` is the number of tokens whose KV is complete after the step. `blocks` are appended to the table, or
    replace it.
    """

    key: str
    computed: int
    blocks: list[int]
    replace: bool


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The metadata of one step, from the scheduler side to the worker side."""

    changes: list[TableChange] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    """Output tokens of each new request to be restored, by vLLM's request id; 0 for a seeded request without output."""


@dataclass(slots=True)
class BlockTable:
    """A running request's cache blocks in context order, and the number of tokens whose KV they hold."""

    computed: int
    blocks: list[int]


class MellConnector(KVConnectorBase_V1):
    """Both halves of the connector; vLLM creates one instance per role."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size: int = vllm_config.cache_config.block_size
        self.num_blocks: int = kv_cache_config.num_blocks
        self._groups = len(kv_cache_config.kv_cache_groups)
        # scheduler side
        self._keys: dict[str, str] = {}
        self._staged: dict[str, StagedBlocks] = {}
        self._loads: list[BlockLoad] = []
        self._to_restore: dict[str, tuple[Request, int]] = {}
        # worker side
        self.runner: Any = None
        self.layout: CacheLayout | None = None
        self.unsupported: str | None = None
        self.tables: dict[str, BlockTable] = {}
        self.blocks_loaded = 0
        self.segments = Segments()
        self._failed: set[int] = set()
        self._discards_samples = False

    # --- scheduler side -------------------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        """Record the request's key, its output so far and the blocks staged for it."""
        params = request.kv_transfer_params or {}
        if key := params.get("mell_key"):
            self._keys[request.request_id] = key
            outputs = params.get("mell_output", 0)
            if outputs:
                history.replay(request, outputs)
            if outputs or request.sampling_params.seed is not None:
                self._to_restore[request.request_id] = (request, outputs)
        if staged := params.get("mell_load"):
            self._staged[request.request_id] = StagedBlocks.from_params(staged)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens beyond the local cache that staged blocks cover; 0 if there is a gap between the two.

        vLLM calls this again when the request could not be scheduled. After the load, and when the request resumes
        after a preemption, the result is 0.
        """
        staged = self._staged.get(request.request_id)
        if staged is None:
            return 0, False
        covered = staged.last * self.block_size - num_computed_tokens
        if num_computed_tokens < staged.first * self.block_size or covered <= 0:
            return 0, False
        return covered, False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Record the cache blocks that the staged blocks are loaded into."""
        staged = self._staged.pop(request.request_id, None)
        if staged is None or num_external_tokens == 0:
            return
        start = staged.last - num_external_tokens // self.block_size
        target = blocks.get_block_ids()[0][start : staged.last]
        self._loads.append(BlockLoad(staged, start - staged.first, list(target)))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """The step's metadata for the worker."""
        meta = StepMetadata(loads=self._loads)
        self._loads = []
        self._add_gone(scheduler_output, meta)
        self._add_outputs(scheduler_output, meta)
        if self._groups > 1:
            return meta
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            if key := self._keys.get(new.req_id):
                computed = new.num_computed_tokens + scheduled[new.req_id]
                meta.changes.append(TableChange(key, computed, list(new.block_ids[0]), replace=True))
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks, before in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            key = self._keys.get(request_id)
            fresh = list(blocks[0]) if blocks else []
            resumed = request_id in cached.resumed_req_ids
            computed = before + scheduled[request_id]
            # A decode step inside a block completes none: most steps of most requests need no entry.
            if key and (fresh or resumed or scheduled[request_id] > 1 or computed % self.block_size == 0):
                meta.changes.append(TableChange(key, computed, fresh, resumed))
        return meta

    def _add_gone(self, scheduler_output: "SchedulerOutput", meta: StepMetadata) -> None:
        """Add the requests that ended or were preempted: their block tables are void from this step on."""
        for request_id in scheduler_output.finished_req_ids:
            self._staged.pop(request_id, None)
            self._to_restore.pop(request_id, None)
            if key := self._keys.pop(request_id, None):
                meta.gone.append(key)
        for request_id in scheduler_output.preempted_req_ids or ():
            if key := self._keys.get(request_id):
                meta.gone.append(key)

    def _add_outputs(self, scheduler_output: "SchedulerOutput", meta: StepMetadata) -> None:
        """Add the first-time scheduled requests whose output or seeded generator the worker has to restore."""
        if not self._to_restore:
            return
        for new in scheduler_output.scheduled_new_reqs:
            request, outputs = self._to_restore.pop(new.req_id, (None, 0))
            if request is not None and history.split(request, outputs, new):
                meta.outputs[new.req_id] = outputs

    # --- worker side ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Record the cache's layout; a cache that cannot be moved by blocks sets `unsupported` and raises nothing."""
        if self._groups > 1:
            self.unsupported = f"the model has {self._groups} KV cache groups"
            return
        try:
            self.layout = CacheLayout(kv_caches, self.num_blocks)
        except TransferFailed as error:
            self.unsupported = str(error)
        else:
            if self.layout.device.type == "cuda":
                preload()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Update the block tables, load staged blocks, then restore output; never raises."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        for key in meta.gone:
            self.tables.pop(key, None)
        for change in meta.changes:
            table = self.tables.get(change.key)
            if table is None or change.replace:
                self.tables[change.key] = BlockTable(change.computed, change.blocks)
            else:
                table.computed = change.computed
                table.blocks.extend(change.blocks)
        if self._discards_samples:
            history.rewind(self.runner)
        for block_load in meta.loads:
            self._load(block_load)
        # vLLM discards the samples of a step in which a load failed; seeded generators are set back in the next step.
        self._discards_samples = bool(self._failed)
        for request_id, outputs in meta.outputs.items():
            history.restore(self.runner, request_id, outputs)
        if meta.outputs:
            history.refresh(self.runner)

    def _load(self, load: BlockLoad) -> None:
        """Scatter staged blocks, or report the cache blocks as failed."""
        slot, count = load.staged.slot, load.staged.last - load.staged.first
        try:
            if self.layout is None:
                raise TransferFailed(self.unsupported or "no KV cache registered")
            payload = self.segments.payload(slot, count * self.layout.block_bytes)
            self.layout.scatter(load.blocks, count, load.skip, payload)
            self.segments.check(slot)
        except Exception:
            log.exception("loading %d KV blocks failed; they are recomputed", len(load.blocks))
            self._failed.update(load.blocks)
            return
        self.blocks_loaded += len(load.blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed in this step."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: loads are complete before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """No-op: the worker extension gathers blocks on demand."""

    def wait_for_save(self) -> None:
        """No-op, as `save_kv_layer`."""
