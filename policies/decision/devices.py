"""The division of the memory of devices between the replicas of all pools, by what these have observed.

It stands between observing and deciding: all pools' needs are known, and the sizes that follow are in the next reports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.cluster.replica import Replica
from policies.decision.memory import PoolMemory
from policies.decision.observation import Device, DeviceSeat, Status
from policies.memory.division import SeatNeed, divide, moves_requests
from policies.memory.needs import ReplicaDemand, seat_need
from policies.model import Blocks, Bytes, PoolId, ReplicaId, ReplicaState


@dataclass(frozen=True, slots=True)
class SeatSize:
    """The part of a division that a replica gets: the blocks of its KV pool, and the bytes that it wants for that."""

    replica: ReplicaId
    blocks: Blocks
    want: Bytes


Division = Mapping[str, tuple[SeatSize, ...]]
"""The sizes of the replicas on each device."""


@dataclass(slots=True)
class DivisionMemory:
    """The memory of divisions: the newest one, and the times of the latest shrinks that moved requests."""

    newest: Division = field(default_factory=dict)
    shrunk_at: dict[ReplicaId, float] = field(default_factory=dict)

    def divide(self, devices: Sequence[Device], pools: Mapping[PoolId, PoolMemory], now: float, acts: bool) -> None:
        """Divide the memory of devices. Only a division that `acts` shrinks replicas."""
        present = {seat.replica for device in devices for seat in device.seats}
        self.shrunk_at = {replica: at for replica, at in self.shrunk_at.items() if replica in present}
        demands = {id: demand for pool in pools.values() for id, demand in _demands(pool).items()} if devices else {}
        self.newest = {device.id: self.divide_device(device, demands, now, acts) for device in devices}

    def divide_device(
        self, device: Device, demands: Mapping[ReplicaId, ReplicaDemand], now: float, acts: bool
    ) -> tuple[SeatSize, ...]:
        """Divide the memory of one device between its replicas with these demands."""
        needs = [self._need(seat, demands[seat.replica]) for seat in device.seats if seat.replica in demands]
        kept = sum(seat.blocks * seat.model.block for seat in device.seats if seat.replica not in demands)
        # A replica that turns out to need more than was counted at its start may leave less than the floors.
        room = Bytes(max(device.room - kept, sum(need.floor for need in needs)))
        sizes = divide(room, needs, now)
        if acts:
            self.shrunk_at |= {n.replica: now for n in needs if moves_requests(n, sizes[n.replica])}
        blocks = {seat.replica: seat.model.block for seat in device.seats}
        return tuple(
            SeatSize(need.replica, Blocks(sizes[need.replica] // blocks[need.replica]), need.want) for need in needs
        )

    def _need(self, seat: DeviceSeat, demand: ReplicaDemand) -> SeatNeed:
        return seat_need(
            seat.replica,
            seat.model,
            seat.block_tokens,
            seat.weight,
            seat.declared,
            seat.blocks,
            demand,
            self.shrunk_at.get(seat.replica),
        )


def _demands(memory: PoolMemory) -> dict[ReplicaId, ReplicaDemand]:
    """The demands of a pool's replicas. Requests without a replica count for the newest one that runs."""
    cluster, locations, rate = memory.cluster, memory.locations, memory.learned.experience.decode_rate
    newest = max(cluster.running(), key=lambda replica: replica.order, default=None)
    nowhere = [cluster.requests[id].tokens for id in cluster.waiting if id not in locations.homes]
    found = {}
    for id, status in locations.statuses.items():
        replica = cluster.replicas.get(id)
        if status.state is ReplicaState.STARTING:
            continue
        if replica is None:
            found[id] = ReplicaDemand(_used(status), 0, 0, rate)
            continue
        waiting, requests = replica.queued_tokens, len(replica.requests) + replica.queued
        if replica is newest:
            waiting, requests = waiting + sum(nowhere), requests + len(nowhere)
        found[id] = ReplicaDemand(_used_by(replica), waiting, requests, rate)
    return found


def _used_by(replica: Replica) -> int:
    """The tokens of KV in use, moves to the replica included."""
    return max(0, replica.capacity - replica.free)


def _used(status: Status) -> int:
    """The tokens of KV in use by the replica's own count."""
    free = status.free_blocks or 0
    return max(0, status.capacity - free * status.block_size)
