"""The chaos suite's own judgement: a suite that cannot fail proves nothing."""

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chaos.hand import NOTHING, Blow
from benchmarks.chaos.heard import Heard, Verdict, judge
from benchmarks.chaos.offers import Offer, draw_trace, make_offers, undisturbed
from benchmarks.chaos.report import is_good, make_document, render
from benchmarks.chaos.run import Judged, Result
from benchmarks.chaos.strikes import HANG_S, STALL_S, Kind, Strike, draw_strikes
from benchmarks.chaos.watch import Closed, holdings

OFFER = Offer(0.0, "a", (5, 6, 7), 4)
SEEDED = replace(OFFER, seeded=True)
WANT = "one two three four"
WHOLE = Heard(text=WANT, chunks=4, finish="length", tokens=4, done=True)
LOST = {"message": "the replica died", "type": "service_unavailable_error"}


def failed(**changed: Any) -> Heard:
    """An answer that an error ended in the middle."""
    heard = Heard(text="one two", chunks=2, done=True)
    heard.fail(LOST)
    return replace(heard, **changed)


# --- drawing ------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_faults_and_another_one_others() -> None:
    assert draw_strikes(7, 300, 5) == draw_strikes(7, 300, 5)
    assert draw_strikes(7, 300, 5) != draw_strikes(8, 300, 5)


def test_a_longer_run_begins_as_a_shorter_one_does() -> None:
    short, long = draw_strikes(7, 60, 2), draw_strikes(7, 300, 2)
    assert long[: len(short)] == short
    assert len(long) > len(short)


def test_a_dozen_strikes_hold_every_kind() -> None:
    strikes = draw_strikes(3, 1000, 2)
    for first in range(0, len(strikes) - 11, 12):
        assert {strike.kind for strike in strikes[first : first + 12]} == set(Kind)


def test_strikes_come_in_order_and_in_time() -> None:
    strikes = draw_strikes(1, 600, 4)
    times = [strike.at_s for strike in strikes]
    assert times == sorted(times)
    assert all(0 < at_s < 600 for at_s in times)
    assert 100 < len(strikes) < 220
    assert all(0 <= strike.pick < 1 for strike in strikes)


@pytest.mark.parametrize(("kind", "bounds"), [(Kind.STALL, STALL_S), (Kind.HANG, HANG_S), (Kind.KILL, (0, 0))])
def test_only_replicas_that_stand_still_do_so_for_a_while(kind: Kind, bounds: tuple[float, float]) -> None:
    lasting = [strike.lasts_s for strike in draw_strikes(1, 600, 2) if strike.kind is kind]
    assert lasting and all(bounds[0] <= seconds <= bounds[1] for seconds in lasting)


def test_requests_are_drawn_from_the_seed_alone() -> None:
    offers = make_offers(draw_trace(4, 120), 4)
    assert offers == make_offers(draw_trace(4, 120), 4)
    assert len({offer.prompt for offer in offers}) == len(offers) > 60
    assert 0.1 < sum(offer.seeded for offer in offers) / len(offers) < 0.25
    assert all(offer.body("m").keys() >= {"seed"} for offer in offers if offer.seeded)
    assert all("seed" not in offer.body("m") for offer in offers if not offer.seeded)


def test_an_undisturbed_answer_depends_on_every_token_of_the_prompt() -> None:
    assert undisturbed((5, 6, 7), 50) == undisturbed((5, 6, 7), 50)
    assert undisturbed((5, 6, 8), 50) != undisturbed((5, 6, 7), 50)
    assert undisturbed((5, 6, 7), 50).startswith(undisturbed((5, 6, 7), 20)[:20])


# --- hearing ------------------------------------------------------------------------------------------


def test_a_stream_is_heard_as_it_was_sent() -> None:
    heard = Heard()
    heard.take({"choices": [{"text": "one ", "finish_reason": None}]})
    heard.take({"choices": [{"text": "two", "finish_reason": "length"}]})
    heard.take({"choices": [], "usage": {"completion_tokens": 2}})
    assert heard == Heard(text="one two", chunks=2, finish="length", tokens=2)


def test_an_error_event_is_heard() -> None:
    heard = Heard()
    heard.take({"error": LOST})
    assert (heard.error, heard.kind) == (LOST["message"], LOST["type"])


@pytest.mark.parametrize("lost", [False, True])
def test_a_whole_answer_is_exact(lost: bool) -> None:
    assert judge(WHOLE, OFFER, WANT, lost) == (Verdict.EXACT, "")
    assert judge(WHOLE, SEEDED, WANT, lost) == (Verdict.EXACT, "")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("one two tree four", id="changed"),
        pytest.param("one two two three four", id="repeated"),
        pytest.param("one three four", id="left out"),
        pytest.param("one two three", id="missing at the end"),
        pytest.param("one two three four five", id="too many"),
        pytest.param("", id="empty"),
    ],
)
def test_a_changed_token_is_wrong(text: str) -> None:
    assert judge(replace(WHOLE, text=text), OFFER, WANT, lost=True)[0] is Verdict.WRONG


@pytest.mark.parametrize("tokens", [3, 5, None])
def test_the_server_must_have_counted_the_tokens_right(tokens: int | None) -> None:
    assert judge(replace(WHOLE, tokens=tokens), OFFER, WANT, lost=False)[0] is Verdict.WRONG


def test_a_wrong_token_is_wrong_also_where_the_client_left_or_an_error_followed() -> None:
    assert judge(failed(text="one zwei"), SEEDED, WANT, lost=True)[0] is Verdict.WRONG
    assert judge(Heard(text="one zwei", left=True), OFFER, WANT, lost=False)[0] is Verdict.WRONG


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"done": False}, id="no last word"),
        pytest.param({"finish": None}, id="no reason to end"),
        pytest.param({"done": False, "finish": None, "text": "one", "broken": "ReadError"}, id="broken"),
        pytest.param({"done": False, "finish": None, "text": "", "chunks": 0}, id="nothing at all"),
    ],
)
def test_a_stream_that_just_ends_is_silent(changed: dict[str, Any]) -> None:
    assert judge(replace(WHOLE, **changed), SEEDED, WANT, lost=True)[0] is Verdict.SILENT


def test_what_a_client_had_when_it_left_has_to_be_right() -> None:
    assert judge(Heard(text="one t", chunks=2, left=True), OFFER, WANT, lost=False) == (Verdict.LEFT, "")


def test_seeded_sampling_may_end_with_an_error_when_its_replica_is_lost() -> None:
    assert judge(failed(), SEEDED, WANT, lost=True) == (Verdict.PROMISED, "")


@pytest.mark.parametrize(
    ("heard", "offer", "lost"),
    [
        pytest.param(failed(), OFFER, True, id="greedy"),
        pytest.param(failed(), SEEDED, False, id="no replica was lost"),
        pytest.param(failed(text="", chunks=0), SEEDED, True, id="before the first token"),
        pytest.param(failed(kind="server_error"), SEEDED, True, id="another error"),
        pytest.param(failed(done=False), SEEDED, True, id="no last word"),
    ],
)
def test_no_other_error_is_promised(heard: Heard, offer: Offer, lost: bool) -> None:
    assert judge(heard, offer, WANT, lost)[0] is Verdict.ERROR


# --- looking for what is left -------------------------------------------------------------------------


def replica(
    name: str = "r", state: str = "RUNNING", requests: int = 0, used: int = 0, slots: int = 0
) -> dict[str, Any]:
    return {
        "id": name,
        "state": state,
        "pids": [1],
        "requests": [{"label": str(i)} for i in range(requests)],
        "used_tokens": used,
        "staging_slots_in_use": slots,
    }


def test_a_replica_at_rest_holds_nothing() -> None:
    assert holdings(replica()) is None


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ({"requests": 1}, "1 requests"),
        ({"used": 16}, "16 tokens in used blocks or promised room"),
        ({"slots": 2}, "2 staging slots"),
        ({"used": 16, "slots": 2}, "16 tokens in used blocks or promised room, 2 staging slots"),
    ],
)
def test_whatever_is_held_is_told(held: dict[str, Any], told: str) -> None:
    assert holdings(replica(**held)) == told


def looked(*looks: list[dict[str, Any]]) -> list[str]:
    closed = Closed()
    for replicas in looks:
        closed.look({"replicas": replicas})
    return closed.leaks()


def test_a_replica_that_closes_with_a_slot_takes_it_to_its_grave() -> None:
    leaking = replica(state="DRAINING", slots=1)
    assert looked([leaking], [leaking], []) == ["replica r closed with 1 staging slots"]


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([[replica(state="DRAINING", slots=1)], []], id="once"),
        pytest.param([[replica(state="DRAINING", requests=1, used=9)]] * 5, id="while requests run there"),
        pytest.param([[replica(slots=1)]] * 5, id="while it runs"),
        pytest.param([[replica(state="DRAINING", slots=1)]] * 3 + [[replica(state="DRAINING")]], id="let go of"),
    ],
)
def test_what_is_in_use_or_let_go_of_is_no_leak(looks: list[list[dict[str, Any]]]) -> None:
    assert looked(*looks) == []


# --- reporting ----------------------------------------------------------------------------------------


def result(*verdicts: Verdict, leaks: tuple[str, ...] = ()) -> Result:
    judged = [
        Judged(replace(OFFER, label=f"s{i}"), verdict, "why" if verdict is Verdict.WRONG else "", WHOLE)
        for i, verdict in enumerate(verdicts)
    ]
    kill, move = Strike(1.0, Kind.KILL, 0.5), Strike(2.0, Kind.MOVE, 0.5)
    blows = [Blow(kill, 1.0, "r1", ("s0", "s1"), "SIGKILL"), Blow(move, hit=(), outcome=NOTHING)]
    return Result(judged, blows, list(leaks))


def test_all_as_promised_is_good() -> None:
    assert is_good(result(Verdict.EXACT, Verdict.LEFT, Verdict.PROMISED))


@pytest.mark.parametrize("verdict", [Verdict.WRONG, Verdict.SILENT, Verdict.ERROR])
def test_one_bad_stream_is_not(verdict: Verdict) -> None:
    assert not is_good(result(Verdict.EXACT, verdict))


def test_one_leak_is_not() -> None:
    assert not is_good(result(Verdict.EXACT, leaks=("replica r holds 1 staging slots",)))


def test_streams_are_counted_for_the_fault_that_hit_them() -> None:
    document = make_document(result(Verdict.EXACT, Verdict.PROMISED, Verdict.EXACT), {"seed": 1})
    assert document["faults"][Kind.KILL] == {
        "drawn": 1,
        "struck": 1,
        "outcomes": {"SIGKILL": 1},
        "streams": {Verdict.EXACT: 1, Verdict.PROMISED: 1},
    }
    assert (document["faults"][Kind.MOVE]["drawn"], document["faults"][Kind.MOVE]["struck"]) == (1, 0)
    assert document["streams"] == {Verdict.EXACT: 2, Verdict.PROMISED: 1}


def test_what_is_bad_is_told_in_full_and_survives_json() -> None:
    document = make_document(result(Verdict.EXACT, Verdict.WRONG, leaks=("process 7 belongs to no replica",)), {})
    assert json.loads(json.dumps(document)) == json.loads(json.dumps(document))
    (bad,) = json.loads(json.dumps(document))["bad"]
    assert (bad["verdict"], bad["offer"]["label"], bad["heard"]["text"]) == ("wrong tokens", "s1", WANT)
    page = render(json.loads(json.dumps(document)))
    assert "BAD: s1: wrong tokens: why" in page
    assert "LEAK: process 7 belongs to no replica" in page
    assert page.endswith("NOT as promised")
