"""The sections of the page: their tables, and the questions that they answer; pure.

Every table has a caption with the conditions of its figures. `m [a, b]` is the median m with minimum a and maximum b.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.evaluation.style import Pictures
from benchmarks.gpu.figures import draw_moves, draw_serving
from benchmarks.gpu.record import (
    EqualityRow,
    FailureRow,
    FaultRow,
    MemoryRow,
    MovesRow,
    NcclRow,
    NeighbourRow,
    PartRow,
    ReplacementRow,
    RunRecord,
    ServingRow,
    Spread,
    StageRow,
    StartRow,
    SuiteRow,
)
from benchmarks.serving import FIGURES

Cells = Sequence[str]


@dataclass(frozen=True, slots=True)
class RecordSection:
    """A section: its title, its text (empty without rows), and the names of its figures' rows.

    `answers` has the questions, each with a test of a record for an answer.
    """

    title: str
    render: Callable[[RunRecord, Pictures], list[str]]
    answers: Mapping[str, Callable[[RunRecord], bool]]


# --- tables -------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """A number with three significant digits, four from 100 on, and commas between thousands."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{4 if abs(value) >= 100 else 3}g}"


def cell(spread: Spread | None) -> str:
    """A spread as a cell; a single value and an unknown range have none."""
    if spread is None:
        return ""
    if spread.low is None or spread.high is None or spread.n == 1:
        return number(spread.median)
    return f"{number(spread.median)} [{number(spread.low)}, {number(spread.high)}]"


def table(header: Cells, rows: Iterable[Cells]) -> list[str]:
    """A table, with an empty line before it."""
    return ["", f"| {' | '.join(header)} |", "|" + "---|" * len(header), *(f"| {' | '.join(row)} |" for row in rows)]


def _by_conditions(
    rows: Sequence[MovesRow | NeighbourRow | ServingRow | EqualityRow | FaultRow | MemoryRow],
) -> list[str]:
    return list(dict.fromkeys(row.conditions for row in rows))


# --- sections -----------------------------------------------------------------------------------------


def _checks(record: RunRecord, pictures: Pictures) -> list[str]:
    lines: list[str] = []
    for suite in record.of(SuiteRow):
        lines += ["", f"`{suite.command}`: {suite.summary}", *[""] * bool(suite.skipped)]
        lines += [f"- skipped: {reason}" for reason in suite.skipped]
    stages = record.of(StageRow)
    rates = {(row.stage, row.slot_mib): row.gb_s for row in stages}
    names = [name for name in dict.fromkeys(row.stage for row in stages) if any(n == name and m for n, m in rates)]
    if names:
        whole = cell(rates.get(("copy", 0)))
        lines += [
            "",
            "`python -m benchmarks.gpu.stages`: the stages of a move without an engine, with the cache of an 8B shape, "
            f"in GB/s of the blocks' bytes; a copy of 1 GiB reaches {whole}. *move* is gather and scatter with the "
            "messages between the processes.",
        ]
        sizes = dict.fromkeys(row.slot_mib for row in stages if row.slot_mib)
        rows = [[f"{mib} MiB", *(cell(rates.get((name, mib))) for name in names)] for mib in sizes]
        lines += table(["slot", *names], rows)
    return lines


_MOVED = {
    "client_ms": "at the client, ms",
    "handed_ms": "between the tokens of the hand-over, ms",
    "gaps": "in median gaps",
    "source_ms": "source, ms",
    "whole_ms": "whole move, ms",
    "copy_ms": "copying, ms",
    "mib": "MiB",
    "gb_s": "copying, GB/s",
}
_BY = {"pre-copy": "KV", "stop-and-copy": "KV, stop-and-copy", "tokens": "tokens"}


def _moves(record: RunRecord, pictures: Pictures) -> list[str]:
    moves = record.of(MovesRow)
    lines: list[str] = []
    for conditions in _by_conditions(moves):
        rows = [row for row in moves if row.conditions == conditions]
        used = [name for name in _MOVED if any(name in row.figures for row in rows)]
        lines += ["", f"{conditions}; nothing else running. The pause of one moved stream, and its copying phase."]
        cells = (
            [f"{row.context:,}", _BY[row.mode], _asked(row), *(cell(row.figures.get(name)) for name in used)]
            for row in sorted(rows, key=lambda row: row.context)
        )
        lines += table(["context", "by", "as ordered", *(_MOVED[name] for name in used)], cells)
        failures = [f"- failed: {_BY[row.mode]}, {row.context:,}: {why}" for row in rows for why in row.failures]
        lines += [*[""] * bool(failures), *failures]
    if moves:
        lines += ["", draw_moves(moves, record.of(StageRow), pictures, f"{record.origin.date}-moves")]
    return lines


def _asked(row: MovesRow) -> str:
    done = max((figure.n for figure in row.figures.values()), default=0)
    return f"{done} of {row.asked}"


def _neighbours(record: RunRecord, pictures: Pictures) -> list[str]:
    rows = record.of(NeighbourRow)
    lines: list[str] = []
    for conditions in _by_conditions(rows):
        here = [row for row in rows if row.conditions == conditions]
        lines += [
            "",
            f"{conditions}. {here[0].per_replica} other streams on each replica beside a moved one of "
            f"{here[0].context:,} tokens: their gaps during the move over their gaps without one, ratios of rounds.",
        ]
        cells = (
            [_BY[r.mode], r.role, str(r.median.n), cell(r.median), cell(r.p99), cell(r.quiet_ms), cell(r.quiet_p99_ms)]
            for r in here
        )
        header = ("by", "replica", "rounds", "median gap", "p99 gap", "without: median, ms", "without: p99, ms")
        lines += table(header, cells)
    return lines


def _serving(record: RunRecord, pictures: Pictures) -> list[str]:
    rows = record.of(ServingRow)
    units = {name: unit for name, unit, _ in FIGURES}
    lines: list[str] = []
    for conditions in _by_conditions(rows):
        here = [row for row in rows if row.conditions == conditions]
        first = here[0]
        lines += [
            "",
            f"{conditions}. {first.prompt} prompt and {first.output} output tokens, {first.ratio.n} interleaved pairs; "
            "the ratio is Mell / vLLM's own server.",
        ]
        cells = (
            [str(r.streams), " ".join((r.figure, units[r.figure])), cell(r.mell), cell(r.bare), cell(r.ratio)]
            for r in here
        )
        lines += table(("streams", "figure", "Mell", "vLLM", "ratio"), cells)
    if rows:
        lines += ["", draw_serving(rows, pictures, f"{record.origin.date}-serving")]
    return lines


def _equality(record: RunRecord, pictures: Pictures) -> list[str]:
    rows = record.of(EqualityRow)
    lines: list[str] = []
    for conditions in _by_conditions(rows):
        lines += ["", f"{conditions}. Streams with equal texts, one number per round."]
        grouped: dict[Cells, list[EqualityRow]] = {}
        for row in rows:
            if row.conditions == conditions:
                grouped.setdefault((row.server, row.sampling, f"{row.first} = {row.second}"), []).append(row)
        cells = (
            [*names, ", ".join(f"{row.equal} of {row.streams}" for row in found), _moved(found)]
            for names, found in grouped.items()
        )
        lines += table(("server", "sampling", "runs", "equal", "moved as ordered"), cells)
    return lines


def _moved(rows: Sequence[EqualityRow]) -> str:
    return ", ".join(f"{row.moved} of {row.streams}" for row in rows if row.moved is not None)


def _faults(record: RunRecord, pictures: Pictures) -> list[str]:
    rows = record.of(FaultRow)
    lines: list[str] = []
    for conditions in _by_conditions(rows):
        replaced = {row.fault: row.seconds for row in record.of(ReplacementRow) if row.conditions == conditions}
        cells = (
            [
                {"drain": "drain", "kill": "kill -9"}[row.fault],
                f"{row.held} of {row.streams}" if row.held is not None else f"some of {row.streams}",
                f"{len(row.broken)}",
                *("" if s is None else number(s) for s in (row.longest_gap_s, row.empty_s, replaced.get(row.fault))),
                ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items()),
            ]
            for row in rows
            if row.conditions == conditions
        )
        header = ("fault", "streams there", "broken", "longest gap, s", "empty after, s", "replaced after, s", "moves")
        lines += ["", f"{conditions}.", *table(header, cells)]
    return lines


def _nccl(record: RunRecord, pictures: Pictures) -> list[str]:
    rows = record.of(NcclRow)
    return table(("check", "result"), ([row.check, row.result] for row in rows)) if rows else []


def _memory(record: RunRecord, pictures: Pictures) -> list[str]:
    rows = record.of(MemoryRow)
    lines: list[str] = []
    for conditions in _by_conditions(rows):
        cells = (
            [row.owner, row.what, number(row.mib), number(row.slots_mib) if row.slots_mib else ""]
            for row in rows
            if row.conditions == conditions
        )
        lines += ["", f"{conditions}.", *table(("process", "memory", "MiB", "of these, slots"), cells)]
    return lines


def _run(record: RunRecord, pictures: Pictures) -> list[str]:
    lines: list[str] = []
    if starts := record.of(StartRow):
        rows = ([row.servers, row.conditions, number(row.seconds)] for row in starts)
        lines += table(("servers", "conditions", "start to /health, s"), rows)
    if parts := record.of(PartRow):
        lines += table(("part", "outcome", "s"), ([row.name, row.outcome, number(row.seconds)] for row in parts))
    lines += [""] * bool(record.of(FailureRow))
    return lines + [f"- failed: {row.part}, {row.step}: `{row.error[-300:]!r}`" for row in record.of(FailureRow)]


# --- questions ----------------------------------------------------------------------------------------


def _moved_over(transport: str) -> Callable[[RunRecord], bool]:
    return lambda record: any(row.transport == transport and row.figures for row in record.of(MovesRow))


def _compared(first: str, second: str, invariant: bool) -> Callable[[RunRecord], bool]:
    """True of a record that compares such runs with batch-invariant kernels, or with the usual ones."""

    def answered(record: RunRecord) -> bool:
        return any(
            row.first == first and row.second.startswith(second) and ("invariant" in row.conditions) is invariant
            for row in record.of(EqualityRow)
        )

    return answered


def _served(streams: int) -> Callable[[RunRecord], bool]:
    return lambda record: any(row.streams == streams for row in record.of(ServingRow))


def _struck(fault: str) -> Callable[[RunRecord], bool]:
    return lambda record: any(row.fault == fault for row in record.of(FaultRow))


SECTIONS: Sequence[RecordSection] = (
    RecordSection("Tests and stages", _checks, {"The tests for GPUs": lambda record: bool(record.of(SuiteRow))}),
    RecordSection(
        "Serving",
        _serving,
        {
            f"Throughput and latency beside vLLM's own server at {streams} streams": _served(streams)
            for streams in (16, 64, 256)
        },
    ),
    RecordSection(
        "Pause and copying",
        _moves,
        {
            "Pause and copying against the context over `cuda_ipc`": _moved_over("cuda_ipc"),
            "Pause and copying between two GPUs over `nccl`": _moved_over("nccl"),
            "Pause and copying over `shared`, through host memory": _moved_over("shared"),
            "The pause of stop-and-copy": lambda r: any(row.mode == "stop-and-copy" for row in r.of(MovesRow)),
        },
    ),
    RecordSection("Neighbours", _neighbours, {"The effect on neighbours": lambda r: bool(r.of(NeighbourRow))}),
    RecordSection(
        "Equality of text",
        _equality,
        {
            "Equality, cached against cached, batch-invariant": _compared("cached", "again", True),
            "Equality, cached against cached, with vLLM's usual kernels": _compared("cached", "again", False),
            "Equality of moved with unmoved texts, batch-invariant": _compared("cached", "moved", True),
            "Equality of moved with unmoved texts, with vLLM's usual kernels": _compared("cached", "moved", False),
            "Equality of resent with unmoved texts on vLLM's own server, the control of moves by tokens": _compared(
                "cached", "resent", True
            ),
            "Equality with seeded sampling": lambda r: any(row.sampling == "seeded" for row in r.of(EqualityRow)),
        },
    ),
    RecordSection(
        "Drain and kill",
        _faults,
        {f"A {fault} of a replica under load": _struck(fault) for fault in ("drain", "kill")},
    ),
    RecordSection(
        "NCCL",
        _nccl,
        {
            "NCCL with one GPU": lambda r: bool(r.of(NcclRow)),
            "The stage `nccl` between two GPUs": lambda r: any(row.stage == "nccl" for row in r.of(StageRow)),
        },
    ),
    RecordSection("Memory", _memory, {"Memory that CUDA contexts and slots take": lambda r: bool(r.of(MemoryRow))}),
    RecordSection("The run", _run, {}),
)
