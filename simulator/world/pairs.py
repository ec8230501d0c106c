"""Groups of replicas that share their parameters (`policies.memory.pairing`): their forming, their steps, their end.

    forming --every layer copied--> paired --demand fits--> undoing --every layer back--> over

A group forms layer by layer. The holder of a layer gets the KV of a giver's requests in it while steps go on; the giver
stops for the blocks that are not full and for those that its steps have filled meanwhile. The memory of the dropped
layers is there once all are copied. To be undone, each member has to hold its own requests alone; then parameters are
loaded and KV comes back, in the same way. From the first to the last layer, steps have the times of a whole group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Protocol

from policies.cost.lines import Line
from policies.memory.pairing import (
    HeldRequestSize,
    MemberLoad,
    MemberMove,
    Pairing,
    PairSpeed,
    RecentDemand,
    even_layers,
    form,
    level_members,
    undo,
)
from policies.model import Bytes, ReplicaId, Tokens
from simulator.costs.costs import Costs
from simulator.world.engine import SimulatedEngine
from simulator.world.live import Live, Stage
from simulator.world.lockstep import Lockstep
from simulator.world.loop import Loop, Turn
from simulator.world.moving import Mover
from simulator.world.replicas import Replicas
from simulator.world.setup import Exchange, PairSetup, Setup
from simulator.world.terms import speed_of


class GroupPhase(StrEnum):
    """The phases of a group."""

    FORMING = "forming"
    PAIRED = "paired"
    UNDOING = "undoing"


@dataclass(slots=True)
class GroupRecord:
    """The life of a group: times in seconds, None before; the bytes of KV that were exchanged, and the prediction."""

    pairing: Pairing
    began_s: float
    formed_s: float | None = None
    undoing_s: float | None = None
    over_s: float | None = None
    sent: int = 0


@dataclass(slots=True)
class Group:
    """A group under way; `chains` are the sequences of copies that have not ended."""

    engines: tuple[SimulatedEngine, ...]
    lockstep: Lockstep[SimulatedEngine]
    record: GroupRecord
    phase: GroupPhase = GroupPhase.FORMING
    chains: int = 0

    @property
    def members(self) -> tuple[ReplicaId, ...]:
        """The names of its replicas."""
        return tuple(engine.replica for engine in self.engines)


@dataclass(frozen=True, slots=True)
class LayerGift:
    """`layers` layers that the giver has dropped, or gets back, and the member that holds them."""

    giver: SimulatedEngine
    holder: SimulatedEngine
    layers: int = 1


class GroupedPool(Protocol):
    """A pool as its groups see it."""

    @property
    def replicas(self) -> Replicas: ...

    @property
    def mover(self) -> Mover | None: ...

    def is_starting(self, replica: ReplicaId) -> bool:
        """True while a replica starts."""
        ...

    def resize(self, replica: ReplicaId, capacity: Tokens, held: Tokens | None = None) -> None:
        """Report a capacity for a replica whose engine holds `held` tokens."""
        ...

    def level(self, move: MemberMove) -> None:
        """Move a request between two members of a group."""
        ...


class Groups:
    """The groups of a pool. `records` has all of them, also those that are over."""

    def __init__(self, loop: Loop, setup: Setup, costs: Costs, pool: GroupedPool) -> None:
        """Raises `ValueError` for a set-up or costs with which groups are not simulated."""
        pairs, speed = setup.pairs, speed_of(costs)
        if pairs is None or speed is None or costs.migration is None or not speed_interferes(costs):
            raise ValueError("groups of replicas need costs of steps, of prefills that interfere, and of migrations")
        if setup.block_tokens or setup.max_gpus != setup.min_replicas:
            raise ValueError("groups of replicas need a constant number of replicas without prefix caches")
        self.records: list[GroupRecord] = []
        self._loop = loop
        self._pairs: PairSetup = pairs
        self._capacity = setup.capacity
        self._kv_bytes = costs.migration.kv_bytes
        self._link = costs.migration.intra
        self._block_tokens = costs.migration.block_tokens
        self._pool = pool
        self._speed = PairSpeed(
            speed,
            pairs.hop,
            Line(0.0, self._kv_bytes / self._link.bytes_per_s),
            pairs.exchange is not Exchange.IN_TURN,
        )
        self._groups: dict[tuple[ReplicaId, ...], Group] = {}
        self._fits_since: Mapping[tuple[ReplicaId, ...], float] = {}
        self._demand = RecentDemand()

    def begin(self) -> None:
        """Form the groups that are there from the start."""
        if self._pairs.always:
            names, size = list(self._pool.replicas.engines), self._pairs.terms.size
            for start in range(0, len(names) - size + 1, size):
                group = self._join(Pairing(tuple(names[start : start + size]), self._pairs.gain))
                self._formed(group)

    def arrived(self, live: Live) -> None:
        """Note the prompt of a request."""
        self._demand.arrived(live.id, live.job.prompt, self._loop.now)

    def over(self, live: Live) -> None:
        """Note the end of a request."""
        self._demand.ended(live.id, self._loop.now)

    def decide(self) -> None:
        """Undo and form groups, level their members, and report their capacities; behind the decisions of an epoch."""
        loads = self._loads()
        outlook = self._demand.outlook(loads, self._loop.now)
        if not self._pairs.always:
            if self._pairs.restores:
                self._undo(loads)
            for pairing in form(loads, self._pairs.gain, self._speed, outlook, self._pairs.terms):
                group = self._join(pairing)
                self._exchange(group)
        self._level(loads)
        self._report()

    # --- what the decisions see ---------------------------------------------------------------------------

    def _loads(self) -> list[MemberLoad]:
        return [self._load(engine) for engine in self._pool.replicas.engines.values()]

    def _load(self, engine: SimulatedEngine) -> MemberLoad:
        now, scheduler, mover = self._loop.now, engine.scheduler, self._pool.mover
        assert mover is not None, "groups need moves"
        running = scheduler.running.values() if engine.lockstep is not None else ()
        movable = tuple(
            HeldRequestSize(live.id, Tokens(round(live.tokens(now))))
            for live in running
            if live.stage is Stage.DECODE and live.id not in mover.under_way
        )
        return MemberLoad(
            engine.replica,
            engine.node,
            self._capacity,
            engine.used(now),
            sum(live.need for live in scheduler.waiting),
            max((live.need for live in scheduler.waiting), default=0),
            engine.prefilling(),
            engine.batch.size,
            engine.batch.context(now),
            movable,
            engine.lockstep is None and not self._pool.is_starting(engine.replica),
        )

    # --- decisions ----------------------------------------------------------------------------------------

    def _undo(self, loads: Sequence[MemberLoad]) -> None:
        paired = [name for name, group in self._groups.items() if group.phase is GroupPhase.PAIRED]
        found = undo(loads, paired, self._fits_since, self._loop.now, self._pairs.terms)
        self._fits_since = found.fits_since
        for move in found.moves:
            self._pool.level(move)
        for name in found.groups:
            group = self._groups[name]
            group.phase, group.lockstep.account = GroupPhase.UNDOING, None
            group.record.undoing_s = self._loop.now
            self._exchange(group)

    def _level(self, loads: Sequence[MemberLoad]) -> None:
        mover = self._pool.mover
        assert mover is not None, "groups need moves"
        moving = {each.source.replica for each in mover.under_way.values()}
        for name, group in self._groups.items():
            if group.phase is GroupPhase.PAIRED and moving.isdisjoint(name):
                members = [load for load in loads if load.replica in name]
                if (move := level_members(members, self._speed.replica)) is not None:
                    self._pool.level(move)

    def _report(self) -> None:
        """Report what a member uses, and its part of what is free in its group, as its capacity."""
        now = self._loop.now
        for group in self._groups.values():
            if group.lockstep.account is not None:
                free = (group.lockstep.account - group.lockstep.used(now)) / len(group.engines)
                for engine in group.engines:
                    self._pool.resize(engine.replica, Tokens(round(engine.used(now) + free)), self._capacity)

    # --- groups come and go -------------------------------------------------------------------------------

    def _join(self, pairing: Pairing) -> Group:
        engines = tuple(self._pool.replicas.engines[name] for name in pairing.members)
        lockstep = Lockstep(engines, self._speed.replica.costs.overhead_s, self._pairs.hop)
        group = Group(engines, lockstep, GroupRecord(pairing, self._loop.now))
        for engine in engines:
            engine.lockstep = lockstep
        self.records.append(group.record)
        self._groups[pairing.members] = group
        self._settle(group)
        return group

    def _formed(self, group: Group) -> None:
        group.phase, group.record.formed_s = GroupPhase.PAIRED, self._loop.now
        group.lockstep.account = Tokens(len(group.engines) * self._capacity + self._pairs.gain)
        self._settle(group)

    def _over(self, group: Group) -> None:
        group.record.over_s = self._loop.now
        del self._groups[group.members]
        for engine in group.engines:
            engine.lockstep = None
            self._pool.resize(engine.replica, self._capacity)
        self._settle(group)

    def _settle(self, group: Group) -> None:
        for engine in group.engines:
            self._pool.replicas.touch(engine)
        self._pool.replicas.settle()

    # --- exchanges ----------------------------------------------------------------------------------------

    def _exchange(self, group: Group) -> None:
        """Copy the KV of all layers that a member drops, or that it gets back."""
        holding = even_layers(self._pairs.layers, len(group.engines))
        gifts = [
            [
                LayerGift(giver, holder, layers)
                for holder, layers in zip(group.engines, holding, strict=True)
                if holder is not giver
            ]
            for giver in group.engines
        ]
        if self._pairs.exchange is Exchange.AT_ONCE:
            chains = [[gift] for each in gifts for gift in each]
            for engine in group.engines:
                engine.pause(self._whole_s(group, engine))
        else:
            chains = [[LayerGift(g.giver, g.holder) for g in each for _ in range(g.layers)] for each in gifts]
            if self._pairs.exchange is Exchange.IN_TURN:
                chains = [[gift for turn in zip_longest(*chains) for gift in turn if gift is not None]]
        group.chains = len(chains)
        for each in chains:
            self._give(group, iter(each))

    def _whole_s(self, group: Group, engine: SimulatedEngine) -> float:
        """Seconds of the exchange of all layers at once."""
        size, now = len(group.engines), self._loop.now
        most = max(each.used(now) for each in group.engines) * (size - 1) / size
        load_s = 0.0
        if group.phase is GroupPhase.UNDOING:
            load_s = self._pairs.layer_bytes * self._pairs.layers * (size - 1) / size / self._pairs.load_bytes_per_s
        return load_s + self._link.latency_s + most * self._kv_bytes / self._link.bytes_per_s

    def _give(self, group: Group, gifts: Iterator[LayerGift]) -> None:
        """Begin the next copy of a chain. Parameters are loaded before KV comes back."""
        gift = next(gifts, None)
        if gift is None:
            group.chains -= 1
            if not group.chains:
                (self._over if group.phase is GroupPhase.UNDOING else self._formed)(group)
            return
        if group.phase is GroupPhase.UNDOING:
            load_s = self._pairs.layer_bytes * gift.layers / self._pairs.load_bytes_per_s
            self._loop.at(self._loop.now + load_s, Turn.LINK, lambda: self._copy(group, gift, gifts))
        else:
            self._copy(group, gift, gifts)

    def _copy(self, group: Group, gift: LayerGift, gifts: Iterator[LayerGift]) -> None:
        mover, began_s = self._pool.mover, self._loop.now
        assert mover is not None, "groups need moves"
        token = self._kv_bytes * gift.layers / self._pairs.layers
        size = Bytes(round(gift.giver.used(began_s) * token))
        ends = (gift.holder, gift.giver) if group.phase is GroupPhase.UNDOING else (gift.giver, gift.holder)

        def copied() -> None:
            group.record.sent += size
            if self._pairs.exchange is not Exchange.AT_ONCE:
                self._stop_for_rest(group, gift.giver, self._loop.now - began_s, token)
            self._give(group, gifts)

        mover.links.send(mover.route(*ends), size, self._link.latency_s, copied)

    def _stop_for_rest(self, group: Group, giver: SimulatedEngine, copied_s: float, token: float) -> None:
        """Have the giver stand still while the rest of a layer is copied: what a block lacks, and the newest tokens."""
        if giver.batch.size:
            steps = copied_s / group.lockstep.cycle_s()
            rest = giver.batch.size * (steps + self._block_tokens / 2) * token
            group.record.sent += round(rest)
            giver.pause(self._link.latency_s + rest / self._link.bytes_per_s)
            self._pool.replicas.touch(giver)
            self._pool.replicas.settle()


def speed_interferes(costs: Costs) -> bool:
    """True if requests join and leave a batch between two steps only, prefills included."""
    return costs.compute is not None and costs.compute.prefill and costs.compute.interference
