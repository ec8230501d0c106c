"""The scheduler's metrics, as they are scraped."""

from dataclasses import replace
from math import inf, isnan

import pytest

from deployments.metrics.exposition import merge
from deployments.metrics.telemetry import Telemetry
from migration.protocol.record import CopyOutcome, CopyRecord, MigrationRecord, Outcome
from policies.cost.service import ReplicaSpeed, ServiceLevel, SpeedLimit
from policies.cost.steps import StepCosts
from policies.decision.level.service import ServiceReport
from policies.decision.limits import Mode
from policies.model import Bytes, PoolId, ReplicaId, ReplicaState, RequestId
from policies.plan import Path, Reason
from policies.prefix.copies import CopyReason
from tests.deployments.metrics.test_exposition import parsed

P = PoolId("p")
RECORD = MigrationRecord(
    id="m",
    request_id=RequestId("r"),
    label="l",
    source=ReplicaId("a"),
    target=ReplicaId("b"),
    path=Path.KV,
    reason="requested by operator",
    state="done",
    trigger=Reason.MANUAL,
    outcome=Outcome.COMMITTED,
    bytes=Bytes(1000),
    pause_s=0.03,
    predicted_kv_s=0.2,
)


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry(P)


def values(telemetry: Telemetry) -> dict[str, dict[tuple[str, ...], float]]:
    return parsed(merge([telemetry.expose("s")]))


def test_a_committed_migration(telemetry: Telemetry) -> None:
    telemetry.migrated(RECORD)
    seen = values(telemetry)
    assert seen["mell_migrations_total"] == {("committed", "kv", "p", "requested by operator", "s"): 1}
    assert seen["mell_migration_bytes_total"] == {("p", "s"): 1000}
    assert seen["mell_migration_pause_seconds_sum"] == {("kv", "p", "s"): 0.03}
    assert seen["mell_migration_predicted_seconds_sum"] == {("kv", "p", "s"): 0.2}


def test_copies_before_the_end_of_a_replica(telemetry: Telemetry) -> None:
    copy = CopyRecord("c", ReplicaId("a"), ReplicaId("b"), CopyReason.EVACUATE, "done", CopyOutcome.DONE)
    for record in (copy, replace(copy, bytes=Bytes(1000)), replace(copy, outcome=CopyOutcome.ABORTED)):
        telemetry.copied(record)
    seen = values(telemetry)
    assert seen["mell_cache_copies_total"] == {("done", "p", "evacuate", "s"): 2, ("aborted", "p", "evacuate", "s"): 1}
    assert seen["mell_cache_copy_bytes_total"] == {("p", "s"): 1000}


def test_an_aborted_migration_has_no_pause(telemetry: Telemetry) -> None:
    telemetry.migrated(replace(RECORD, outcome=Outcome.ABORTED))
    seen = values(telemetry)
    assert seen["mell_migrations_total"] == {("aborted", "kv", "p", "requested by operator", "s"): 1}
    assert "mell_migration_pause_seconds_sum" not in seen


@pytest.mark.parametrize(
    ("trigger", "details", "label"),
    [(Reason.FILL, "; kv failed: slot 7 is gone", "fill"), (Reason.LOST, ": it died", "replica lost")],
)
def test_a_reason_is_counted_without_its_details(
    telemetry: Telemetry, trigger: Reason, details: str, label: str
) -> None:
    telemetry.migrated(replace(RECORD, trigger=trigger, reason=trigger + details))
    assert list(values(telemetry)["mell_migrations_total"]) == [("committed", "kv", "p", label, "s")]


def test_replicas_by_state_and_their_time(telemetry: Telemetry) -> None:
    running, starting, asleep = ReplicaState.RUNNING, ReplicaState.STARTING, ReplicaState.ASLEEP
    telemetry.epoch([running, running, starting], passed_s=2.0, wanted=4)
    telemetry.epoch([running, asleep], passed_s=1.5, wanted=2)
    seen = values(telemetry)
    assert seen["mell_replicas"] == {
        ("p", "s", "RUNNING"): 1,
        ("p", "s", "STARTING"): 0,
        ("p", "s", "DRAINING"): 0,
        ("p", "s", "STOPPED"): 0,
        ("p", "s", "ASLEEP"): 1,
        ("p", "s", "WAKING"): 0,
    }
    assert seen["mell_gpu_seconds_total"] == {("p", "s"): 7.5}, "not of the one asleep"
    assert seen["mell_replicas_wanted"] == {("p", "s"): 2}


def test_duration_of_a_migration(telemetry: Telemetry) -> None:
    telemetry.resumed(Path.TOKENS, 0.4)
    assert values(telemetry)["mell_migration_seconds_sum"] == {("tokens", "p", "s"): 0.4}


def test_a_freed_replica(telemetry: Telemetry) -> None:
    telemetry.freed(3.0)
    assert values(telemetry)["mell_time_to_free_replica_seconds_sum"] == {("p", "s"): 3.0}


def test_counters_without_labels_are_there_from_the_start(telemetry: Telemetry) -> None:
    seen = values(telemetry)
    assert seen["mell_gpu_seconds_total"] == seen["mell_migration_bytes_total"] == {("p", "s"): 0}


def test_the_metrics_of_two_pools_stand_side_by_side(telemetry: Telemetry) -> None:
    other = Telemetry(PoolId("q"))
    telemetry.epoch([ReplicaState.RUNNING], passed_s=2.0, wanted=1)
    other.epoch([ReplicaState.RUNNING] * 2, passed_s=2.0, wanted=3)
    other.dry_run(2, 5)
    text = merge([(*telemetry.expose("s"), *other.expose("s"))])
    seen = parsed(text)
    assert seen["mell_replicas_wanted"] == {("p", "s"): 1, ("q", "s"): 3}
    assert seen["mell_gpu_seconds_total"] == {("p", "s"): 2, ("q", "s"): 4}
    assert seen["mell_dry_run_moves_total"] == {("q", "s"): 5}
    assert text.count(b"# TYPE mell_replicas gauge") == 1


# --- a service level ----------------------------------------------------------------------------------


def test_without_a_service_level_there_is_nothing_of_one(telemetry: Telemetry) -> None:
    assert not [name for name in values(telemetry) if "service" in name]


def test_a_service_level_is_exposed_as_it_stands(telemetry: Telemetry) -> None:
    level, limits = ServiceLevel(itl_p99_s=0.05), SpeedLimit(ReplicaSpeed(StepCosts(((1, 0.01),))), 0.04)
    telemetry.service(ServiceReport(level))
    assert values(telemetry)["mell_service_step_limit_seconds"] == {("p", "s"): inf}
    telemetry.service(ServiceReport(level, limits, 0.045, 0, 2.5, 1.5))
    seen = {name: samples for name, samples in values(telemetry).items() if "service" in name}
    p99 = seen.pop("mell_service_p99_seconds")
    assert p99[("target", "p", "s", "itl")] == 0.05 and isnan(p99[("reached", "p", "s", "ttft")])
    states = {state[-1]: value for state, value in seen.pop("mell_service_state").items()}
    assert states == {"measuring": 0, "held": 0, "slow": 1, "unreachable": 0}
    assert {name: samples[("p", "s")] for name, samples in seen.items()} == {
        "mell_service_step_seconds": 0.045,
        "mell_service_step_limit_seconds": 0.04,
        "mell_service_late_replicas": 0,
        "mell_service_free_replicas": 2.5,
        "mell_service_reserve_replicas": 1.5,
    }


# --- a dry run ----------------------------------------------------------------------------------------


def test_without_a_dry_run_there_is_nothing_of_one(telemetry: Telemetry) -> None:
    telemetry.epoch([ReplicaState.RUNNING], passed_s=1.0, wanted=1)
    assert not [name for name in values(telemetry) if "dry_run" in name]


def test_a_dry_run_is_exposed_as_it_stands_and_counted(telemetry: Telemetry) -> None:
    telemetry.dry_run(3, 5)
    telemetry.dry_run(2, 1)
    seen = {name: samples[("p", "s")] for name, samples in values(telemetry).items() if "dry_run" in name}
    assert seen == {"mell_dry_run_replicas_needed": 2, "mell_dry_run_moves_total": 6}


def test_a_dry_run_ends_with_its_mode(telemetry: Telemetry) -> None:
    telemetry.dry_run(3, 5)
    telemetry.begin_mode(Mode.OFF)
    assert isnan(values(telemetry)["mell_dry_run_replicas_needed"][("p", "s")])
