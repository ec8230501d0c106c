"""The verdicts of the chaos suite, which must be able to fail."""

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chaos.answers import StreamedAnswer, StreamVerdict, judge, judge_among
from benchmarks.chaos.faults import HANG_S, STALL_S, FaultKind, PlannedFault, draw_faults
from benchmarks.chaos.injector import NOTHING, InjectedFault
from benchmarks.chaos.offers import Offer, draw_trace, make_offers, undisturbed
from benchmarks.chaos.report import is_good, make_document, render
from benchmarks.chaos.run import ChaosResult, Judged
from benchmarks.chaos.watch import ClosedReplicas, holdings

OFFER = Offer(0.0, "a", (5, 6, 7), 4)
SEEDED = replace(OFFER, seeded=True)
WANT = "one two three four"
WHOLE = StreamedAnswer(text=WANT, chunks=4, finish="length", tokens=4, done=True)
LOST = {"message": "the replica died", "type": "InternalServerError"}


def failed(**changed: Any) -> StreamedAnswer:
    """An answer that ended with an error in the middle."""
    answer = StreamedAnswer(text="one two", chunks=2, done=True)
    answer.fail(LOST)
    return replace(answer, **changed)


# --- drawing ------------------------------------------------------------------------------------------


def test_seed_determines_the_faults() -> None:
    assert draw_faults(7, 300, 5) == draw_faults(7, 300, 5)
    assert draw_faults(7, 300, 5) != draw_faults(8, 300, 5)


def test_longer_run_begins_with_the_faults_of_a_shorter_one() -> None:
    short, long = draw_faults(7, 60, 2), draw_faults(7, 300, 2)
    assert long[: len(short)] == short
    assert len(long) > len(short)


def test_a_dozen_faults_have_every_kind() -> None:
    faults = draw_faults(3, 1000, 2)
    for first in range(0, len(faults) - 11, 12):
        assert {fault.kind for fault in faults[first : first + 12]} == set(FaultKind)


def test_faults_are_in_order_and_within_the_run() -> None:
    faults = draw_faults(1, 600, 4)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert all(0 < at_s < 600 for at_s in times)
    assert 100 < len(faults) < 220
    assert all(0 <= fault.pick < 1 for fault in faults)


@pytest.mark.parametrize(
    ("kind", "bounds"), [(FaultKind.STALL, STALL_S), (FaultKind.HANG, HANG_S), (FaultKind.KILL, (0, 0))]
)
def test_only_stopped_replicas_have_a_duration(kind: FaultKind, bounds: tuple[float, float]) -> None:
    lasting = [fault.lasts_s for fault in draw_faults(1, 600, 2) if fault.kind is kind]
    assert lasting and all(bounds[0] <= seconds <= bounds[1] for seconds in lasting)


def test_requests_are_drawn_from_the_seed_alone() -> None:
    offers = make_offers(draw_trace(4, 120), 4)
    assert offers == make_offers(draw_trace(4, 120), 4)
    assert len({offer.prompt for offer in offers}) == len(offers) > 60
    assert 0.1 < sum(offer.seeded for offer in offers) / len(offers) < 0.25
    assert all(offer.body("m").keys() >= {"seed"} for offer in offers if offer.seeded)
    assert all("seed" not in offer.body("m") for offer in offers if not offer.seeded)


def test_undisturbed_answer_depends_on_every_token_of_the_prompt() -> None:
    assert undisturbed((5, 6, 7), 50) == undisturbed((5, 6, 7), 50)
    assert undisturbed((5, 6, 8), 50) != undisturbed((5, 6, 7), 50)
    assert undisturbed((5, 6, 7), 50).startswith(undisturbed((5, 6, 7), 20)[:20])


# --- reading ------------------------------------------------------------------------------------------


def test_answer_has_the_text_and_usage_of_its_events() -> None:
    answer = StreamedAnswer()
    answer.take({"choices": [{"text": "one ", "finish_reason": None}]})
    answer.take({"choices": [{"text": "two", "finish_reason": "length"}]})
    answer.take({"choices": [], "usage": {"completion_tokens": 2}})
    assert answer == StreamedAnswer(text="one two", chunks=2, finish="length", tokens=2)


def test_answer_has_the_error_of_an_error_event() -> None:
    answer = StreamedAnswer()
    answer.take({"error": LOST})
    assert (answer.error, answer.kind) == (LOST["message"], LOST["type"])


@pytest.mark.parametrize("lost", [False, True])
def test_whole_answer_is_exact(lost: bool) -> None:
    assert judge(WHOLE, OFFER, WANT, lost) == (StreamVerdict.EXACT, "")
    assert judge(WHOLE, SEEDED, WANT, lost) == (StreamVerdict.EXACT, "")


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
def test_changed_text_is_wrong(text: str) -> None:
    assert judge(replace(WHOLE, text=text), OFFER, WANT, lost=True)[0] is StreamVerdict.WRONG


@pytest.mark.parametrize("tokens", [3, 5, None])
def test_wrong_token_count_of_the_server_is_wrong(tokens: int | None) -> None:
    assert judge(replace(WHOLE, tokens=tokens), OFFER, WANT, lost=False)[0] is StreamVerdict.WRONG


def test_wrong_token_before_an_error_or_an_early_leave_is_wrong() -> None:
    assert judge(failed(text="one zwei"), SEEDED, WANT, lost=True)[0] is StreamVerdict.WRONG
    assert judge(StreamedAnswer(text="one zwei", left=True), OFFER, WANT, lost=False)[0] is StreamVerdict.WRONG


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"done": False}, id="no regular end"),
        pytest.param({"finish": None}, id="no finish reason"),
        pytest.param({"done": False, "finish": None, "text": "one", "broken": "ReadError"}, id="broken"),
        pytest.param({"done": False, "finish": None, "text": "", "chunks": 0}, id="nothing at all"),
    ],
)
def test_stream_with_an_irregular_end_is_silent(changed: dict[str, Any]) -> None:
    assert judge(replace(WHOLE, **changed), SEEDED, WANT, lost=True)[0] is StreamVerdict.SILENT


def test_answer_of_a_leaving_client_is_exact_so_far() -> None:
    assert judge(StreamedAnswer(text="one t", chunks=2, left=True), OFFER, WANT, lost=False) == (StreamVerdict.LEFT, "")


def test_answer_without_an_expected_text_has_to_be_whole() -> None:
    whole = StreamedAnswer(text="any", tokens=OFFER.output, finish="length", done=True)
    assert judge_among(whole, OFFER, []) == (StreamVerdict.WHOLE, "")
    short = StreamedAnswer(text="any", tokens=OFFER.output - 1, finish="length", done=True)
    assert judge_among(short, OFFER, [])[0] is StreamVerdict.WRONG


def test_error_of_seeded_sampling_after_a_lost_replica_is_promised() -> None:
    assert judge(failed(), SEEDED, WANT, lost=True) == (StreamVerdict.PROMISED, "")


@pytest.mark.parametrize(
    ("answer", "offer", "lost"),
    [
        pytest.param(failed(), OFFER, True, id="greedy"),
        pytest.param(failed(), SEEDED, False, id="no replica was lost"),
        pytest.param(failed(text="", chunks=0), SEEDED, True, id="before the first token"),
        pytest.param(failed(kind="server_error"), SEEDED, True, id="another error"),
        pytest.param(failed(done=False), SEEDED, True, id="no regular end"),
    ],
)
def test_other_errors_are_not_promised(answer: StreamedAnswer, offer: Offer, lost: bool) -> None:
    assert judge(answer, offer, WANT, lost)[0] is StreamVerdict.ERROR


# --- leaks --------------------------------------------------------------------------------------------


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


def test_idle_replica_holds_nothing() -> None:
    assert holdings(replica()) is None


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ({"requests": 1}, "1 requests"),
        ({"used": 16}, "16 tokens in used blocks or promised room"),
        ({"slots": 2}, "2 staging slots"),
        ({"used": 16, "slots": 2}, "16 tokens in used blocks or promised room, 2 staging slots"),
    ],
)
def test_holdings_name_every_held_resource(held: dict[str, Any], text: str) -> None:
    assert holdings(replica(**held)) == text


def looked(*looks: list[dict[str, Any]]) -> list[str]:
    closed = ClosedReplicas()
    for replicas in looks:
        closed.look({"replicas": replicas})
    return closed.leaks()


def test_replica_that_closes_with_a_slot_leaks_it() -> None:
    leaking = replica(state="DRAINING", slots=1)
    assert looked([leaking], [leaking], []) == ["replica r closed with 1 staging slots"]


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([[replica(state="DRAINING", slots=1)], []], id="once"),
        pytest.param([[replica(state="DRAINING", requests=1, used=9)]] * 5, id="while requests run there"),
        pytest.param([[replica(slots=1)]] * 5, id="while it runs"),
        pytest.param([[replica(state="DRAINING", slots=1)]] * 3 + [[replica(state="DRAINING")]], id="released"),
    ],
)
def test_resources_in_use_or_released_are_no_leak(looks: list[list[dict[str, Any]]]) -> None:
    assert looked(*looks) == []


# --- reporting ----------------------------------------------------------------------------------------


def result(*verdicts: StreamVerdict, leaks: tuple[str, ...] = ()) -> ChaosResult:
    judged = [
        Judged(replace(OFFER, label=f"s{i}"), verdict, "why" if verdict is StreamVerdict.WRONG else "", WHOLE)
        for i, verdict in enumerate(verdicts)
    ]
    kill, move = PlannedFault(1.0, FaultKind.KILL, 0.5), PlannedFault(2.0, FaultKind.MOVE, 0.5)
    injected = [InjectedFault(kill, 1.0, "r1", ("s0", "s1"), "SIGKILL"), InjectedFault(move, hit=(), outcome=NOTHING)]
    return ChaosResult(judged, injected, list(leaks))


def test_run_with_only_promised_verdicts_is_good() -> None:
    assert is_good(result(StreamVerdict.EXACT, StreamVerdict.LEFT, StreamVerdict.PROMISED))


@pytest.mark.parametrize("verdict", [StreamVerdict.WRONG, StreamVerdict.SILENT, StreamVerdict.ERROR])
def test_run_with_a_bad_stream_is_bad(verdict: StreamVerdict) -> None:
    assert not is_good(result(StreamVerdict.EXACT, verdict))


def test_run_with_a_leak_is_bad() -> None:
    assert not is_good(result(StreamVerdict.EXACT, leaks=("replica r holds 1 staging slots",)))


def test_streams_count_for_the_fault_that_hit_them() -> None:
    document = make_document(result(StreamVerdict.EXACT, StreamVerdict.PROMISED, StreamVerdict.EXACT), {"seed": 1})
    assert document["faults"][FaultKind.KILL] == {
        "drawn": 1,
        "struck": 1,
        "outcomes": {"SIGKILL": 1},
        "streams": {StreamVerdict.EXACT: 1, StreamVerdict.PROMISED: 1},
    }
    assert (document["faults"][FaultKind.MOVE]["drawn"], document["faults"][FaultKind.MOVE]["struck"]) == (1, 0)
    assert document["streams"] == {StreamVerdict.EXACT: 2, StreamVerdict.PROMISED: 1}


def test_bad_streams_and_leaks_are_in_the_document_and_on_the_page() -> None:
    document = make_document(
        result(StreamVerdict.EXACT, StreamVerdict.WRONG, leaks=("process 7 belongs to no replica",)), {}
    )
    assert json.loads(json.dumps(document)) == json.loads(json.dumps(document))
    (bad,) = json.loads(json.dumps(document))["bad"]
    assert (bad["verdict"], bad["offer"]["label"], bad["heard"]["text"]) == ("wrong tokens", "s1", WANT)
    page = render(json.loads(json.dumps(document)))
    assert "BAD: s1: wrong tokens: why" in page
    assert "LEAK: process 7 belongs to no replica" in page
    assert page.endswith("NOT as promised")
