"""The follower reports each migration once."""

from typing import Any

from app.cli.migrations import Follower
from app.client.documents import Records, parse_records
from migration.protocol.record import Outcome
from tests.app.client.sample import record


def listed(*records: dict[str, Any]) -> Records:
    return parse_records(records)


def ids(records: Records) -> list[str]:
    return [record.id for record in records]


def test_ended_migrations_are_reported_once_oldest_first() -> None:
    follower = Follower()
    assert ids(follower.feed(listed(record("new"), record("old")))) == ["old", "new"]
    assert follower.feed(listed(record("new"), record("old"))) == ()


def test_a_running_migration_is_reported_when_it_ends() -> None:
    follower = Follower()
    assert follower.feed(listed(record("m", None))) == ()
    assert ids(follower.feed(listed(record("m", Outcome.REFUSED)))) == ["m"]


def test_a_report_waits_one_list_for_the_total_time() -> None:
    follower = Follower()
    incomplete = record("m", resume_s=None)
    assert follower.feed(listed(incomplete)) == ()
    (reported,) = follower.feed(listed(record("m")))
    assert reported.whole_s is not None
    impatient = Follower()
    impatient.feed(listed(incomplete))
    assert ids(impatient.feed(listed(incomplete))) == ["m"]


def test_skipped_migrations_are_not_reported_unless_running() -> None:
    follower = Follower()
    follower.skip(listed(record("done"), record("running", None)))
    assert ids(follower.feed(listed(record("done"), record("running")))) == ["running"]
