"""Devices that several models share: each has a budget of bytes, replicas that are awake, and sleepers.

The decisions are those of `policies.memory`: the ledger keeps each device within its budget, `divide` gives memory to
replicas in every epoch, and openings and closings climb and descend the ladder. Replicas obey orders at once, but
memory in use stays held until its requests have moved or ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, assert_never

from policies.memory.division import SeatNeed, divide, moves_requests
from policies.memory.ladder import (
    DeviceState,
    Grow,
    OpeningNeed,
    SeatState,
    Sleep,
    Start,
    Stop,
    Wait,
    Wake,
    climb,
    descend,
)
from policies.memory.ledger import DeviceLedger, MemoryOrder, MemoryReport, OrderNumber, ReplicaMemory, Seat
from policies.memory.needs import ReplicaDemand, seat_need
from policies.memory.plan import ASLEEP, MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes, PoolId, ReplicaId, Tokens
from simulator.world.devices import DeviceId, Occupant, TakenDevice
from simulator.world.loop import Loop
from simulator.world.replicas import Replicas

FENCE = 1
"""Simulations have one scheduler."""


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model on shared devices.

    `block_tokens` are the tokens of a KV block, `weight` its share in divisions. A sleeper wakes in `wake_s` seconds, a
    new replica starts in `startup_s`. At least `min_replicas` are awake. At first the model sleeps on `homes` devices.
    """

    memory: ModelMemory
    block_tokens: int
    wake_s: float
    startup_s: float
    weight: float = 1.0
    min_replicas: int = 0
    homes: int = 1


@dataclass(frozen=True, slots=True)
class SharedSetup:
    """`count` devices with `budget` bytes each, `per_node` on a node. A replica falls asleep in `sleep_s` seconds.

    At most `sleepers` replicas of a model sleep on a device.
    """

    count: int
    budget: Bytes
    per_node: int = 8
    sleep_s: float = 0.0
    sleepers: int = 1

    def homes(self, number: int, count: int) -> list[int]:
        """The devices on which model `number` sleeps at first: `count` different ones, and others for each model."""
        found: list[int] = []
        for turn in range(min(count, self.count)):
            device = (number + turn * (1 + number // self.count)) % self.count
            while device in found:
                device = (device + 1) % self.count
            found.append(device)
        return found


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """The memory that a replica holds on a device, in bytes: its KV blocks, and all of the rest."""

    pool: PoolId
    device: int
    kv: Bytes
    rest: Bytes


class SharingPool(Protocol):
    """A pool as the devices see it."""

    @property
    def id(self) -> PoolId: ...

    @property
    def replicas(self) -> Replicas: ...

    @property
    def newest(self) -> ReplicaId | None:
        """The replica that was opened last."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """The tokens of the requests without a replica."""
        ...

    def is_starting(self, replica: ReplicaId) -> bool:
        """True while a replica starts or wakes."""
        ...

    def resize(self, replica: ReplicaId, capacity: Tokens, held: Tokens | None = None) -> None:
        """Change the capacity of a replica, which still holds `held` tokens (None: no more than that)."""
        ...

    def lose(self, replica: ReplicaId) -> None:
        """Close a replica without requests."""
        ...


@dataclass(slots=True)
class SharedReplica:
    """A replica on a device. `occupant` is its name in its pool, None while it sleeps.

    It is waking or starting until `ready_at`. It has been idle since `idle_since`, if it is. `want` is the KV memory
    that it wants, `target` that of the newest division, in bytes.
    """

    seat: ReplicaId
    pool: PoolId
    device: int
    memory: ReplicaMemory
    occupant: ReplicaId | None = None
    ready_at: float = 0.0
    wakes: bool = False
    idle_since: float | None = None
    shrunk_at: float | None = None
    want: Bytes = Bytes(0)
    target: Bytes = Bytes(0)


class SharedDevices:
    """All devices of a world. `models` are those of its pools, `ledgers` those of the devices.

    `wakes` and `starts` count these, `waits` the openings for which nothing fitted.

    Raises `ValueError` if the sleepers, or the floors of the minimums, exceed a device's budget.
    """

    def __init__(self, loop: Loop, setup: SharedSetup, models: Mapping[PoolId, SharedModel]) -> None:
        self.wakes = 0
        self.starts = 0
        self.waits = 0
        self._loop = loop
        self._setup = setup
        self._models = models
        self._pools: dict[PoolId, SharingPool] = {}
        self.ledgers = [DeviceLedger(setup.budget, FENCE) for _ in range(setup.count)]
        self._replicas: dict[ReplicaId, SharedReplica] = {}
        self._named: dict[Occupant, SharedReplica] = {}
        self._begun = False
        self._started = 0
        for number, (pool, model) in enumerate(models.items()):
            for device in setup.homes(number, model.homes):
                if self._seat(pool, device, ASLEEP) is None:
                    raise ValueError(f"the sleepers exceed the budget of device {device}")

    @property
    def free(self) -> int | None:
        """See `Housing`: replicas of several models may share a device, so that no number of them is free."""
        return None

    @property
    def held(self) -> list[HeldMemory]:
        """The memory that every replica holds, asleep or awake."""
        found = []
        for replica in self._replicas.values():
            memory, held = self._models[replica.pool].memory, replica.memory.held
            kv = (held.blocks or 0) * memory.block
            found.append(HeldMemory(replica.pool, replica.device, Bytes(kv), Bytes(memory.need(held) - kv)))
        return found

    def register(self, pool: SharingPool) -> None:
        """Add the pool of a model."""
        self._pools[pool.id] = pool

    # --- replicas come and go -----------------------------------------------------------------------------

    def take(self, occupant: Occupant, node: str) -> TakenDevice | None:
        """See `Housing`. The ladder chooses the device."""
        pool = occupant.pool
        rung = climb(self._opening(pool), [self._state(device) for device in range(self._setup.count)])
        model, slept = self._models[pool], False
        match rung:
            case Grow() | Wait():
                self.waits += isinstance(rung, Wait)
                return None
            case Wake(replica=seat, sleeping=sleeping):
                slept = self._send_to_sleep(sleeping)
                found: SharedReplica | None = self._replicas[seat]
                assert found is not None
                self._divide(found.device, model.memory.least - model.memory.asleep)
                if not self._order(found, MemoryPlan(model.memory.floor)):
                    return None
                self.wakes += 1
                seconds = model.wake_s
            case Start(device=device, sleeping=sleeping, stopping=stopping):
                slept = self._send_to_sleep(sleeping)
                for sleeper in stopping:
                    self._remove(self._replicas[sleeper])
                self._divide(device, model.memory.least)
                found = self._seat(pool, device, MemoryPlan(model.memory.floor))
                if found is None:
                    return None
                self.starts += 1
                seconds = model.startup_s
            case _:
                assert_never(rung)
        seconds = seconds + self._setup.sleep_s * slept if self._begun else 0.0
        found.occupant, found.wakes = occupant.replica, isinstance(rung, Wake)
        found.ready_at, found.idle_since = self._loop.now + seconds, None
        self._named[occupant] = found
        capacity = Tokens(model.memory.floor * model.block_tokens)
        return TakenDevice(f"node-{found.device // self._setup.per_node}", seconds, capacity, DeviceId(found.device))

    def give_back(self, occupant: Occupant) -> None:
        """See `Housing`. The replica sleeps, or stops."""
        found = self._named.pop(occupant, None)
        if found is None:
            raise ValueError(f"{occupant.replica} of {occupant.pool} is on no device")
        found.occupant, found.idle_since, found.shrunk_at = None, None, None
        device = self._state(found.device)
        (seat,) = [each for each in device.seats if each.replica == found.seat]
        rung = descend(seat, device, self._setup.sleepers)
        match rung:
            case Sleep():
                self._order(found, ASLEEP)
            case Stop():
                self._remove(found)
            case _:
                assert_never(rung)

    def _send_to_sleep(self, sleeping: Sequence[ReplicaId]) -> bool:
        for seat in sleeping:
            found = self._replicas[seat]
            assert found.occupant is not None, "only a replica that is awake falls asleep"
            self._pools[found.pool].lose(found.occupant)
        return bool(sleeping)

    def _seat(self, pool: PoolId, device: int, plan: MemoryPlan) -> SharedReplica | None:
        """A new replica on a device; None without room."""
        memory = self._models[pool].memory
        seat = ReplicaId(f"{pool}#{self._started}")
        declared = MemoryPlan(memory.blocks_in(self._setup.budget))
        ledger = self.ledgers[device].start(seat, memory, declared, plan)
        if ledger is None:
            return None
        self._started += 1
        self.ledgers[device] = ledger
        found = SharedReplica(seat, pool, device, ReplicaMemory(seat, OrderNumber(FENCE, ledger.number), plan, plan))
        self._replicas[seat] = found
        return found

    def _remove(self, found: SharedReplica) -> None:
        self.ledgers[found.device] = self.ledgers[found.device].without(found.seat)
        del self._replicas[found.seat]

    # --- orders -------------------------------------------------------------------------------------------

    def _order(self, found: SharedReplica, plan: MemoryPlan) -> bool:
        """Order a plan, which the replica obeys at once. False without room."""
        return self._obey(found, self.ledgers[found.device].order(found.seat, plan))

    def _obey(self, found: SharedReplica, given: tuple[DeviceLedger, MemoryOrder] | None) -> bool:
        if given is None:
            return False
        self.ledgers[found.device], order = given
        found.memory = found.memory.obey(order)
        self._converge(found)
        return True

    def _converge(self, found: SharedReplica) -> None:
        """Have a replica hold what it is ordered to, as far as its requests leave it, and report that."""
        ordered, held = found.memory.ordered, found.memory.held
        if ordered.blocks is not None and held.blocks is not None and ordered.blocks < held.blocks:
            used = -(-self._used(found) // self._models[found.pool].block_tokens)
            held = MemoryPlan(Blocks(min(held.blocks, max(ordered.blocks, used))))
        else:
            held = ordered
        found.memory = replace(found.memory, held=held)
        report = MemoryReport(found.seat, found.memory.at, ordered, held)
        self.ledgers[found.device] = self.ledgers[found.device].take(report)
        if found.occupant is not None and ordered.blocks is not None and held.blocks is not None:
            size = self._models[found.pool].block_tokens
            pool = self._pools[found.pool]
            pool.resize(found.occupant, Tokens(ordered.blocks * size), Tokens(held.blocks * size))

    # --- epochs -------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Divide the memory of every device, by the needs of the replicas that are awake on it."""
        self._begun = True
        for found in self._named.values():
            if found.memory.ordered != found.memory.held:
                self._converge(found)
            if not self._is_empty(found):
                found.idle_since = None
            elif found.idle_since is None:
                found.idle_since = self._loop.now
        for device in range(self._setup.count):
            self._divide(device)
            self.ledgers[device].check_integrity()

    def _divide(self, device: int, reserved: int = 0) -> None:
        """Divide a device's KV memory, without the bytes `reserved` for a replica to come."""
        here = [self._replicas[seat.replica] for seat in self.ledgers[device].seats]
        awake = [found for found in here if found.occupant is not None]
        if not awake:
            return
        others = sum(self._models[found.pool].memory.need(MemoryPlan(Blocks(0))) for found in awake)
        asleep = sum(self._models[found.pool].memory.asleep for found in here if found.occupant is None)
        room = Bytes(self._setup.budget - others - asleep - reserved)
        sizes = divide(room, [self._need(found) for found in awake], self._loop.now)
        changes = []
        for found in awake:
            block, blocks = self._models[found.pool].memory.block, found.memory.ordered.blocks
            assert blocks is not None, "a replica that is awake has blocks"
            found.target = sizes[found.seat]
            changes.append((found.target // block - blocks, found))
        for change, found in sorted(changes, key=lambda each: each[0]):
            self._change(found, change)

    def _change(self, found: SharedReplica, change: int) -> None:
        """Change the number of a replica's blocks; it grows no more than the ledger has room for."""
        memory, blocks = self._models[found.pool].memory, found.memory.ordered.blocks
        assert blocks is not None, "a replica that is awake has blocks"
        if change < 0 and moves_requests(self._need(found), Bytes((blocks + change) * memory.block)):
            found.shrunk_at = self._loop.now
        self._obey(found, self.ledgers[found.device].order_size(found.seat, Blocks(blocks + change)))

    def _need(self, found: SharedReplica) -> SeatNeed:
        model = self._models[found.pool]
        memory = model.memory
        blocks = found.memory.ordered.blocks
        assert blocks is not None, "a replica that is awake has blocks"
        pool = self._pools[found.pool]
        engine = pool.replicas.engines[self._name(found)]
        scheduler = engine.scheduler
        waiting = sum(live.held for live in scheduler.waiting)
        if pool.newest == self._name(found):
            waiting += pool.waiting_tokens
        requests = len(scheduler.running) + len(scheduler.waiting)
        demand = ReplicaDemand(self._used(found), waiting, requests, 1.0 / engine.batch.step_s)
        declared = memory.blocks_in(self._setup.budget)
        need = seat_need(
            found.seat, memory, model.block_tokens, model.weight, declared, blocks, demand, found.shrunk_at
        )
        found.want = need.want
        return need

    # --- what the ladder sees -----------------------------------------------------------------------------

    def _state(self, device: int) -> DeviceState:
        seats = tuple(self._seat_state(seat) for seat in self.ledgers[device].seats)
        here = [self._replicas[seat.replica] for seat in self.ledgers[device].seats]
        is_waking = any(found.wakes and found.ready_at > self._loop.now for found in here if found.occupant is not None)
        return DeviceState(device, self._setup.budget, seats, is_waking)

    def _seat_state(self, seat: Seat) -> SeatState:
        found = self._replicas[seat.replica]
        memory = self._models[found.pool].memory
        if not found.memory.ordered.is_awake:
            return SeatState(seat.replica, found.pool, False, memory.asleep, memory.asleep)
        used = -(-self._used(found) // self._models[found.pool].block_tokens) if found.occupant is not None else 0
        least = memory.need(MemoryPlan(Blocks(max(memory.floor, used))))
        is_idle = found.occupant is not None and self._is_empty(found) and self._may_sleep(found)
        busy = found.occupant is not None and not self._is_empty(found)
        return SeatState(
            seat.replica, found.pool, True, least, memory.asleep, found.idle_since if is_idle else None, busy
        )

    def _opening(self, pool: PoolId) -> OpeningNeed:
        awake = [found for occupant, found in self._named.items() if occupant.pool == pool]
        block = self._models[pool].memory.block
        sizes = {found.seat: (found.memory.ordered.blocks or 0) * block for found in awake}
        short = sum(max(0, found.want - sizes[found.seat]) for found in awake)
        growing = max(awake, key=lambda found: (found.target - sizes[found.seat], found.seat), default=None)
        coming = 0 if growing is None else max(0, growing.target - sizes[growing.seat])
        name = None if growing is None else growing.seat
        return OpeningNeed(pool, self._models[pool].memory.least, Bytes(short), name, Bytes(coming))

    def _may_sleep(self, found: SharedReplica) -> bool:
        """True for a replica that has had an epoch since it is ready, beyond the model's minimum."""
        awake = sum(occupant.pool == found.pool for occupant in self._named)
        return found.ready_at < self._loop.now and awake > self._models[found.pool].min_replicas

    def _is_empty(self, found: SharedReplica) -> bool:
        pool, name = self._pools[found.pool], self._name(found)
        return not pool.is_starting(name) and pool.replicas.engines[name].is_empty

    def _used(self, found: SharedReplica) -> int:
        """Tokens of KV in use; none before its engine is there, or once it is closed."""
        if found.occupant is None:
            return 0
        engine = self._pools[found.pool].replicas.engines.get(found.occupant)
        return 0 if engine is None else round(engine.capacity - engine.free(self._loop.now))

    @staticmethod
    def _name(found: SharedReplica) -> ReplicaId:
        assert found.occupant is not None, "a sleeper has no name in its pool"
        return found.occupant
