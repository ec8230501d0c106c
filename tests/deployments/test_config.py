"""The values that deployments derive from their settings, on any machine."""

from dataclasses import replace

import pytest
from ray import cloudpickle

from deployments.config import TRANSFER_FLOOR_S, CopyMode, MigrationSettings, SchedulerConfig, ServiceLevelSettings
from migration.protocol.rounds import CopyLimits
from migration.protocol.sizing import LATE
from migration.run.world import MigrationLimits
from policies.cost.service import ServiceLevel
from policies.decision.limits import Limits, LiveLimits
from policies.prefix.routing import Routing


def test_the_limits_of_a_migration_are_those_of_the_settings() -> None:
    settings = MigrationSettings(
        prepare_timeout_s=1.0,
        copy_timeout_s=2.0,
        final_copy_timeout_s=3.0,
        adopt_timeout_s=4.0,
        prefill_timeout_s=7.0,
        max_rounds=5,
        final_blocks=6,
    )
    assert settings.limits == MigrationLimits(1.0, 2.0, 3.0, 4.0, CopyLimits(5, 6), prefill_s=7.0)


def test_unset_limits_of_a_migration_are_the_protocols_own() -> None:
    assert MigrationSettings().limits == MigrationLimits()


def test_the_limit_of_a_transfer_follows_the_slots_unless_it_is_set() -> None:
    assert MigrationSettings().transfer_s(200_000_000) == TRANSFER_FLOOR_S + LATE * 2.0
    assert MigrationSettings(transfer_timeout_s=1.5).transfer_s(200_000_000) == 1.5


def test_the_limits_of_an_epoch_are_those_of_the_settings() -> None:
    config = SchedulerConfig(
        moves_per_epoch=1,
        cooldown_s=2.0,
        headroom_s=3.0,
        slack=4.0,
        linger_s=5.0,
        foresight_s=6.0,
        manual_cooldown_s=7.0,
        bounds=(8, 9),
    )
    limits = Limits(moves_per_epoch=1, cooldown_s=2.0, headroom_s=3.0)
    expected = replace(LiveLimits(), limits=limits, linger_s=5.0, foresight_s=6.0, by_hand_s=7.0, slack=4.0)
    assert config.terms.limits == expected


def test_caches_are_copied_before_replicas_stop_where_arrivals_are_routed_by_content() -> None:
    for copies in CopyMode:
        for routing in Routing:
            expected = (copies, routing) == (CopyMode.AUTO, Routing.TREE)
            assert SchedulerConfig(copies=copies, routing=routing).evacuates is expected


def test_a_service_level_is_part_of_the_terms() -> None:
    assert SchedulerConfig().terms.service is None
    slo = ServiceLevelSettings(ttft_p99_s=2.0, itl_p99_ms=50.0)
    assert SchedulerConfig(slo=slo).terms.service == ServiceLevel(2.0, 0.05)
    assert SchedulerConfig(slo=ServiceLevelSettings(itl_p99_ms=50.0)).terms.service == ServiceLevel(None, 0.05)


@pytest.mark.parametrize(("epoch_s", "ttl_s"), [(0.2, 1.0), (3.0, 6.0)])
def test_a_placement_outlives_two_epochs(epoch_s: float, ttl_s: float) -> None:
    assert SchedulerConfig(epoch_s=epoch_s).terms.placement_ttl_s == ttl_s


@pytest.mark.parametrize("settings", [MigrationSettings(slots=3), SchedulerConfig(moves_at_once=3, bounds=(2, 3))])
def test_settings_travel_to_other_machines(settings: MigrationSettings | SchedulerConfig) -> None:
    assert cloudpickle.loads(cloudpickle.dumps(settings)) == settings
