"""Made-up outcomes, for tests of the page without simulations."""

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.results import Results

Change = Callable[[Case], Mapping[str, Any]]


def results(cases: Iterable[Case], change: Change = lambda case: {}) -> Results:
    """Made-up outcomes of these cases, the same on every call; `change` changes the metrics of a case."""
    wanted = list(cases)
    return Results({case: {**_metrics(case), **change(case)} for case in wanted}, dict.fromkeys(wanted, 1.0))


def _metrics(case: Case) -> dict[str, Any]:
    chance = Random(repr(case))

    def some(least: float, most: float) -> float:
        return chance.uniform(least, most)

    def spread(most: float) -> dict[str, float]:
        return {"mean": some(0.1, most), "p50": some(0.1, most), "p99": some(0.1, most), "max": most}

    return {
        **{name: some(20, 30) for name in ("gpus_mean", "gpus_peak", "bound_peak", "requests_held_mean")},
        "bound": {"peak": 25, "mean": some(19, 20), "repack_mean": 20.1},
        "workload": {"requests": 1000, "capped": 50, "prompt_mean": 900.0, "output_mean": 3000.0},
        "ratio_to_bound": some(1, 1.3),
        "utilisation": some(0.6, 1),
        "serving_ratio": some(0.4, 1),
        **{f"{what}_per_s": some(0.1, 5) for what in ("migrations", "evictions", "preemptions", "requests_finished")},
        "requests_waiting_mean": some(0, 9),
        "gpu_seconds": some(5000, 9000),
        "most_above_ratio": some(-1, 2),
        "operations": {"count": 5000, "most_units": 8, "beyond_promise": 0},
        "moves_by_reason": {"overload": 3, "fill": 1},
        "moves_by_outcome": {"moved": 9, "deferred": 1},
        "moves_by_path": {"kv": {"completed": 3}, "tokens": {"completed": 1}},
        **{name: spread(90) for name in ("stall_s", "added_ttft_s", "added_completion_s", "pause_s", "slowdown")},
        "series": [{"at_s": float(at), "gpus": 20 + at, "bound": 20} for at in range(3)],
    }
