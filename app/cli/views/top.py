"""`mell top`: the cluster as it is now; pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from app.cli.rates import Rates
from app.cli.views.bars import Bar, fullness
from app.cli.views.migrations import sentence
from app.cli.views.numbers import age, count
from app.cli.views.status import header, state_of, totals
from app.client.documents import Records, ReplicaDocument, StateDocument
from policies.model import Phase

SILENT_S = 2.5
"""Twice the time between looks, and a little: then something is amiss."""
_LEAST_MOVES = 3


@dataclass(frozen=True, slots=True)
class Picture:
    """What was seen at `seen_s`, a time of the same clock as `now_s` below; `trouble` is why nothing came since."""

    state: StateDocument
    records: Records
    rates: Rates | None
    seen_s: float
    trouble: str | None = None


def show_top(url: str, picture: Picture, now_s: float, now: float, height: int) -> RenderableType:
    """The page, about `height` lines high. `now_s` is monotonic, `now` in seconds since 1970."""
    silent_s = now_s - picture.seen_s
    silence = _silence(silent_s, picture.trouble) if silent_s > SILENT_S else Text()
    state = picture.state
    # While nobody answers, what was seen is as old as the line above it says, and not the scheduler's fault.
    head = header(url, state, now - silent_s)[:-1]
    moves = max(_LEAST_MOVES, height - len(head) - len(state.replicas) - 6)
    return Group(
        *head,
        rates(picture.rates),
        silence,
        _replicas(state.replicas),
        totals(state),
        Text(),
        *_moves(picture.records[:moves], now),
    )


def rates(rates: Rates | None) -> Text:
    """What comes, goes, is computed and is moved."""
    if rates is None:
        return Text("rates: looking", "bright_black")
    return Text(
        f"last {rates.over_s:.0f} s: {rates.came:.1f} requests/s came, {rates.left:.1f} left; "
        f"{count(rates.tokens)} tokens/s; {rates.moved * 60:.0f} moves/min"
    )


def _silence(silent_s: float, trouble: str | None) -> Text:
    return Text(f"no answer for {silent_s:.0f} s{': ' if trouble else ''}{trouble or ''}", "bold red")


def _replicas(found: tuple[ReplicaDocument, ...]) -> Table:
    """One row for each; its bar is made of its requests, by the tokens they have in the KV cache, largest first."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for ratio in (None, None, 1, None, None, None):
        table.add_column(ratio=ratio, no_wrap=True, justify="left" if len(table.columns) < 3 else "right")
    for replica in found:
        sizes = sorted((request.tokens for request in replica.requests if request.phase != Phase.WAITING), reverse=True)
        waiting = f" +{replica.waiting}" if replica.waiting else ""
        table.add_row(
            Text(replica.id),
            state_of(replica),
            Bar(sizes, replica.capacity_tokens),
            Text(f"{replica.used_share:.0%}", fullness(replica.used_share)),
            Text(f"{count(replica.used_tokens)}/{count(replica.capacity_tokens)}"),
            Text.assemble(f"{len(replica.requests) - replica.waiting}", (waiting, "yellow"), " req"),
        )
    return table


def _moves(records: Records, now: float) -> Iterator[Text]:
    if not records:
        yield Text("no migrations yet", "bright_black")
    for record in records:
        line = Text.assemble(f"{age(now - record.started_at):>7} ago  ", sentence(record), no_wrap=True)
        line.overflow = "ellipsis"
        yield line
