"""The file of a soak, its setting and then its rounds as JSON lines, and the report on it."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.load import percentile

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """The lines of a file: the setting, then rounds. An incomplete last line is ignored.

    Raises:
        ValueError: another line is not JSON.
    """
    raw = path.read_text().split("\n") if path.exists() else [""]
    return [json.loads(line) for line in raw[:-1]]


def rounds_of(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines of rounds."""
    return lines[1:]


def count_moves(lines: Sequence[Line]) -> int:
    """The number of accepted moves, with any outcome."""
    return sum(len(line["moves"]) for line in rounds_of(lines))


def is_good(lines: Sequence[Line]) -> bool:
    """True if no round had a fault."""
    return not any(line["bad"] or line["leaks"] for line in rounds_of(lines))


def render(lines: Sequence[Line], control: Sequence[Line] = ()) -> Iterator[str]:
    """All rounds as text: moves by outcome, pauses, and memory, beside that of the control if there is one."""
    rounds = rounds_of(lines)
    moves = [move for line in rounds for move in line["moves"]]
    verdicts = Counter(verdict for line in rounds for verdict in line["verdicts"])
    yield f"{len(moves)} moves in {len(rounds)} rounds; streams: {_counts(verdicts)}"
    yield f"rejected orders: {_counts(sum((Counter(line['rejected']) for line in rounds), Counter()))}"
    for asked, path, outcome in sorted({(m["asked"], m["path"], m["outcome"]) for m in moves}):
        found = [m for m in moves if (m["asked"], m["path"], m["outcome"]) == (asked, path, outcome)]
        yield f"  {asked:>6} ordered, by {path:6} {outcome:10}{len(found):7}{_pauses(found)}"
        yield from (
            f"{'':12}{count} x {why}" for why, count in Counter(m["error"] for m in found if m["error"]).items()
        )
    yield from _memory(rounds, rounds_of(control))
    yield from (f"BAD: round {line['number']}: {what}" for line in rounds for what in line["bad"])
    yield from (f"LEAK: round {line['number']}: {what}" for line in rounds for what in line["leaks"])


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "none"


def _pauses(moves: Sequence[Line]) -> str:
    pauses = [1e3 * move["pause_s"] for move in moves if move["pause_s"] is not None]
    if not pauses:
        return ""
    quantiles = ", ".join(f"p{round(100 * q)} {percentile(pauses, q):.1f}" for q in (0.5, 0.9, 0.99))
    return f"   pause ms {quantiles}, max {max(pauses):.1f}"


def _memory(rounds: Sequence[Line], control: Sequence[Line]) -> Iterator[str]:
    """Memory at four points of the newest run: a leak grows from each to the next, caches only fill."""
    newest, other = (_newest_run(each) for each in (rounds, control))
    yield f"memory (PSS, MB) of the newest run, of {len(newest)} rounds: first, one third, two thirds, last"
    if other:
        yield f"in brackets: of the control, of {len(other)} rounds"
    for name in sorted(newest[-1]["memory_mb"] if newest else ()):
        for kind in newest[-1]["memory_mb"][name]:
            found = "".join(f"{mb:9.1f}" for mb in _at_points(newest, name, kind))
            beside = "".join(f"{mb:9.1f}" for mb in _at_points(other, name, kind))
            yield f"  {name:32}{kind:10}{found}" + (f"   ({beside.strip()})" if beside else "")


def _newest_run(rounds: Sequence[Line]) -> Sequence[Line]:
    """The rounds since the newest start of the servers."""
    return [line for line in rounds if line["run"] == rounds[-1]["run"]]


def _at_points(rounds: Sequence[Line], name: str, kind: str) -> list[float]:
    """A process's memory after the first round, one and two thirds of them, and the last."""
    points = sorted({round(share * (len(rounds) - 1)) for share in (0, 1 / 3, 2 / 3, 1)}) if rounds else []
    return [rounds[i]["memory_mb"].get(name, {}).get(kind, 0.0) for i in points]
