"""The worker extension: a replica's calls to its engine's worker before the engine serves.

vLLM mixes this class into its Worker (`worker_extension_cls`); `collective_rpc` calls its methods in order with
the steps. Blocks are copied by the copier (`copier`), which waits for no step.
"""

import logging
import multiprocessing
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from migration.kv.connector import MellConnector
from migration.protocol.errors import TransferFailed

if TYPE_CHECKING:
    from migration.kv.parameters import Parameters

log = logging.getLogger(__name__)


class MellWorker:
    """A mix-in of vLLM's Worker; the prefix `mell_` keeps method names from clashing with the Worker's own."""

    model_runner: Any
    """The Worker's model runner."""
    vllm_config: VllmConfig
    mell_parameters: "Parameters"
    """Those of an engine with an elastic pool."""

    def mell_describe(self) -> dict[str, Any]:
        """The cache's `ShardShape` ("layout"), the copier's address, and the process ids.

        If blocks cannot be moved, the layout is None, there is no copier, and "unsupported" has the reason; in
        "unmirrored" is the reason why the cache's contents cannot be followed, None if they can. Contexts
        of n tokens hold n / block size blocks only if the cache is "plain". "host_blocks" are those for which a tier of
        host memory has room, 0 without one; "parameter_bytes" is the size of the parameters without biases, which stay,
        0 unless the pool is elastic, and "kept_parameters" the reason why they cannot be dropped, None if they can. An
        engine of a pooling model has no connector at all.

        Must be called before the first request: it also gives the connector the model runner.
        """
        starter = multiprocessing.parent_process()  # not the operating system's parent, which may be a fork server
        processes = {"worker_pid": os.getpid(), "starter_pid": starter.pid if starter else None}
        if not has_kv_transfer_group():
            return {**_WITHOUT_CONNECTOR, **processes}
        connector = connector_of_worker()
        connector.runner = self.model_runner
        layout = connector.layout
        return {
            "layout": list(layout.shape) if layout else None,
            "quantized": connector.quantized,
            "block_bytes": layout.block_bytes if layout else 0,
            "num_blocks": connector.num_blocks,
            "plain": connector.unmovable is None,
            "unsupported": connector.unsupported,
            "unmirrored": connector.unmirrored,
            "host_blocks": connector.host_blocks,
            **(self._describe_parameters() if connector.is_elastic else _NOT_DROPPED),
            "copier": connector.copier.address if connector.copier else None,
            **processes,
        }

    def _describe_parameters(self) -> dict[str, Any]:
        # A version of vLLM may lack what this needs, and then no pool is elastic.
        from migration.kv.parameters import Parameters

        self.mell_parameters = Parameters(self.model_runner.get_model(), self.vllm_config)
        return {"parameter_bytes": self.mell_parameters.size, "kept_parameters": self.mell_parameters.why_kept()}

    def mell_renumber(self, moved: Sequence[tuple[int, int]]) -> None:
        """See `MellConnector.renumber`; the executor calls it (`executor`)."""
        connector_of_worker().renumber(moved)

    def mell_release(self, first: int) -> str | None:
        """See `MellConnector.give_back`; the reason if the machine did not take the memory."""
        try:
            connector_of_worker().give_back(first)
        except OSError as error:
            return str(error)
        return None

    def mell_drop(self) -> None:
        """Drop the parameters of all layers (`Parameters.drop`)."""
        self.mell_parameters.drop(self.model_runner.get_model().modules())

    def mell_load(self) -> str | None:
        """Load the dropped parameters; the reason if that failed, and they are still dropped."""
        try:
            self.mell_parameters.load()
        except Exception as error:
            log.exception("the model's parameters could not be loaded again")
            return f"{type(error).__name__}: {error}"
        return None


_NOT_DROPPED: dict[str, Any] = {"parameter_bytes": 0, "kept_parameters": "memory.budget_mib is not set"}

_WITHOUT_CONNECTOR: dict[str, Any] = {
    "layout": None,
    "quantized": False,
    "block_bytes": 0,
    "num_blocks": 1,
    "plain": True,
    "unsupported": "the engine has no connector",
    "unmirrored": "a pooling model's cache is not followed",
    "host_blocks": 0,
    **_NOT_DROPPED,
    "copier": None,
}
"""The description of a worker of a pooling model."""


def connector_of_worker() -> MellConnector:
    """The connector of this process, an engine's worker. Raises TransferFailed without one."""
    connector = get_kv_transfer_group()
    if not isinstance(connector, MellConnector):
        raise TransferFailed("the engine runs without Mell's KV connector")
    return connector
