"""The member `devices` of `/mell/state`: what each replica holds of its node's memory, and why."""

from collections.abc import Mapping
from typing import Any

from deployments.scheduler.memory.nodes import NodeMemory
from policies.memory.ledger import Seat
from policies.memory.plan import mib_of
from policies.model import ReplicaId

_WHY: Mapping[str, str] = {
    "starts": "it starts",
    "silent": "it does not report: it counts with its last report and orders",
    "asleep": "it sleeps",
    "hand": "an operator has ordered its size",
    "start": "it has the size of its start",
}


def devices_json(memory: NodeMemory, acts: bool) -> list[dict[str, Any]]:
    """All nodes with replicas, or with replicas that wait. `acts` is true in the mode `act`."""
    waiting = {each.node for each in memory.starting.waits.values()}
    return [_device_json(memory, node, acts) for node in sorted({*memory.ledgers.nodes, *waiting})]


def _device_json(memory: NodeMemory, node: str, acts: bool) -> dict[str, Any]:
    ledger = memory.ledgers.on(node)
    seats = [_seat_json(memory, seat, acts) for seat in ledger.seats]
    seats += [
        {"replica": replica, "pool": each.pool, "by": "waits", "held_mib": 0, "ordered_mib": mib_of(each.size)}
        | {"why": each.reason}
        for replica, each in memory.starting.waits.items()
        if each.node == node and memory.ledgers.home(replica) is None
    ]
    return {
        "id": node,
        "budget_mib": mib_of(ledger.budget),
        "ordered_mib": mib_of(ledger.bound),
        "held_mib": mib_of(sum(seat.model.need(seat.reported.held) for seat in ledger.seats if seat.reported)),
        "seats": seats,
    }


def _seat_json(memory: NodeMemory, seat: Seat, acts: bool) -> dict[str, Any]:
    """The part of a replica. `want` and `target` are those of its KV pool by the newest division."""
    home, reported, block = memory.ledgers.home(seat.replica), seat.reported, seat.model.block
    held = seat.bound if reported is None else seat.model.need(reported.held)
    found: dict[str, Any] = {
        "replica": seat.replica,
        "pool": None if home is None else home.pool,
        "by": _by(memory, seat, acts),
        "held_mib": mib_of(held),
        "ordered_mib": mib_of(seat.bound),
    }
    if (size := memory.division.size_of(seat)) is None:
        why = _why_it_waits(memory, seat.replica) or _paired_with(memory, seat.replica) or _WHY.get(found["by"], "")
        return found | {"why": why}
    target = size.blocks * block
    if size.want > target:
        why = "its requests want more than there is for it"
    elif size.blocks <= seat.model.floor:
        why = "it keeps the least, one request of max_model_len"
    else:
        why = "its requests have what they want; the rest is for its prefix cache"
    return found | {"want_mib": mib_of(size.want), "target_mib": mib_of(target), "why": why}


def _why_it_waits(memory: NodeMemory, replica: ReplicaId) -> str | None:
    """The reason why a replica waits for memory, to start or to wake; None if it does not."""
    waits = memory.starting.waits.get(replica)
    return memory.starting.lacks.get(replica) if waits is None else waits.reason


def _paired_with(memory: NodeMemory, replica: ReplicaId) -> str | None:
    """The pair of a replica, with its state and its origin; None if it is in none."""
    found = memory.ledgers.find(replica)
    if found is None or not found.memory.is_paired or (pair := found.memory.pair) is None:
        return None
    origin = "by hand" if pair.by_hand else "by the policy"
    return f"it shares its layers with {pair.buddy}, {origin}: {pair.state}"


def _by(memory: NodeMemory, seat: Seat, acts: bool) -> str:
    """The origin of a replica's size."""
    if _why_it_waits(memory, seat.replica) is not None:
        return "waits"
    if seat.model.is_claimed or memory.ledgers.is_claimed(seat.replica):
        return "starts"
    if seat.reported is None or memory.ledgers.find(seat.replica) is None:
        return "silent"
    if not seat.reported.ordered.is_awake:
        return "asleep"
    if _paired_with(memory, seat.replica) is not None:
        return "pair"
    if seat.reported.by_hand:
        return "hand"
    return "demand" if acts and memory.division.size_of(seat) is not None else "start"
