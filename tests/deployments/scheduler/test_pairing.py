"""The policy of pairs in the live scheduler, over replicas that stand in for real ones: they report, and obey."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.api.calls import MoveAccepted, PairOrder
from deployments.api.report import ElasticMemory, PairReport
from deployments.config import MemorySettings, PairingSettings, SchedulerConfig
from deployments.metrics.exposition import merge
from deployments.scheduler.deployment import LiveScheduler
from deployments.scheduler.recorder import FileRecorder
from migration.memory.pair_tables import HalfState
from migration.memory.tables import PoolState
from migration.protocol.errors import Refused
from policies.causes import Cause
from policies.cost.fit import NO_STEPS
from policies.cost.steps import PrefillChunk
from policies.decision.limits import Mode
from policies.decision.pairs import ANSWER_S
from policies.memory.ledger import MemoryReport, OrderNumber
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import (
    SOLE_POOL,
    Blocks,
    Bytes,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)
from policies.plan import Pair, Unpair
from simulator.command.replay import replay
from simulator.workload.recording import read_recording
from tests.deployments.metrics.test_exposition import parsed
from tests.deployments.scheduler.fakes import (
    AnsweringReplica,
    FakeClaims,
    FakeListing,
    FakeModes,
    Present,
    Reporting,
    make_ports,
)
from tests.deployments.scheduler.test_scheduler import FakeScaler
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time

A, B = ReplicaId("a"), ReplicaId("b")
BLOCKS, BLOCK_TOKENS, MIB = 256, 4, 1 << 20
MODEL = ModelMemory(Bytes(100 * MIB), Bytes(10 * MIB), Bytes(MIB), Bytes(MIB), Blocks(4), 4, Bytes(20 * MIB))
FIRST = OrderNumber(1)
PAIR = Pair(A, B, Tokens(2 * 40 * BLOCK_TOKENS))
"""Each half drops two layers of 20 MiB, for blocks of one."""


def requests(replica: ReplicaId, running: int, waiting: int) -> Sequence[RequestLoad]:
    """Requests of 100 tokens."""
    phases = [Phase.DECODE] * running + [Phase.WAITING] * waiting
    return [
        RequestLoad(RequestId(f"{replica}{number}"), "", Tokens(100), phase, 1.0, 0)
        for number, phase in enumerate(phases)
    ]


class Steady(FakeScaler):
    """Two replicas, of which none may sleep."""

    def spare(self, idle: Sequence[ReplicaId]) -> Sequence[ReplicaId]:
        return ()


class Burst:
    """Implements `RemoteReplicas[ControlApi]`: two replicas on a node, each with `running` and `waiting` requests.

    They give layers for as long as `giving`, and get them back within one report. Their `orders` are those about pairs.
    """

    def __init__(self, pairing: Mode = Mode.ACT, mode: Mode = Mode.ACT) -> None:
        self.running, self.waiting = 10, 1
        self.half: PairReport | None = None
        self.orders: list[str] = []
        self.refuses = self.giving = False
        self._steps = NO_STEPS
        self._reporting = Reporting()
        self.config = SchedulerConfig(
            mode=mode,
            policy="pack",
            bounds=(2, 2),
            linger_s=600.0,
            foresight_s=0.0,
            memory=MemorySettings(budget_mib=2 * (110 + BLOCKS)),
            pairing=PairingSettings(mode=pairing),
        )
        ports = make_ports(SOLE_POOL, self, (A, B), FakeListing((A, B)), Steady(2, 2))
        self.core = LiveScheduler(ReplicaId("s"), self.config, 1, [ports], now, now, FakeModes(), FakeClaims())

    async def epochs(self, count: int = 1) -> None:
        for _ in range(count):
            await asyncio.sleep(1.0)
            await self.core._epochs.epoch()
            await asyncio.sleep(0.01)

    async def pairing(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.core.state(SOLE_POOL))["pairing"]
        return found

    def at(self, replica: ReplicaId, routed: bool = True) -> AnsweringReplica:
        return AnsweringReplica(self, replica)

    def forget(self, replica: ReplicaId) -> None: ...

    async def answer(self, replica: ReplicaId, call: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        if call == "report":
            return self._reporting.report(self._present(replica), args[1], now())
        if call in ("pair", "unpair"):
            self.orders.append(call)
            if self.refuses:
                raise Refused("no room", Cause.UNEXPECTED)
        if call == "pair":
            order: PairOrder = args[0]
            self.half = PairReport(order.epoch, order.upper, HalfState.GIVING, (0, 2), 0, by_hand=order.by_hand)
        elif call == "unpair" and self.half is not None:
            self.half = replace(self.half, state=HalfState.RETURNING)
        elif call == "set_memory":
            return self._memory(args[0].replica, args[0].at).report
        return None

    def _present(self, replica: ReplicaId) -> Present:
        if replica == A:
            self._follow_pair()
        memory = self._memory(replica)
        assert memory.report.held.blocks is not None
        loads = requests(replica, self.running, self.waiting)
        used = -(-100 * self.running // BLOCK_TOKENS)
        self._steps = self._steps.add(0.02, 10, 1000.0, (PrefillChunk(10, 0),), steps=20)
        capacity = memory.report.held.blocks * BLOCK_TOKENS
        load = ReplicaLoad(
            replica,
            ReplicaState.RUNNING,
            "n",
            Tokens(capacity),
            BLOCK_TOKENS,
            Blocks(capacity // BLOCK_TOKENS - used),
            64,
            tuple(loads),
            steps=self._steps,
            nominal_tokens=Tokens(BLOCKS * BLOCK_TOKENS),
        )
        return Present(load, memory=memory)

    def _follow_pair(self) -> None:
        if self.half is not None and self.half.state == HalfState.GIVING and not self.giving:
            self.half = replace(self.half, state=HalfState.PAIRED, remote=2, hops=self.half.hops + 100)
        elif self.half is not None and self.half.state == HalfState.RETURNING:
            self.half = replace(self.half, state=HalfState.OVER, remote=0)

    def _memory(self, replica: ReplicaId, at: OrderNumber = FIRST) -> ElasticMemory:
        paired = self.half is not None and self.half.state == HalfState.PAIRED
        plan = MemoryPlan(Blocks(BLOCKS + 40), 2) if paired else MemoryPlan(Blocks(BLOCKS))
        half = self.half
        if half is not None and replica == B:
            half = replace(half, buddy=A, layers=(2, 4))
        report = MemoryReport(replica, at, plan, plan)
        assert plan.blocks is not None
        return ElasticMemory(
            report, MODEL, Blocks(600), Blocks(BLOCKS), plan.blocks, Blocks(0), PoolState.SETTLED, pair=half
        )


async def test_a_burst_beyond_both_pools_forms_a_pair_once_and_its_end_undoes_it(tmp_path: Path) -> None:
    burst = Burst()
    recording = tmp_path / "epochs.jsonl"
    recorder = burst.core._epochs._recorder = FileRecorder(recording, burst.config.terms)
    burst.giving = True
    await burst.epochs(8)
    assert burst.orders == ["pair"]
    assert burst.half is not None and not burst.half.by_hand
    (shown,) = (await burst.pairing())["pairs"]
    assert (shown["lower"], shown["upper"], shown["boundary"], shown["phase"]) == (A, B, 2, "forming")
    (device,) = (await burst.core.state(SOLE_POOL))["devices"]
    assert [(seat["by"], seat["why"]) for seat in device["seats"]] == [
        ("pair", f"it shares its layers with {buddy}, by the policy: giving") for buddy in (B, A)
    ]
    burst.giving = False
    await burst.epochs(10)
    assert burst.orders == ["pair"], "the burst goes on"
    assert parsed_pairs(await burst.core.metrics()) == {"forming": 0, "paired": 1, "undoing": 0}
    burst.running, burst.waiting = 4, 0
    await burst.epochs(20)
    assert burst.orders == ["pair", "unpair"]
    assert not (await burst.pairing())["pairs"]
    recorder.close()
    assert replay(recording).different == ()
    planned = [pair for epoch in read_recording(recording)[1] for plan in epoch.plans[SOLE_POOL] for pair in plan.pairs]
    formed, undone = planned
    assert isinstance(formed, Pair) and formed.paired_s is not None, "with it, all of the queue has room"
    assert replace(formed, paired_s=None) == PAIR
    assert undone == Unpair(A, B)


def parsed_pairs(families: Any) -> dict[str, float]:
    return {labels[0]: value for labels, value in parsed(merge([families]))["mell_pairs"].items()}


@pytest.mark.parametrize(("pairing", "mode"), [(Mode.OBSERVE, Mode.ACT), (Mode.ACT, Mode.OBSERVE)])
async def test_what_is_observed_is_only_proposed(pairing: Mode, mode: Mode, tmp_path: Path) -> None:
    burst = Burst(pairing, mode)
    recorder = burst.core._epochs._recorder = FileRecorder(tmp_path / "epochs.jsonl", burst.config.terms)
    await burst.epochs(8)
    shown = await burst.pairing()
    assert (burst.orders, shown["mode"], shown["pairs"]) == ([], "observe", [])
    assert shown["proposed"] == {"formed": 1, "undone": 0, "now": [{"lower": A, "upper": B, "forms": True}]}
    recorder.close()
    assert replay(tmp_path / "epochs.jsonl").different == ()


@pytest.mark.parametrize(("pairing", "mode"), [(Mode.OFF, Mode.ACT), (Mode.ACT, Mode.OFF)])
async def test_off_neither_forms_nor_proposes(pairing: Mode, mode: Mode) -> None:
    burst = Burst(pairing, mode)
    await burst.epochs(8)
    assert not burst.orders
    assert "proposed" not in await burst.pairing()


async def test_an_order_that_is_refused_is_given_again_but_not_at_once() -> None:
    burst = Burst()
    burst.refuses = True
    await burst.epochs(round(ANSWER_S))
    assert burst.orders == ["pair"]
    await burst.epochs(round(2 * ANSWER_S))
    assert burst.orders == ["pair"] * 3


async def test_a_pair_by_hand_stays_until_it_is_undone_by_hand() -> None:
    burst = Burst()
    burst.running = burst.waiting = 0
    await burst.epochs()
    assert await burst.core.pair(SOLE_POOL, A, B) == MoveAccepted(A)
    await burst.epochs(20)
    assert burst.orders == ["pair"]
    (shown,) = (await burst.pairing())["pairs"]
    assert (shown["by_hand"], shown["phase"]) == (True, "paired")
