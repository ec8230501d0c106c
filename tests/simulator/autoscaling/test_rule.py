"""The autoscaler's rule, beside Ray's own function on the same inputs."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.autoscaling.rule import Autoscaler, LoadSamples, ScalingRule, WantedChange, scale
from tests.counts import scaled

History = list[tuple[float, float, int]]
"""(seconds passed, load, running replicas) of every call."""

DEFAULT = ScalingRule()
QUICK = ScalingRule(target=10.0, upscale_delay_s=2.0, downscale_delay_s=30.0)


def ours(rule: ScalingRule, history: History) -> list[int]:
    """The target number after every call, which begins at 1."""
    wanted, change, now, found = 1, WantedChange(), 0.0, []
    for passed_s, load, running in history:
        now += passed_s
        wanted, change = scale(rule, load, running, wanted, change, now)
        found.append(wanted)
    return found


def of_ray(rule: ScalingRule, history: History, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The same by Ray's function, as Serve's controller wraps it."""
    from ray.serve import autoscaling_policy
    from ray.serve.config import AutoscalingConfig

    config = AutoscalingConfig(
        min_replicas=0,
        max_replicas=1000,
        target_ongoing_requests=rule.target,
        upscale_delay_s=rule.upscale_delay_s,
        downscale_delay_s=rule.downscale_delay_s,
    )
    decide = autoscaling_policy._apply_autoscaling_config(autoscaling_policy.default_autoscaling_policy)
    state: dict[str, Any] = {}
    wanted, now, found = 1, 0.0, []
    for passed_s, load, running in history:
        now += passed_s
        monkeypatch.setattr(autoscaling_policy, "time", SimpleNamespace(time=lambda at=now: at))
        context: Any = SimpleNamespace(
            config=config,
            current_num_replicas=running,
            target_num_replicas=wanted,
            total_num_requests=load,
            policy_state=state,
        )
        number, state = decide(context)
        wanted = int(number)
        found.append(wanted)
    return found


def steady(load: float, running: int, seconds: int) -> Iterable[tuple[float, float, int]]:
    return ((1.0, load, running) for _ in range(seconds))


DAY: History = [
    *steady(3, 1, 20),  # a rise that does not last
    *steady(1, 1, 3),
    *steady(5, 1, 32),  # one that does
    *steady(5, 3, 5),
    *steady(0.4, 3, 599),  # a fall just before its delay
    *steady(6.2, 3, 1),
    *steady(0, 3, 700),
    *steady(0, 1, 700),  # to zero
    *steady(0, 0, 5),
    *steady(7, 0, 3),  # and from there
    *steady(7, 4, 40),
]


@pytest.mark.parametrize("rule", [DEFAULT, QUICK, ScalingRule(target=0.7, upscale_delay_s=0.0)], ids=str)
def test_a_day_is_scaled_as_by_ray(rule: ScalingRule, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ours(rule, DAY) == of_ray(rule, DAY, monkeypatch)


def test_the_day_scales_up_down_to_zero_and_up_again() -> None:
    found = ours(DEFAULT, DAY)
    assert found[:54] == [1] * 53 + [3]
    assert 0 in found and found[-1] == 4


@given(
    history=st.lists(
        st.tuples(
            st.sampled_from([0.1, 0.5, 1.0, 29.9, 30.0, 100.0, 600.0]),
            st.one_of(st.integers(0, 40).map(float), st.floats(0, 40, allow_subnormal=False)),
            st.integers(0, 8),
        ),
        max_size=60,
    ),
    target=st.one_of(st.integers(1, 12).map(float), st.floats(0.1, 12.0)),
    delays=st.tuples(st.sampled_from([0.0, 2.0, 30.0]), st.sampled_from([0.0, 30.0, 600.0])),
)
@settings(max_examples=scaled(300), deadline=None)
def test_any_history_is_scaled_as_by_ray(history: History, target: float, delays: tuple[float, float]) -> None:
    rule = ScalingRule(target=target, upscale_delay_s=delays[0], downscale_delay_s=delays[1])
    with pytest.MonkeyPatch.context() as patch:
        assert ours(rule, history) == of_ray(rule, history, patch)


def test_ray_counts_no_requests_of_stopping_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load that the simulated fleet leaves out: replicas that are stopping are not among those that run."""
    from ray.serve._private import autoscaling_state
    from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
    from ray.serve._private.common import (
        RUNNING_REQUESTS_KEY,
        DeploymentID,
        ReplicaID,
        ReplicaMetricReport,
        TimeStampedValue,
    )
    from ray.serve.config import AutoscalingConfig

    # Ray's mean goes on to the present: with the real time, rounding makes 7.000000000000001 of it now and then.
    monkeypatch.setattr(autoscaling_state, "time", SimpleNamespace(time=lambda: 2.0, monotonic=lambda: 2.0))
    state = DeploymentAutoscalingState(DeploymentID("engine", "app"))
    state._config = AutoscalingConfig()
    replicas = [ReplicaID(name, state._deployment_id) for name in "ab"]
    for replica, ongoing in zip(replicas, (3.0, 4.0), strict=True):
        samples = [TimeStampedValue(at_s, ongoing) for at_s in (0.0, 1.0)]
        state.record_request_metrics_for_replica(ReplicaMetricReport(replica, {RUNNING_REQUESTS_KEY: samples}, 1.0))
    state.update_running_replica_ids(replicas)
    assert state.get_total_num_requests() == 7.0
    state.update_running_replica_ids(replicas[:1])
    assert state.get_total_num_requests() == 3.0


def test_samples_are_seen_after_their_push_for_the_look_back_period() -> None:
    samples = LoadSamples(look_back_s=4.0, push_s=2.0)
    means = []
    for second in range(9):
        samples.add(float(second), float(second))
        means.append(samples.mean(float(second)))
    # Pushes at 0, 2, 4, 6 and 8; the mean of the samples of four seconds.
    assert means == [0.0, 0.0, 1.0, 1.0, 2.5, 2.5, 4.5, 4.5, 6.5]


def test_an_autoscaler_keeps_its_bounds_and_waits_for_its_delays() -> None:
    rule = ScalingRule(target=1.0, upscale_delay_s=2.0, downscale_delay_s=30.0, look_back_s=1.0, push_s=1.0)
    autoscaler = Autoscaler(rule, 1, 3)
    assert [autoscaler.observe(float(second), 5.0, 1) for second in range(4)] == [1, 1, 3, 3]
    falling = [autoscaler.observe(float(second), 0.5, 3) for second in range(4, 37)]
    assert falling == [3] * 30 + [1] * 3


def test_an_autoscaler_without_a_greatest_number_follows_the_load() -> None:
    autoscaler = Autoscaler(ScalingRule(target=1.0, upscale_delay_s=0.0, look_back_s=1.0, push_s=1.0), 1, None)
    assert autoscaler.observe(0.0, 100.0, 1) == 100
