"""Tables: every figure as median and range over the runs, and as ratios to the baseline, pair by pair."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.economics.case import LiveCase
from benchmarks.economics.figures import ROWS, Figures, Row
from benchmarks.load import spread

TITLE, CELL = 30, 26
"""Widths of columns."""
WIDER, CLOSE = 0.15, 0.02
"""By how much the range of the runs is widened for moves, and what GPU-seconds may differ by."""
JUDGED = ("gpu_seconds", "migrations", "migrations_kv", "migrations_tokens")
"""The figures that predictions are judged by."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run's measured figures, and its predicted ones if it was simulated."""

    case: LiveCase
    measured: Figures
    predicted: Figures | None = None


def render(results: Sequence[RunFigures], baseline: str) -> str:
    """The measured figures, for each window and for all together."""
    windows = list(dict.fromkeys(one.case.window.name for one in results))
    parts = [(name, [one for one in results if one.case.window.name == name]) for name in windows]
    if len(windows) > 1:
        parts.append(("all windows", list(results)))
    return "\n\n".join("\n".join(_table(name, members, baseline)) for name, members in parts)


def _table(name: str, results: Sequence[RunFigures], baseline: str) -> Iterator[str]:
    by_variant: dict[str, list[RunFigures]] = {}
    for one in results:
        by_variant.setdefault(one.case.variant, []).append(one)
    counts = ", ".join(f"{len(members)} of {variant}" for variant, members in by_variant.items())
    yield f"{name}: {counts}. Median [min, max]; below, ratios to {baseline}, run by run."
    yield _line("", by_variant)
    for row in ROWS:
        yield _line(_title(row), [_values([one.measured for one in m], row) for m in by_variant.values()])
        ratios = [_ratios(members, by_variant.get(baseline, []), row.name) for members in by_variant.values()]
        if any(ratios):
            yield _line(
                "", [_spread(found, 2) if v != baseline else "" for v, found in zip(by_variant, ratios, strict=True)]
            )


def _ratios(results: Sequence[RunFigures], baseline: Sequence[RunFigures], name: str) -> list[float]:
    """Ratios of runs to the baseline's runs of the same pair, without those in which either figure is 0 or missing."""
    base = {one.case.pairs_with: one.measured.get(name) for one in baseline}
    pairs = [(one.measured.get(name), base.get(one.case.pairs_with)) for one in results]
    return [ours / theirs for ours, theirs in pairs if ours and theirs]


def compare(results: Sequence[RunFigures]) -> str:
    """Measured and predicted figures by variant and window, with the prediction's error run by run."""
    groups: dict[tuple[str, str], list[tuple[Figures, Figures]]] = {}
    for one in results:
        if one.predicted is not None:
            pair = (one.measured, one.predicted)
            groups.setdefault((one.case.variant, one.case.window.name), []).append(pair)
    return "\n\n".join("\n".join(_comparison(*name, pairs)) for name, pairs in groups.items())


def judge(made: Sequence[RunFigures], foretold: Sequence[RunFigures]) -> str:
    """Means of predictions beside the ranges of the runs, by variant, window and conditions.

    A number of moves agrees if it lies in the range widened by `WIDER` at both ends, GPU-seconds if their mean differs
    from the runs' by at most `CLOSE`.
    """
    parts = []
    for key in dict.fromkeys((one.case.variant, one.case.window, one.case.conditions) for one in foretold):
        measured, expected = (
            [each.measured for each in side if (each.case.variant, each.case.window, each.case.conditions) == key]
            for side in (made, foretold)
        )
        if measured:
            parts.append("\n".join(_judgement(f"{key[0]} on {key[1].name}", measured, expected)))
    return "\n\n".join(parts) or "There are no runs of these cases to compare with."


def _judgement(name: str, measured: Sequence[Figures], expected: Sequence[Figures]) -> Iterator[str]:
    yield f"{name}: {len(measured)} runs, {len(expected)} seeds. Median [min, max] of the runs, mean of the seeds."
    yield _line("", ["runs", "seeds", "agreeing range", ""])
    for row in ROWS:
        if row.name not in JUDGED:
            continue
        runs, seeds = ([each[row.name] or 0.0 for each in side] for side in (measured, expected))
        low, high = (
            (fmean(runs) * (1 - CLOSE), fmean(runs) * (1 + CLOSE))
            if row.name == "gpu_seconds"
            else (min(runs) * (1 - WIDER), max(runs) * (1 + WIDER))
        )
        agrees = "agrees" if low <= fmean(seeds) <= high else "DIFFERS"
        cells = [_spread(runs, row.digits), f"{fmean(seeds):,.1f}", f"{low:,.1f}, {high:,.1f}", agrees]
        yield _line(_title(row), cells)


def _comparison(variant: str, window: str, pairs: Sequence[tuple[Figures, Figures]]) -> Iterator[str]:
    yield f"{variant} on {window}: runs: {len(pairs)}. Median [min, max]."
    yield _line("", ["measured", "predicted", "error, %"])
    for row in ROWS:
        if row.name in pairs[0][1]:
            measured, predicted = ([pair[side] for pair in pairs] for side in (0, 1))
            yield _line(_title(row), [_values(measured, row), _values(predicted, row), _spread(_errors(pairs, row), 0)])


def _errors(pairs: Sequence[tuple[Figures, Figures]], row: Row) -> list[float]:
    """Errors of predictions in per cent, without those of a measured value of 0 or none."""
    both = [(measured.get(row.name), predicted.get(row.name)) for measured, predicted in pairs]
    return [100 * (guess / value - 1) for value, guess in both if value and guess is not None]


def _title(row: Row) -> str:
    return f"{row.title}, {row.unit}" if row.unit else row.title


def _values(found: Sequence[Figures], row: Row) -> str:
    return _spread([value * row.scale for one in found if (value := one.get(row.name)) is not None], row.digits)


def _spread(values: Sequence[float], digits: int) -> str:
    return spread(values, digits) if values else "-"


def _line(title: str, cells: Sequence[str] | dict[str, list[RunFigures]]) -> str:
    return (f"{title:{TITLE}}" + "".join(f"{cell:>{CELL}}" for cell in cells)).rstrip()
