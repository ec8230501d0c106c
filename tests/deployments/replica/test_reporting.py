"""The migrations in a replica's reports."""

from dataclasses import replace

from deployments.api.report import Gauges
from deployments.cache.mirror import Mirror
from deployments.replica.reporting import ReplicaReporter
from migration.kv.cache_events import BlocksRemoved, BlocksStored
from migration.protocol.record import MigrationRecord, Outcome
from policies.model import ReplicaId, RequestId
from policies.plan import Path, Reason
from policies.prefix.change import CacheChange, Tier
from tests.deployments.scheduler.fakes import make_report

A, B = ReplicaId("a"), ReplicaId("b")
LOAD = make_report("a").load


def record(id: str, outcome: Outcome | None = Outcome.COMMITTED) -> MigrationRecord:
    return MigrationRecord(id, RequestId("r"), "", A, B, Path.KV, "drain", "copy", Reason.DRAIN, outcome)


def reported(reporter: ReplicaReporter, version: int | None, *records: MigrationRecord) -> list[MigrationRecord]:
    return list(reporter.report(LOAD, Gauges(), records, version, 0.0).records)


def test_a_snapshot_has_all_migrations_and_changes_have_those_with_news() -> None:
    reporter = ReplicaReporter()
    old, running = record("old"), record("running", None)
    assert reported(reporter, None, running, old) == [running, old]
    assert reported(reporter, 1, running, old) == [running], "a move without news would be forgotten"
    ended = replace(running, outcome=Outcome.ABORTED)
    assert reported(reporter, 2, ended, old) == [ended]
    assert reported(reporter, 3, replace(ended), old) == []
    resumed = replace(old, resume_s=1.0)
    assert reported(reporter, 4, ended, resumed) == [resumed]


def test_the_cache_is_reported_whole_in_snapshots_and_by_changes_otherwise() -> None:
    reporter, mirror = ReplicaReporter(), Mirror()
    mirror.take(0, [BlocksStored([1, (1 << 64) - 1])])

    def cache(version: int | None) -> CacheChange | None:
        return reporter.report(LOAD, Gauges(), (), version, 0.0, mirror.change).report.cache

    assert cache(None) == CacheChange({Tier.HBM: (1, (1 << 64) - 1)}, {}, True)
    assert cache(1) is None
    mirror.take(1, [BlocksRemoved([1])])
    assert cache(2) == CacheChange({}, {Tier.HBM: (1,)}, False)
    assert cache(1) == CacheChange({Tier.HBM: ((1 << 64) - 1,)}, {}, True)


def test_after_a_lost_answer_all_migrations_are_reported_again() -> None:
    reporter = ReplicaReporter()
    assert reported(reporter, None, record("old")) == [record("old")]
    assert reported(reporter, 1, record("new"), record("old")) == [record("new")]
    assert reported(reporter, 1, record("new"), record("old")) == [record("new"), record("old")]
