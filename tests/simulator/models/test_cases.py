"""One run of each contender on a number of devices."""

from pathlib import Path

import pytest

from simulator.models.baselines import static_devices
from simulator.models.cases import SharingCase, SharingContender, SharingPlan, perform_case
from simulator.models.outcome import SharedOutcome
from tests.simulator.models.small import START_S, WAKE_S, small_plan
from tests.simulator.physics import job

OWN, SCALED, TO_ZERO, STATIC, SWAP, SWAP_ASLEEP, MELL = SharingContender


def performed(plan: SharingPlan, contender: SharingContender, devices: int, setting: float = 1.0) -> SharedOutcome:
    outcome = perform_case(plan, SharingCase(contender, setting), devices, lambda now: None)
    assert outcome is not None
    return outcome


def slowest_s(outcome: SharedOutcome, model: str) -> float:
    ttft_s = outcome.models[model].ttft_p99_s
    assert ttft_s is not None
    return ttft_s


@pytest.fixture
def plan(tmp_path: Path) -> SharingPlan:
    """Three models that are asked one after the other, of which two fit into a device while they are awake."""
    requests = {name: (job(f"q{name}", at_s),) for name, at_s in (("a", 10.0), ("b", 50.0), ("c", 90.0))}
    return small_plan(tmp_path, requests, asleep_mib=1)


def test_models_with_devices_of_their_own_wait_for_nothing_but_starts(plan: SharingPlan) -> None:
    own, scaled, to_zero = (performed(plan, each, 3, 30.0) for each in (OWN, SCALED, TO_ZERO))
    assert own.gpu_seconds == scaled.gpu_seconds == 3 * 300.0
    assert slowest_s(own, "c") < 0.5 and own.keeps_level
    assert to_zero.gpu_seconds < own.gpu_seconds / 2
    assert START_S < slowest_s(to_zero, "c") < START_S + 5.0
    assert to_zero.whole.late == 3 and not to_zero.keeps_level


def test_a_device_swaps_models_by_starts_or_by_wakes(plan: SharingPlan) -> None:
    whole, asleep, mell = (performed(plan, each, 1) for each in (SWAP, SWAP_ASLEEP, MELL))
    assert START_S < slowest_s(whole, "b") < START_S + 0.5
    assert WAKE_S < slowest_s(asleep, "b") < WAKE_S + 0.5
    assert WAKE_S < slowest_s(mell, "b") < WAKE_S + 0.5
    assert whole.gpu_seconds == mell.gpu_seconds == 300.0


def test_static_shares_need_room_for_all_models(plan: SharingPlan) -> None:
    assert perform_case(plan, SharingCase(STATIC), 1, lambda now: None) is None
    static = performed(plan, STATIC, 2)
    assert slowest_s(static, "c") < 0.5 and static.gpu_seconds == 2 * 300.0


def test_the_model_with_the_most_work_has_the_device_with_the_least(plan: SharingPlan) -> None:
    work = {model.pool: float(number) for number, model in enumerate(plan.models)}
    devices = static_devices(plan.models, work, 2, plan.budget)
    assert devices is not None
    assert [[model.entry.name for model in each] for each in devices] == [["c"], ["b", "a"]]


def test_sleepers_that_do_not_fit_are_no_outcome(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, {name: () for name in "abc"}, asleep_mib=9)
    for contender in (SWAP_ASLEEP, MELL):
        assert perform_case(plan, SharingCase(contender, 1), 1, lambda now: None) is None


def test_the_first_model_in_line_comes_first_and_the_busy_one_ends_its_requests(tmp_path: Path) -> None:
    steady = tuple(job(f"a{number}", 10.0 + 0.5 * number) for number in range(80))
    plan = small_plan(tmp_path, {"a": steady, "b": (job("b", 40.0),), "c": (job("c", 41.0),)})
    outcome = performed(plan, SWAP, 1)
    first, second = slowest_s(outcome, "b"), slowest_s(outcome, "c")
    assert START_S < first < START_S + 3.0, "the busy model takes no more requests"
    assert 3 * START_S < second < 3 * START_S + 5.0, "the busy model was in line before the third one"
    assert outcome.whole.lost == 0 and slowest_s(outcome, "a") > START_S


def test_a_device_that_is_not_needed_after_all_goes_on_with_its_model(tmp_path: Path) -> None:
    # The first model, with fewer requests, is to leave for the third one; but the second one has ended before.
    long, brief = job("a", 10.0, output=6000), [job(f"b{number}", 10.0, output=1500) for number in range(2)]
    plan = small_plan(tmp_path, {"a": (long, job("later", 43.0)), "b": tuple(brief), "c": (job("c", 42.0),)})
    outcome = performed(plan, SWAP, 2)
    waited_s = 2 * (outcome.models["a"].ttft_p50_s or 0.0) - slowest_s(outcome, "a")
    assert 1.0 < waited_s < 5.0, "the later request waits until it is clear that the model stays"


def test_requests_that_wait_for_two_minutes_are_lost(tmp_path: Path) -> None:
    endless = tuple(job(f"a{number}", 1.0, 100, 900) for number in range(4))
    plan = small_plan(tmp_path, {"a": endless, "b": (job("b", 2.0),)}, startup_s=150.0)
    outcome = performed(plan, SWAP, 1)
    assert outcome.models["b"].lost == 1 and outcome.models["b"].late == 1
