"""What the scheduler counts, as it is scraped."""

from dataclasses import replace

import pytest

from deployments.exposition import merge
from deployments.telemetry import Telemetry
from migration.messages import Path
from migration.record import MigrationRecord, Outcome
from policies.model import Blocks, Bytes, ReplicaId, ReplicaLoad, ReplicaState, RequestId, Tokens
from tests.deployments.test_exposition import parsed

RECORD = MigrationRecord(
    id="m",
    request_id=RequestId("r"),
    label="l",
    source=ReplicaId("a"),
    target=ReplicaId("b"),
    path=Path.KV,
    reason="manual",
    state="done",
    outcome=Outcome.COMMITTED,
    bytes=Bytes(1000),
    pause_s=0.03,
    predicted_kv_s=0.2,
)


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


def values(telemetry: Telemetry) -> dict[str, dict[tuple[str, ...], float]]:
    return parsed(merge([telemetry.expose("s")]))


def load(name: str, state: ReplicaState) -> ReplicaLoad:
    return ReplicaLoad(ReplicaId(name), state, "n", Tokens(1), 1, Blocks(1), 1)


def test_a_committed_migration(telemetry: Telemetry) -> None:
    telemetry.migrated(RECORD)
    seen = values(telemetry)
    assert seen["mell_migrations_total"] == {("committed", "kv", "manual", "s"): 1}
    assert seen["mell_migration_bytes_total"] == {("s",): 1000}
    assert seen["mell_migration_pause_seconds_sum"] == {("kv", "s"): 0.03}
    assert seen["mell_migration_predicted_seconds_sum"] == {("kv", "s"): 0.2}


def test_an_aborted_migration_has_no_pause(telemetry: Telemetry) -> None:
    telemetry.migrated(replace(RECORD, outcome=Outcome.ABORTED))
    seen = values(telemetry)
    assert seen["mell_migrations_total"] == {("aborted", "kv", "manual", "s"): 1}
    assert "mell_migration_pause_seconds_sum" not in seen


@pytest.mark.parametrize(
    ("reason", "label"),
    [("manual; kv failed: slot 7 is gone", "manual"), ("replica lost: it died", "replica lost")],
)
def test_a_reason_is_counted_without_its_details(telemetry: Telemetry, reason: str, label: str) -> None:
    telemetry.migrated(replace(RECORD, reason=reason))
    assert list(values(telemetry)["mell_migrations_total"]) == [("committed", "kv", label, "s")]


def test_replicas_by_state_and_their_time(telemetry: Telemetry) -> None:
    running, starting = load("a", ReplicaState.RUNNING), load("b", ReplicaState.STARTING)
    telemetry.epoch([running, running, starting], passed_s=2.0)
    telemetry.epoch([running], passed_s=1.5)
    seen = values(telemetry)
    assert seen["mell_replicas"] == {
        ("s", "RUNNING"): 1,
        ("s", "STARTING"): 0,
        ("s", "DRAINING"): 0,
        ("s", "STOPPED"): 0,
    }
    assert seen["mell_gpu_seconds_total"] == {("s",): 7.5}


def test_a_freed_replica(telemetry: Telemetry) -> None:
    telemetry.freed(3.0)
    assert values(telemetry)["mell_time_to_free_replica_seconds_sum"] == {("s",): 3.0}


def test_counters_without_labels_are_there_from_the_start(telemetry: Telemetry) -> None:
    seen = values(telemetry)
    assert seen["mell_gpu_seconds_total"] == seen["mell_migration_bytes_total"] == {("s",): 0}
