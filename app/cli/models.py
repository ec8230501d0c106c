"""`mell models`: a row for each model, with its replicas, requests and memory. Everything but `models` is pure."""

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.cli.endpoint import MellEndpoint
from app.cli.formatting import age
from app.cli.status import staleness
from app.cli.terminal import Terminal
from app.client.documents import ReplicaDocument, SeatDocument, StateDocument, requests_on
from policies.model import Phase, ReplicaState

_AWAKE = (ReplicaState.RUNNING, ReplicaState.DRAINING)
_STARTING = (ReplicaState.STARTING, ReplicaState.WAKING)


def models(endpoint: MellEndpoint, terminal: Terminal) -> None:
    """Show the models once."""
    state = endpoint.state()
    rows = model_rows(state)
    terminal.write({"models": [row.to_json() for row in rows]})
    terminal.show(render_models(state, rows, time.time()))


@dataclass(frozen=True, slots=True)
class ModelMemoryRow:
    """The memory of a model's replicas, in MiB. `held_mib` is also that of replicas that start, without its parts yet.

    `share` is that of `held_mib` in the budgets of all nodes.
    """

    parameters_mib: int
    kv_mib: int
    rest_mib: int
    held_mib: int
    share: float


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model: its names in calls, the numbers of its replicas and of its requests, and its memory.

    `model` is its id, None for a sole model. `memory` is None without budgets. `notes` are the reasons why it does not
    serve, or not with all replicas.
    """

    model: str | None
    names: tuple[str, ...]
    awake: int
    asleep: int
    starting: int
    running: int
    waiting: int
    memory: ModelMemoryRow | None
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """Its names, with its id if that is none of them."""
        names = ", ".join(self.names) or self.model or "-"
        return names if self.model is None or self.model in (names, *self.names) else f"{names} ({self.model})"

    def to_json(self) -> dict[str, Any]:
        """The row as a member of `mell models --json`."""
        return {
            "model": self.model,
            "names": list(self.names),
            "replicas": {"awake": self.awake, "asleep": self.asleep, "starting": self.starting},
            "requests": {"running": self.running, "waiting": self.waiting},
            "memory": None if self.memory is None else asdict(self.memory),
            "notes": list(self.notes),
        }


def model_rows(state: StateDocument) -> list[ModelRow]:
    """A row for each model; for a sole one, the only row."""
    if not state.models:
        return [_row(None, state.names, state)]
    return [_row(each.model, each.names, state) for each in state.models]


def _row(model: str | None, names: tuple[str, ...], state: StateDocument) -> ModelRow:
    replicas = [replica for replica in state.replicas if model in (None, replica.model)]
    ids = {replica.id for replica in replicas}
    seats = [seat for node in state.nodes for seat in node.seats if model is None or seat.replica in ids]
    states = [replica.state for replica in replicas]
    phases = [request.phase for request in requests_on(replicas).values()]
    waiting = phases.count(Phase.WAITING)
    return ModelRow(
        model,
        names,
        awake=sum(each in _AWAKE for each in states),
        asleep=states.count(ReplicaState.ASLEEP),
        starting=sum(each in _STARTING for each in states),
        running=len(phases) - waiting,
        waiting=waiting,
        memory=_memory(replicas, seats, sum(node.budget_mib for node in state.nodes)) if state.nodes else None,
        notes=tuple(_notes(states, replicas, seats, state)),
    )


def _memory(replicas: Iterable[ReplicaDocument], seats: Iterable[SeatDocument], budget_mib: int) -> ModelMemoryRow:
    pools = [replica.memory for replica in replicas if replica.memory is not None]
    held = sum(seat.mib for seat in seats)
    return ModelMemoryRow(
        sum(pool.parameters_mib for pool in pools),
        sum(pool.kv_mib for pool in pools),
        sum(pool.rest_mib for pool in pools),
        held,
        held / budget_mib,
    )


def _notes(
    states: list[str], replicas: Collection[ReplicaDocument], seats: Iterable[SeatDocument], state: StateDocument
) -> Iterator[str]:
    if ReplicaState.ASLEEP in states and not any(each in (*_AWAKE, *_STARTING) for each in states):
        since = [r.memory.asleep_at for r in replicas if r.memory is not None and r.memory.asleep_at is not None]
        asleep = f"asleep for {age(state.as_of - max(since))}" if since else "asleep"
        wakes = "a request wakes it" if state.mode == "act" else f"in the mode {state.mode}, only mell wake wakes it"
        yield f"{asleep}: {wakes}"
    for replica in replicas:
        if replica.memory is not None and replica.memory.cause is not None:
            yield f"{replica.id}: {replica.memory.cause}"
    for seat in seats:
        if seat.by == "waits":
            yield f"{seat.replica} waits for memory: {seat.why}"


def render_models(state: StateDocument, rows: Iterable[ModelRow], now: float) -> RenderableType:
    """The whole output. `now` is in seconds since 1970."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("MODEL")
    memory = ("PARAMETERS", "KV", "REST", "MIB", "SHARE") if state.nodes else ()
    for name in ("AWAKE", "ASLEEP", "STARTING", "RUN", "WAIT", *memory):
        table.add_column(name, justify="right", no_wrap=True)
    notes = []
    for row in rows:
        counts = (row.awake, row.asleep, row.starting, row.running, row.waiting)
        table.add_row(Text(row.title), *(Text(f"{count:,}") for count in counts), *_memory_cells(row.memory))
        notes += [Text(f"{row.title}: {note}", "yellow") for note in row.notes]
    return Group(*staleness(state, now), table, *notes)


def _memory_cells(memory: ModelMemoryRow | None) -> list[Text]:
    if memory is None:
        return []
    sizes = (memory.parameters_mib, memory.kv_mib, memory.rest_mib, memory.held_mib)
    return [*(Text(f"{size:,}") for size in sizes), Text(f"{memory.share:.0%}")]
