"""Predicted times of jobs by the number of replicas for prefills."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.job_times import JobLoad, job_time
from policies.cost.service import ReplicaSpeed, ServiceLevel
from policies.cost.steps import StepCosts, proportional

SPEED = ReplicaSpeed(StepCosts(proportional(1e-4), 0.02, 1e-4, 1e-6, 1e-8), chunk_tokens=1024)
LOAD = JobLoad(4.0, 1000, 0, 1.0, 3000, 100.0, 1000.0, 0.02)
ANY = ServiceLevel()
rates = st.floats(0.1, 20.0)


def job_s(load: JobLoad, prefills: int, decoding: float, level: ServiceLevel = ANY) -> float:
    return job_time(SPEED, load, prefills, decoding, level).job_s


def test_job_alone_takes_its_prefill_and_its_steps() -> None:
    alone = replace(LOAD, rate=1e-6)
    steps_s = alone.answer * SPEED.costs.step_s(1, 1000.0)
    beside_s = SPEED.prefill_s(1000, 0, 1, 1000.0) + SPEED.costs.step_s(1, 1000.0) / 2
    assert job_s(alone, 0, 4) == pytest.approx(beside_s + steps_s, rel=1e-3)
    apart_s = SPEED.prefill_s(1000) + alone.pause_s + steps_s
    assert job_s(alone, 1, 3) == pytest.approx(
        min(apart_s, 0.75 * beside_s + 0.25 * apart_s + 0.75 * steps_s), rel=0.05
    )


@pytest.mark.parametrize(
    ("load", "best"),
    [
        (replace(LOAD, rate=10.0, answer=50.0, context=300.0), "prefills apart"),
        (replace(LOAD, rate=4.0, prompt=20, longest=50, answer=300.0, context=1500.0), "all do both"),
        (replace(LOAD, pause_s=20.0), "all do both"),
    ],
    ids=["prefills lengthen most steps", "decoding needs all replicas", "hand-overs take long"],
)
def test_best_number_follows_the_load(load: JobLoad, best: str) -> None:
    all_both_s, *apart_s = (job_s(load, prefills, 4 - prefills) for prefills in range(4))
    assert all_both_s < inf
    assert (min(apart_s) < all_both_s) is (best == "prefills apart")


def test_replicas_that_do_not_keep_up_are_no_prediction() -> None:
    load = replace(LOAD, rate=60.0)
    assert all(job_time(SPEED, load, prefills, 4 - prefills, ANY).is_overload for prefills in range(4))
    few = replace(LOAD, rate=12.0, answer=10.0)
    assert job_time(SPEED, few, 1, 3, ANY).is_overload is False
    assert job_time(SPEED, replace(few, answer=2000.0), 3, 1, ANY).is_overload


@given(rates, rates, st.integers(0, 3), st.integers(1, 4))
def test_more_arrivals_never_shorten_jobs(one: float, more: float, prefills: int, decoding: int) -> None:
    before_s, after_s = (job_s(replace(LOAD, rate=rate), prefills, decoding) for rate in (one, one + more))
    assert 0 < before_s <= after_s * 1.01


@given(rates, st.integers(1, 3), st.integers(1, 4), st.floats(0.0, 1.0))
def test_a_longer_pause_never_shortens_jobs(rate: float, prefills: int, decoding: int, pause_s: float) -> None:
    load = replace(LOAD, rate=rate)
    longer = replace(load, pause_s=load.pause_s + pause_s)
    assert job_s(load, prefills, decoding) <= job_s(longer, prefills, decoding)


def test_targets_outweigh_the_mean() -> None:
    """Prefills beside decoding take steps beyond the level, and a job apart takes a little longer."""
    load = replace(LOAD, rate=2.0, pause_s=0.3)
    here, apart = (job_time(SPEED, load, prefills, 4 - prefills, ServiceLevel(None, 0.04)) for prefills in (0, 1))
    assert here.job_s < apart.job_s and here.itl_p99_s > 0.1 > apart.itl_p99_s
    level = ServiceLevel(None, 0.04)
    assert here.cost_s(level) > apart.cost_s(level)
    assert here.cost_s(ANY) == here.job_s
