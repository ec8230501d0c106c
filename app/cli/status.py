"""`mell status`: the replicas, their totals, and the migrations so far. Everything but `status` is pure."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.cli.endpoint import MellEndpoint
from app.cli.formatting import Bar, age, count, duration, plural, shown_mode, usage_colour
from app.cli.migrations import summary
from app.cli.terminal import Terminal
from app.client.documents import (
    ModelDocument,
    NodeDocument,
    PairingDocument,
    PrefillsDocument,
    Records,
    ReplicaDocument,
    ScalingDocument,
    SeatDocument,
    ServiceDocument,
    StateDocument,
)
from migration.protocol.record import Outcome
from policies.decision.disaggregation.prefill_load import PrefillReason
from policies.decision.level.scaling import ScaleDownBlock, ScaleUp
from policies.model import Phase, ReplicaState, Role
from policies.precedence import DEFAULT_CLASS

_STALE_S = 5.0
_STATES = {ReplicaState.RUNNING: "green", ReplicaState.DRAINING: "yellow"}


def status(endpoint: MellEndpoint, terminal: Terminal) -> None:
    """Show the replicas once; as JSON, the document at `/mell/state`."""
    if terminal.as_json:
        terminal.write(endpoint.state_document())
        return
    state, records = endpoint.state(), endpoint.migrations()
    terminal.show(render_status(endpoint.url, state, records, time.time()))


def render_status(url: str, state: StateDocument, records: Records, now: float) -> RenderableType:
    """The whole output. `now` is in seconds since 1970."""
    return Group(
        *header(url, state, now),
        replica_table(state.replicas, state.as_of),
        *device_tables(state, headed=True),
        Text(),
        totals(state),
        *class_totals(state),
        *migration_counts(records, now),
    )


def header(url: str, state: StateDocument, now: float) -> list[Text]:
    """The URL, the mode and the number of replicas; a warning if the state is old."""
    wanted = "" if state.wanted is None else f" of {state.wanted} wanted"
    mode = shown_mode(state.mode, state.configured_mode)
    policy = f", policy {state.policy}" if state.policy else ""
    lines = [
        Text.assemble("Mell at ", (url, "bold")),
        Text(f"mode {mode}{policy}; {len(state.running)}{wanted} replicas running"),
    ]
    if state.dry_run:
        lines.append(Text(f"dry run: {state.dry_run}", "cyan"))
    lines += own_lines(state)
    for model in state.models:
        lines.append(model_line(model, state))
        lines += [Text("  ").append_text(line) for line in own_lines(model)]
    lines += staleness(state, now)
    if state.resting:
        pairs = ", ".join(f"{source} → {target}" for source, target in state.resting)
        lines.append(Text(f"no moves after failures: {pairs}", "yellow"))
    return [*lines, Text()]


def staleness(state: StateDocument, now: float) -> list[Text]:
    """A warning if the state is old, or none has come from a scheduler yet."""
    if not state.as_of:
        return [Text("no report from the scheduler yet", "yellow")]
    if (old_s := now - state.as_of) > _STALE_S:
        return [Text(f"as of {age(old_s)} ago: the scheduler is unavailable, or the clocks differ", "yellow")]
    return []


def own_lines(model: StateDocument | ModelDocument) -> list[Text]:
    """The service level of one model, and the reasons for its number of replicas."""
    lines = service_lines(model.service) if model.service else []
    if model.scaling:
        lines.append(scaling_line(model.scaling))
    if model.prefills:
        lines.append(prefills_line(model.prefills))
    if model.pairing:
        lines += pairing_lines(model.pairing)
    return lines


def model_line(model: ModelDocument, state: StateDocument) -> Text:
    """One of several models, with its numbers of replicas and requests."""
    running = [replica for replica in state.running if replica.model == model.model]
    own = [replica for replica in state.replicas if replica.model == model.model]
    requests = {request.id for replica in own for request in replica.requests}
    wanted = "" if model.wanted is None else f" of {model.wanted} wanted"
    numbers = f": {len(running)}{wanted} replicas running, {plural(len(requests), 'request')}"
    return Text.assemble("model ", (model.model, "bold"), numbers)


def service_lines(service: ServiceDocument) -> list[Text]:
    """The state of the service level, both its times, and the reasons for a bad state."""
    parts = [f"service level {service.state}"]
    if service.step_limit_s is not None and service.slowest_step_s is not None:
        parts.append(f"slowest step {1e3 * service.slowest_step_s:.1f} of {1e3 * service.step_limit_s:.1f} ms")
    if service.late_replicas:
        parts.append(f"{plural(service.late_replicas, 'replica')} with late first tokens")
    colour = "" if service.state in ("held", "measuring") else "yellow"
    return [Text("; ".join(parts), colour), *_times(service), *(Text(f"  {reason}", colour) for reason in service.why)]


def _times(service: ServiceDocument) -> Iterator[Text]:
    """A line for each time: its 99th percentile as reached and as predicted, and the target."""
    every = service.reached, service.predicted, service.target
    for name, (reached_s, predicted_s, target_s) in (
        ("first token", [times.ttft_p99_s for times in every]),
        ("between tokens", [times.itl_p99_s for times in every]),
    ):
        is_late = target_s is not None and reached_s is not None and reached_s > target_s
        text = f"  {name}, p99: {duration(reached_s)}, predicted {duration(predicted_s)}, target {duration(target_s)}"
        yield Text(text, "yellow" if is_late else "")


def scaling_line(scaling: ScalingDocument) -> Text:
    """The reasons for the number of replicas, with the numbers that decide."""
    least = f"the settings keep at least {plural(scaling.min_replicas, 'replica')}"
    linger = duration(scaling.linger_left_s)
    rare = f"on fewer than {scaling.level_replicas}, prefills lengthen too many steps"
    free = f"{scaling.free_replicas:.1f} replicas free, {scaling.reserve_replicas:.1f} kept in reserve"
    up: Mapping[str, str] = {
        ScaleUp.MINIMUM: least,
        ScaleUp.PREFILLS: rare,
        ScaleUp.REQUESTS: f"{plural(scaling.waiting_requests, 'request')} without room",
        ScaleUp.RESERVE: free,
    }
    kept: Mapping[str, str] = {
        ScaleDownBlock.MINIMUM: least,
        ScaleDownBlock.STARTING: "another one is starting",
        ScaleDownBlock.PREFILLS: rare,
        ScaleDownBlock.RESERVE: free,
        ScaleDownBlock.LINGER: f"an empty one stays for {linger}",
        ScaleDownBlock.IN_USE: "all are in use",
    }
    parts = []
    if scaling.up is not None:
        opening = f"{plural(scaling.opened, 'replica')} will open" if scaling.opened else "no further replica may open"
        parts.append(f"{opening}: {up.get(scaling.up, scaling.up)}")
    if scaling.kept is not None:
        parts.append(f"no replica closes: {kept.get(scaling.kept, scaling.kept)}")
    else:
        parts.append(f"{plural(scaling.closed, 'replica')} will close")
    return Text("; ".join(parts))


def prefills_line(prefills: PrefillsDocument) -> Text:
    """The reason for the number of replicas for prefills, with the times that decide."""
    others = [f"{number}: {duration(seconds)}" for number, seconds in sorted(prefills.predicted_s.items())]
    why: Mapping[str, str] = {
        PrefillReason.MEASURING: "too little is known yet",
        PrefillReason.ROOM: "with more of them the others would lack room",
        PrefillReason.OVERLOAD: "no number of them keeps up with the arrivals",
        PrefillReason.TIMES: f"predicted times of a job are {', '.join(others)}",
    }
    head = f"{prefills.prefill_replicas} of at most {plural(prefills.at_most, 'replica')} for prefills"
    share = f", {prefills.apart_share:.0%} of the newest prompts there"
    return Text(f"{head}{share}: {why.get(prefills.reason, prefills.reason)}")


def pairing_lines(pairing: PairingDocument) -> list[Text]:
    """A line for each pair of replicas, for each that the policy proposes, and for each replica that it cannot pair."""
    lines = []
    for pair in pairing.pairs:
        state = "" if pair.state == pair.phase else f" ({pair.state})"
        origin = "by hand" if pair.by_hand else "by the policy"
        cause = "" if pair.cause is None else f": {pair.cause}"
        head = f"pair {pair.lower} + {pair.upper}, layers from {pair.boundary} on at {pair.upper}"
        lines.append(Text(f"{head}, {origin}: {pair.phase}{state} for {age(pair.state_s)}{cause}"))
    lines += [Text(f"would pair {lower} + {upper}", "cyan") for lower, upper in pairing.proposed]
    if pairing.mode != "off":
        lines += [Text(f"{id} cannot be in a pair: {why}", "yellow") for id, why in pairing.unpairable.items()]
    return lines


def replica_table(replicas: Sequence[ReplicaDocument], as_of: float) -> Table:
    """One row per replica, with its state at `as_of`."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    for name in ("REPLICA", "STATE", "NODE"):
        table.add_column(name, no_wrap=True)
    table.add_column("KV CACHE", ratio=1, no_wrap=True)
    for name in ("", "USED/TOKENS", "REQ", "WAIT"):
        table.add_column(name, justify="right", no_wrap=True)
    for replica in replicas:
        table.add_row(
            Text(replica.id),
            styled_state(replica, as_of),
            Text(replica.node[:8]),
            Bar((replica.used_tokens,), replica.capacity_tokens, usage_colour(replica.used_share)),
            Text(f"{replica.used_share:.0%}"),
            Text(f"{count(replica.used_tokens)}/{count(replica.capacity_tokens)}"),
            Text(f"{len(replica.requests)}"),
            Text(f"{replica.waiting}", "yellow" if replica.waiting else ""),
        )
    return table


def memory_table(replicas: Sequence[ReplicaDocument], seats: Mapping[str, SeatDocument]) -> Table:
    """One row per replica with an elastic KV pool, and with a seat; with its model if there are several."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    models = ("MODEL",) if any(replica.model is not None for replica in replicas) else ()
    for name in ("REPLICA", *models, "BY", "POOL"):
        table.add_column(name, no_wrap=True)
    for name in ("USED", "BLOCKS", "ORDERED", "LEAST", "MOST", "MIB"):
        table.add_column(name, justify="right", no_wrap=True)
    for replica in replicas:
        seat, pool = seats.get(replica.id), replica.memory
        if seat is None and pool is None:
            continue
        model, by = (Text(replica.model or ""),) if models else (), Text("" if seat is None else seat.by)
        if pool is None:
            cells = ["", *("" for _ in range(5)), "" if seat is None else f"{seat.mib:,}"]
        else:
            sizes = (pool.used_blocks, pool.blocks, pool.ordered_blocks, pool.least_blocks, pool.declared_blocks)
            state = pool.state if pool.cause is None else f"{pool.state}: {pool.cause}"
            state += "" if pool.pair is None else f", {pool.pair.state} with {pool.pair.buddy}"
            cells = [state, *(f"{size:,}" for size in (*sizes, pool.mib))]
        table.add_row(Text(replica.id), *model, by, *map(Text, cells))
    return table


def memory_of_nodes(nodes: Sequence[NodeDocument]) -> Text:
    """A line for each node with the sum of its memory, and one for each replica with the reason of its part."""
    lines = []
    for node in nodes:
        lines.append(f"node {node.id[:8]}: {node.held_mib:,} of {node.budget_mib:,} MiB held")
        lines += [f"  {seat.replica}: {seat.why}" for seat in node.seats]
    return Text("\n".join(lines))


def device_tables(state: StateDocument, headed: bool) -> list[RenderableType]:
    """The memory of each node with a budget: a bar of its holders, and a line with what each holds. Else nothing."""
    if not state.nodes:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, show_header=headed)
    table.add_column("NODE", no_wrap=True)
    table.add_column("MEMORY", ratio=1, no_wrap=True)
    for name in ("", "HELD/MIB", "ORDERED"):
        table.add_column(name, justify="right", no_wrap=True)
    lines = []
    for node in state.nodes:
        seats = seats_by_holder(node, state)
        table.add_row(
            Text(node.id[:8]),
            Bar([sum(seat.mib for seat in own) for own in seats.values()], node.budget_mib),
            Text(f"{node.held_mib / node.budget_mib:.0%}"),
            Text(f"{node.held_mib:,}/{node.budget_mib:,}"),
            Text(f"{node.ordered_mib:,}"),
        )
        lines.append(
            Text(
                f"{node.id[:8]}: {', '.join(starmap(_holding, seats.items()))}", no_wrap=not headed, overflow="ellipsis"
            )
        )
    return [*([Text()] if headed else []), table, *lines]


def seats_by_holder(node: NodeDocument, state: StateDocument) -> Mapping[str, Sequence[SeatDocument]]:
    """The seats on a node by model, largest sum first; with only one model, by replica."""
    found: dict[str, list[SeatDocument]] = {}
    for seat in node.seats:
        found.setdefault((seat.model if state.models else None) or seat.replica, []).append(seat)
    return dict(sorted(found.items(), key=lambda item: -sum(seat.mib for seat in item[1])))


_NOTED = ("asleep", "starts", "waits", "silent")
"""Origins of sizes, in `SeatDocument.by`, of replicas that do not serve."""


def _holding(holder: str, seats: Sequence[SeatDocument]) -> str:
    """The memory of one holder in MiB, with the number of its replicas that do not serve, unless all are alike."""
    counts = {by: sum(seat.by == by for seat in seats) for by in _NOTED}
    notes = [by if count == len(seats) else f"{count} {by}" for by, count in counts.items() if count]
    return f"{holder} {sum(seat.mib for seat in seats):,}" + (f" ({', '.join(notes)})" if notes else "")


def styled_state(replica: ReplicaDocument, as_of: float) -> Text:
    """A replica's state in its colour, with its role if it has one, and its model if there are several.

    Behind ASLEEP: for how long it has been at `as_of`.

    In brackets: the role that an operator has set.
    """
    style = next((style for state, style in _STATES.items() if state == replica.state), "cyan")
    role = f" {replica.role}" if replica.role != Role.BOTH else ""
    if replica.role_by_hand is not None:
        role += f" [{replica.role_by_hand}]"
    model = "" if replica.model is None else f" {replica.model}"
    since = None if replica.state != ReplicaState.ASLEEP or replica.memory is None else replica.memory.asleep_at
    asleep = "" if since is None else f" {age(as_of - since)}"
    return Text.assemble((replica.state, style), asleep, role, (model, "bold"))


def totals(state: StateDocument) -> Text:
    """Totals over all replicas."""
    used, capacity = (sum(getattr(r, name) for r in state.replicas) for name in ("used_tokens", "capacity_tokens"))
    share = f" ({used / capacity:.0%})" if capacity else ""
    waiting = sum(replica.waiting for replica in state.replicas)
    preempted = sum(replica.preemptions for replica in state.replicas)
    return Text(
        f"total: {plural(len(state.requests()), 'request')}, {waiting} waiting; "
        f"KV {count(used)} of {count(capacity)} tokens{share}; {plural(preempted, 'preemption')} so far"
    )


def class_totals(state: StateDocument) -> list[Text]:
    """The requests of each service class, if there is another one than the default class."""
    requests = list(state.requests().values())
    names = sorted({request.service_class for request in requests})
    if names in ([], [DEFAULT_CLASS]):
        return []
    parts = []
    for name in names:
        members = [request for request in requests if request.service_class == name]
        waiting = sum(request.phase == Phase.WAITING for request in members)
        parts.append(f"{name} {len(members)}" + (f" ({waiting} waiting)" if waiting else ""))
    return [Text(f"classes: {', '.join(parts)}")]


def migration_counts(records: Records, now: float) -> list[Text]:
    """The number of listed migrations by outcome, and the newest one."""
    if not records:
        return [Text("migrations: none")]
    outcomes = [record.outcome for record in records]
    ended = ", ".join(f"{n} {outcome}" for outcome in Outcome if (n := outcomes.count(outcome)))
    under_way = f"{outcomes.count(None)} under way" if None in outcomes else ""
    counts = Text(f"migrations: {', '.join(filter(None, (ended, under_way)))}")
    newest = Text.assemble(f"newest, {age(now - records[0].started_at)} ago: ", summary(records[0]))
    return [counts, newest]
