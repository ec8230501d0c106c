"""The worker extension: a replica's calls to its engine's worker, between two steps.

vLLM mixes this class into its Worker (`worker_extension_cls`); `collective_rpc` calls its methods in order with
the steps. An exception would end the worker, so a call that can fail returns its error as a value.
"""

import logging
import os
import secrets
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from migration.kv.connector import MellConnector
from migration.kv.layout import CacheLayout
from migration.kv.staging import HEADER
from migration.protocol.errors import BlocksGone, TransferFailed

log = logging.getLogger(__name__)


class MellWorker:
    """A mix-in of vLLM's Worker; the prefix `mell_` keeps method names from clashing with the Worker's own."""

    model_runner: Any
    """The Worker's model runner."""

    def mell_describe(self) -> dict[str, Any]:
        """The cache's layout (empty if blocks cannot be moved; "unsupported" has the reason) and the process ids.

        Must be called before the first request: it also gives the connector the model runner.
        """
        connector = _connector()
        connector.runner = self.model_runner
        layout = connector.layout
        return {
            "layout": layout.describe() if layout else "",
            "block_bytes": layout.block_bytes if layout else 0,
            "num_blocks": connector.num_blocks,
            "unsupported": connector.unsupported,
            "worker_pid": os.getpid(),
            "parent_pid": os.getppid(),
        }

    def mell_gather(self, key: str, first: int, last: int, segment: str, offset: int) -> dict[str, Any]:
        """Copy blocks [first, last) of a running request into a slot.

        Returns:
            {"ticket", "bytes"}, or {"error"} if a block is not full, with "gone" if the request holds no blocks.
        """
        try:
            return self._mell_gather(_connector(), key, first, last, segment, offset)
        except BlocksGone as error:
            return {"error": str(error), "gone": True}
        except TransferFailed as error:
            return {"error": str(error)}
        except Exception as error:
            log.exception("gathering KV blocks failed")
            return {"error": f"gathering KV blocks failed: {error}"}

    def _mell_gather(
        self, connector: MellConnector, key: str, first: int, last: int, segment: str, offset: int
    ) -> dict[str, Any]:
        layout = _layout(connector)
        table = connector.tables.get(key)
        if table is None:
            raise BlocksGone("the request holds no blocks (waiting, preempted or ended)")
        if last * connector.block_size > table.computed:
            raise TransferFailed(f"only {table.computed} tokens are computed, block {last} is not full")
        memory = connector.segments.get(segment)
        size = (last - first) * layout.block_bytes
        payload = memory.view(offset + HEADER, size)
        memory.stamp(offset, 0)
        layout.gather(table.blocks[first:last], payload)
        ticket = secrets.randbits(63) | 1
        memory.stamp(offset, ticket)
        return {"ticket": ticket, "bytes": HEADER + size}

    def mell_counters(self) -> dict[str, int]:
        """The number of blocks loaded since the start, and of requests with a block table."""
        connector = _connector()
        return {"blocks_loaded": connector.blocks_loaded, "tables": len(connector.tables)}


def _connector() -> MellConnector:
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    if not isinstance(connector, MellConnector):
        raise TransferFailed("the engine runs without Mell's KV connector")
    return connector


def _layout(connector: MellConnector) -> CacheLayout:
    if connector.layout is None:
        raise TransferFailed(connector.unsupported or "no KV cache registered")
    return connector.layout
