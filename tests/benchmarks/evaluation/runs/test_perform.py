"""The report's metrics beyond the simulator's own."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.evaluation.runs.case import Case, Span
from benchmarks.evaluation.runs.perform import OperationCounter, perform
from policies.cluster.changes import Changes
from policies.plan import Plan
from policies.rules.registry import policy
from simulator.outcome.recorder import EventRecorder
from simulator.workload.workload import Poisson
from tests.simulator.outcome.hand import cluster, move

CASE = Case("mell", Poisson(0.5), Span(150.0, 30.0), 4000)
GROWTH = Changes()


def test_units_are_counted_per_operation_after_the_first() -> None:
    made = cluster([60], waiting=3)
    first, second, third = (Changes(waiting=(request,)) for request in list(made.waiting.values()))
    counter = OperationCounter(policy("best_fit"), EventRecorder(lambda now: None))
    for changes in (first, second, GROWTH, third):
        counter.rebalance(made, changes)
    one, two = Plan.of(moves=(move(6, 0),)), Plan.of(moves=(move(7, 1), move(8, 1), move(9, 2)))
    counter.decided(0.0, made, [one, two, one, Plan(), two])
    assert counter.units_moved == [2, 0]


def test_unbatched_runs_count_operations(traces: Path) -> None:
    operations = perform(replace(CASE, batched=False), traces).metrics["operations"]
    assert operations["count"] > 100
    assert operations["most_units"] >= 1
    assert "operations" not in perform(CASE, traces).metrics


def test_ideal_costs_have_no_slowdown_and_no_pause(traces: Path) -> None:
    metrics = perform(CASE, traces).metrics
    assert metrics["slowdown"]["p99"] == pytest.approx(1.0)
    assert metrics["pause_s"] is None


def test_lower_bound_is_at_most_the_gpus(traces: Path) -> None:
    metrics = perform(CASE, traces).metrics
    assert metrics["bound"]["mean"] <= metrics["bound"]["repack_mean"] <= metrics["gpus_mean"]
