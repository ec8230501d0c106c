"""`mell status`: the replicas, their totals and what was moved lately; pure."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.cli.views.bars import Bar, fullness
from app.cli.views.migrations import sentence
from app.cli.views.numbers import age, count, plural
from app.client.documents import Records, ReplicaDocument, StateDocument
from migration.record import Outcome
from policies.model import ReplicaState

_STALE_S = 5.0
_STATES = {ReplicaState.RUNNING: "green", ReplicaState.DRAINING: "yellow"}


def show_status(url: str, state: StateDocument, records: Records, now: float) -> RenderableType:
    """The page. `now` is in seconds since 1970."""
    return Group(*header(url, state, now), replicas(state.replicas), Text(), totals(state), *lately(records, now))


def header(url: str, state: StateDocument, now: float) -> list[Text]:
    """Where, how, and how many replicas; a warning when nobody has looked for long."""
    wanted = "" if state.wanted is None else f" of {state.wanted} wanted"
    policy = f", policy {state.policy}" if state.policy else ""
    lines = [
        Text.assemble("Mell at ", (url, "bold")),
        Text(f"mode {state.mode}{policy}; {len(state.running)}{wanted} replicas running"),
    ]
    if state.dry_run:
        lines.append(Text(f"dry run: {state.dry_run}", "cyan"))
    if not state.as_of:
        lines.append(Text("the scheduler has not said anything yet", "yellow"))
    elif (old_s := now - state.as_of) > _STALE_S:
        lines.append(Text(f"as of {age(old_s)} ago: the scheduler is away, or the clocks differ", "yellow"))
    if state.resting:
        pairs = ", ".join(f"{source} → {target}" for source, target in state.resting)
        lines.append(Text(f"moves rest, after failures: {pairs}", "yellow"))
    return [*lines, Text()]


def replicas(found: Sequence[ReplicaDocument]) -> Table:
    """One row for each replica."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    for name in ("REPLICA", "STATE", "NODE"):
        table.add_column(name, no_wrap=True)
    table.add_column("KV CACHE", ratio=1, no_wrap=True)
    for name in ("", "USED/TOKENS", "REQ", "WAIT"):
        table.add_column(name, justify="right", no_wrap=True)
    for replica in found:
        table.add_row(
            Text(replica.id),
            state_of(replica),
            Text(replica.node[:8]),
            Bar((replica.used_tokens,), replica.capacity_tokens, fullness(replica.used_share)),
            Text(f"{replica.used_share:.0%}"),
            Text(f"{count(replica.used_tokens)}/{count(replica.capacity_tokens)}"),
            Text(f"{len(replica.requests)}"),
            Text(f"{replica.waiting}", "yellow" if replica.waiting else ""),
        )
    return table


def state_of(replica: ReplicaDocument) -> Text:
    """The state of a replica, in its colour."""
    return Text(replica.state, next((style for state, style in _STATES.items() if state == replica.state), "cyan"))


def totals(state: StateDocument) -> Text:
    """All replicas together."""
    used, capacity = (sum(getattr(r, name) for r in state.replicas) for name in ("used_tokens", "capacity_tokens"))
    share = f" ({used / capacity:.0%})" if capacity else ""
    waiting = sum(replica.waiting for replica in state.replicas)
    preempted = sum(replica.preemptions for replica in state.replicas)
    return Text(
        f"total: {plural(len(state.requests()), 'request')}, {waiting} waiting; "
        f"KV {count(used)} of {count(capacity)} tokens{share}; {plural(preempted, 'preemption')} so far"
    )


def lately(records: Records, now: float) -> list[Text]:
    """The migrations that are remembered, and the newest of them."""
    if not records:
        return [Text("migrations: none")]
    outcomes = [record.outcome for record in records]
    known = ", ".join(f"{n} {outcome}" for outcome in Outcome if (n := outcomes.count(outcome)))
    under_way = f"{outcomes.count(None)} under way" if None in outcomes else ""
    counts = Text(f"migrations: {', '.join(filter(None, (known, under_way)))}")
    newest = Text.assemble(f"newest, {age(now - records[0].started_at)} ago: ", sentence(records[0]))
    return [counts, newest]
