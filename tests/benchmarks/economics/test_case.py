"""Runs as values: their order and their settings."""

import pytest

from app.settings import Settings
from app.simulator.errors import BadInput
from benchmarks.economics.case import DELAYS, SCHEDULERS, Conditions, RunWindow, read_window, settings, turns
from tests.benchmarks.economics.made_up import CONDITIONS, WINDOW, case

OTHER = RunWindow("other", 2.0)


def test_variants_rotate_their_order() -> None:
    order = [one.variant for one in turns(["a", "b", "c"], [WINDOW], 4, CONDITIONS)]
    assert order == [*"abc", *"cab", *"bca", *"abc"]


def test_every_window_runs_before_any_repeat() -> None:
    cases = turns(["a", "b"], [WINDOW, OTHER], 2, CONDITIONS)
    assert [(one.window, one.repeat) for one in cases[::2]] == [(WINDOW, 0), (OTHER, 0), (WINDOW, 1), (OTHER, 1)]
    assert len(set(cases)) == 8


def test_pairs_have_the_same_window_repeat_and_conditions() -> None:
    assert case("mell").pairs_with == case("serve").pairs_with
    others = [case(window=OTHER), case(repeat=1), case(conditions=Conditions(seconds=7))]
    assert all(other.pairs_with != case().pairs_with for other in others)


@pytest.mark.parametrize("variant", [v for v in SCHEDULERS if v not in DELAYS])
def test_settings_are_valid_for_the_application(variant: str) -> None:
    valid = Settings.model_validate(settings(case(variant)))
    assert valid.engine == "paced"
    assert valid.scheduler.mode == "act"
    assert (valid.scheduler.moves_per_epoch is None) is (variant == "mell")
    assert valid.scheduler.slack == CONDITIONS.slack
    scaling = valid.deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.initial, scaling.max_replicas) == (1, 1, CONDITIONS.max_replicas)


@pytest.mark.parametrize("variant", DELAYS)
def test_serve_scales_by_itself(variant: str) -> None:
    valid = Settings.model_validate(settings(case(variant, conditions=Conditions(ongoing=7))))
    assert valid.scheduler.mode == "off"
    scaling = valid.deployment_config.autoscaling_config
    assert scaling.target_ongoing_requests == 7
    assert (scaling.downscale_delay_s < CONDITIONS.seconds) is (variant == "serve_quick")


@pytest.mark.parametrize(
    ("text", "window"),
    [("azure:5", RunWindow("azure", 5.0)), ("azure:2.5:3", RunWindow("azure", 2.5, 3.0))],
)
def test_windows_are_parsed(text: str, window: RunWindow) -> None:
    assert read_window(text) == window


@pytest.mark.parametrize("text", ["azure", "azure:", "azure:x", "azure:1:2:3"])
def test_malformed_windows_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is not a window"):
        read_window(text)
