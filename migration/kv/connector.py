"""The vLLM connector: knows which blocks a request has, and loads moved blocks into new requests.

Scheduler side (EngineCore process), in time order; nothing here owns blocks, vLLM frees them as always:
    on_new_request               learn the request's key, its output so far and its staged blocks, if it has any
    get_num_new_matched_tokens   how much of the context the staged blocks cover beyond the local cache
    update_state_after_alloc     which cache blocks they go to
    build_connector_meta         each step: loads to do, output to restore, and what changed in the block tables

Worker side:
    register_kv_caches           learn the layout
    start_load_kv                each step, before the forward pass: block tables, loads, then output to restore
    get_block_ids_with_load_errors   blocks that could not be loaded; vLLM recomputes them

A request carries its key in `SamplingParams.extra_args["kv_transfer_params"]`: {"mell_key": str}; "mell_output": int,
how many tokens at the prompt's end are output (see `history`); and, when it is to load blocks, "mell_load": a `Load` as
a mapping. Keys are Mell's own; vLLM's request ids stay its business.
An exception in the worker half would kill the engine and every request on it, so a load that fails is
reported as failed blocks and never raises.
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

from migration.errors import TransferFailed
from migration.kv import history
from migration.kv.device import preload
from migration.kv.layout import CacheLayout
from migration.kv.staging import Segments
from migration.messages import SlotRef

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks [first, last) of a context, staged in a slot."""

    first: int
    last: int
    slot: SlotRef

    def to_params(self) -> dict[str, Any]:
        """The load in the form in which it rides on a request."""
        slot = self.slot
        return {
            "first": self.first,
            "last": self.last,
            "segment": slot.segment,
            "offset": slot.offset,
            "ticket": slot.ticket,
        }

    @staticmethod
    def from_params(params: Mapping[str, Any]) -> "Load":
        """The inverse of `to_params`."""
        slot = SlotRef(params["segment"], params["offset"], params["ticket"])
        return Load(params["first"], params["last"], slot)


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Scatter staged blocks, from the `skip`-th on, into the cache blocks `blocks`."""

    load: Load
    skip: int
    blocks: list[int]


@dataclass(slots=True)
class TableChange:
    """What a step changes in one request's block table; `computed` counts tokens whose KV it completes."""

    key: str
    computed: int
    blocks: list[int]
    replace: bool


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler side tells the worker side in one step."""

    changes: list[TableChange] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    """How many tokens of a new request are output, by vLLM's request ids; 0 for one that is seeded and has none."""


@dataclass(slots=True)
class BlockTable:
    """A running request's cache blocks in context order, and how many tokens they hold."""

    computed: int
    blocks: list[int]


class MellConnector(KVConnectorBase_V1):
    """Both halves of the connector; vLLM makes one instance per role."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size: int = vllm_config.cache_config.block_size
        self.num_blocks: int = kv_cache_config.num_blocks
        self._groups = len(kv_cache_config.kv_cache_groups)
        # scheduler side
        self._keys: dict[str, str] = {}
        self._wanted: dict[str, Load] = {}
        self._loads: list[BlockLoad] = []
        self._begun: dict[str, tuple[Request, int]] = {}
        # worker side
        self.runner: Any = None
        self.layout: CacheLayout | None = None
        self.unsupported: str | None = None
        self.tables: dict[str, BlockTable] = {}
        self.blocks_loaded = 0
        self.segments = Segments()
        self._failed: set[int] = set()
        self._sampled_in_vain = False

    # --- scheduler side -------------------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        """Learn the request's key, its output so far and the blocks staged for it."""
        params = request.kv_transfer_params or {}
        if key := params.get("mell_key"):
            self._keys[request.request_id] = key
            outputs = params.get("mell_output", 0)
            if outputs:
                history.replay(request, outputs)
            if outputs or request.sampling_params.seed is not None:
                self._begun[request.request_id] = (request, outputs)
        if load := params.get("mell_load"):
            self._wanted[request.request_id] = Load.from_params(load)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens beyond the local cache that staged blocks cover; 0 if there is a hole between the two.

        Asked again when the request could not be scheduled. Once loaded, or when the request is
        resumed after a preemption, there is nothing to load any more.
        """
        load = self._wanted.get(request.request_id)
        if load is None:
            return 0, False
        covered = load.last * self.block_size - num_computed_tokens
        if num_computed_tokens < load.first * self.block_size or covered <= 0:
            return 0, False
        return covered, False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Note which cache blocks the staged ones go to."""
        load = self._wanted.pop(request.request_id, None)
        if load is None or num_external_tokens == 0:
            return
        start = load.last - num_external_tokens // self.block_size
        target = blocks.get_block_ids()[0][start : load.last]
        self._loads.append(BlockLoad(load, start - load.first, list(target)))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """What the worker must know of this step."""
        meta = StepMetadata(loads=self._loads)
        self._loads = []
        self._note_gone(scheduler_output, meta)
        self._note_begun(scheduler_output, meta)
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
            # A decode step inside a block fills none: most steps of most requests say nothing.
            if key and (fresh or resumed or scheduled[request_id] > 1 or computed % self.block_size == 0):
                meta.changes.append(TableChange(key, computed, fresh, resumed))
        return meta

    def _note_gone(self, scheduler_output: "SchedulerOutput", meta: StepMetadata) -> None:
        """Tables that are void from this step on: of requests that ended, and of preempted ones."""
        for request_id in scheduler_output.finished_req_ids:
            self._wanted.pop(request_id, None)
            self._begun.pop(request_id, None)
            if key := self._keys.pop(request_id, None):
                meta.gone.append(key)
        for request_id in scheduler_output.preempted_req_ids or ():
            if key := self._keys.get(request_id):
                meta.gone.append(key)

    def _note_begun(self, scheduler_output: "SchedulerOutput", meta: StepMetadata) -> None:
        """Requests that begin, and were begun elsewhere or are seeded."""
        if not self._begun:
            return
        for new in scheduler_output.scheduled_new_reqs:
            request, outputs = self._begun.pop(new.req_id, (None, 0))
            if request is not None and history.split(request, outputs, new):
                meta.outputs[new.req_id] = outputs

    # --- worker side ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn the layout; a cache that cannot be moved by blocks is noted, not refused."""
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
        if self._sampled_in_vain:
            history.rewind(self.runner)
        for block_load in meta.loads:
            self._load(block_load)
        self._sampled_in_vain = bool(self._failed)
        for request_id, outputs in meta.outputs.items():
            history.restore(self.runner, request_id, outputs)
        if meta.outputs:
            history.refresh(self.runner)

    def _load(self, wanted: BlockLoad) -> None:
        """Scatter staged blocks, or report the cache blocks as failed."""
        slot, count = wanted.load.slot, wanted.load.last - wanted.load.first
        try:
            if self.layout is None:
                raise TransferFailed(self.unsupported or "no KV cache registered")
            staged = self.segments.payload(slot, count * self.layout.block_bytes)
            self.layout.scatter(wanted.blocks, count, wanted.skip, staged)
            self.segments.check(slot)
        except Exception:
            log.exception("loading %d KV blocks failed; they are recomputed", len(wanted.blocks))
            self._failed.update(wanted.blocks)
            return
        self.blocks_loaded += len(wanted.blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed in this step."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved: blocks are gathered on demand by the worker extension."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
