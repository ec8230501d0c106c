"""From demand to divisions, orders and reports: replicas of two pools on one node, with every fault of their messages.

Calls are lost, late or unanswered; replicas fall silent, die, and start; another scheduler takes over at any time.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from deployments.api.calls import MeasuredEngine, SeatCall, SeatGiven
from deployments.api.report import ElasticMemory
from deployments.config import MemorySettings
from deployments.scheduler.memory.ledgers import BudgetedPool, NodeLedgers, ReportedMemory
from deployments.scheduler.memory.nodes import NodeMemory
from deployments.scheduler.memory.starting import StartingSeats
from migration.protocol.errors import PeerLost
from policies.decision.devices import DivisionMemory
from policies.memory.ledger import DeviceLedger, MemoryOrder, MemoryReport, OrderNumber, ReplicaMemory, Seat
from policies.memory.needs import ReplicaDemand
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes, PoolId, ReplicaId
from tests.deployments.scheduler.fakes import AnsweringReplica, FakeClaims

MIB = 1 << 20
BUDGET, DECLARED, EPOCH_S = 1000, 700, 1.0
POOLS = {PoolId("one"): 1.0, PoolId("two"): 2.0}
MODELS = {
    PoolId("one"): ModelMemory(Bytes(60 * MIB), Bytes(40 * MIB), Bytes(0), Bytes(MIB), Blocks(20)),
    PoolId("two"): ModelMemory(Bytes(30 * MIB), Bytes(40 * MIB), Bytes(0), Bytes(2 * MIB), Blocks(10)),
}
MOST = 2


@dataclass
class Running:
    """A replica that serves. It has the memory of a growth at once, that of a shrink until it has given it back."""

    pool: PoolId
    memory: ReplicaMemory
    used: int = 0

    @property
    def held(self) -> int:
        return MODELS[self.pool].need(self.memory.held)

    def obey(self, order: MemoryOrder) -> None:
        follows = self.memory.obey(order)
        if follows is not self.memory:
            held = max(follows.held.blocks or 0, follows.ordered.blocks or 0)
            self.memory = replace(follows, held=replace(follows.held, blocks=Blocks(held)))

    def give_back(self) -> None:
        self.memory = replace(self.memory, held=self.memory.ordered)


@dataclass
class Starting:
    """A replica that starts. Its engine, once it may start, has what the smallest replica of its model needs."""

    pool: PoolId
    has_engine: bool = False

    @property
    def held(self) -> int:
        return MODELS[self.pool].least if self.has_engine else 0


@dataclass
class World:
    """Implements `RemoteReplicas[ControlApi]`: the replicas of a node, and their scheduler."""

    draw: random.Random
    faults: bool = True
    running: dict[ReplicaId, Running] = field(default_factory=dict)
    starting: dict[ReplicaId, Starting] = field(default_factory=dict)
    late: list[MemoryOrder] = field(default_factory=list)
    orders: int = 0
    now: float = 0.0
    fence: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def __post_init__(self) -> None:
        self.claims = FakeClaims()
        self.demand = dict.fromkeys(POOLS, 0)
        self.take_over()

    def take_over(self) -> None:
        """Another scheduler begins."""
        self.fence += 1
        self.division = DivisionMemory()
        pools = {
            pool: BudgetedPool(
                self, weight, lambda: (0, MOST), lambda r: r not in self.running and r not in self.starting
            )
            for pool, weight in POOLS.items()
        }
        settings = MemorySettings(budget_mib=BUDGET, declared=3.0)
        nodes = NodeMemory.of(settings, self.fence, pools, self.claims, lambda: True, lambda: self.now)
        assert nodes is not None
        self.nodes = nodes

    def at(self, replica: ReplicaId, routed: bool = True) -> AnsweringReplica:
        return AnsweringReplica(self, replica)

    def forget(self, replica: ReplicaId) -> None: ...

    async def answer(self, replica: ReplicaId, call: str, *args: Any) -> MemoryReport:
        order, _, fence = args
        self.orders += 1
        fault = self.draw.random() if self.faults else 1.0
        if fault < 0.1 or replica not in self.running or fence < self.running[replica].memory.at.fence:
            raise PeerLost("lost")
        if fault < 0.2:
            self.late.append(order)
            raise PeerLost("late")
        self.running[replica].obey(order)
        report = self.running[replica].memory.report
        if fault < 0.3:
            raise PeerLost("unanswered")
        return report

    def gather(self) -> None:
        for pool in POOLS:
            here = {name: each for name, each in self.running.items() if each.pool == pool}
            reported = {}
            for name, each in here.items():
                if self.faults and self.draw.random() < 0.1:
                    continue
                seen, report = each.memory.asked(self.fence)
                each.memory = seen
                memory = ElasticMemory(
                    report or seen.report,
                    MODELS[pool],
                    Blocks(DECLARED),
                    Blocks(100),
                    Blocks(0),
                    Blocks(each.used),
                    "settled",
                )
                reported[name] = ReportedMemory("n", memory, block_tokens=16)
            self.nodes.ledgers.take(pool, reported, here)

    async def epoch(self) -> None:
        """Gather, divide and order, as the live scheduler does."""
        self.now += EPOCH_S
        self.gather()
        demands = {}
        for name, each in self.running.items():
            # Requests that do not fit wait.
            used = each.used * 16
            demands[name] = ReplicaDemand(used, self.demand[each.pool] - used, 4, 20.0)
        self.division.newest = {
            device.id: self.division.divide_device(device, demands, self.now, acts=True)
            for device in self.nodes.division.devices()
        }
        self.nodes.division.follow(self.division.newest)
        await asyncio.gather(*self.nodes.division._tasks)
        self.check()
        for name, start in list(self.starting.items()):
            self.go_on(name, start)
            self.check()

    def go_on(self, name: ReplicaId, each: Starting) -> None:
        """A replica that starts asks for memory, if its call arrives."""
        if self.faults and self.draw.random() < 0.2:
            return
        model = MODELS[each.pool]
        measured = MeasuredEngine(model, Blocks(DECLARED), Blocks(100)) if each.has_engine else None
        answer = self.nodes.starting.seat(SeatCall(each.pool, name, "n", measured))
        if not isinstance(answer, SeatGiven) or (self.faults and self.draw.random() < 0.2):
            return
        if each.has_engine:
            del self.starting[name]
            self.running[name] = Running(each.pool, ReplicaMemory(name, answer.at, answer.plan, answer.plan))
        each.has_engine = True

    def move(self) -> None:
        """The world goes on."""
        for each in self.running.values():
            if not self.faults or self.draw.random() < 0.5:
                each.give_back()
            each.used = min(each.memory.ordered.blocks or 0, self.demand[each.pool] // 16)
        if not self.faults:
            return
        while self.late and self.draw.random() < 0.5:
            order = self.late.pop(self.draw.randrange(len(self.late)))
            if order.replica in self.running:
                self.running[order.replica].obey(order)
        event = self.draw.random()
        if event < 0.05:
            self.take_over()
        elif event < 0.1 and self.running:
            del self.running[self.draw.choice(sorted(self.running))]
        elif event < 0.2 and len(self.starting) + len(self.running) < 5:
            pool = self.draw.choice(sorted(POOLS))
            self.starting[ReplicaId(f"{pool}-{next(self.numbers)}")] = Starting(pool)
        elif event < 0.23 and self.starting:
            del self.starting[self.draw.choice(sorted(self.starting))]
        elif event < 0.5:
            self.demand[self.draw.choice(sorted(POOLS))] = self.draw.randrange(16_000)
        self.check()

    @property
    def held(self) -> int:
        held = sum(each.held for each in self.running.values()) + sum(each.held for each in self.starting.values())
        return held // MIB

    def check(self) -> None:
        assert self.held <= BUDGET, f"{self.held} of {BUDGET} MiB"


async def played(seed: int, epochs: int = 120) -> World:
    """A world with faults, once its models have been measured."""
    world = World(random.Random(seed), faults=False)
    for pool in POOLS:
        world.starting[ReplicaId(f"{pool}-first")] = Starting(pool)
    for _ in range(6):
        await world.epoch()
        world.move()
    assert len(world.running) == 2
    world.faults = True
    for _ in range(epochs):
        await world.epoch()
        world.move()
    return world


@pytest.mark.parametrize("seed", range(40))
async def test_the_budget_is_never_exceeded_and_constant_demand_comes_to_rest(seed: int) -> None:
    world = await played(seed)
    world.faults, world.late = False, []
    world.demand = {PoolId("one"): 8_000, PoolId("two"): 1_000}
    for _ in range(25):
        await world.epoch()
        world.move()
    before = world.orders
    for _ in range(5):
        await world.epoch()
        world.move()
    assert world.orders == before, "nothing is ordered without a reason"
    sizes = {size.replica: size.blocks for size in world.division.newest.get("n", ())}
    assert sizes.keys() == world.running.keys()
    for name, each in world.running.items():
        assert abs((each.memory.held.blocks or 0) - sizes[name]) <= 1
    waits = [each for each in world.starting.values() if not each.has_engine]
    least = sum(MODELS[each.pool].least for each in world.running.values()) // MIB
    assert all(least + MODELS[each.pool].least // MIB > BUDGET for each in waits), "whoever waits has no room"


def orders_at_once(ledger: DeviceLedger, replica: ReplicaId, blocks: Blocks) -> tuple[DeviceLedger, MemoryOrder]:
    """Growth is ordered before anything has been given back."""
    order = MemoryOrder(replica, OrderNumber(ledger.fence, ledger.number + 1), MemoryPlan(blocks))
    return replace(ledger, number=order.at.number), order


def held(seat: Seat) -> Bytes:
    """Orders do not count."""
    return seat.model.need(seat.reported.held if seat.reported else seat.declared)


BROKEN: dict[str, tuple[type, str, Callable[..., Any] | property]] = {
    "growth needs no room": (DeviceLedger, "order_size", orders_at_once),
    "replicas that wait are given memory at once": (StartingSeats, "reserved", lambda *args, **kwargs: -BUDGET * MIB),
    "a new scheduler does not know who starts": (NodeLedgers, "_restore", lambda self: None),
    "silent replicas do not count": (NodeLedgers, "_is_here", lambda self, pool, replica: False),
    "orders do not count before they are obeyed": (Seat, "bound", property(held)),
}


async def played_often() -> None:
    for seed in range(200):
        await played(seed)


@pytest.mark.slow
@pytest.mark.parametrize("rule", BROKEN)
async def test_a_broken_rule_exceeds_the_budget(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = BROKEN[rule]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError, match="of 1000 MiB"):
        await played_often()
