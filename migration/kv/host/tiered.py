"""Mell's connector with a tier of host memory behind the prefix cache.

`TieredConnector` is `MellConnector` and drives vLLM's `OffloadingConnector` beside it, each with its own part of the
steps' messages. vLLM has a connector of several others (`MultiConnector`); this one knows more of both:

    blocks to load     Mell's loads and tails first; for all other requests, the blocks that the tier has
    blocks in use      vLLM's offloading stores a block of an ended request later, unless a step gets the block before.
                       Blocks of Mell's loads are written outside of steps, so the tier is given these, too
    spoiled blocks     a request whose blocks the tier could not load is computed from the first of them on; vLLM's
                       offloading knows no such failure
    events             the names of the tier's blocks, in the batches and the contents that have those of the pool

Beside those of `MellConnector`, a request may have the parameters "mell_pin": the `PinnedBlocks` as a mapping;
"mell_unpin": str, the name of a pin that ends. The reply is the number of blocks.

What the tier keeps is written through: each full block, of prompt and output, as soon as it is computed. A request
finds it when the prefix cache has lost it: after an eviction, or after its own preemption.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from migration.kv.cache_events import PoolContents, pool_contents, split_names
from migration.kv.connector import MellConnector, PinnedBlocks, StepMetadata, StepReport, why_unmirrored
from migration.kv.host.host_tier import HostTierManager, HostTierWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class TieredMetadata(StepMetadata):
    """The metadata of one step, with the tier's."""

    tier: OffloadingConnectorMetadata | None = None


@dataclass
class TieredReport(StepReport):
    """The messages of one step's workers, with the tier's. `spoiled` slots cannot be used (see `HostTierWorker`)."""

    tier: OffloadingWorkerMetadata | None = None
    spoiled: frozenset[int] = frozenset()

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "TieredReport":
        """The sum of two workers' reports."""
        assert isinstance(other, TieredReport)
        both = super().aggregate(other)
        tier = self.tier.aggregate(other.tier) if self.tier and other.tier else self.tier or other.tier
        return TieredReport(both.arrived, both.halts, tier, self.spoiled | other.spoiled)


class TieredConnector(MellConnector):
    """Both halves of the connector; vLLM creates one instance per role.

    For a cache whose blocks do not have one name each, it makes a `MellConnector` instead: there is no tier then.
    """

    def __new__(
        cls, vllm_config: "VllmConfig", role: "KVConnectorRole", kv_cache_config: "KVCacheConfig"
    ) -> "MellConnector":
        """A connector with a tier, if the cache can have one."""
        if why_unmirrored(kv_cache_config.kv_cache_groups):
            return MellConnector(vllm_config, role, kv_cache_config)
        made: TieredConnector = super().__new__(cls)
        return made

    def __init__(self, vllm_config: "VllmConfig", role: "KVConnectorRole", kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._tier = OffloadingConnector(vllm_config, role, kv_cache_config)
        self._from_tier: set[str] = set()
        """vLLM's ids of the requests that load blocks from the tier, if they are admitted."""

    @property
    def host_blocks(self) -> int:
        """The number of blocks for which the tier has room."""
        assert self._tier.connector_worker is not None
        return int(self._tier.connector_worker.spec.num_chunks)

    # --- scheduler side -------------------------------------------------------------------------------

    @property
    def _manager(self) -> HostTierManager:
        manager = self._tier.scheduler.manager
        assert isinstance(manager, HostTierManager)
        return manager

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Give both the cache's manager."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._tier.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        """Begin to follow a request; carry out its orders to the tier."""
        super().on_new_request(request)
        self._tier.on_new_request(request)
        params, id = request.kv_transfer_params or {}, request.request_id
        if pin := params.get("mell_pin"):
            wanted = PinnedBlocks(**pin)
            self._replies[id] = self._manager.pin(wanted.pin, split_names(wanted.names))
        if unpin := params.get("mell_unpin"):
            self._replies[id] = self._manager.unpin(unpin)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """As `MellConnector`'s, or else the tokens that the tier has: all but the last, as in the prefix cache."""
        self._from_tier.discard(request.request_id)
        covered, waits = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if covered != 0:
            return covered, waits
        most = request.num_tokens - 1 - num_computed_tokens
        found, waits = self._tier.scheduler.get_num_new_matched_tokens(request, num_computed_tokens, most)
        if found:
            self._from_tier.add(request.request_id)
        return found, waits

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        """The sources of the tokens that a request loads."""
        if request.request_id not in self._from_tier:
            return dict(super().get_external_cache_hit_sources(request, num_external_tokens))
        return dict(self._tier.get_external_cache_hit_sources(request, num_external_tokens))

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Begin the loads of a request from where its tokens are."""
        by_tier = request.request_id in self._from_tier
        super().update_state_after_alloc(request, blocks, 0 if by_tier else num_external_tokens)
        self._tier.update_state_after_alloc(request, blocks, num_external_tokens if by_tier else 0)
        if num_external_tokens and not by_tier:
            # Its blocks are in no step. A store that has not read them yet is made before the copier writes to them.
            self._tier.scheduler._current_batch_allocated_block_ids.update(chain(*blocks.get_block_ids()))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """The step's metadata for the worker. Mell's comes first: it may split a request into prompt and output."""
        step = super().build_connector_meta(scheduler_output)
        tier = self._tier.build_connector_meta(scheduler_output)
        assert isinstance(tier, OffloadingConnectorMetadata)
        return TieredMetadata(**{each.name: getattr(step, each.name) for each in dataclasses.fields(step)}, tier=tier)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """As `MellConnector`'s; then the tier's stores and loads that are complete, or spoiled."""
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, TieredReport)
        if report is not None and report.spoiled:
            self._manager.spoil(report.spoiled)
        if self._manager.spoiled:
            for request_id in connector_output.finished_recving or ():
                self._cut(request_id)
        try:
            connector_output.kv_connector_worker_meta = report.tier if report is not None else None
            self._tier.update_connector_output(connector_output)
        finally:
            connector_output.kv_connector_worker_meta = report

    def _cut(self, request_id: str) -> None:
        """Have a request whose load has ended compute its tokens from the first spoiled block on.

        vLLM does the same for blocks that a connector reports as failed, but only if the policy for such failures is to
        compute; a tail that fails (`TailLoad`) has to fail its request.
        """
        status = self._tier.scheduler._req_status.get(request_id)
        if status is None or status.req.is_finished():
            return
        jobs = [self._tier.scheduler._jobs[job] for job in status.transfer_jobs]
        loaded = {key for job in jobs if not job.is_store for key in job.keys}
        ends = [status.req_context.get_offload_key_position(key) for key in loaded & self._manager.spoiled]
        if not ends:
            return
        request, local = status.req, status.num_locally_computed_tokens
        request.num_computed_tokens = min(ends) - self.block_size
        (group,) = status.group_states
        group.next_stored_chunk_idx = request.num_computed_tokens // self.block_size
        if request.prefill_stats is not None and not request.num_preemptions:
            sound = request.num_computed_tokens - local
            request.prefill_stats.set(request.prefill_stats.num_prompt_tokens, local, sound)
        if not request.num_computed_tokens:
            # vLLM looks for blocks anew, and allocates all of them.
            self._kv_cache_manager.free(request)

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """The changes of the tier, and behind them the contents, if a request has asked for them."""
        return (*self._manager.changes(), *super().take_events())

    def _delete(self, names: bytes | None) -> int:
        return super()._delete(names) + self._manager.delete(None if names is None else split_names(names))

    def _contents(self) -> PoolContents:
        return pool_contents(self._kv_cache_manager.block_pool, self._manager.names())

    def has_pending_push_work(self) -> bool:
        """True while stores or loads of the tier are under way: they end with a step, also of an idle engine."""
        pending: bool = self._tier.has_pending_push_work()
        return pending

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that ends."""
        self._from_tier.discard(request.request_id)
        self._tier.request_finished_all_groups(request, block_ids)
        return super().request_finished_all_groups(request, block_ids)

    def reset_cache(self) -> bool:
        """Empty the tier. False while stores or loads are under way."""
        if self._tier.has_pending_push_work():
            return False
        self._tier.reset_cache()
        return True

    # --- worker side ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Give both the cache."""
        super().register_kv_caches(kv_caches)
        self._tier.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: "KVConnectorMetadata") -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        self._tier.bind_connector_metadata(_tier_part(connector_metadata))

    def clear_connector_metadata(self) -> None:
        """End a step."""
        super().clear_connector_metadata()
        self._tier.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: "KVConnectorMetadata") -> None:
        """Make the stores whose blocks this step may reuse; then void block tables, begin and end loads."""
        self._tier.handle_preemptions(_tier_part(kv_connector_metadata))
        super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """As `MellConnector`'s; then the tier's loads."""
        super().start_load_kv(forward_context, **kwargs)
        self._tier.start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """Note the blocks that the tier stores before the next step."""
        self._tier.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As `MellConnector`'s; ended loads of the tier, too."""
        sent, ended = super().get_finished(finished_req_ids)
        _, loaded = self._tier.get_finished(finished_req_ids)
        return sent, (ended or set()) | loaded

    def build_connector_worker_meta(self) -> StepReport | None:
        """As `MellConnector`'s, with the tier's."""
        report, tier, spoiled = super().build_connector_worker_meta(), self._tier.build_connector_worker_meta(), set()
        if isinstance(worker := self._worker, HostTierWorker):
            spoiled, worker.spoiled = worker.spoiled, spoiled
        if report is None and tier is None and not spoiled:
            return None
        report = report or StepReport()
        return TieredReport(report.arrived, report.halts, tier, frozenset(spoiled))

    @property
    def _worker(self) -> Any:
        """vLLM's worker half of the tier."""
        assert self._tier.connector_worker is not None
        return self._tier.connector_worker.worker

    def shutdown(self) -> None:
        """End both."""
        super().shutdown()
        self._tier.shutdown()

    # --- both -----------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """vLLM's statistics of its offloading."""
        return self._tier.get_kv_connector_stats()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """That of vLLM's offloading."""
        layout: str | None = OffloadingConnector.get_required_kvcache_layout(vllm_config)
        return layout

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "KVConnectorStats | None":
        """Those of vLLM's offloading."""
        return OffloadingConnector.build_kv_connector_stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics":
        """Those of vLLM's offloading."""
        return OffloadingConnector.build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _tier_part(metadata: "KVConnectorMetadata") -> OffloadingConnectorMetadata:
    assert isinstance(metadata, TieredMetadata)
    assert metadata.tier is not None
    return metadata.tier
