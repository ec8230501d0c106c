"""Runs as values: their order and their settings."""

import pytest

from app.settings import Settings
from benchmarks.economics.case import (
    FOLLOWS_LEVEL,
    KV_SCALES,
    SCHEDULERS,
    SERVE_SCALES,
    Conditions,
    RunWindow,
    read_level,
    read_window,
    rule_of,
    settings,
    turns,
)
from deployments.config import ServiceLevelSettings
from policies.cost.service import ServiceLevel
from simulator.autoscaling.rule import LoadMeasure, ScalingRule
from simulator.errors import BadInput
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


@pytest.mark.parametrize("variant", [v for v in SCHEDULERS if v not in (*SERVE_SCALES, *KV_SCALES)])
def test_settings_are_valid_for_the_application(variant: str) -> None:
    valid = Settings.model_validate(settings(case(variant)))
    assert valid.engine == "paced"
    assert valid.scheduler.mode == "act"
    assert (valid.scheduler.moves_per_epoch == 0) is (variant in ("worst_fit", "pack_unmoved", "constant"))
    assert valid.scheduler.slack == (None if variant in FOLLOWS_LEVEL else CONDITIONS.slack)
    scaling = valid.deployment_config.autoscaling_config
    constant, most = CONDITIONS.constant, CONDITIONS.max_replicas
    bounds = (constant, constant, constant) if variant == "constant" else (1, 1, most)
    assert (scaling.min_replicas, scaling.initial, scaling.max_replicas) == bounds


@pytest.mark.parametrize("variant", SERVE_SCALES)
def test_serve_scales_by_itself(variant: str) -> None:
    conditions = Conditions(ongoing=7, upscale_s=3.0, downscale_s=5.0)
    valid = Settings.model_validate(settings(case(variant, conditions=conditions)))
    assert valid.scheduler.mode == "off"
    scaling = valid.deployment_config.autoscaling_config
    assert scaling.target_ongoing_requests == 7
    given = (scaling.upscale_delay_s, scaling.downscale_delay_s) == (3.0, 5.0)
    assert given is (variant == "serve_quick")


@pytest.mark.parametrize("variant", KV_SCALES)
def test_neither_mell_nor_serve_scales_beside_another_autoscaler(variant: str) -> None:
    valid = Settings.model_validate(settings(case(variant)))
    assert valid.scheduler.mode == "off"
    assert valid.deployment_config.autoscaling_config.target_ongoing_requests is None


def test_autoscalers_by_kv_utilisation_have_the_delays_of_serve_or_of_the_conditions() -> None:
    conditions = Conditions(kv_target=0.4, upscale_s=3.0, downscale_s=5.0)
    assert rule_of(case("kv", conditions=conditions)) == ScalingRule(LoadMeasure.KV, 0.4)
    quick = rule_of(case("kv_quick", conditions=conditions))
    assert quick is not None
    assert (quick.measure, quick.target) == (LoadMeasure.KV, 0.4)
    assert (quick.upscale_delay_s, quick.downscale_delay_s) == (3.0, 5.0)
    assert all(rule_of(case(variant)) is None for variant in SCHEDULERS if variant not in KV_SCALES)


@pytest.mark.parametrize("variant", SCHEDULERS)
def test_only_variants_that_follow_a_level_get_it(variant: str) -> None:
    conditions = Conditions(ttft_p99_s=30.0, itl_p99_ms=400.0)
    slo = Settings.model_validate(settings(case(variant, conditions=conditions))).scheduler.slo
    assert slo.level == (conditions.level if variant in FOLLOWS_LEVEL else None)
    assert conditions.level == ServiceLevel(30.0, 0.4)
    assert "service level: TTFT p99 30 s and ITL p99 400 ms" in conditions.name


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("ttft_p99_s=2", ServiceLevelSettings(ttft_p99_s=2.0)),
        ("itl_p99_ms=50,ttft_p99_s=0.5", ServiceLevelSettings(ttft_p99_s=0.5, itl_p99_ms=50.0)),
    ],
)
def test_levels_are_parsed(text: str, level: ServiceLevelSettings) -> None:
    assert read_level(text) == level


@pytest.mark.parametrize("text", ["2", "ttft=2", "ttft_p99_s=", "ttft_p99_s=-1", "ttft_p99_s=2;itl_p99_ms=50"])
def test_malformed_levels_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is not a service level"):
        read_level(text)


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
