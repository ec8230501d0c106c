"""The newest records are kept, repeated ones dropped, and of older ones no more than that they have ended."""

import gc
from dataclasses import replace

import pytest

from deployments.metrics.telemetry import Telemetry
from deployments.scheduler.records import KEPT, Records
from migration.protocol.record import MigrationRecord, Outcome
from policies.model import SOLE_POOL, ReplicaId, RequestId
from policies.plan import Path, Reason
from tests.deployments.metrics.test_telemetry import values

A, B = ReplicaId("a"), ReplicaId("b")


def under_way(id: str = "m") -> MigrationRecord:
    return MigrationRecord(id, RequestId("r"), "", A, B, Path.KV, "drain", "copying", Reason.DRAIN)


def ended(id: str = "m") -> MigrationRecord:
    return replace(under_way(id), state="done", outcome=Outcome.COMMITTED, duration_s=2.0, pause_s=0.5)


def resumed(id: str = "m") -> MigrationRecord:
    return replace(ended(id), resume_s=0.75)


def test_a_record_under_way_is_new_each_time_and_an_ended_one_twice_at_most() -> None:
    telemetry = Telemetry(SOLE_POOL)
    records = Records(telemetry)
    assert [records.keep(each) for each in (under_way(), under_way(), ended(), ended())] == [True, True, True, False]
    assert not records.keep(under_way()), "late"
    assert [records.keep(each) for each in (resumed(), resumed(), ended(), under_way())] == [True, False, False, False]
    assert records.newest_first() == [resumed()]
    assert list(values(telemetry)["mell_migrations_total"].values()) == [1]


def _records_in_memory() -> int:
    """The number of records in this process, which other tests may have left, too."""
    gc.collect()
    return sum(type(thing) is MigrationRecord for thing in gc.get_objects())


@pytest.mark.slow
def test_an_ended_migration_is_known_when_its_record_has_gone_and_keeps_no_memory_but_its_id() -> None:
    others, records = _records_in_memory(), Records(Telemetry(SOLE_POOL))
    for number in range(3 * KEPT):
        assert records.keep(resumed(f"m{number}"))
    assert len(records) == KEPT and "m0" not in records
    assert _records_in_memory() - others < 2 * KEPT
    assert not records.keep(resumed("m0")) and not records.keep(ended("m0"))
