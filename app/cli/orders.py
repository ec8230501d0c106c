"""`mell move`, `drain`, `role`, `memory`, `sleep`, `mode` and others: give an order, or with --wait see its end."""

from enum import StrEnum
from typing import Any

from app.cli.endpoint import MellEndpoint
from app.cli.errors import Failed
from app.cli.formatting import plural, shown_mode
from app.cli.migrations import summary
from app.cli.status import memory_of_nodes, memory_table
from app.cli.terminal import PATIENCE_S, WAIT_INTERVAL_S, Terminal
from app.client.documents import ReplicaDocument, parse_state
from migration.protocol.record import MigrationRecord, Outcome
from policies.model import Role


def move(endpoint: MellEndpoint, terminal: Terminal, request: str, target: str | None, path: str, wait: bool) -> None:
    """Order a move. With `wait`, raises Failed unless it commits."""
    id = endpoint.move(request, target, path)
    terminal.show(f"migration {id} has begun")
    if not wait:
        terminal.write({"id": id})
        return
    record = _ended(endpoint, terminal, id)
    if record.outcome is not Outcome.COMMITTED:
        raise Failed(summary(record).plain, record.to_json())
    terminal.write(record.to_json())
    terminal.show(summary(record))


def _ended(endpoint: MellEndpoint, terminal: Terminal, id: str) -> MigrationRecord:
    """Wait for the end of a migration; its record."""
    listed_s = terminal.clock()
    for records in terminal.poll(endpoint.migrations, WAIT_INTERVAL_S):
        record = next((record for record in records if record.id == id), None)
        if record is not None:
            listed_s = terminal.clock()
            if record.outcome is not None:
                return record
        elif terminal.clock() - listed_s > PATIENCE_S:
            break
    raise Failed(f"migration {id} is no longer listed: the scheduler or the source may have died")


_MISSING_STATES = 2
"""A replica is gone once it is missing from this many successive states; a slow one may be missing from one."""


def drain(endpoint: MellEndpoint, terminal: Terminal, replica: str, wait: bool) -> None:
    """Order that a replica be drained."""
    answer = endpoint.drain(replica)
    terminal.show(f"{replica} drains: its requests move to others, then it stops")
    if wait:
        _wait_until_gone(endpoint, terminal, replica)
        answer |= {"state": "GONE"}
        terminal.show(f"{replica} is gone")
    terminal.write(answer)


def _wait_until_gone(endpoint: MellEndpoint, terminal: Terminal, id: str) -> None:
    """Wait until a replica is gone, and show the number of its remaining requests whenever it changes."""
    remaining: int | None = None
    missing, as_of = 0, 0.0
    for state in terminal.poll(endpoint.state, WAIT_INTERVAL_S):
        # While the scheduler is unavailable, an ingress returns an old state, possibly an empty one.
        if state.as_of <= as_of:
            continue
        as_of = state.as_of
        replica = state.replica(id)
        missing = missing + 1 if replica is None else 0
        if missing == _MISSING_STATES:
            return
        if replica is not None and len(replica.requests) != remaining:
            remaining = len(replica.requests)
            terminal.show(_progress(replica))


def _progress(replica: ReplicaDocument) -> str:
    return f"{plural(len(replica.requests), 'request')} left on {replica.id}, which is {replica.state}"


def drain_node(endpoint: MellEndpoint, terminal: Terminal, node: str, wait_s: float | None) -> None:
    """Order that a node be drained. With `wait_s`, raises Failed unless no replica is left there after that time."""
    answer = endpoint.drain_node(node, wait_s)
    nodes, replicas = frozenset(answer["nodes"]), answer["replicas"]
    if not replicas:
        terminal.show(f"no replica is on {node}")
    else:
        terminal.show(f"{node} drains: {plural(len(replicas), 'replica')} will be replaced elsewhere")
        if wait_s is not None:
            _wait_until_empty(endpoint, terminal, nodes, wait_s)
            answer |= {"replicas": []}
            terminal.show(f"{node} is empty")
    terminal.write(answer)


def _wait_until_empty(endpoint: MellEndpoint, terminal: Terminal, nodes: frozenset[str], wait_s: float) -> None:
    """Wait until no replica is on the nodes, and show what is left whenever it changes. Raises Failed."""
    shown, missing, as_of, until_s = "", 0, 0.0, terminal.clock() + wait_s
    for state in terminal.poll(endpoint.state, WAIT_INTERVAL_S):
        if state.as_of > as_of:
            as_of = state.as_of
            there = [replica for replica in state.replicas if replica.node in nodes]
            missing = missing + 1 if not there else 0
            if missing == _MISSING_STATES:
                return
            left = "; ".join(map(_progress, there))
            if left and left != shown:
                terminal.show(shown := left)
        if terminal.clock() > until_s:
            raise Failed(f"after {wait_s:g} s: {shown or 'the scheduler has not reported'}")


def hand_over(
    endpoint: MellEndpoint, terminal: Terminal, to: str | None, key: str | None, undo: bool, wait_s: float | None
) -> None:
    """Hand all requests over to the Mell at `to`, undo that, or show it.

    With `wait_s`, raises Failed unless no request of clients runs here after that time.
    """
    if undo:
        answer = endpoint.undo_hand_over()
    else:
        answer = endpoint.hand_over() if to is None else endpoint.begin_hand_over(to, key)
    terminal.show(shown := _shown_hand_over(answer))
    if wait_s is not None:
        answer = _wait_until_handed_over(endpoint, terminal, shown, wait_s)
    terminal.write(answer)


def _shown_hand_over(state: dict[str, Any]) -> str:
    silent = f" (without answers of {', '.join(state['silent'])})" if state["silent"] else ""
    left = f"{plural(state['here'], 'request')} here, {state['there']} there{silent}"
    if state["to"] is None:
        return f"no hand-over: {left}" + (f", {state['taken']} of another Mell" if state["taken"] else "")
    stay = "; ".join(f"{count} to the end: {why}" for why, count in sorted(state["staying"].items()))
    return f"to {state['to']}: {left}" + (f" ({stay})" if stay else "")


def _wait_until_handed_over(endpoint: MellEndpoint, terminal: Terminal, shown: str, wait_s: float) -> dict[str, Any]:
    """Wait until no request runs here, and show what is left whenever it is not as `shown`. Raises Failed."""
    until_s = terminal.clock() + wait_s
    for state in terminal.poll(endpoint.hand_over, WAIT_INTERVAL_S):
        if (now := _shown_hand_over(state)) != shown:
            terminal.show(shown := now)
        if not state["here"] and not state["silent"]:
            return state
        if terminal.clock() > until_s:
            break
    raise Failed(f"after {wait_s:g} s: {shown}")


AUTO = "auto"
"""The size of a KV pool at its start."""


class ModeChoice(StrEnum):
    """A mode of the scheduler: `policies.decision.limits.Mode`, without its imports."""

    OFF = "off"
    OBSERVE = "observe"
    ACT = "act"


_EFFECTS = {
    ModeChoice.OFF: "the scheduler begins no more moves, and opens and closes no replica",
    ModeChoice.OBSERVE: "the scheduler begins no more moves, and reports what it would do",
    ModeChoice.ACT: "the scheduler moves requests, and opens and closes replicas",
}


def mode(endpoint: MellEndpoint, terminal: Terminal, mode: ModeChoice | None) -> None:
    """Set the scheduler's mode, or show it."""
    if mode is None:
        found = endpoint.mode()
        terminal.show(f"mode {shown_mode(found['mode'], found['configured_mode'])}")
        terminal.write(found)
        return
    answer = endpoint.set_mode(mode)
    terminal.show(f"mode {mode}: {_EFFECTS[mode]}")
    terminal.write(answer)


class RoleChoice(StrEnum):
    """A role for a replica; AUTO: the one that Mell assigns."""

    PREFILL = Role.PREFILL
    DECODE = Role.DECODE
    BOTH = Role.BOTH
    AUTO = "auto"


def set_role(endpoint: MellEndpoint, terminal: Terminal, replica: str, role: RoleChoice) -> None:
    """Set a replica's role."""
    answer = endpoint.set_role(replica, None if role is RoleChoice.AUTO else role)
    terminal.show(f"{replica}: " + ("Mell assigns its role" if role is RoleChoice.AUTO else f"its role is {role}"))
    terminal.write(answer)


def memory(endpoint: MellEndpoint, terminal: Terminal, replica: str | None, blocks: str | None) -> None:
    """Set the size of a replica's KV pool, or show all pools, or one of them. Raises Failed without elastic pools."""
    if blocks is not None and replica is not None:
        answer = endpoint.set_memory(replica, None if blocks == AUTO else int(blocks))
        size = f"its KV pool gets {plural(int(blocks), 'block')}" if blocks != AUTO else "Mell sizes its KV pool"
        terminal.show(f"{replica}: {size}")
        terminal.write(answer)
        return
    document = endpoint.state_document()
    state = parse_state(document)
    found = [each for each in state.replicas if replica in (None, each.id)]
    if replica is not None and not found:
        raise Failed(f"no replica {replica!r} is running")
    seats = {seat.replica: seat for node in state.nodes for seat in node.seats}
    if not any(each.memory or each.id in seats for each in found):
        raise Failed("KV pools keep their sizes: memory.budget_mib is not set")
    terminal.show(memory_table(found, seats))
    if replica is None and state.nodes:
        terminal.show(memory_of_nodes(state.nodes))
    devices = {"devices": document.get("devices", [])} if replica is None else {}
    listed = [{"id": each["id"], "memory": each.get("memory")} for each in document["replicas"]]
    terminal.write({"replicas": [each for each in listed if replica in (None, each["id"])], **devices})


def set_asleep(endpoint: MellEndpoint, terminal: Terminal, name: str, asleep: bool) -> None:
    """Have a replica, if one has that id, or else a model fall asleep or wake."""
    kind = "replicas" if any(replica.id == name for replica in endpoint.state().replicas) else "models"
    answer = endpoint.set_asleep(kind, name, asleep)
    terminal.show(f"{name}: {'falls asleep once its requests have left' if asleep else 'wakes'}")
    terminal.write(answer)


def pair(endpoint: MellEndpoint, terminal: Terminal, lower: str, upper: str) -> None:
    """Form a pair of two replicas."""
    answer = endpoint.pair(lower, upper)
    terminal.show(f"{lower} and {upper} give each other layers: mell memory shows it")
    terminal.write(answer)


def unpair(endpoint: MellEndpoint, terminal: Terminal, replica: str) -> None:
    """Undo the pair of a replica."""
    answer = endpoint.unpair(replica)
    terminal.show(f"{replica} and its buddy load all layers again: mell memory shows it")
    terminal.write(answer)


def set_bounds(endpoint: MellEndpoint, terminal: Terminal, least: int, most: int, model: str | None) -> None:
    """Set the bounds on the number of a model's replicas."""
    answer = endpoint.set_bounds(least, most, model)
    terminal.show(f"at least {plural(least, 'replica')}, at most {most}")
    terminal.write(answer)


def set_level(
    endpoint: MellEndpoint,
    terminal: Terminal,
    service_class: str,
    ttft_p99_s: float | None,
    itl_p99_ms: float | None,
    model: str | None,
) -> None:
    """Set the service level of a class for a model."""
    answer = endpoint.set_level(service_class, ttft_p99_s, itl_p99_ms, model)
    first = [] if ttft_p99_s is None else [f"first tokens within {ttft_p99_s:g} s"]
    others = [] if itl_p99_ms is None else [f"others within {itl_p99_ms:g} ms"]
    terminal.show(f"class {service_class}: {', '.join(first + others)}, for 99 %")
    terminal.write(answer)
