"""`mell migrations`: records as rows and as sentences; pure."""

from collections.abc import Sequence

from rich.text import Text

from app.cli.views.numbers import duration
from app.client.documents import Records
from migration.record import MigrationRecord, Outcome

_STYLES = {Outcome.COMMITTED: "green", Outcome.ABORTED: "red", Outcome.REFUSED: "yellow", None: "cyan"}
_WIDE = 110
"""Columns of a terminal from which on there is room for reasons."""
_LEAST_REQUEST = 8
_ID, _REPLICA, _PATH, _TIME, _OUTCOME = 8, 8, 6, 7, 9
_FIXED = _ID + 2 * _REPLICA + _PATH + 3 * _TIME + _OUTCOME + 8
"""Everything but the request and the reason, and a space after each of nine columns but the last."""


def show_migrations(records: Records, width: int, headed: bool = True) -> list[Text]:
    """A line for each, in the order given, and one more for an error.

    PRED and TOOK are from the order to the first new token at the target, PAUSE is what the source saw. The widths
    depend on `width` alone, so that rows which are told one by one stand under each other. IDs are cut.
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
        Text(name_of(record)),
        Text(record.source),
        Text(record.target),
        Text(record.path),
        *(Text(duration(seconds)) for seconds in (record.predicted_s, record.whole_s, record.pause_s)),
        outcome_of(record),
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
    """Of the columns that are shown."""
    free = max(_LEAST_REQUEST, width - _FIXED)
    request = free if width < _WIDE else free * 2 // 5
    shown = (_ID, request, _REPLICA, _REPLICA, _PATH, _TIME, _TIME, _TIME, _OUTCOME)
    return shown if width < _WIDE else (*shown, free - request - 1)


def sentence(record: MigrationRecord) -> Text:
    """A migration in a line: which request went where, and how that ended."""
    pause = f", paused {duration(record.pause_s)}" if record.outcome is Outcome.COMMITTED else ""
    error = f": {record.error}" if record.error and record.outcome is not Outcome.COMMITTED else ""
    return Text.assemble(
        f"{name_of(record)} {record.source} → {record.target} by {record.path}, ", outcome_of(record), pause, error
    )


def name_of(record: MigrationRecord) -> str:
    """What the client calls the request, else its id."""
    return record.label or record.request_id


def outcome_of(record: MigrationRecord) -> Text:
    """How it ended, or in which state it is, in its colour."""
    return Text(record.outcome or record.state, _STYLES[record.outcome])
