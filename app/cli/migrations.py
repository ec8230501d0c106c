"""`mell migrations`: records as rows and as one-line summaries, and each migration as it ends."""

import math
from collections.abc import Sequence

from rich.text import Text

from app.cli.endpoint import MellEndpoint
from app.cli.formatting import duration
from app.cli.terminal import WATCH_INTERVAL_S, Terminal
from app.client.documents import Records
from migration.protocol.record import MigrationRecord, Outcome, Recent

_STYLES = {Outcome.COMMITTED: "green", Outcome.ABORTED: "red", Outcome.REFUSED: "yellow", None: "cyan"}
_WIDE = 110
"""Minimum width of a terminal, in columns, for the column REASON."""
_MIN_REQUEST = 8
_ID, _REPLICA, _PATH, _TIME, _OUTCOME = 8, 8, 6, 7, 9
_FIXED = _ID + 2 * _REPLICA + _PATH + 3 * _TIME + _OUTCOME + 8
"""Width of all columns but REQUEST and REASON, with the eight spaces between nine columns."""
_REMEMBERED = 1 << 14


def migrations(endpoint: MellEndpoint, terminal: Terminal, last: int) -> None:
    """Show the newest migrations, newest first."""
    records = endpoint.migrations()[:last]
    terminal.write({"migrations": [record.to_json() for record in records]})
    terminal.show(*render_migrations(records, terminal.console.width))


def follow(endpoint: MellEndpoint, terminal: Terminal, last: int) -> None:
    """Show the newest ended migrations, oldest first, then each migration as it ends, until interrupted."""
    follower = Follower()
    ended = tuple(record for record in endpoint.migrations() if record.outcome is not None)
    follower.skip(ended[last:])
    terminal.show(*render_migrations((), terminal.console.width))
    for records in terminal.poll(endpoint.migrations, WATCH_INTERVAL_S, math.inf):
        for record in follower.feed(records):
            terminal.write(record.to_json())
            terminal.show(*render_migrations((record,), terminal.console.width, headed=False))


class Follower:
    """Selects the newly ended migrations from successive lists; pure.

    The total time of a committed migration may arrive after its outcome, so the migration waits for it until the next
    list.
    """

    def __init__(self) -> None:
        self._ended: Recent[str, None] = Recent(_REMEMBERED)
        self._reported: Recent[str, None] = Recent(_REMEMBERED)

    def feed(self, records: Records) -> Records:
        """The newly ended migrations among `records`, which are newest first; the result is oldest first."""
        new = tuple(record for record in reversed(records) if self._is_new(record))
        for record in new:
            self._reported[record.id] = None
        for record in records:
            if record.outcome is not None:
                self._ended[record.id] = None
        return new

    def _is_new(self, record: MigrationRecord) -> bool:
        if record.id in self._reported or record.outcome is None:
            return False
        complete = record.outcome is not Outcome.COMMITTED or record.whole_s is not None
        return complete or record.id in self._ended

    def skip(self, records: Records) -> None:
        """Do not report the ended migrations among `records`."""
        for record in records:
            if record.outcome is not None:
                self._reported[record.id] = None


def render_migrations(records: Records, width: int, headed: bool = True) -> list[Text]:
    """One line per record, in the given order, and another line for an error; pure.

    PRED and TOOK are times from the order to the first new token at the target, PAUSE is the source's pause. Column
    widths depend on `width` alone, so that rows printed one by one are aligned. IDs are shortened.
    """
    lines = [_line(_HEADINGS, width, "bold")] if headed else []
    for record in records:
        lines.append(_line(_row(record), width))
        if record.error:
            lines.append(Text(f"  {record.error}", "red"))
    return lines


_HEADINGS = tuple(map(Text, ("ID", "REQUEST", "FROM", "TO", "PATH", "PRED", "TOOK", "PAUSE", "OUTCOME", "REASON")))


def _row(record: MigrationRecord) -> tuple[Text, ...]:
    return (
        Text(record.id[:_ID]),
        Text(request_name(record)),
        Text(record.source),
        Text(record.target),
        Text(record.path),
        *(Text(duration(seconds)) for seconds in (record.predicted_s, record.whole_s, record.pause_s)),
        styled_outcome(record),
        Text(record.reason),
    )


def _line(row: Sequence[Text], width: int, style: str = "") -> Text:
    line = Text(style=style, no_wrap=True)
    for index, (cell, cell_width) in enumerate(zip(row, _widths(width), strict=False)):
        fitted = cell.copy()
        fitted.truncate(cell_width, overflow="ellipsis")
        fitted.align("right" if 5 <= index <= 7 else "left", cell_width)
        line.append_text(fitted).append(" ")
    line.rstrip()
    return line


def _widths(width: int) -> tuple[int, ...]:
    """The widths of all shown columns."""
    free = max(_MIN_REQUEST, width - _FIXED)
    request = free if width < _WIDE else free * 2 // 5
    shown = (_ID, request, _REPLICA, _REPLICA, _PATH, _TIME, _TIME, _TIME, _OUTCOME)
    return shown if width < _WIDE else (*shown, free - request - 1)


def summary(record: MigrationRecord) -> Text:
    """A migration in one line: request, source, target, path and outcome."""
    pause = f", paused {duration(record.pause_s)}" if record.outcome is Outcome.COMMITTED else ""
    error = f": {record.error}" if record.error and record.outcome is not Outcome.COMMITTED else ""
    return Text.assemble(
        f"{request_name(record)} {record.source} → {record.target} by {record.path}, ",
        styled_outcome(record),
        pause,
        error,
    )


def request_name(record: MigrationRecord) -> str:
    """The request's label, else its id."""
    return record.label or record.request_id


def styled_outcome(record: MigrationRecord) -> Text:
    """The outcome of a migration, or the state of a running one, in its colour."""
    return Text(record.outcome or record.state, _STYLES[record.outcome])
