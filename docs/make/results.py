"""docs/results.md from docs/results.toml: the measured numbers that other pages quote."""

import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

PAGE = Path(__file__).parents[1] / "results.md"
DATA = Path(__file__).parents[1] / "results.toml"

_WIDTH = 120
_UNKNOWN = "not recorded"

_INTRO = """\
# Results

<!-- Made by `python -m docs.make`; edit `docs/results.toml` instead. -->

The measured numbers that the pages quote, with counterpart, command, commit, date and machine. Losing results and
missed aims stand in the same tables. [Where the time goes](where-time-goes.md) explains the costs. Simulated results
are in [evaluation.md](evaluation.md), with a [one-page summary](evaluation-summary.md).

The engine is vLLM 0.32.0's CPU build in float32 with Mell's tiny model, or the *paced engine*: a stand-in without a
model that steps at the pace of a GPU and accounts for KV blocks as vLLM does. `m [a, b]` is the median m with minimum a
and maximum b. *TTFT* is the time to the first token. A date is that of the measurement, or else of its publication.

**Machines.**
"""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BenchmarkRun(_Record):
    """One execution of a benchmark. An empty command, commit or date was not recorded."""

    command: str
    commit: str
    date: str
    machine: str
    rows: tuple[tuple[str, ...], ...]


class Question(_Record):
    """A question and its table: a row begins with its name, the other cells are those of `columns`.

    `summary` has the figure and the counterpart for the first table of the page, with `{0[1]}` for a cell of a row.
    """

    title: str
    asks: str
    about: str
    columns: tuple[str, ...]
    summary: tuple[str, str]
    notes: tuple[str, ...] = ()
    runs: tuple[BenchmarkRun, ...]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The rows of all runs."""
        return [row for run in self.runs for row in run.rows]

    @model_validator(mode="after")
    def _rows_are_whole(self) -> "Question":
        for row in self.rows:
            if len(row) != 1 + len(self.columns):
                raise ValueError(f"{self.title}: {row} has other cells than {self.columns}")
        return self


class MeasuredResults(_Record):
    """The data file."""

    machines: dict[str, str]
    questions: tuple[Question, ...]

    @field_validator("questions")
    @classmethod
    def _machines_are_described(cls, questions: tuple[Question, ...], info: ValidationInfo) -> tuple[Question, ...]:
        used = {run.machine for question in questions for run in question.runs}
        if strange := used - info.data.get("machines", {}).keys():
            raise ValueError(f"machines without a description: {sorted(strange)}")
        return questions


def read(path: Path = DATA) -> MeasuredResults:
    """The results of a file. Raises pydantic's ValidationError."""
    return MeasuredResults.model_validate(tomllib.loads(path.read_text()))


def page() -> str:
    """The text of docs/results.md."""
    results = read()
    machines = (f"- *{name}*: {text}." for name, text in results.machines.items())
    parts = [
        _INTRO + "\n" + "\n".join(_wrapped(line, "  ") for line in machines) + "\n",
        "## Summary\n\n" + _table(("Question", "Mell", "Counterpart", "Section"), map(_summary, results.questions)),
        *map(section, results.questions),
    ]
    return "\n".join(parts)


def section(question: Question) -> str:
    """The section of one question, with its heading."""
    head = ("", *question.columns, "Command", "Commit", "Date", "Machine")
    rows = ((*row, *_source(run)) for run in question.runs for row in run.rows)
    parts = [
        f"## {question.title}\n",
        _wrapped(f"**{question.asks}** {' '.join(question.about.split())}") + "\n",
        _table(head, rows),
        _commands(run.command for run in question.runs),
        "".join(_note(note) + "\n" for note in question.notes),
    ]
    return "\n".join(part for part in parts if part)


def _summary(question: Question) -> Sequence[str]:
    figure, counterpart = (cell.format(*question.rows) for cell in question.summary)
    anchor = question.title.lower().replace(" ", "-")
    return question.asks, figure, counterpart, f"[{question.title}](#{anchor})"


def _source(run: BenchmarkRun) -> Iterator[str]:
    """The cells of a row's command, as the module or path that it runs, commit, date and machine."""
    words = [word for word in run.command.split() if word not in ("python", "-m", "pytest")]
    yield f"`{' '.join(words) if words[0] == 'make' else Path(words[0]).name}`" if words else _UNKNOWN
    yield from (run.commit or _UNKNOWN, run.date or _UNKNOWN, run.machine)


def _commands(commands: Iterable[str]) -> str:
    """The commands of a section, each once, as a block."""
    found = [command for command in dict.fromkeys(commands) if command]
    return "\n".join(["```sh", *map(_command, found), "```", ""]) if found else ""


def _command(command: str) -> str:
    whole = command if command.startswith("make ") else f".venv/bin/{command}"
    return " \\\n".join(textwrap.wrap(whole, _WIDTH - 2, subsequent_indent="  ", break_on_hyphens=False))


def _note(note: str) -> str:
    return f"\n{note}" if note.startswith("![") else _wrapped(f"- {note}", "  ")


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:], ""])
