"""Cases of the evaluation."""

from pathlib import Path

import pytest

from benchmarks.evaluation.runs.case import Case, Physics, Recording, Span, expected_requests, seeds
from benchmarks.evaluation.runs.eight import A100
from benchmarks.evaluation.runs.scale import FULL
from benchmarks.evaluation.sections.sensitivity import base, dimensions
from simulator.costs.costs import IDEAL, PathChoice, read_costs
from simulator.workload.workload import Poisson, draw

SPAN = Span(1000.0, 10.0)
AZURE = "azure2023_conv.csv.gz"


def test_ideal_costs_have_no_changes() -> None:
    assert Physics().read() is IDEAL


def test_costs_without_changes_equal_the_file() -> None:
    assert Physics(A100.costs).read() == read_costs(A100.costs)


def test_changes_apply_to_costs() -> None:
    given = read_costs(A100.costs)
    costs = Physics(A100.costs, PathChoice.KV, False, 7.0, 9.0, slowness=2.0).read()
    assert given.compute and costs.compute and costs.migration
    assert (costs.migration.path, costs.migration.consensus) == (PathChoice.KV, False)
    assert (costs.migration.inter.bytes_per_s, costs.startup_s) == (7.0, 9.0)
    assert costs.compute.linear[0][1] == 2 * given.compute.linear[0][1]
    assert costs.compute.chunk_tokens == given.compute.chunk_tokens


def test_arrivals_are_scaled_to_a_mean_rate(traces: Path) -> None:
    case = Case("pack", Recording(AZURE, mean_rate=0.1), SPAN, 1000)
    jobs = draw(case.recipe(traces), 0).jobs
    assert len(jobs) / jobs[-1].arrival_s == pytest.approx(0.1)
    assert expected_requests(case, traces) == len(jobs)


def test_arrivals_without_a_mean_rate_are_unchanged(traces: Path) -> None:
    case = Case("pack", Recording(AZURE), SPAN, 1000)
    assert draw(case.recipe(traces), 0).jobs[-1].arrival_s < 60


def test_expected_poisson_arrivals_follow_from_the_rate(traces: Path) -> None:
    assert expected_requests(Case("pack", Poisson(0.5), SPAN, 1000), traces) == 500


def test_seeded_cases_differ_only_in_their_seed() -> None:
    case = Case("pack", Poisson(0.5), SPAN, 1000)
    assert seeds(case, 2) == [case, Case("pack", Poisson(0.5), SPAN, 1000, seed=1)]


def test_base_is_a_variant_of_every_dimension() -> None:
    found = [[v.label for v in dimension.variants if v.case == base(FULL)] for dimension in dimensions(FULL)]
    assert found == [["0.8"], ["x 10"], ["Poisson"], ["x 1"], ["1"], ["10"], ["30"]]


def test_label_of_the_base_equals_its_cost_file() -> None:
    costs = read_costs(A100.costs)
    assert costs.migration
    assert costs.migration.inter.bytes_per_s * 8 / 1e9 == 10
    assert costs.startup_s == 30
