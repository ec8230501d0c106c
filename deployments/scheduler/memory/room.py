"""Room for replicas that wait for memory: the idle ones that fall asleep for them."""

from collections.abc import Collection, Mapping

from deployments.scheduler.memory.ledgers import NodeLedgers
from deployments.scheduler.memory.nodes import NodeMemory
from policies.memory.ladder import DeviceState, SeatState, make_room
from policies.memory.ledger import Seat
from policies.model import Bytes, ReplicaId

IdleTimes = Mapping[ReplicaId, float]
"""The replicas that may fall asleep since others need their memory, with the times since when they are idle."""


def replicas_to_sleep(nodes: NodeMemory, idle: IdleTimes, leaving: Collection[ReplicaId]) -> tuple[ReplicaId, ...]:
    """The idle replicas that fall asleep for those that wait, where shrinks are not enough.

    On a node with a replica that is `leaving`, its memory comes first.
    """
    found: list[ReplicaId] = []
    waits, lacks = nodes.starting.waits, nodes.starting.lacks
    for node, device in zip(nodes.ledgers.nodes, device_states(nodes.ledgers, (), (), idle), strict=True):
        # A measured engine counts with all that it needs already.
        waiting = [(seat.pool, Bytes(0)) for seat in device.seats if seat.replica in lacks]
        waiting += [(each.pool, each.size) for each in waits.values() if each.node == node]
        if not any(seat.replica in leaving for seat in device.seats):
            found += make_room(device, waiting)
    return tuple(found)


def device_states(
    ledgers: NodeLedgers, asleep: Collection[ReplicaId], waking: Collection[ReplicaId], idle: IdleTimes
) -> tuple[DeviceState, ...]:
    """The nodes, with the replicas on them; those `asleep` may be ordered to be, those `waking` to wake.

    A replica that divisions size can shrink to its floor.
    """
    found = []
    for number, node in enumerate(ledgers.nodes):
        ledger = ledgers.on(node)
        seats = tuple(_seat_state(ledgers, seat, asleep, idle) for seat in ledger.seats)
        is_waking = any(seat.replica in waking for seat in ledger.seats)
        found.append(DeviceState(number, ledger.budget, seats, is_waking))
    return tuple(found)


def _seat_state(ledgers: NodeLedgers, seat: Seat, asleep: Collection[ReplicaId], idle: IdleTimes) -> SeatState:
    home, reported = ledgers.home(seat.replica), ledgers.find(seat.replica)
    assert home is not None, "every seat has a home"
    sleeps = seat.replica in asleep or (seat.reported is not None and not seat.reported.ordered.is_awake)
    held = seat.model.least if ledgers.is_divided(seat) else seat.bound
    size = seat.model.asleep if sleeps else held
    may_sleep = reported is not None and not reported.memory.is_paired
    idle_since = idle.get(seat.replica) if may_sleep else None
    return SeatState(seat.replica, home.pool, not sleeps, size, seat.model.asleep, idle_since)
