"""A replica's memory as far as it follows orders: its KV pool, its sleep, its reports and its metrics."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from deployments.api.calls import MeasuredEngine
from deployments.api.report import ElasticMemory, PairReport
from deployments.metrics.exposition import Family, expose
from deployments.replica.host import RequestHost
from deployments.replica.moves import Moves
from deployments.replica.prefix_cache.evacuation import LastCopies
from deployments.replica.seating import Seating
from migration.memory.run import EngineMemory, HostedRequests, ResizeCounts, Resizer, WakeCounts, begin
from migration.memory.tables import PoolState
from migration.protocol.errors import Refused
from policies.causes import Cause
from policies.memory.ledger import MemoryOrder, MemoryReport, OrderNumber
from policies.memory.plan import ASLEEP
from policies.model import Blocks, PoolId, ReplicaId, ReplicaState

log = logging.getLogger("ray.serve")


async def start_pool(memory: EngineMemory | None, seating: Seating | None) -> OrderNumber:
    """Give the pool of an engine without requests the size that the replica gets with its seat; its place among orders.

    Raises:
        ValueError: see `Seating.wait`.
    """
    if seating is None or memory is None:
        return OrderNumber(0)
    seat = await seating.wait(MeasuredEngine(memory.model, memory.declared, memory.size))
    await begin(memory, seat.plan.blocks or memory.model.floor)
    return seat.at


class ElasticRequests:
    """Implements `HostedRequests` on a replica.

    `pending` is the number of migrations and copies that occupy memory here, `save` has the cache copied to other
    replicas, each time that this one falls asleep, and `give_up` ends the engine for a reason.
    """

    def __init__(
        self,
        host: RequestHost,
        moves: Moves,
        block_size: int,
        pending: Callable[[], int],
        save: Callable[[], LastCopies],
        give_up: Callable[[str], Coroutine[Any, Any, None]],
    ) -> None:
        self._host = host
        self._moves = moves
        self._block_size = block_size
        self._pending = pending
        self._save = save
        self._saving: LastCopies | None = None
        self._give_up = give_up

    @property
    def is_empty(self) -> bool:
        """See `HostedRequests.is_empty`. The cache is copied once there is no request."""
        assert self._saving is not None, "the replica is closed"
        return self._saving.over(empty=not any(self._host.loads()) and not self._pending()) and not self._pending()

    def close(self) -> None:
        """See `HostedRequests.close`."""
        self._moves.sleep()
        self._saving = self._save()

    def open(self) -> None:
        """See `HostedRequests.open`."""
        if self._saving is not None:
            self._saving.close()
        self._host.asleep = False

    def give_back(self, blocks: Blocks) -> None:
        """See `HostedRequests.give_back`."""
        count = self._host.give_back(blocks, self._block_size)
        log.info("the KV pool shrinks: %d requests continue on other replicas", count)

    def give_up(self, reason: str) -> None:
        """See `HostedRequests.give_up`."""
        self._ending = asyncio.create_task(self._give_up(reason))


_STATES = {
    PoolState.EMPTYING: ReplicaState.DRAINING,
    PoolState.DROPPING: ReplicaState.ASLEEP,
    PoolState.ASLEEP: ReplicaState.ASLEEP,
    PoolState.LOADING: ReplicaState.WAKING,
    PoolState.OVER: ReplicaState.DRAINING,
}


class KvPool:
    """The memory of the replica `id`, as far as it follows orders. Without a `memory` it keeps its size.

    `at` is the place of the size at its start among its orders.
    """

    def __init__(self, id: ReplicaId, memory: EngineMemory | None, requests: HostedRequests, at: OrderNumber) -> None:
        self._id = id
        self._memory = memory
        self._resizer = None if memory is None else Resizer(id, memory, time.monotonic, requests, at)
        self._epoch = time.time() - time.monotonic()
        """The zero of the resizer's clock, in seconds since 1970."""

    @property
    def resizer(self) -> Resizer | None:
        """Follows the orders; None if the pool keeps its size."""
        return self._resizer

    def state(self, is_empty: bool) -> ReplicaState:
        """The state of a replica with or without requests whose engine lives, and that does not stop.

        Without any, one that is about to fall asleep is ASLEEP already: nothing is left for it to drain. One that could
        not load is DRAINING until it is replaced.
        """
        if self._resizer is None:
            return ReplicaState.RUNNING
        if is_empty and self._resizer.state is PoolState.EMPTYING:
            return ReplicaState.ASLEEP
        return _STATES.get(self._resizer.state, ReplicaState.RUNNING)

    def obey(self, order: MemoryOrder, shrink_s: float) -> MemoryReport:
        """See `ControlApi.set_memory`."""
        if self._resizer is None or self._memory is None:
            raise Refused("the KV pool keeps its size", Cause.UNEXPECTED)
        if order.plan == ASLEEP and self._memory.sleepless is not None:
            raise Refused(f"the replica cannot sleep: {self._memory.sleepless}", Cause.UNEXPECTED)
        return self._resizer.obey(order, shrink_s)

    def measure(self) -> None:
        """Measure what processes hold beside a pool that rests; its replica is in no pair."""
        memory, resizer = self._memory, self._resizer
        if memory is not None and resizer is not None and resizer.state is PoolState.SETTLED:
            memory.measure(resizer.report.held)

    def report(self, fence: int, unpairable: str | None = None, pair: PairReport | None = None) -> ElasticMemory | None:
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
            memory.sleepless,
            unpairable,
            pair,
            None if resizer.asleep_at is None else self._epoch + resizer.asleep_at,
        )

    def metrics(self, fence: int, pool: PoolId) -> tuple[Family, ...]:
        """The metrics of the pool and of its resizes; none if it keeps its size."""
        report = self.report(fence)
        if report is None or self._resizer is None:
            return ()
        return expose_memory(report, self._resizer.counts, self._resizer.wakes, pool, self._id)

    def close(self) -> None:
        """End a resize under way."""
        if self._resizer is not None:
            self._resizer.close()


def expose_memory(
    memory: ElasticMemory, counts: ResizeCounts, wakes: WakeCounts, pool: PoolId, replica: str
) -> tuple[Family, ...]:
    """The metrics of a replica's memory, of its resizes and of its wakes.

    Their label `replica` is the replica's id, and `pool` its pool's.
    """
    return expose(_Memory(memory, counts, wakes), {"replica": replica, "pool": pool})


class _Memory:
    """A registry of the numbers in a report."""

    def __init__(self, memory: ElasticMemory, counts: ResizeCounts, wakes: WakeCounts) -> None:
        self._memory = memory
        self._counts = counts
        self._wakes = wakes

    def collect(self) -> Iterable[Metric]:
        memory, counts, wakes = self._memory, self._counts, self._wakes
        blocks = GaugeMetricFamily("mell_kv_blocks", "Declared KV blocks by state.", labels=("state",))
        blocks.add_metric(("used",), memory.used)
        blocks.add_metric(("free",), memory.size - memory.used)
        blocks.add_metric(("withheld",), memory.declared - memory.size)
        yield blocks
        sizes = GaugeMetricFamily(
            "mell_memory_bytes", "Memory that the replica may have of its device, by kind.", labels=("kind",)
        )
        for kind, size in memory.parts.items():
            sizes.add_metric((kind,), size)
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
        woken = CounterMetricFamily("mell_wakes", "Wakes of a sleeping replica, by outcome.", labels=("outcome",))
        woken.add_metric(("done",), wakes.done)
        woken.add_metric(("failed",), wakes.failed)
        yield woken
        seconds = SummaryMetricFamily("mell_wake_seconds", "From the order to wake until the replica takes requests.")
        seconds.add_metric((), wakes.done, wakes.seconds)
        yield seconds
