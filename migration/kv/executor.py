"""vLLM's executor with a KV pool that changes its size.

The client of an engine core calls the core's executor with the name of a method of its workers (`collective_rpc`). The
core makes such calls between two steps, whether requests run or not. The calls below are about the pool, which is in
the core's own process, and end here; a renumbering goes on to all workers, within the same call. A step that has been
computed, but whose output the core has not taken yet, may name blocks that could not be filled: by their new ids.

    mell_fit(size, spare)   shrink the pool by some blocks; (size now, blocks over, blocks moved), see `ElasticPool.fit`
    mell_grow(size)         hand out more; (size now, 0, 0)

`mell_pair_copy(layer, back)` goes on to the worker (`pair`) with the ids of all blocks that have KV.
"""

import logging
import os
import weakref
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from migration.kv.pool import Renumbering, declared_times, elastic_pool
from policies.model import Blocks

log = logging.getLogger(__name__)


class ElasticExecutor(MultiprocExecutor):
    """vLLM's executor of workers in processes of their own, as on the CPU build."""

    def _post_init_executor(self) -> None:
        """See `MultiprocExecutor`."""
        self._steps: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        """Outputs of steps that the core has not taken yet."""

    def determine_available_memory(self) -> list[int]:
        """The memory for the declared blocks: of the workers' own number, the multiple that is declared."""
        found = super().determine_available_memory()
        times = declared_times(self.vllm_config)
        assert times is not None, "the pool is elastic"
        cache = self.vllm_config.cache_config
        if cache.num_gpu_blocks_override is not None:
            cache.num_gpu_blocks_override = int(cache.num_gpu_blocks_override * times)
        return [int(each * times) for each in found]

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), *more: Any, **kwargs: Any
    ) -> Any:
        """As vLLM's, but for calls about the pool."""
        if method == "mell_fit":
            return [self._fit(*args)]
        if method == "mell_grow":
            return [(elastic_pool().grow(*args), 0, 0)]
        if method == "mell_pair_copy":
            args = (*args, elastic_pool().filled())
        found = super().collective_rpc(method, timeout, args, *more, **kwargs)
        if isinstance(found, Future):
            self._steps.add(found)
        return found

    def _fit(self, size: Blocks, spare: int) -> tuple[int, int, int]:
        fitted = elastic_pool().fit(size, spare)
        if fitted.moved:
            try:
                super().collective_rpc("mell_renumber", args=(fitted.moved,))
            except BaseException:
                # Some worker may have the old ids: any further step could read another request's KV.
                log.exception("a worker has not renumbered its KV blocks: the engine ends")
                os._exit(1)
            # The workers have answered to the calls before that one.
            for step in self._steps:
                _rename_failed(step, fitted)
        return fitted.size, fitted.over, len(fitted.moved)


def _rename_failed(step: Future[Any], fitted: Renumbering) -> None:
    if not step.exception() and (output := getattr(step.result(), "kv_connector_output", None)) is not None:
        output.invalid_block_ids = fitted.renamed(output.invalid_block_ids)
