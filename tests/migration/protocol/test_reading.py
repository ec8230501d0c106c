"""A reader's reactions to events and to its own calls, one by one. The rows of its table are in `test_tables`."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migration.protocol.errors import IllegalEvent
from migration.protocol.reading import (
    Action,
    AttachHost,
    FindRequest,
    Followed,
    GiveUp,
    HostGone,
    KeepRequest,
    Output,
    PlaceRequest,
    Reader,
    ReleaseRequest,
    SegmentOrigin,
)
from migration.protocol.request import Delta, Doubt, Lost, Moved, Moving, StreamEvent
from migration.protocol.tables.reader import FINAL, TERM, ReaderState
from policies.model import ReplicaId, RequestId

R = RequestId("r")
A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")


def delta(index: int, *tokens: int, hop: int = 0, finish: str | None = None) -> Delta:
    return Delta(R, hop, index, tokens, finish)


def reading(*tokens: int) -> Reader:
    """A reader whose request runs on replica a and has given these tokens."""
    made = Reader()
    made.begin()
    made.submitting(A)
    made.submitted()
    if tokens:
        made.take(delta(0, *tokens), A)
    return made


def test_request_is_placed_then_read() -> None:
    made = Reader()
    assert made.begin() == [PlaceRequest(None, anew=True)]
    made.submitting(A)
    assert made.submitted() == []
    assert (made.state, made.host, made.cursor.hop, made.origin) == (ReaderState.READING, A, 0, SegmentOrigin.FIRST)


def test_tokens_may_overtake_the_answer_to_the_submission() -> None:
    made = Reader()
    made.begin()
    made.submitting(A)
    assert made.take(delta(0, 5, finish="stop"), A) == [Output(0, (5,), (), "stop")]
    assert made.state is ReaderState.FINISHED


@pytest.mark.parametrize(
    ("word", "state", "action"),
    [
        (Moving(R, 0, 1, "b"), ReaderState.MOVING, None),
        (Moved(R, 0, 1, 0, "b"), ReaderState.READING, AttachHost(B, 1, 0)),
        (Lost(R, 0, "the engine died"), ReaderState.PLACING, HostGone(A, "the engine died")),
    ],
    ids=["moving", "moved", "lost"],
)
def test_other_events_wait_for_the_answer_to_the_submission(
    word: StreamEvent, state: ReaderState, action: Action | None
) -> None:
    made = Reader()
    made.begin()
    made.submitting(A)
    assert made.take(word, A) == []
    actions = made.submitted()
    assert made.state is state and (action is None or action in actions)


def test_events_lost_during_the_submission_are_requested_afterwards() -> None:
    made = Reader()
    made.begin()
    made.submitting(A)
    assert made.out_of_step() == []
    assert made.submitted() == [AttachHost(A, 0, 0)]


def test_gap_is_asked_for() -> None:
    made = reading(5)
    assert made.take(delta(3, 8), A) == [AttachHost(A, 0, 1)]
    assert made.take(delta(1, 6, 7, 8), A) == [Output(1, (6, 7, 8))]


def test_extras_go_with_their_tokens() -> None:
    made = reading()
    made.take(Delta(R, 1, 1, (6,), None, ((1, b"6"),)), B)
    assert made.take(Delta(R, 0, 0, (5,), None, ((0, b"5"),)), A) == [Output(0, (5,), ((0, b"5"),))]
    moved = made.take(Moved(R, 0, 1, 1, "b"), A)
    assert Output(1, (6,), ((1, b"6"),)) in moved


def test_reader_follows_a_move_and_attaches() -> None:
    made = reading(5)
    made.take(Moving(R, 0, 1, "b"), A)
    assert made.take(Moved(R, 0, 1, 1, "b"), A) == [Followed(B, 1), AttachHost(B, 1, 1)]
    assert (made.host, made.cursor.hop, made.moves, made.state) == (B, 1, 1, ReaderState.READING)


def test_reader_follows_to_the_last_of_several_hosts() -> None:
    """The second one moved the request on before its first word was read."""
    made = reading(5)
    made.take(Moving(R, 1, 2, "c"), B)
    made.take(Moved(R, 1, 2, 2, "c"), B)
    made.take(delta(2, 7, hop=2), C)
    assert made.take(Moved(R, 0, 1, 1, "b"), A) == [Followed(B, 1), AttachHost(B, 1, 1), AttachHost(B, 1, 1)]
    assert (made.host, made.state) == (B, ReaderState.MOVING), "a token of the second host is missing"
    made.take(delta(1, 6, hop=1), B)
    assert made.take(Moved(R, 1, 2, 2, "c"), B) == [Followed(C, 2), AttachHost(C, 2, 3), Output(2, (7,))]
    assert made.host == C


def test_lost_host_of_a_move_leads_to_its_target() -> None:
    made = reading(5)
    made.take(Moving(R, 0, 1, "b"), A)
    assert made.host_lost("it died") == [HostGone(A, "it died"), FindRequest(B, 1, 1)]
    made.take(delta(1, 6, hop=1), B)
    assert made.found() == [Followed(B, 1), ReleaseRequest(A, 1), Output(1, (6,))]
    assert (made.host, made.cursor.hop, made.moves, made.resubmissions) == (B, 1, 1, 0)


def test_target_that_does_not_have_it_begins_a_new_term() -> None:
    made = reading(5)
    made.take(Moving(R, 0, 1, "b"), A)
    made.host_lost("it died")
    assert made.not_found() == [PlaceRequest(A, anew=True)]
    assert (made.cursor.hop, made.resubmissions, made.origin) == (TERM, 1, SegmentOrigin.RESUBMISSION)
    made.submitting(C)
    assert made.submitted() == [ReleaseRequest(A, TERM), ReleaseRequest(B, TERM)]


def test_every_term_is_above_all_hops_of_the_last() -> None:
    made = reading()
    hops = []
    for replica in (B, C, A):
        made.host_lost("it died")
        made.submitting(replica)
        made.submitted()
        hops.append(made.cursor.hop)
    assert hops == [TERM, 2 * TERM, 3 * TERM]


def test_submission_without_an_answer_begins_a_new_term_and_is_no_resubmission() -> None:
    """The replica may have taken the request, and given hop 1 to another one."""
    made = Reader()
    made.begin()
    made.submitting(A)
    assert made.host_lost("no answer") == [PlaceRequest(A, anew=False)]
    assert (made.cursor.hop, made.resubmissions) == (TERM, 0)
    made.submitting(B)
    assert made.submitted() == [ReleaseRequest(A, TERM)]


def test_source_in_doubt_is_kept_and_its_target_never_followed() -> None:
    made = reading(5)
    made.take(Moving(R, 0, 1, "b"), A)
    assert made.take(Doubt(R, 0, 1), A) == [KeepRequest(A, 0, 1)]
    assert made.take(Moving(R, 0, 1, "b"), A) == [] and made.state is ReaderState.READING
    assert made.take(Moved(R, 0, 1, 1, "b"), A) == [] and made.cursor.hop == 0
    assert made.host_lost("it died")[-1] == PlaceRequest(A, anew=True)


def test_question_of_a_source_is_answered_each_time() -> None:
    made = reading(5)
    assert made.take(Doubt(R, 0, 1), A) == made.take(Doubt(R, 0, 1), A) == [KeepRequest(A, 0, 1)]


def test_later_attempt_of_a_kept_source_is_followed() -> None:
    made = reading(5)
    made.take(Doubt(R, 0, 1), A)
    made.take(Moving(R, 0, 2, "c"), A)
    assert made.take(Moved(R, 0, 2, 1, "c"), A) == [Followed(C, 1), AttachHost(C, 2, 1)]


def test_source_in_doubt_is_not_kept_once_its_target_was_asked() -> None:
    made = reading(5)
    made.take(Moving(R, 0, 1, "b"), A)
    made.host_lost("it stands still")
    assert made.take(Doubt(R, 0, 1), A) == []
    made.found()
    assert made.take(Doubt(R, 0, 1), A) == [ReleaseRequest(A, 1)]


@pytest.mark.parametrize("word", [delta(1, 6), Moving(R, 0, 9, "c"), Doubt(R, 0, 1)], ids=["delta", "moving", "doubt"])
def test_who_speaks_of_an_older_hop_is_released(word: StreamEvent) -> None:
    made = reading(5)
    made.host_lost("it stands still")
    assert made.take(word, A) == [ReleaseRequest(A, TERM)]


@pytest.mark.parametrize("word", [Lost(R, 0, "x"), Moved(R, 0, 9, 1, "c"), delta(1, finish="stop")])
def test_who_has_ended_an_older_hop_is_not_released(word: StreamEvent) -> None:
    made = reading(5)
    made.host_lost("it stands still")
    assert made.take(word, A) == []


def test_client_that_leaves_ends_the_request_wherever_it_may_run() -> None:
    made = reading(5)
    made.take(Moving(R, 0, 1, "b"), A)
    assert made.leave() == [ReleaseRequest(A, None), ReleaseRequest(B, None)]
    assert made.take(delta(1, 6), A) == [ReleaseRequest(A, None)]


def test_finished_output_releases_all_but_the_host() -> None:
    made = reading(5)
    made.take(Moving(R, 0, 1, "b"), A)
    assert made.take(delta(1, 6, finish="stop"), A) == [Output(1, (6,), (), "stop"), ReleaseRequest(B, None)]
    assert made.leave() == []


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("died", [False, True])
def test_an_engine_that_dies_with_the_request_counts_once(moving: bool, died: bool) -> None:
    made = reading(5)
    if moving:
        made.take(Moving(R, 0, 1, "b"), A)
    made.take(Lost(R, 0, "it died", died=died), A)
    made.host_lost("its process has ended", died)
    assert made.engine_losses == died


def test_an_engine_that_dies_before_it_is_known_to_have_the_request_counts_then() -> None:
    made = Reader()
    made.begin()
    made.submitting(A)
    made.take(Lost(R, 0, "it died", died=True), A)
    assert made.engine_losses == 0
    made.submitted()
    assert (made.engine_losses, made.state) == (1, ReaderState.PLACING)


def test_a_request_that_no_engine_takes_is_given_up() -> None:
    made = reading()
    assert made.take(Lost(R, 0, "not a grammar", invalid=True), A) == [ReleaseRequest(A, None), GiveUp("not a grammar")]


def test_a_request_that_no_replica_takes_is_given_up() -> None:
    made = Reader()
    made.begin()
    assert made.not_placed() == [GiveUp(None)]


def test_call_that_was_not_made_has_no_result() -> None:
    made = reading(5)
    made.take(Moving(R, 0, 1, "b"), A)
    for result in (made.found, made.not_found, made.submitted, made.not_placed):
        with pytest.raises(IllegalEvent):
            result()
    assert (made.state, made.host, made.cursor.hop) == (ReaderState.MOVING, A, 0)
    assert made.take(delta(1, 6), A) == [Output(1, (6,))]


# --- any order ----------------------------------------------------------------------------------------

WORDS = st.one_of(
    st.builds(
        lambda hop, index, count, end: delta(index, *range(index, index + count), hop=hop, finish=end),
        st.sampled_from([0, 1, 2, TERM, TERM + 1]),
        st.integers(0, 5),
        st.integers(0, 3),
        st.sampled_from([None, None, None, "stop"]),
    ),
    st.builds(lambda hop, to: Moving(R, hop, hop + 1, to), st.sampled_from([0, 1, TERM]), st.sampled_from("bc")),
    st.builds(
        lambda hop, index, to: Moved(R, hop, hop + 1, index, to),
        st.sampled_from([0, 1, TERM]),
        st.integers(0, 5),
        st.sampled_from("bc"),
    ),
    st.builds(lambda hop: Doubt(R, hop, hop + 1), st.sampled_from([0, 1, TERM])),
    st.builds(lambda hop, invalid: Lost(R, hop, "lost", invalid), st.sampled_from([0, 1, TERM]), st.booleans()),
)
CALLS = st.sampled_from(["submitted", "found", "not_found", "host_lost", "out_of_step", "not_placed", "leave"])


def call(made: Reader, name: str) -> list[Action]:
    """Feed the result of a call, if one is under way."""
    if name in ("submitted", "not_placed") and made.state is not ReaderState.PLACING:
        return []
    if name in ("found", "not_found") and made.state is not ReaderState.FINDING:
        return []
    if name == "submitted":
        made.submitting(C)
    return made.host_lost("it died") if name == "host_lost" else list(getattr(made, name)())


@given(st.lists(st.one_of(st.tuples(WORDS, st.sampled_from([A, B, C])), CALLS), max_size=30))
def test_output_has_no_gap_or_repetition_for_any_events(
    happened: Sequence[tuple[StreamEvent, ReplicaId] | str],
) -> None:
    made = Reader()
    actions = made.begin()
    hops = [made.cursor.hop]
    for event in happened:
        over = made.state in FINAL
        fresh = call(made, event) if isinstance(event, str) else made.take(*event)
        assert not over or all(isinstance(action, ReleaseRequest) for action in fresh)
        actions += fresh
        hops.append(made.cursor.hop)
    outputs = [action for action in actions if isinstance(action, Output)]
    tokens = [token for output in outputs for token in output.tokens]
    assert tokens == list(range(len(tokens)))
    assert [output.index for output in outputs] == [
        sum(len(before.tokens) for before in outputs[:i]) for i in range(len(outputs))
    ]
    assert all(output.finish is None for output in outputs[:-1])
    assert hops == sorted(hops)
    ends = [a for a in actions if isinstance(a, GiveUp) or (isinstance(a, Output) and a.finish is not None)]
    assert len(ends) <= 1 and (not ends or made.state in FINAL)


@given(st.lists(st.one_of(st.tuples(WORDS, st.sampled_from([A, B, C])), CALLS), max_size=30))
def test_reader_never_keeps_a_source_for_an_attempt_that_it_follows_or_asks_for(
    happened: Sequence[tuple[StreamEvent, ReplicaId] | str],
) -> None:
    made = Reader()
    actions = made.begin()
    for event in happened:
        actions += call(made, event) if isinstance(event, str) else made.take(*event)
    kept = {action.next_hop for action in actions if isinstance(action, KeepRequest)}
    taken = {a.hop for a in actions if isinstance(a, FindRequest | AttachHost) and a.hop % TERM}
    assert not kept & taken
