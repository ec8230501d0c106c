"""Any policy, through any history."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.cost.service import ReplicaSpeed, SpeedLimit
from policies.cost.steps import StepCosts, proportional
from policies.decision.limits import Limits
from policies.model import ReplicaState
from policies.rules.registry import policy
from tests.policies.history import CAPACITY, IDEAL, MOVED, SPECS, STAYED, UNDER_WAY, Setting, Tick, played
from tests.policies.settings import few, many

every_policy = pytest.mark.parametrize("spec", SPECS)

sizes = st.integers(1, CAPACITY // 4) | st.integers(1, CAPACITY)
ticks = st.builds(
    Tick,
    arrivals=st.lists(sizes, max_size=8),
    departs=st.lists(st.integers(0, 30), max_size=3),
    grows=st.lists(st.integers(0, 4) | st.integers(0, CAPACITY), min_size=1, max_size=3),
    fates=st.lists(st.sampled_from([MOVED, UNDER_WAY, STAYED]), min_size=1, max_size=3),
    loses=st.none() | st.none() | st.none() | st.integers(0, 9),
    starts=st.booleans(),
    ranks=st.just([0]) | st.lists(st.integers(-1, 2), min_size=1, max_size=4),
    prompts=st.lists(st.integers(-1, 63), min_size=1, max_size=8),
)
histories = st.lists(ticks, min_size=1, max_size=10)
limits = st.builds(
    Limits,
    moves_per_epoch=st.none() | st.integers(0, 3),
    cooldown_s=st.sampled_from([0.0, 1.0, 3.0]),
    lead_s=st.sampled_from([0.0, 1.0]),
    slack=st.sampled_from([0.0, 0.0, 0.5, 2.0]),
    foresight_s=st.sampled_from([0.0, 0.0, 3.0]),
    linger_s=st.sampled_from([0.0, 0.0, 2.0]),
)
COSTS = StepCosts(proportional(0.001), overhead_s=0.01, context_s=1e-5)
speeds = st.builds(SpeedLimit, st.just(ReplicaSpeed(COSTS)), st.floats(0.0121, 0.02))
"""Limits of a step: at least one request of the largest size, at most ten."""
settings = st.builds(
    Setting,
    least=st.integers(0, 2),
    holds=st.booleans(),
    starts_as=st.sampled_from([ReplicaState.RUNNING, ReplicaState.STARTING]),
    supply=st.none() | st.integers(0, 4),
    headroom=st.sampled_from([0, 2]),
    limits=limits,
    speed=st.none() | speeds,
    block_tokens=st.sampled_from([0, 1, 3]),
)
ideal = st.sampled_from([IDEAL, replace(IDEAL, headroom=2), replace(IDEAL, block_tokens=2)])


def check(spec: str, setting: Setting, history: list[Tick]) -> None:
    for epoch, (_, plan, wrong) in enumerate(played(policy(spec), setting, history)):
        assert wrong == [], f"epoch {epoch}: {plan}"


@every_policy
@few
@given(ideal, histories)
def test_history_in_the_ideal_model(spec: str, setting: Setting, history: list[Tick]) -> None:
    check(spec, setting, history)


@every_policy
@few
@given(settings, histories)
def test_history(spec: str, setting: Setting, history: list[Tick]) -> None:
    check(spec, setting, history)


THERE_AND_BACK = [
    Tick(arrivals=[5, 6], departs=[], grows=[0]),
    Tick(arrivals=[], departs=[], grows=[0], starts=True),
    Tick(arrivals=[1, 1, 40, 2], departs=[], grows=[3], loses=0),
]
"""A request leaves a replica in the epoch in which another one may move there."""


@pytest.mark.slow
@every_policy
@few
@given(settings, histories, st.sampled_from([-1, 0]))
@example(Setting(holds=True, starts_as=ReplicaState.STARTING, limits=Limits(slack=2.0)), THERE_AND_BACK, -1)
def test_plans_are_the_same_if_nothing_is_shared(spec: str, setting: Setting, history: list[Tick], prompt: int) -> None:
    """Whether prompts have names that no other one has, no names, or are not looked at."""
    apart = [replace(tick, prompts=[prompt]) for tick in history]
    plans, blind = (
        [plan for _, plan, _ in played(policy(spec), replace(setting, block_tokens=tokens), apart)] for tokens in (1, 0)
    )
    assert plans == blind


@pytest.mark.slow
@every_policy
@many
@given(ideal | settings, histories)
def test_many_histories(spec: str, setting: Setting, history: list[Tick]) -> None:
    check(spec, setting, history)
