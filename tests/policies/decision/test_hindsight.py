"""Hindsight, from samples of a dry run."""

import pytest

from policies.cost.service import ReplicaSpeed, ServiceLevel
from policies.cost.steps import StepCosts
from policies.decision.level.hindsight import HOUR_S, Hindsight, ShadowSample, hindsight
from policies.decision.limits import LiveLimits, Mode, Terms
from tests.policies.decision.observed import observed
from tests.policies.decision.test_shadow import NO_GROWTH, Rehearsed, so_far

SAMPLES = [ShadowSample(0.0, 4, 2, True), ShadowSample(60.0, 4, 3, False), ShadowSample(90.0, 2, 1, True)]
SPEED = ReplicaSpeed(StepCosts(((1, 0.02), (2, 0.021))))


def test_the_numbers_are_means_over_the_time() -> None:
    assert hindsight(SAMPLES, 150.0) == Hindsight(150.0, (90 * 4 + 60 * 2) / 150, (60 * 2 + 30 * 3 + 60) / 150, 3, 0.8)


@pytest.mark.parametrize(("missed_s", "meets"), [(36.0, True), (37.0, False)])
def test_the_level_may_be_missed_for_a_hundredth_of_the_time(missed_s: float, meets: bool) -> None:
    found = hindsight([ShadowSample(0.0, 1, 1, False), ShadowSample(missed_s, 1, 1, True)], HOUR_S)
    assert found is not None and found.meets_level is meets


def test_only_the_last_hour_counts() -> None:
    found = hindsight(SAMPLES, HOUR_S + 80.0)
    assert found is not None
    assert found.seconds == HOUR_S
    assert found.gpus_real == pytest.approx((10 * 4 + (HOUR_S - 10) * 2) / HOUR_S)


def test_there_is_none_in_the_first_minute() -> None:
    assert hindsight([], 5.0) is hindsight(SAMPLES[:1], 59.0) is None
    assert hindsight(SAMPLES[:1], 60.0) is not None


def shadowed(level: ServiceLevel | None) -> Hindsight | None:
    """The hindsight after two minutes with three requests on two replicas."""
    terms = Terms(NO_GROWTH, LiveLimits(linger_s=0.0), 0.0, Mode.OBSERVE, service=level, speed=SPEED)
    made = Rehearsed(terms)
    for now in (0.0, 1.0, 60.0, 120.0):
        made.observe(observed("a: p40 q20 | b: r15", now))
    return so_far(made).hindsight


def test_the_shadow_keeps_samples_if_there_is_a_level() -> None:
    assert shadowed(None) is None
    assert shadowed(ServiceLevel(itl_p99_s=0.05)) == Hindsight(120.0, 2.0, 1.0, 1, 1.0)


def test_a_level_that_the_shadow_misses() -> None:
    missed = shadowed(ServiceLevel(itl_p99_s=0.01))
    assert missed is not None and not missed.meets_level
