"""Models on a node that has room for one of them awake: an idle one falls asleep for one that waits."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deployments.api.calls import MeasuredEngine, MoveAccepted, PlaceCall, SeatCall, SeatGiven
from deployments.api.report import ElasticMemory, PairReport
from deployments.config import MemorySettings, SchedulerConfig
from deployments.scheduler import scaler
from deployments.scheduler.deployment import LiveScheduler
from deployments.scheduler.memory.nodes import NodeMemory
from deployments.scheduler.scaler import ServeScaler
from migration.memory.pair_tables import HalfState
from migration.memory.tables import PoolState
from migration.protocol.errors import Refused
from policies.causes import Cause
from policies.cluster.changes import Arrival
from policies.decision.limits import Mode
from policies.decision.placement import Place, Queue
from policies.memory.ledger import MemoryReport, OrderNumber, ReplicaMemory
from policies.memory.plan import ASLEEP, MemoryPlan
from policies.model import (
    Blocks,
    Bytes,
    Phase,
    PoolId,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)
from tests.deployments.scheduler.fakes import (
    AnsweringReplica,
    FakeClaims,
    FakeListing,
    FakeModes,
    Present,
    Reporting,
    make_ports,
)
from tests.deployments.scheduler.memory.test_node_memory import MEASURED, MIB, MODEL, ONE, TWO, A, B, C
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time

BUDGET = 400
POOLS = {A: ONE, B: TWO}
BLOCK_TOKENS = 16
WOKEN = 8
"""An answer begins within so many epochs of a request for a sleeping model: sleep, wake, load, and one more of each."""


class House:
    """Implements `RemoteReplicas[ControlApi]`: `awake` and `asleep` replicas on a node, and their scheduler.

    Awake, each needs 250 MiB of the `budget` at least. What falls asleep gives its memory back by its next report, what
    wakes loads for one report. A request is served for `served` epochs. The first model has a minimum of `least`.
    """

    def __init__(self, awake: str, asleep: str, mode: Mode, least: int, budget: int) -> None:
        self.budget = budget
        plans = dict.fromkeys(awake, MemoryPlan(Blocks(150))) | dict.fromkeys(asleep, ASLEEP)
        self.memory = {
            ReplicaId(name): ReplicaMemory(ReplicaId(name), OrderNumber(1), plan, plan) for name, plan in plans.items()
        }
        self.states = {
            id: ReplicaState.RUNNING if each.held.is_awake else ReplicaState.ASLEEP for id, each in self.memory.items()
        }
        self.slept: list[ReplicaId] = []
        self.served = 1
        self.pair: PairReport | None = None
        self.waiting: dict[RequestId, PoolId] = {}
        self.running: dict[ReplicaId, dict[RequestId, int]] = {id: {} for id in self.memory}
        self.answered: list[RequestId] = []
        self._reporting = Reporting()
        config = SchedulerConfig(
            mode=mode, linger_s=600.0, foresight_s=0.0, memory=MemorySettings(budget_mib=budget), bounds=(0, 1)
        )
        self.scalers = {
            pool: ServeScaler("mell", pool, self, self._listing(pool), (fewest, 1), lambda seconds: None, now, now)
            for pool, fewest in ((ONE, least), (TWO, 0))
        }
        ports = [make_ports(pool, self, self._of(pool), self._listing(pool), self.scalers[pool]) for pool in (ONE, TWO)]
        self.claims = FakeClaims()
        self.core = LiveScheduler(ReplicaId("s"), config, 1, ports, now, now, FakeModes(), self.claims)

    def _of(self, pool: PoolId) -> list[ReplicaId]:
        return [replica for replica in self.memory if POOLS[replica] == pool]

    def _listing(self, pool: PoolId) -> FakeListing:
        return FakeListing(self._of(pool))

    def at(self, replica: ReplicaId, routed: bool = True) -> AnsweringReplica:
        return AnsweringReplica(self, replica)

    def forget(self, replica: ReplicaId) -> None: ...

    async def answer(self, replica: ReplicaId, call: str, *args: Any) -> Any:
        if call == "report":
            return self._reporting.report(self._present(replica), args[1], now())
        if call == "close" and self.running[replica]:
            raise Refused("the replica is not empty", Cause.NOT_EMPTY)
        return self._obey(replica, *args) if call == "set_memory" else None

    def _obey(self, replica: ReplicaId, order: Any, shrink_s: float, fence: int) -> MemoryReport:
        before = self.memory[replica]
        after = before.obey(order)
        if order.plan == ASLEEP and before.ordered != ASLEEP:
            assert not self.running[replica], "it has requests"
            self.slept.append(replica)
        elif after.ordered.is_awake:
            if not before.ordered.is_awake:
                self.states[replica] = ReplicaState.WAKING
            after = replace(after, held=after.ordered)
        self.memory[replica] = after
        assert sum(MODEL.need(each.held) for each in self.memory.values()) <= self.budget * MIB
        return after.report

    def _present(self, replica: ReplicaId) -> Present:
        each, state = self.memory[replica], self.states[replica]
        pool_state = PoolState.LOADING if state is ReplicaState.WAKING else PoolState.SETTLED
        if each.ordered == ASLEEP:
            each, self.states[replica] = replace(each, held=ASLEEP), ReplicaState.ASLEEP
            state, pool_state = ReplicaState.ASLEEP, PoolState.ASLEEP
        elif state is ReplicaState.WAKING:
            self.states[replica] = ReplicaState.RUNNING
        self.memory[replica] = each
        blocks, start = each.held.blocks or Blocks(0), Blocks(150)
        requests = tuple(
            RequestLoad(id, id, Tokens(BLOCK_TOKENS), Phase.DECODE, 1.0, 0) for id in self.running[replica]
        )
        model = replace(MODEL, asleep=Bytes(20 * MIB))
        memory = ElasticMemory(
            each.report, model, Blocks(300), start, blocks, Blocks(len(requests)), pool_state, pair=self.pair
        )
        capacity, nominal = Tokens(blocks * BLOCK_TOKENS), Tokens(start * BLOCK_TOKENS)
        free = Blocks(blocks - len(requests))
        load = ReplicaLoad(
            replica, state, "n", capacity, BLOCK_TOKENS, free, 64, requests=requests, nominal_tokens=nominal
        )
        return Present(load, memory=memory)

    async def epoch(self) -> None:
        """A second passes: requests ask for replicas and end, and the scheduler has an epoch."""
        await asyncio.sleep(1.0)
        for replica, requests in self.running.items():
            for id in [id for id, left in requests.items() if not left]:
                del requests[id]
                self.answered.append(id)
            self.running[replica] = {id: left - 1 for id, left in requests.items()}
        await self.core._epochs.epoch()
        for id, pool in list(self.waiting.items()):
            (decision,) = await self.core.place((PlaceCall(pool, Arrival(id, Tokens(BLOCK_TOKENS)), id, ()),))
            if isinstance(decision, Place | Queue) and self.states[decision.replica] is ReplicaState.RUNNING:
                del self.waiting[id]
                self.running[decision.replica][id] = self.served
        await asyncio.sleep(0.1)

    async def epochs(self, count: int) -> None:
        for _ in range(count):
            await self.epoch()

    @property
    def nodes(self) -> NodeMemory:
        assert self.core._nodes is not None
        return self.core._nodes

    async def begins(self, measured: MeasuredEngine | None) -> None:
        """A replica of the second model asks for memory once a second until it has some."""
        for _ in range(WOKEN):
            if isinstance(self.nodes.starting.seat(SeatCall(TWO, C, "n", measured)), SeatGiven):
                return
            await self.epoch()
        raise AssertionError("it waits")

    @property
    def awake(self) -> set[ReplicaId]:
        return {replica for replica, each in self.memory.items() if each.ordered.is_awake}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., House]:
    """A house over fakes of Serve's controller."""
    monkeypatch.setattr(scaler, "generation", lambda: "g")
    monkeypatch.setattr(scaler, "read_bounds", lambda app, pool, generation, configured: configured)
    monkeypatch.setattr(scaler, "write_bounds", lambda *args: None)
    monkeypatch.setattr(scaler, "read_wanted", lambda app, pool, generation: None)
    monkeypatch.setattr(scaler, "write_wanted", lambda app, pool, generation, wanted: None)

    def made(awake: str = "a", asleep: str = "b", mode: Mode = Mode.ACT, least: int = 0, budget: int = BUDGET) -> House:
        return House(awake, asleep, mode, least, budget)

    return made


async def test_an_idle_model_sleeps_for_one_that_wakes(make: Callable[..., House]) -> None:
    house = make()
    await house.epochs(5)
    assert house.awake == {A} and not house.slept, "nobody needs its memory"
    house.waiting[RequestId("q")] = TWO
    await house.epochs(WOKEN)
    assert house.slept == [A] and house.answered == ["q"]
    assert house.awake == {B} and [house.scalers[pool].wanted for pool in (ONE, TWO)] == [0, 1]


async def test_a_model_with_a_request_does_not_sleep_until_that_ends(make: Callable[..., House]) -> None:
    house = make()
    house.served = 20
    house.waiting[RequestId("p")] = ONE
    await house.epochs(5)
    house.waiting[RequestId("q")] = TWO
    await house.epochs(WOKEN)
    assert house.awake == {A} and not house.slept
    await house.epochs(20 + WOKEN)
    assert house.slept == [A] and house.awake == {B}


async def test_a_model_with_a_request_in_every_epoch_leaves_the_floor_of_another_one_that_wakes(
    make: Callable[..., House],
) -> None:
    """The pool of the one shrinks, and both serve."""
    house = make(budget=520)
    house.running[A], house.served = {RequestId("r"): 1000}, 1000
    await house.epochs(3)
    before = house.memory[A].held.blocks or 0
    house.waiting[RequestId("q")] = TWO
    await house.epochs(WOKEN)
    assert house.running[B] and house.running[A] and not house.slept
    assert (house.memory[A].held.blocks or 0) <= 70 < before, (
        "of 520 MiB, the other one needs 250, and this one 200 + KV"
    )


@pytest.mark.parametrize(
    ("mode", "least", "is_paired"),
    [(Mode.ACT, 1, False), (Mode.OBSERVE, 0, False), (Mode.OFF, 0, False), (Mode.ACT, 0, True)],
    ids=["the minimum", "mode observe", "mode off", "a pair"],
)
async def test_an_idle_model_that_may_not_sleep_stays_awake(
    make: Callable[..., House], mode: Mode, least: int, is_paired: bool
) -> None:
    house = make(asleep="", mode=mode, least=least)
    house.pair = PairReport(1, B, HalfState.PAIRED, (0, 1), 0) if is_paired else None
    await house.epochs(3)
    house.nodes.ledgers.take_measurement(TWO, MODEL)
    with pytest.raises(AssertionError, match="it waits"):
        await house.begins(None)
    assert not house.slept


@pytest.mark.parametrize("is_known", [True, False], ids=["before its engine starts", "with its measured engine"])
async def test_an_idle_model_sleeps_for_one_that_starts(make: Callable[..., House], is_known: bool) -> None:
    """What nobody knows yet is taken to fit beside the smallest pool of the other."""
    house = make(asleep="")
    await house.epochs(3)
    if is_known:
        house.nodes.ledgers.take_measurement(TWO, MODEL)
    await house.begins(None)
    assert house.slept == ([A] if is_known else [])
    await house.begins(MEASURED)
    assert house.slept == [A]


@pytest.mark.parametrize(("every", "turns"), [(1, "a"), (6, "abababa")])
async def test_models_that_are_asked_in_turns_sleep_for_requests_of_the_other_one_only(
    make: Callable[..., House], every: int, turns: str
) -> None:
    """A request each second keeps the first model awake until they end; of rarer ones, each has a model sleep."""
    house = make()
    asked = [RequestId(f"q{number}") for number in range(8)]
    for number, id in enumerate(asked):
        house.waiting[id] = (ONE, TWO)[number % 2]
        await house.epochs(every)
    await house.epochs(2 * WOKEN)
    assert sorted(house.answered) == sorted(asked) and house.slept == list(turns)
    await house.epochs(30)
    assert house.slept == list(turns) and len(house.awake) == 1


async def test_a_scheduler_that_has_been_replaced_gives_no_memory(make: Callable[..., House]) -> None:
    house = make(asleep="")
    await house.epochs(3)
    call = SeatCall(TWO, C, "n", None)
    await house.core.seat(call)
    house.claims.replaced = True
    with pytest.raises(Refused):
        await house.core.seat(call)


async def test_all_replicas_of_a_model_may_sleep_once_an_operator_has_lowered_its_minimum(
    make: Callable[..., House],
) -> None:
    house = make(least=1)
    await house.epochs(3)
    house.waiting[RequestId("q")] = TWO
    await house.epochs(WOKEN)
    assert not house.slept
    assert await house.core.set_bounds(ONE, 0, 1) == MoveAccepted(ONE)
    await house.epochs(WOKEN)
    assert house.slept == [A] and house.answered == ["q"]
