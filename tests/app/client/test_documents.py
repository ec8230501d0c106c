"""Parsing of the endpoint's documents."""

import pytest

from app.client.documents import parse_match, parse_records, parse_state
from migration.protocol.record import Outcome
from policies.model import SOLE_POOL, Phase
from tests.app.client.sample import BUSY, MATCHED, MOVED, match, record, replica, request, state


def test_a_state_of_the_scheduler_is_read() -> None:
    found = parse_state(BUSY)
    first, second, third = found.replicas
    assert (first.id, first.used_tokens, first.used_share) == ("aaaaaaaa", 72 * 32, 0.72)
    assert (second.state, second.waiting, len(second.requests)) == ("DRAINING", 1, 2)
    assert third.used_share == 0.0
    assert [r.id for r in found.running] == ["aaaaaaaa"]


def test_the_state_before_the_first_report_is_read() -> None:
    found = parse_state({"as_of": 0.0, "mode": "off", "replicas": []})
    assert (found.wanted, found.policy, found.replicas) == (None, None, ())


def test_a_match_is_read() -> None:
    found = parse_match(MATCHED)
    assert (found.prompt_tokens, found.full_blocks, found.block_size) == (1201, 75, 16)
    assert (found.replica, found.by, found.queues, found.off) == ("bbbbbbbb", "content", False, None)
    _, its = found.replicas
    assert (its.id, its.hbm, its.dram, its.fits, its.favoured) == ("bbbbbbbb", 1184, 16, True, True)
    assert (its.wait_s, its.first_token_s, its.score_s) == pytest.approx((0.2, 0.21, 0.25))
    absent = parse_match(match(None, off="no replica has a mirror"))
    assert (absent.replica, absent.by, absent.off, absent.replicas) == (None, None, "no replica has a mirror", ())


def test_a_request_in_hand_over_counts_once_with_its_later_run() -> None:
    found = parse_state(
        state(replica("b", request("r", 40, hop=1)), replica("a", request("r", 30, Phase.MOVING, hop=0)))
    ).requests()
    assert {id: (r.tokens, r.hop) for id, r in found.items()} == {"r": (40, 1)}


def test_records_are_read_with_their_derived_members() -> None:
    committed, aborted, running = parse_records(MOVED["migrations"])
    assert committed.outcome is Outcome.COMMITTED and committed.predicted_s == 0.05
    assert committed.whole_s == pytest.approx(0.048 - 0.0066 + 0.015)
    assert (aborted.outcome, running.outcome) == (Outcome.ABORTED, None)


def test_a_record_without_a_pool_belongs_to_the_sole_one() -> None:
    old = record("m")
    del old["pool"]
    assert [found.pool for found in parse_records([old, record("m", pool="Other")])] == [SOLE_POOL, "Other"]


def test_members_of_a_newer_version_are_ignored() -> None:
    assert parse_records([record("m", moon="full")])[0].id == "m"
    assert parse_state(state(replica("a") | {"moon": "full"}, moon="full")).replicas[0].id == "a"


@pytest.mark.parametrize("document", [[], None, "x", {}, {"replicas": []}, state({"id": "a"}), state(None)])  # type: ignore[arg-type]
def test_an_invalid_state_is_refused(document: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        parse_state(document)


def test_a_replica_that_would_copy_a_prompt_has_its_donor() -> None:
    first, second = MATCHED["replicas"]
    copying = {**first, "copy": {"from": "bbbbbbbb", "tokens": 1184, "copy_s": 0.06}}
    found = parse_match({**MATCHED, "replicas": [copying, second]})
    assert [replica.copies_from for replica in found.replicas] == ["bbbbbbbb", None]
