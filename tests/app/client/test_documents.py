"""Documents of the endpoint as values."""

import pytest

from app.client.documents import parse_records, parse_state
from migration.protocol.record import Outcome
from policies.model import Phase
from tests.app.client.sample import BUSY, MOVED, record, replica, request, state


def test_a_state_is_read_as_the_scheduler_makes_it() -> None:
    found = parse_state(BUSY)
    first, second, third = found.replicas
    assert (first.id, first.used_tokens, first.used_share) == ("aaaaaaaa", 72 * 32, 0.72)
    assert (second.state, second.waiting, len(second.requests)) == ("DRAINING", 1, 2)
    assert third.used_share == 0.0
    assert [r.id for r in found.running] == ["aaaaaaaa"]


def test_what_an_ingress_says_before_it_has_heard_of_the_scheduler_is_a_state() -> None:
    found = parse_state({"as_of": 0.0, "mode": "off", "replicas": []})
    assert (found.wanted, found.policy, found.replicas) == (None, None, ())


def test_a_request_that_is_handed_over_is_counted_once_as_its_later_run() -> None:
    found = parse_state(
        state(replica("b", request("r", 40, hop=1)), replica("a", request("r", 30, Phase.MOVING, hop=0)))
    ).requests()
    assert {id: (r.tokens, r.hop) for id, r in found.items()} == {"r": (40, 1)}


def test_records_are_read_with_what_is_derived_of_them() -> None:
    committed, aborted, running = parse_records(MOVED["migrations"])
    assert committed.outcome is Outcome.COMMITTED and committed.predicted_s == 0.05
    assert committed.whole_s == pytest.approx(0.048 - 0.0066 + 0.015)
    assert (aborted.outcome, running.outcome) == (Outcome.ABORTED, None)


def test_members_of_a_newer_version_are_passed_over() -> None:
    assert parse_records([record("m", moon="full")])[0].id == "m"
    assert parse_state(state(replica("a") | {"moon": "full"}, moon="full")).replicas[0].id == "a"


@pytest.mark.parametrize("document", [[], None, "x", {}, {"replicas": []}, state({"id": "a"}), state(None)])  # type: ignore[arg-type]
def test_what_is_no_state_is_refused(document: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        parse_state(document)
