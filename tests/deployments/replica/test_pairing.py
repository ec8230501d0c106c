"""A replica's part in pairs, up to the first step of one."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from deployments.api.calls import PairOrder
from deployments.metrics.exposition import merge
from deployments.replica.elastic import KvPool
from deployments.replica.pairing import PairCounts, PairKeeper
from migration.memory.pair_run import EngineHalf, PairLook, PairProposal, PairShell
from migration.memory.pair_tables import HalfState, PairEvent
from migration.memory.run import EngineMemory, HostedRequests
from migration.protocol.errors import PeerLost, Refused
from policies.memory.ledger import MemoryOrder, OrderNumber
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import SOLE_POOL, Blocks, Bytes, ReplicaId
from tests.deployments.metrics.test_exposition import parsed
from tests.migration.memory.test_memory_run import FakePool

pytestmark = pytest.mark.virtual_time

A, B = ReplicaId("a"), ReplicaId("b")
MODEL = ModelMemory(Bytes(1000), Bytes(0), Bytes(0), Bytes(50), Blocks(4), 4, Bytes(200))
ORDER = PairOrder(1, B, 1.0)


class Half:
    """The part of `EngineHalf` that comes before the buddy is asked."""

    layers = 4
    unable: str | None = None

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.closed = 0

    async def listen(self, epoch: int) -> str:
        await asyncio.sleep(0.1)
        if self.error is not None:
            raise self.error
        return "address"

    async def close(self) -> None:
        self.closed += 1


class AwayBuddy:
    async def propose_pair(self, proposal: Any) -> str:
        raise PeerLost("it is away")

    async def pair_state(self, epoch: int) -> str | None:
        raise PeerLost("it is away")


class Keeper:
    """A `PairKeeper` of replica a."""

    def __init__(self, size: int = 40, declared: int = 200) -> None:
        self.half, self.pool, self.closed = Half(), FakePool(size, declared), False
        self.pool.model = MODEL
        nothing: Any = None
        self.kv_pool = KvPool(A, cast(EngineMemory, self.pool), cast(HostedRequests, nothing), OrderNumber(0))
        self.keeper = PairKeeper(
            A,
            "model",
            cast(EngineHalf, self.half),
            self.kv_pool,
            lambda _: AwayBuddy(),
            lambda: "the replica stops" if self.closed else None,
            lambda reason: None,
        )

    async def takes_orders(self) -> bool:
        """True if the pool follows an order about its size."""
        await asyncio.sleep(1)
        plan = MemoryPlan(Blocks(30))
        report = self.kv_pool.obey(MemoryOrder(A, OrderNumber(1, 1), plan), 1.0)
        return report.ordered == plan


async def test_a_pool_takes_orders_again_once_the_engine_could_not_begin_a_pair() -> None:
    made = Keeper()
    made.half.error = RuntimeError("unforeseen")
    with pytest.raises(Refused, match="unforeseen"):
        await made.keeper.form(ORDER)
    assert made.keeper.is_over
    assert await made.takes_orders()


async def test_a_replica_that_closes_while_its_engine_begins_is_not_paired() -> None:
    made = Keeper()
    forming = asyncio.create_task(made.keeper.form(ORDER))
    await asyncio.sleep(0.05)
    made.closed = True
    with pytest.raises(Refused, match="the replica stops"):
        await forming
    assert made.keeper.is_over
    assert made.half.closed == 1
    assert await made.takes_orders()


async def test_pairs_are_counted_with_their_hops_whether_they_last_or_are_over() -> None:
    made = Keeper()
    proposal = PairProposal(1, A, B, 2, 4, "model", "address", 1.0)
    nothing: Any = None
    shell = PairShell(proposal, A, nothing, nothing, AwayBuddy(), lambda _: None, lambda: None)
    shell.times = {HalfState.ASKING: 10.0, HalfState.GIVING: 11.0, HalfState.PAIRED: 14.0}
    shell.look = PairLook(remote=2, hops=100, hop_seconds=3.0, lost_steps=1)
    made.keeper._pairing = shell
    lasting = PairCounts(1, 4.0, 0, 0.0, 100, 3.0, 1)
    assert PairCounts.of(shell) == lasting
    shell.times |= {HalfState.SHRINKING: 30.0, HalfState.OVER: 32.5}
    made.keeper._forget()
    assert made.keeper.is_over
    samples = parsed(merge([made.keeper.metrics(SOLE_POOL)]))
    assert {labels[0]: n for labels, n in samples["mell_pair_seconds_count"].items()} == {"forming": 1, "undoing": 1}
    assert {labels[0]: n for labels, n in samples["mell_pair_seconds_sum"].items()} == {"forming": 4.0, "undoing": 2.5}
    for name, value in (("mell_hop_seconds_count", 100), ("mell_hop_seconds_sum", 3.0), ("mell_lost_steps_total", 1)):
        assert list(samples[name].values()) == [value]
    made.half.unable = "it has several workers"
    assert made.keeper.metrics(SOLE_POOL) == ()


async def test_a_late_order_neither_ends_a_newer_pair_nor_forms_an_older_one() -> None:
    made = Keeper()
    nothing: Any = None
    proposal = PairProposal(2, A, B, 2, 4, "model", "address", 1.0)
    shell = PairShell(proposal, A, nothing, nothing, AwayBuddy(), lambda _: None, lambda: None)
    shell.times = {shell.state: asyncio.get_running_loop().time()}
    made.keeper._pairing = shell
    assert not made.keeper.undo("late", 1)
    made.keeper._forget()
    with pytest.raises(Refused, match="newer pair"):
        await made.keeper.form(ORDER)
    assert await made.takes_orders()


async def test_a_refused_proposal_leaves_the_pool_as_it_was() -> None:
    made = Keeper()
    with pytest.raises(Refused, match="layers"):
        await made.keeper.accept(PairProposal(1, B, A, 3, 5, "model", "address", 1.0))
    assert await made.takes_orders()


@pytest.mark.parametrize(("size", "declared", "why"), [(40, 200, None), (4, 200, "raise memory.budget_mib")])
async def test_a_pool_without_room_for_an_exchange_is_not_paired(size: int, declared: int, why: str | None) -> None:
    unable = Keeper(size, declared).keeper.unable
    assert unable is None if why is None else why in (unable or "")


async def test_a_pool_that_could_not_grow_by_what_the_parameters_need_again_is_not_paired() -> None:
    # In a pair the replica would give up memory, and others would have it once its parameters come back.
    assert "memory.declared" in (Keeper(10, 12).keeper.unable or "")
    assert Keeper(10, 13).keeper.unable is None


async def test_a_half_that_is_given_up_is_over_and_has_its_last_report() -> None:
    made = Keeper()
    proposal = PairProposal(1, A, B, 2, 4, "model", "address", 1.0)
    resizer = made.kv_pool.resizer
    assert resizer is not None
    shell = PairShell(
        proposal, A, cast(EngineHalf, made.half), resizer, AwayBuddy(), lambda _: None, made.keeper._forget
    )
    made.keeper._pairing = shell
    shell._feed(PairEvent.CALL_FAILED)
    assert made.keeper.is_over
    report = made.keeper.report()
    assert report is not None and report.state is HalfState.OVER


async def test_an_operator_takes_a_pair_of_the_policy_over() -> None:
    made = Keeper()
    await made.keeper.form(ORDER)
    report = made.keeper.report()
    assert report is not None and not report.by_hand
    await made.keeper.form(replace(ORDER, epoch=2, by_hand=True))
    report = made.keeper.report()
    assert report is not None and (report.epoch, report.by_hand) == (1, True)
