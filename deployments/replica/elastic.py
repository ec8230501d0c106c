"""A replica's elastic KV pool: its size at the start, its orders, its reports and its metrics."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from deployments.api.calls import MeasuredEngine
from deployments.api.report import ElasticMemory
from deployments.engine.port import Engine
from deployments.metrics.exposition import Family, expose
from deployments.replica.seating import Seating
from migration.memory.run import EngineMemory, ResizeCounts, Resizer, begin
from migration.protocol.errors import Refused
from policies.causes import Cause
from policies.memory.ledger import MemoryOrder, MemoryReport, OrderNumber
from policies.model import Blocks, PoolId, ReplicaId

log = logging.getLogger("ray.serve")


class KvPool:
    """The KV pool of the replica `id`. Without a `memory` it keeps its size.

    `at` is the place of the size at its start among its orders.
    """

    def __init__(
        self, id: ReplicaId, memory: EngineMemory | None, give_back: Callable[[Blocks], object], at: OrderNumber
    ) -> None:
        self._id = id
        self._memory = memory
        self._resizer = None if memory is None else Resizer(id, memory, time.monotonic, give_back, at)

    @classmethod
    async def start(
        cls, id: ReplicaId, engine: Engine, seating: Seating | None, give_back: Callable[[Blocks, int], int]
    ) -> Self:
        """Give the pool of an engine without requests the size that the replica gets with its seat.

        `give_back` is that of `RequestHost`.

        Raises:
            ValueError: see `Seating.wait`.
        """
        at = OrderNumber(0)
        if seating is not None and (memory := engine.memory) is not None:
            seat = await seating.wait(MeasuredEngine(memory.model, memory.declared, memory.size))
            await begin(memory, seat.plan.blocks or memory.model.floor)
            at = seat.at

        def given_back(blocks: Blocks) -> None:
            count = give_back(blocks, engine.stats().block_size)
            log.info("the KV pool shrinks: %d requests continue on other replicas", count)

        return cls(id, engine.memory, given_back, at)

    def obey(self, order: MemoryOrder, shrink_s: float) -> MemoryReport:
        """See `ControlApi.set_memory`."""
        if self._resizer is None:
            raise Refused("the KV pool keeps its size", Cause.UNEXPECTED)
        return self._resizer.obey(order, shrink_s)

    def report(self, fence: int) -> ElasticMemory | None:
        """The report to a scheduler with this fence; None if the pool keeps its size."""
        memory, resizer = self._memory, self._resizer
        if memory is None or resizer is None:
            return None
        return ElasticMemory(
            resizer.asked(fence),
            memory.model,
            memory.declared,
            memory.start,
            memory.size,
            memory.used,
            resizer.state,
            resizer.cause,
        )

    def metrics(self, fence: int, pool: PoolId) -> tuple[Family, ...]:
        """The metrics of the pool and of its resizes; none if it keeps its size."""
        report = self.report(fence)
        if report is None or self._resizer is None:
            return ()
        return expose_memory(report, self._resizer.counts, pool, self._id)

    def close(self) -> None:
        """End a resize under way."""
        if self._resizer is not None:
            self._resizer.close()


def expose_memory(memory: ElasticMemory, counts: ResizeCounts, pool: PoolId, replica: str) -> tuple[Family, ...]:
    """The metrics of an elastic pool, and of its resizes.

    Their label `replica` is the replica's id, and `pool` its pool's.
    """
    return expose(_Memory(memory, counts), {"replica": replica, "pool": pool})


class _Memory:
    """A registry of the numbers in a report."""

    def __init__(self, memory: ElasticMemory, counts: ResizeCounts) -> None:
        self._memory = memory
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        memory, counts = self._memory, self._counts
        blocks = GaugeMetricFamily("mell_kv_blocks", "Declared KV blocks by state.", labels=("state",))
        blocks.add_metric(("used",), memory.used)
        blocks.add_metric(("free",), memory.size - memory.used)
        blocks.add_metric(("withheld",), memory.declared - memory.size)
        yield blocks
        sizes = GaugeMetricFamily(
            "mell_memory_bytes", "Memory that the replica may have of its device, by kind.", labels=("kind",)
        )
        sizes.add_metric(("parameters",), memory.model.parameters)
        sizes.add_metric(("kv",), (memory.report.held.blocks or 0) * memory.model.block)
        sizes.add_metric(("rest",), memory.model.fixed)
        yield sizes
        resizes = CounterMetricFamily(
            "mell_resizes",
            "Resizes of the KV pool that ended, by direction and outcome.",
            labels=("direction", "outcome"),
        )
        resizes.add_metric(("shrink", "done"), counts.shrunk)
        resizes.add_metric(("shrink", "failed"), counts.failed_shrinks)
        resizes.add_metric(("grow", "done"), counts.grown)
        resizes.add_metric(("grow", "failed"), counts.failed_growths)
        yield resizes
        ended = counts.shrunk + counts.failed_shrinks + counts.grown + counts.failed_growths
        seconds = SummaryMetricFamily("mell_resize_seconds", "From the order of a resize to its end.")
        seconds.add_metric((), ended, counts.seconds)
        yield seconds
        moved = CounterMetricFamily("mell_blocks_renumbered", "Used KV blocks that changed their places in a resize.")
        moved.add_metric((), counts.renumbered)
        yield moved
