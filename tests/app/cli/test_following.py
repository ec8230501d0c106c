"""Each migration is told once."""

from typing import Any

from app.cli.following import Follower
from app.client.documents import Records, parse_records
from migration.record import Outcome
from tests.app.client.sample import record


def listed(*records: dict[str, Any]) -> Records:
    return parse_records(records)


def ids(records: Records) -> list[str]:
    return [record.id for record in records]


def test_what_has_ended_is_told_once_oldest_first() -> None:
    follower = Follower()
    assert ids(follower.feed(listed(record("new"), record("old")))) == ["old", "new"]
    assert follower.feed(listed(record("new"), record("old"))) == ()


def test_what_is_under_way_is_told_when_it_ends() -> None:
    follower = Follower()
    assert follower.feed(listed(record("m", None))) == ()
    assert ids(follower.feed(listed(record("m", Outcome.REFUSED)))) == ["m"]


def test_how_long_it_took_is_waited_for_until_the_next_look() -> None:
    follower = Follower()
    untold = record("m", resume_s=None)
    assert follower.feed(listed(untold)) == ()
    (told,) = follower.feed(listed(record("m")))
    assert told.whole_s is not None
    impatient = Follower()
    impatient.feed(listed(untold))
    assert ids(impatient.feed(listed(untold))) == ["m"]


def test_what_is_skipped_is_not_told_unless_it_was_under_way() -> None:
    follower = Follower()
    follower.skip(listed(record("done"), record("running", None)))
    assert ids(follower.feed(listed(record("done"), record("running")))) == ["running"]
