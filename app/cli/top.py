"""`mell top`: the replicas, rates and migrations, refreshed every second.

Rates compare successive states: a request that comes and goes between two of them is not counted.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.cli.endpoint import MellEndpoint
from app.cli.errors import CliError
from app.cli.formatting import Bar, age, count, usage_colour
from app.cli.migrations import summary
from app.cli.status import class_totals, device_tables, header, styled_state, totals
from app.cli.terminal import WATCH_INTERVAL_S, Terminal
from app.client.documents import Records, ReplicaDocument, StateDocument
from policies.model import Phase

RATE_WINDOW_S = 10.0
SILENT_S = 2.5
"""Age of the newest answer from which on it is shown: a little more than two intervals."""
_MIN_MIGRATIONS = 3


def top(endpoint: MellEndpoint, terminal: Terminal) -> None:
    """Show the cluster until interrupted; as JSON, the document at `/mell/state` every second."""
    if terminal.as_json:
        endpoint.state()  # fails at once if no Mell answers; later failures are waited out
        for document in terminal.poll(endpoint.state_document, WATCH_INTERVAL_S, math.inf):
            terminal.write(document)
    screen = TopScreen(endpoint, terminal)
    # A thread redraws the screen, so that the age of the answer is updated during a slow call.
    alternate = terminal.console.is_terminal
    with Live(get_renderable=screen.render, console=terminal.console, screen=alternate, refresh_per_second=2) as live:
        while True:
            terminal.sleep(WATCH_INTERVAL_S)
            screen.refresh()
            live.refresh()


class TopScreen:
    """Polls an endpoint and renders the newest answer. Raises CliError if the first call fails."""

    def __init__(self, endpoint: MellEndpoint, terminal: Terminal) -> None:
        self._endpoint = endpoint
        self._terminal = terminal
        self._window = RateWindow()
        self._view = self._fetch()

    def refresh(self) -> None:
        """Fetch the state; after a failure, keep the last view and its error."""
        try:
            self._view = self._fetch()
        except CliError as error:
            self._view = replace(self._view, error=str(error))

    def _fetch(self) -> "TopView":
        state, records = self._endpoint.state(), self._endpoint.migrations()
        now_s = self._terminal.clock()
        return TopView(state, records, self._window.add(now_s, state), now_s)

    def render(self) -> RenderableType:
        """The screen as of now."""
        terminal = self._terminal
        return render_top(self._endpoint.url, self._view, terminal.clock(), time.time(), terminal.console.height)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second over `over_s`. `tokens` is the growth of requests in both states, prefill included."""

    over_s: float
    came: float
    left: float
    tokens: float
    moved: float


class RateWindow:
    """The states of the last `RATE_WINDOW_S` seconds; pure."""

    def __init__(self) -> None:
        self._states: deque[tuple[float, StateDocument]] = deque()

    def add(self, at_s: float, state: StateDocument) -> Rates | None:
        """Add the state at time `at_s`; the rates since the oldest state, None with only one state."""
        self._states.append((at_s, state))
        while at_s - self._states[0][0] > RATE_WINDOW_S:
            self._states.popleft()
        over_s = at_s - self._states[0][0]
        if over_s <= 0:
            return None
        came = left = tokens = moved = 0
        for (_, earlier), (_, later) in pairwise(self._states):
            before, after = earlier.requests(), later.requests()
            stayed = before.keys() & after.keys()
            came += len(after.keys() - stayed)
            left += len(before.keys() - stayed)
            tokens += sum(max(0, after[id].tokens - before[id].tokens) for id in stayed)
            moved += sum(max(0, after[id].hop - before[id].hop) for id in stayed)
        return Rates(over_s, came / over_s, left / over_s, tokens / over_s, moved / over_s)


@dataclass(frozen=True, slots=True)
class TopView:
    """An answer of the endpoint at monotonic time `seen_s`; `error` is the failure of a later call."""

    state: StateDocument
    records: Records
    rates: Rates | None
    seen_s: float
    error: str | None = None


def render_top(url: str, view: TopView, now_s: float, now: float, height: int) -> RenderableType:
    """The screen, about `height` lines high; pure. `now_s` is monotonic, `now` in seconds since 1970."""
    silent_s = now_s - view.seen_s
    silence = _silence(silent_s, view.error) if silent_s > SILENT_S else Text()
    state = view.state
    # Without an answer, the state's age is the silence shown below the header, not a fault of the scheduler.
    head = header(url, state, now - silent_s)[:-1]
    devices = device_tables(state, headed=False)
    lines = len(head) + len(state.replicas) + 2 * len(state.nodes)
    shown = max(_MIN_MIGRATIONS, height - lines - 6)
    return Group(
        *head,
        render_rates(view.rates),
        silence,
        _replica_table(state.replicas, state.as_of),
        *devices,
        totals(state),
        *class_totals(state),
        Text(),
        *_migration_lines(view.records[:shown], now),
    )


def render_rates(rates: Rates | None) -> Text:
    """The rates in one line."""
    if rates is None:
        return Text("rates: measuring", "bright_black")
    return Text(
        f"last {rates.over_s:.0f} s: {rates.came:.1f} requests/s came, {rates.left:.1f} left; "
        f"{count(rates.tokens)} tokens/s; {rates.moved * 60:.0f} moves/min"
    )


def _silence(silent_s: float, error: str | None) -> Text:
    return Text(f"no answer for {silent_s:.0f} s{': ' if error else ''}{error or ''}", "bold red")


def _replica_table(replicas: tuple[ReplicaDocument, ...], as_of: float) -> Table:
    """One row per replica; its bar shows its requests by their tokens in the KV cache, largest first."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for ratio in (None, None, 1, None, None, None):
        table.add_column(ratio=ratio, no_wrap=True, justify="left" if len(table.columns) < 3 else "right")
    for replica in replicas:
        sizes = sorted((request.tokens for request in replica.requests if request.phase != Phase.WAITING), reverse=True)
        waiting = f" +{replica.waiting}" if replica.waiting else ""
        table.add_row(
            Text(replica.id),
            styled_state(replica, as_of),
            Bar(sizes, replica.capacity_tokens),
            Text(f"{replica.used_share:.0%}", usage_colour(replica.used_share)),
            Text(f"{count(replica.used_tokens)}/{count(replica.capacity_tokens)}"),
            Text.assemble(f"{len(replica.requests) - replica.waiting}", (waiting, "yellow"), " req"),
        )
    return table


def _migration_lines(records: Records, now: float) -> Iterator[Text]:
    if not records:
        yield Text("no migrations yet", "bright_black")
    for record in records:
        line = Text.assemble(f"{age(now - record.started_at):>7} ago  ", summary(record), no_wrap=True)
        line.overflow = "ellipsis"
        yield line
