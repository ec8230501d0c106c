"""Our numbers beside those of an independent simulation of the same workloads."""

from dataclasses import dataclass

from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.eight import A100, AZURE, HIGH, LOW, ArrivalPattern, runs
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.style import Pictures
from benchmarks.evaluation.words import share, table

LOADS = (LOW, HIGH, AZURE)


@dataclass(frozen=True, slots=True)
class Theirs:
    """Mean GPUs, utilisation and moves per second of one workload; None for a policy without moves."""

    gpus: float
    utilisation: float
    moves: float | None = None


THEIR_BOUND = {LOW: 20.83, HIGH: 43.71, AZURE: 216.8}
THEIRS: dict[str, dict[ArrivalPattern, Theirs]] = {
    "worst_fit": {LOW: Theirs(26.22, 0.78), HIGH: Theirs(56.59, 0.76), AZURE: Theirs(275.7, 0.78)},
    "load_balance": {LOW: Theirs(25.10, 0.81, 0.45), HIGH: Theirs(53.42, 0.81, 0.80), AZURE: Theirs(262.2, 0.82, 3.9)},
    "mell": {LOW: Theirs(22.61, 0.90, 3.0), HIGH: Theirs(46.52, 0.93, 8.0), AZURE: Theirs(226.3, 0.96, 76)},
    "mell_repaired": {LOW: Theirs(21.80, 0.93, 2.9), HIGH: Theirs(45.18, 0.96, 9.0), AZURE: Theirs(219.5, 0.99, 100)},
    "pack": {LOW: Theirs(21.56, 0.94, 2.1), HIGH: Theirs(45.16, 0.96, 4.8), AZURE: Theirs(223.0, 0.97, 23)},
}
"""`pack` there is a simpler predecessor of ours, with four seconds of headroom."""


def _cases(scale: Scale) -> list[Case]:
    return [case for policy in THEIRS for load in LOADS for case in runs((A100, load), policy, scale)]


def _parts(results: Results, scale: Scale, pictures: Pictures) -> dict[str, str]:
    header = ("policy", *(f"{load.name}, {whose}" for load in LOADS for whose in ("theirs", "ours")))
    return {"independent": table(header, [_row(results, scale, policy) for policy in THEIRS])}


def _ratios(results: Results, scale: Scale, policy: str, load: ArrivalPattern) -> tuple[float, float]:
    """Their and our ratio of mean GPUs to the mean bound."""
    cases = runs((A100, load), policy, scale)
    ours = results.mean(cases, "gpus_mean") / results.mean(cases, "bound.mean")
    return THEIRS[policy][load].gpus / THEIR_BOUND[load], ours


def _row(results: Results, scale: Scale, policy: str) -> list[str]:
    cells = [f"`{policy}`"]
    for load in LOADS:
        theirs, ours = _ratios(results, scale, policy, load)
        cases = runs((A100, load), policy, scale)
        known = THEIRS[policy][load]
        moves = results.mean(cases, "migrations_per_s")
        cells.append(_cell(theirs, known.utilisation, known.moves))
        cells.append(_cell(ours, results.mean(cases, "utilisation"), None if known.moves is None else moves))
    return cells


def _cell(ratio: float, utilisation: float, moves: float | None) -> str:
    return f"{ratio:.3f} / {share(utilisation, 0)}" + ("" if moves is None else f" / {moves:.1f}")


SECTION = PageSection(_cases, _parts)
