"""The page of one or several records: their sections, and the questions that no record of a GPU answers."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.evaluation.style import Pictures
from benchmarks.gpu.record import NoteRow, RunRecord
from benchmarks.gpu.sections import SECTIONS

WIDTH = 120


def write_page(record: RunRecord, folder: Path) -> None:
    """Write `page.md` and its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"# {title(record)}", "", *body(record, Pictures(folder, "."), "##"), "", "## Not run yet", ""]
    (folder / "page.md").write_text("\n".join(wrapped([*lines, *open_questions([record])])) + "\n")


def title(record: RunRecord) -> str:
    """The title of a record: "Measured on", and its machine or the note on that."""
    noted = [note.text for note in record.of(NoteRow) if note.section == "title"]
    return f"Measured on {(noted or ['; '.join(record.origin.machine)])[0]}"


def body(record: RunRecord, pictures: Pictures, level: str) -> list[str]:
    """The origin of a record and its sections, with headings of this level."""
    origin = record.origin
    machine = "; ".join(origin.machine)
    lines = [f"{origin.date}, commit {origin.commit}. {machine}. {origin.software}.", *_notes(record, "setting")]
    for section in SECTIONS:
        found = section.render(record, pictures) + _notes(record, section.title)
        if found:
            lines += ["", f"{level} {section.title}", *found]
    return lines


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines of a page with paragraphs in lines of at most `WIDTH` characters."""
    found: list[str] = []
    for line in lines:
        is_text = bool(line) and not line.startswith(("|", "!", "#", "- "))
        found += textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) if is_text else [line]
    return found


def open_questions(records: Sequence[RunRecord]) -> list[str]:
    """A list of the questions that no record of a GPU answers."""
    real = [record for record in records if record.origin.device == "cuda"]
    questions = [item for section in SECTIONS for item in section.answers.items()]
    return [f"- {question}." for question, answered in questions if not any(map(answered, real))]


def _notes(record: RunRecord, section: str) -> list[str]:
    return [line for note in record.of(NoteRow) if note.section == section for line in ("", note.text)]
