"""The diagrams in docs/migration-protocol.md are those of the tables.

To bring the page up to date: python -m tests.migration.protocol.test_diagrams --write
"""

import re
import sys
from pathlib import Path

from migration.protocol.tables import donor, reader, source, target
from migration.protocol.tables.table import diagram

PAGE = Path(__file__).parents[3] / "docs" / "migration-protocol.md"
_FENCED = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def wanted() -> list[str]:
    """The diagrams, in the page's order."""
    return [
        diagram(source.TABLE, "The source's side"),
        diagram(target.TABLE, "The target's side"),
        diagram(reader.TABLE, "The reader's side"),
        diagram(donor.TABLE, "The donor's side of a copy"),
    ]


def write() -> None:
    """Put the tables' diagrams in place of those on the page."""
    fresh = iter(wanted())
    PAGE.write_text(_FENCED.sub(lambda _: f"```mermaid\n{next(fresh)}```", PAGE.read_text()))


def test_page_shows_the_tables_as_they_are() -> None:
    assert _FENCED.findall(PAGE.read_text()) == wanted(), (
        "run: python -m tests.migration.protocol.test_diagrams --write"
    )


def test_diagram_shows_commands_and_omits_events_without_effect() -> None:
    lines = diagram(target.TABLE, "T").splitlines()
    assert lines[:4] == ["---", "title: T", "---", "stateDiagram-v2"]
    assert "    new --> reserved: prepare_fits / reserve" in lines
    assert not any("owned --> " in line for line in lines)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    write()
