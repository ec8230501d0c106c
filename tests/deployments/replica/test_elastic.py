"""The state of a replica by that of its memory."""

import time

import pytest

from deployments.replica.elastic import KvPool
from policies.memory.ledger import MemoryOrder, OrderNumber
from policies.memory.plan import ASLEEP, MemoryPlan
from policies.model import SOLE_POOL, Blocks, ReplicaState
from tests.migration.memory.test_memory_run import FakePool, R

pytestmark = pytest.mark.virtual_time


class NoRequests:
    """Implements `HostedRequests` for a replica without any."""

    is_empty = True

    def __init__(self) -> None:
        self.given_up: list[str] = []

    def close(self) -> None: ...

    def open(self) -> None: ...

    def give_back(self, blocks: Blocks) -> None: ...

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)


async def test_a_replica_that_cannot_load_takes_no_request_until_it_is_replaced() -> None:
    memory, requests = FakePool(), NoRequests()
    memory.unloadable = 3
    pool = KvPool(R, memory, requests, OrderNumber(0))
    assert pool._resizer is not None
    states, times = [], []
    for number, plan in enumerate([ASLEEP, *[MemoryPlan(Blocks(8))] * 3], start=1):
        pool.obey(MemoryOrder(R, OrderNumber(1, number), plan), 5.0)
        await pool._resizer.settled()
        states.append(pool.state(is_empty=True))
        report = pool.report(1)
        assert report is not None
        times.append(report.asleep_at)
    assert states == [ReplicaState.ASLEEP] * 3 + [ReplicaState.DRAINING] and requests.given_up
    assert times[0] is not None and times == [times[0]] * 4, "a failed wake is none"


async def test_a_replica_reports_since_when_it_sleeps_until_it_has_woken() -> None:
    pool = KvPool(R, FakePool(), NoRequests(), OrderNumber(0))
    assert pool._resizer is not None
    began, times = time.time(), []
    for number, plan in enumerate([MemoryPlan(Blocks(8)), ASLEEP, MemoryPlan(Blocks(8)), ASLEEP], start=1):
        pool.obey(MemoryOrder(R, OrderNumber(1, number), plan), 5.0)
        await pool._resizer.settled()
        report = pool.report(1)
        assert report is not None
        times.append(report.asleep_at)
    awake, first, woken, second = times
    assert awake is woken is None and first is not None and second is not None
    assert began - 1 < first < second < time.time() + 1, "in seconds since 1970"


async def test_a_pool_is_measured_once_it_rests() -> None:
    memory = FakePool()
    pool = KvPool(R, memory, NoRequests(), OrderNumber(0))
    assert pool._resizer is not None
    pool.metrics(1, SOLE_POOL)
    assert not memory.calls, "whoever looks at the metrics knows of no pair"
    pool.obey(MemoryOrder(R, OrderNumber(1, 1), MemoryPlan(Blocks(8))), 5.0)
    pool.measure()
    assert not any("measure" in call for call in memory.calls)
    await pool._resizer.settled()
    pool.measure()
    assert memory.calls[-1] == "measure 8"
