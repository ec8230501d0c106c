"""The ladder between a pool's openings and closings and the memory of devices.

Policies only open and close replicas. An opening climbs *grow, wake, start, wait*, the cheapest rung first; a closing
descends *sleep, stop*. No policy learns of sleep: a sleeping replica is closed for its pool.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from policies.model import Bytes, PoolId, ReplicaId


@dataclass(frozen=True, slots=True)
class Grow:
    """Open nothing: a replica that is awake gets the memory that the pool lacks by the newest division."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake a sleeper, once `sleeping` are asleep, which are empty."""

    replica: ReplicaId
    device: int
    sleeping: tuple[ReplicaId, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Start a replica on a device, once `sleeping` are asleep, which are empty, and the sleepers `stopping` are
    stopped.
    """

    device: int
    sleeping: tuple[ReplicaId, ...] = ()
    stopping: tuple[ReplicaId, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """The pool waits until a replica is idle or has woken."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Have a replica drop its parameters and KV blocks, and keep its process."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop a replica."""


@dataclass(frozen=True, slots=True)
class SeatState:
    """A replica on a device. `least` are its bytes at its floor if it is awake, else those that it holds asleep.

    `idle_since` is the time since when it has had no request, None while it has one, while it starts or wakes, and if
    it may not sleep.
    """

    replica: ReplicaId
    pool: PoolId
    is_awake: bool
    least: Bytes
    asleep: Bytes
    idle_since: float | None = None
    busy: bool = False


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device with its seats, the budget in bytes, and True while a replica on it is waking.

    Only one replica of a device wakes at a time: page cache and the link to the host are shared.
    """

    device: int
    budget: Bytes
    seats: tuple[SeatState, ...]
    is_waking: bool = False

    @property
    def room(self) -> int:
        """Bytes that are left with every replica that is awake at its floor."""
        return self.budget - sum(seat.least for seat in self.seats)

    @property
    def busy(self) -> int:
        """The number of replicas with requests."""
        return sum(seat.busy for seat in self.seats)


@dataclass(frozen=True, slots=True)
class OpeningNeed:
    """A pool that opens a replica of `least` bytes at its floor.

    A device has one replica of the pool at most that is awake, if they are `apart`: a machine may have several, with
    processors for each. `short` are the bytes of KV memory that its running replicas lack (0: they lack none, such as
    by the speed of their steps), `growing` the replica with the most memory to come by the newest division, and
    `coming` its amount.
    """

    pool: PoolId
    least: Bytes
    short: Bytes = Bytes(0)
    growing: ReplicaId | None = None
    coming: Bytes = Bytes(0)
    apart: bool = True


def climb(need: OpeningNeed, devices: Sequence[DeviceState]) -> Grow | Wake | Start | Wait:
    """The cheapest way to one more replica of a pool.

    Of several devices, one where nothing has to fall asleep
    comes first, then one with few replicas at work, then one with much room. A sleeper that has to wait for another
    one to wake is still awake before a start is over. Sleepers of other pools stop only for a pool without any replica.
    Replicas of the pool itself do not fall asleep for it.
    """
    if need.growing is not None and 0 < need.short <= need.coming:
        return Grow(need.growing)
    wakes = [
        ((device.is_waking, *_cost(device, sleeping)), Wake(seat.replica, device.device, sleeping))
        for device in devices
        if not (need.apart and _is_awake_on(need.pool, device))
        for seat in device.seats
        if seat.pool == need.pool and not seat.is_awake
        if (sleeping := _made_room(device, need.least - seat.least, {need.pool})) is not None
    ]
    if wakes:
        (is_later, *_), wake = min(wakes, key=lambda each: each[0])
        return Wait() if is_later else wake
    has_any = any(seat.pool == need.pool for device in devices for seat in device.seats)
    starts = [
        ((len(start.stopping), *_cost(device, start.sleeping)), start)
        for device in devices
        if not (need.apart and any(seat.pool == need.pool for seat in device.seats))
        if (start := _start(need, device)) is not None and not (start.stopping and has_any)
    ]
    return min(starts, key=lambda each: each[0])[1] if starts else Wait()


def make_room(device: DeviceState, waiting: Sequence[tuple[PoolId, Bytes]]) -> tuple[ReplicaId, ...]:
    """The idle replicas that have to fall asleep for those that wait for memory of a device, in their order.

    `waiting` has their pools and the bytes that they lack. Nobody falls asleep for one that lacks more than all idle
    replicas of other pools can give.
    """
    more, pools = 0, {pool for pool, _ in waiting}
    sleeping: tuple[ReplicaId, ...] = ()
    for _, lacking in waiting:
        if (found := _made_room(device, more + lacking, pools)) is not None:
            more, sleeping = more + lacking, found
    return sleeping


def descend(seat: SeatState, device: DeviceState, sleepers: int) -> Sleep | Stop:
    """The end of a closed replica: it sleeps while fewer than `sleepers` of its pool sleep on its device."""
    asleep = sum(other.pool == seat.pool and not other.is_awake for other in device.seats)
    return Sleep() if asleep < sleepers else Stop()


def _is_awake_on(pool: PoolId, device: DeviceState) -> bool:
    return any(seat.pool == pool and seat.is_awake for seat in device.seats)


def _cost(device: DeviceState, sleeping: Sequence[ReplicaId]) -> tuple[int, int, int, int]:
    """A sort key: the lowest is the best device."""
    return len(sleeping), device.busy, -device.room, device.device


def _made_room(device: DeviceState, more: int, pools: Collection[PoolId]) -> tuple[ReplicaId, ...] | None:
    """The idle replicas that have to fall asleep for `more` bytes for these pools, least recently used first.

    None if that is too little.
    """
    lacking, sleeping = more - device.room, []
    for seat in _by_idleness(device, pools):
        if lacking <= 0:
            break
        sleeping.append(seat.replica)
        lacking -= seat.least - seat.asleep
    return tuple(sleeping) if lacking <= 0 else None


def _start(need: OpeningNeed, device: DeviceState) -> Start | None:
    """A start on a device where no replica of the pool is. Sleepers of other pools stop last, the largest first."""
    sleeping = _made_room(device, need.least, {need.pool})
    if sleeping is not None:
        return Start(device.device, sleeping)
    idle = _by_idleness(device, {need.pool})
    lacking = need.least - device.room - sum(seat.least - seat.asleep for seat in idle)
    stopping = []
    for seat in sorted(
        (seat for seat in device.seats if not seat.is_awake), key=lambda seat: (-seat.asleep, seat.pool)
    ):
        if lacking <= 0:
            break
        stopping.append(seat.replica)
        lacking -= seat.asleep
    return Start(device.device, tuple(seat.replica for seat in idle), tuple(stopping)) if lacking <= 0 else None


def _by_idleness(device: DeviceState, pools: Collection[PoolId]) -> list[SeatState]:
    """The replicas that may fall asleep for these pools, least recently used first."""
    others = (seat for seat in device.seats if seat.is_awake and seat.pool not in pools)
    idle = [(seat.idle_since, seat.replica, seat) for seat in others if seat.idle_since is not None]
    return [seat for _, _, seat in sorted(idle, key=lambda each: each[:2])]
