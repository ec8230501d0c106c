"""Raw runs on disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.evaluation.runs.case import LENGTHS, Case, Physics, Span
from benchmarks.evaluation.runs.store import FailedRun, Store, carry_out
from simulator.workload.workload import Poisson

CASE = Case("best_fit", Poisson(0.5), Span(60.0, 10.0), 4000)


@pytest.fixture
def store(tmp_path: Path, traces: Path) -> Store:
    return Store(tmp_path / "runs", traces)


def test_stored_run_is_not_repeated(store: Store) -> None:
    carry_out(store, [CASE], processes=1, quiet=True)
    kept = json.loads(store.path(CASE).read_text())
    kept["metrics"]["gpus_mean"] = -1.0
    store.path(CASE).write_text(json.dumps(kept))
    assert carry_out(store, [CASE], processes=1, quiet=True).value(CASE, "gpus_mean") == -1.0


@pytest.mark.parametrize(
    "other",
    [
        replace(CASE, seed=1),
        replace(CASE, policy="worst_fit"),
        replace(CASE, policy="best_fit:headroom_s=1"),
        replace(CASE, span=Span(61.0, 10.0)),
        replace(CASE, physics=Physics("h100-8b-nvlink")),
    ],
    ids=["seed", "policy", "option", "span", "physics"],
)
def test_parameters_of_the_outcome_change_the_path(store: Store, other: Case) -> None:
    assert store.path(other) != store.path(CASE)


def test_changed_file_content_changes_the_path(store: Store, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / LENGTHS).write_text((store.traces / LENGTHS).read_text() + "\n")
    assert Store(store.folder, changed).path(CASE).name != store.path(CASE).name


def test_failed_run_is_named(store: Store) -> None:
    with pytest.raises(FailedRun, match=r"BadInput.*capacity=1,"):
        carry_out(store, [replace(CASE, capacity=1)], processes=1, quiet=True)


@pytest.mark.slow
def test_number_of_processes_does_not_change_the_outcome(store: Store, tmp_path: Path) -> None:
    cases = [CASE, replace(CASE, seed=1)]
    alone = carry_out(store, cases, processes=1, quiet=True)
    together = carry_out(Store(tmp_path / "others", store.traces), cases, processes=2, quiet=True)
    assert alone.metrics == together.metrics
