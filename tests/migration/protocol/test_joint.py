"""The theorem of docs/migration-protocol.md, on every joint state of source, target and reader; and that it can fail.

A replica *claims* a request when it runs it, publishes what it computes, and holds it under no migration's lease: then
only its reader ends it. The claim belongs to the reader's term under which the replica got the request.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from migration.protocol.request import Delta
from migration.protocol.tables import reader, source, target
from migration.protocol.tables.reader import ReaderCommand, ReaderEvent, ReaderState, classify
from migration.protocol.tables.source import SourceCommand, SourceEvent, SourceState
from migration.protocol.tables.target import TargetCommand, TargetEvent, TargetState
from tests.migration.protocol import joint as model
from tests.migration.protocol.joint import Joint, R, walk

PAGE = Path(__file__).parents[3] / "docs" / "migration-protocol.md"


@cache
def joints() -> list[Joint]:
    return list(walk())


def rivals(states: Iterable[Joint]) -> Iterator[Joint]:
    """The states with two claims of one term."""
    return (j for j in states if len(set(j.claims.values())) < len(j.claims))


# --- safety -------------------------------------------------------------------------------------------


def test_never_two_owners() -> None:
    assert list(rivals(joints())) == []


def test_reader_accepts_tokens_of_no_replica_while_another_one_owns_the_request() -> None:
    """While it asks the target, whose answer is on its way, events of the source that it gave up may still come."""
    for joint in joints():
        if joint.reader in (ReaderState.READING, ReaderState.MOVING):
            others = {0: "target", 1: "source"}.get(joint.hop)
            assert others not in joint.claims, joint


def test_every_owner_was_made_by_the_reader() -> None:
    for joint in joints():
        if "target" in joint.claims:
            asked = joint.hop > 0 or joint.reader is ReaderState.FINDING or joint.reader in reader.FINAL
            assert asked and joint.settled == 0, joint


def test_source_lets_go_only_once_it_knows_that_the_target_runs_the_request() -> None:
    for joint in joints():
        if joint.source is SourceState.COMMITTED and joint.target is not TargetState.CLOSED:
            assert joint.target in (TargetState.PROVISIONAL, TargetState.OWNED)


def test_target_that_closed_runs_nothing() -> None:
    assert not [j for j in joints() if j.target is TargetState.CLOSED and j.target_runs]


def test_source_is_silent_only_while_it_hands_over() -> None:
    silent = {j.source for j in joints() if j.muted and j.source_runs}
    assert silent == {SourceState.FREEZE, SourceState.HANDOVER, SourceState.DOUBT}


# --- what is outdated, ends ---------------------------------------------------------------------------


def test_claim_of_an_older_term_ends_with_its_next_event() -> None:
    outdated = 0
    for joint in joints():
        over = joint.reader in reader.FINAL
        for name, hop in (("source", 0), ("target", 1)):
            if name in joint.claims and joint.reader is not ReaderState.FINDING and (over or joint.hop > hop):
                outdated += 1
                event = ReaderEvent.OUTDATED if over else classify(Delta(R, hop, 0, ()), joint.hop, joint.settled)
                assert event is not None
                assert ReaderCommand.RELEASE_SPEAKER in reader.TABLE[joint.reader][event][1], joint
    assert outdated


def test_never_no_owner_unless_a_lease_ran_out_or_the_client_left() -> None:
    lost = [j for j in joints() if j.source is SourceState.COMMITTED and j.target is TargetState.CLOSED]
    assert {j.closed_by for j in lost} == {TargetEvent.LEASE_EXPIRED, TargetEvent.CLIENT_GONE}


def test_reader_reads_on_only_from_a_replica_that_has_answered() -> None:
    """Else it would wait for ever for a target whose lease ran out."""
    for joint in joints():
        if joint.hop == 1 and joint.reader in (ReaderState.READING, ReaderState.MOVING) and not joint.asking:
            assert joint.target is TargetState.OWNED, joint


def test_every_source_in_doubt_can_get_an_answer() -> None:
    """Of a reader that reads: that it goes on, or that it does not."""
    for joint in joints():
        if joint.source is SourceState.DOUBT and joint.reader in (ReaderState.READING, ReaderState.MOVING):
            asked = SourceCommand.ASK_READER in source.TABLE[joint.source][SourceEvent.TIMEOUT][1]
            event = classify(model.WORDS["doubt"], joint.hop, joint.settled)
            assert asked and event is not None
            answers = {ReaderCommand.KEEP_SOURCE, ReaderCommand.RELEASE_SPEAKER}
            assert answers & set(reader.TABLE[joint.reader][event][1]), joint


def test_leases_and_time_outs_end_whatever_was_lost() -> None:
    """From every joint state, without another message; a source in doubt ends with its reader's lease."""
    ends = {SourceEvent.TIMEOUT, SourceEvent.CLIENT_GONE}
    for joint in joints():
        held = target.TABLE[joint.target].get(TargetEvent.LEASE_EXPIRED)
        assert joint.target in (TargetState.NEW, TargetState.OWNED, TargetState.CLOSED) or held is not None
        state = joint.source
        while state not in (*source.FINAL, SourceState.NEW):
            following = {source.TABLE[state][event][0] for event in ends & source.TABLE[state].keys()} - {state}
            assert following
            state = min(following)


# --- the model ----------------------------------------------------------------------------------------


def test_three_can_end_in_every_way() -> None:
    ends = {(j.source, j.target, j.reader) for j in joints()}
    assert ends >= {
        (SourceState.COMMITTED, TargetState.OWNED, ReaderState.FINISHED),
        (SourceState.COMMITTED, TargetState.CLOSED, ReaderState.FINISHED),
        (SourceState.ABORTED, TargetState.CLOSED, ReaderState.FINISHED),
        (SourceState.REFUSED, TargetState.CLOSED, ReaderState.READING),
        (SourceState.DOUBT, TargetState.OWNED, ReaderState.READING),
        (SourceState.ABORTED, TargetState.NEW, ReaderState.LEFT),
    }


def test_walk_comes_to_every_state_of_every_table() -> None:
    for seen, states in (
        ({j.source for j in joints()}, set(SourceState)),
        ({j.target for j in joints()}, set(TargetState)),
        ({j.reader for j in joints()}, set(ReaderState) - {ReaderState.NEW}),
    ):
        assert seen == states


def test_page_names_the_number_of_joint_states() -> None:
    found = re.search(r"all ([0-9,]+) joint states", PAGE.read_text())
    assert found is not None and int(found[1].replace(",", "")) == len(joints())


# --- that it can fail ---------------------------------------------------------------------------------

THAW = (SourceState.ABORTED, (SourceCommand.UNMUTE, SourceCommand.CANCEL_TARGET))
FAULTS: dict[str, tuple[Any, Any, Any, Any]] = {
    "source that goes on when the target does not answer": (
        source.TABLE,
        SourceState.HANDOVER,
        SourceEvent.TIMEOUT,
        THAW,
    ),
    "source that goes on when it has lost the target": (
        source.TABLE,
        SourceState.HANDOVER,
        SourceEvent.TARGET_LOST,
        THAW,
    ),
    "source that goes on when its reader does not answer": (source.TABLE, SourceState.DOUBT, SourceEvent.TIMEOUT, THAW),
    "source that is not muted for the hand-over": (
        source.TABLE,
        SourceState.PREPARE,
        SourceEvent.ACCEPTED_TOKENS,
        (SourceState.HANDOVER, (SourceCommand.ANNOUNCE_MOVING, SourceCommand.ADOPT_TOKENS)),
    ),
    "source that is not muted at the first token of a prefill": (
        source.TABLE,
        SourceState.FOLLOW,
        SourceEvent.FIRST_TOKEN,
        (SourceState.FREEZE, (SourceCommand.ANNOUNCE_MOVING, SourceCommand.COPY_FINAL)),
    ),
    "reader that tells the source to go on after it has asked the target": (
        reader.TABLE,
        ReaderState.FINDING,
        ReaderEvent.IN_DOUBT,
        (ReaderState.READING, (ReaderCommand.KEEP_SOURCE,)),
    ),
    "reader that asks the target after it has told the source to go on": (
        reader.TABLE,
        ReaderState.MOVING,
        ReaderEvent.IN_DOUBT,
        (ReaderState.MOVING, (ReaderCommand.KEEP_SOURCE,)),
    ),
    "reader that goes back to the source when the target does not answer": (
        reader.TABLE,
        ReaderState.FINDING,
        ReaderEvent.NOT_FOUND,
        (ReaderState.MOVING, ()),
    ),
    "target that adopts a request again behind its refusal": (
        target.TABLE,
        TargetState.CLOSED,
        TargetEvent.ADOPT,
        (TargetState.ADOPTING, (TargetCommand.ADD_REQUEST,)),
    ),
    "target that prepares again behind its refusal": (
        target.TABLE,
        TargetState.CLOSED,
        TargetEvent.PREPARE_FITS,
        (TargetState.RESERVED, (TargetCommand.RESERVE,)),
    ),
    "target that owns what it has just added": (
        target.TABLE,
        TargetState.ADOPTING,
        TargetEvent.ADDED,
        (TargetState.OWNED, (TargetCommand.RELEASE,)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_row_makes_two_owners(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, state, event, row = FAULTS[fault]
    monkeypatch.setitem(table, state, {**table[state], event: row})
    assert next(rivals(walk()), None) is not None


@pytest.mark.slow
@pytest.mark.parametrize("state", [TargetState.ADOPTING, TargetState.PROVISIONAL, TargetState.OWNED])
def test_refusal_of_a_repeated_adopt_makes_two_owners(state: TargetState, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source goes on, and the target with what the first message brought."""
    rows = {event: row for event, row in target.TABLE[state].items() if event is not TargetEvent.ADOPT}
    monkeypatch.setitem(target.TABLE, state, rows)
    assert next(rivals(walk()), None) is not None
