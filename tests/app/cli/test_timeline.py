"""Migrations as trace events: their spans have the right times and never overlap on a thread."""

from itertools import pairwise
from typing import Any

from app.cli.timeline import trace_events
from app.client.documents import parse_records
from migration.protocol.record import Outcome
from tests.app.client.sample import NOW, record


def events(*records: dict[str, Any]) -> list[dict[str, Any]]:
    return trace_events(parse_records(records))


def spans(*records: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in events(*records) if event["ph"] == "X"]


def test_a_migration_spans_to_the_first_new_token_and_ends_with_the_pause() -> None:
    whole, pause = spans(record("a", started_at=NOW, duration_s=0.05, pause_s=0.01, resume_s=0.03))
    assert (whole["name"], whole["args"]["id"], whole["args"]["path"]) == ("demo to bbbbbbbb", "a", "kv")
    assert (whole["ts"], whole["dur"]) == (NOW * 1e6, 70_000)
    assert (pause["name"], pause["ts"], pause["dur"]) == ("pause", NOW * 1e6 + 40_000, 30_000)
    assert (pause["pid"], pause["tid"]) == (whole["pid"], whole["tid"])


def test_running_migrations_are_left_out_and_failed_ones_differ_in_colour() -> None:
    failed = record("b", Outcome.ABORTED, pause_s=None, resume_s=None, error="the target died")
    (span,) = spans(record("a", None), failed)
    assert (span["dur"], span["args"]["error"]) == (48_000, "the target died")
    assert span["cname"] != spans(record("a"))[0]["cname"]


def test_every_source_replica_is_a_named_process() -> None:
    found = events(record("a", source="cccccccc", target="aaaaaaaa"), record("b"))
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert sorted(names.values()) == ["Mell: moved away from aaaaaaaa", "Mell: moved away from cccccccc"]
    assert {event["pid"] for event in found} == set(names)


def test_concurrent_migrations_are_on_separate_threads() -> None:
    lasting: dict[str, Any] = {"duration_s": 1.0, "pause_s": None, "resume_s": None}
    at = {"a": 0.0, "b": 0.5, "c": 0.75, "d": 1.0, "e": 1.5}
    made = [record(id, started_at=NOW + seconds, **lasting) for id, seconds in at.items()]
    threads = {span["args"]["id"]: span["tid"] for span in spans(*reversed(made))}
    assert threads == {"a": 0, "b": 1, "c": 2, "d": 0, "e": 1}
    for thread in range(3):
        row = sorted((s for s in spans(*made) if s["tid"] == thread), key=lambda s: s["ts"])
        assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(row))


def test_without_migrations_there_are_no_events() -> None:
    assert events() == []
