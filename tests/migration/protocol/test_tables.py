"""The three tables: what holds on every path through each. What holds for them together: `test_joint`.

`steps` walks a table with everything commanded so far (counted up to two), so a statement about all its steps is
one about all event sequences.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Generic, TypeVar

import pytest

from migration.protocol.errors import IllegalEvent
from migration.protocol.tables import reader, source, target
from migration.protocol.tables.reader import ReaderCommand, ReaderEvent, ReaderState
from migration.protocol.tables.source import SourceCommand as Do
from migration.protocol.tables.source import SourceEvent
from migration.protocol.tables.source import SourceState as Source
from migration.protocol.tables.table import Session, Table
from migration.protocol.tables.target import TargetCommand as Act
from migration.protocol.tables.target import TargetEvent
from migration.protocol.tables.target import TargetState as Target

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
C = TypeVar("C", bound=StrEnum)
Node = TypeVar("Node", bound=Hashable)

TARGET_FINAL = {Target.OWNED, Target.CLOSED}
TARGET_RESULTS = {
    TargetEvent.LOADED: Act.LOAD_ROUND,
    TargetEvent.LOAD_FAILED: Act.LOAD_ROUND,
    TargetEvent.ADDED: Act.ADD_REQUEST,
    TargetEvent.ADD_FAILED: Act.ADD_REQUEST,
}


@dataclass(frozen=True, slots=True)
class Step(Generic[S, E, C]):
    """One event of one path; `issued` has the commands up to and with this step, each at most twice."""

    state: S
    event: E
    following: S
    commands: tuple[C, ...]
    issued: tuple[C, ...]


def reachable(start: Node, successors: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Every node that can be reached from `start`."""
    found, new = {start}, [start]
    for node in new:
        for following in successors(node):
            if following not in found:
                found.add(following)
                new.append(following)
    return new


def steps(table: Table[S, E, C], start: S, results: Mapping[E, C]) -> list[Step[S, E, C]]:
    """Every step that any sequence of legal events can make; a result comes only of work that was commanded."""
    found: list[Step[S, E, C]] = []

    def successors(node: tuple[S, tuple[C, ...]]) -> Iterator[tuple[S, tuple[C, ...]]]:
        state, issued = node
        for event, (following, commands) in table[state].items():
            if event in results and results[event] not in issued:
                continue
            counts = Counter(issued + commands)
            after = tuple(sorted(c for c in counts for _ in range(min(2, counts[c]))))
            found.append(Step(state, event, following, commands, after))
            yield following, after

    beginning: tuple[S, tuple[C, ...]] = (start, ())
    reachable(beginning, successors)
    return found


@cache
def source_steps() -> list[Step[Source, SourceEvent, Do]]:
    return steps(source.TABLE, Source.NEW, {})


@cache
def target_steps() -> list[Step[Target, TargetEvent, Act]]:
    return steps(target.TABLE, Target.NEW, TARGET_RESULTS)


@cache
def reader_steps() -> list[Step[ReaderState, ReaderEvent, ReaderCommand]]:
    return steps(reader.TABLE, ReaderState.NEW, {})


# --- either table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", Source)
def test_source_takes_legal_events_and_is_unchanged_by_illegal_ones(state: Source) -> None:
    for event in SourceEvent:
        check_feed(Session(source.TABLE, state), event)


@pytest.mark.parametrize("state", Target)
def test_target_takes_legal_events_and_is_unchanged_by_illegal_ones(state: Target) -> None:
    for event in TargetEvent:
        check_feed(Session(target.TABLE, state), event)


@pytest.mark.parametrize("state", ReaderState)
def test_reader_takes_legal_events_and_is_unchanged_by_illegal_ones(state: ReaderState) -> None:
    for event in ReaderEvent:
        check_feed(Session(reader.TABLE, state), event)


def check_feed(session: Session[S, E, C], event: E) -> None:
    state = session.state
    if session.allows(event):
        following, commands = session.table[state][event]
        assert session.feed(event) == commands
        assert (session.state, session.history) == (following, [event])
    else:
        with pytest.raises(IllegalEvent, match=f"^{event} in state {state}$"):
            session.feed(event)
        assert (session.state, session.history) == (state, [])


def test_illegal_event_keeps_the_history_of_the_legal_ones() -> None:
    session = source.new_session()
    session.feed(SourceEvent.BEGIN)
    with pytest.raises(IllegalEvent):
        session.feed(SourceEvent.ADOPTED)
    assert (session.state, session.history) == (Source.PREPARE, [SourceEvent.BEGIN])


@pytest.mark.parametrize("state", Source)
def test_source_can_always_reach_an_end(state: Source) -> None:
    ends = set(reachable(state, lambda s: [following for following, _ in source.TABLE[s].values()]))
    assert ends & source.FINAL


@pytest.mark.parametrize("state", Target)
def test_target_can_always_reach_an_end(state: Target) -> None:
    ends = set(reachable(state, lambda s: [following for following, _ in target.TABLE[s].values()]))
    assert ends & TARGET_FINAL


@pytest.mark.parametrize("state", ReaderState)
def test_reader_can_always_reach_an_end(state: ReaderState) -> None:
    ends = set(reachable(state, lambda s: [following for following, _ in reader.TABLE[s].values()]))
    assert ends & reader.FINAL


def test_every_state_event_and_command_is_used() -> None:
    for steps, states, events, commands in (
        (source_steps(), set(Source), set(SourceEvent), set(Do)),
        (target_steps(), set(Target), set(TargetEvent), set(Act)),
        (reader_steps(), set(ReaderState), set(ReaderEvent), set(ReaderCommand)),
    ):
        assert {step.state for step in steps} == states
        assert {step.event for step in steps} == events
        assert {command for step in steps for command in step.commands} == commands


# --- the source ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(source.FINAL))
def test_source_ends_for_good(state: Source) -> None:
    assert all(entry == (state, ()) for entry in source.TABLE[state].values())


@pytest.mark.parametrize("state", Source)
def test_world_events_are_legal_in_every_state(state: Source) -> None:
    assert source.TABLE[state].keys() >= source.WORLD


def test_freeze_is_undone_exactly_when_the_source_keeps_the_request() -> None:
    """Copying ends with a halt behind a token, just before the freeze."""
    ended = [step for step in source_steps() if step.following in source.FINAL]
    assert any(Do.MUTE in step.issued for step in ended)
    for step in ended:
        stopped = bool({Do.MUTE, Do.COPY_ROUND} & set(step.issued))
        assert step.issued.count(Do.UNMUTE) == (stopped and step.following is Source.ABORTED)


def test_source_freezes_and_thaws_at_most_once() -> None:
    assert all(step.issued.count(Do.MUTE) <= 1 and step.issued.count(Do.UNMUTE) <= 1 for step in source_steps())


def test_source_halts_exactly_when_it_sends_the_request_and_muted() -> None:
    sending = {Do.ADOPT_KV, Do.ADOPT_TOKENS}
    for step in source_steps():
        sent = sending.intersection(step.commands)
        assert (Do.HALT in step.commands) == bool(sent)
        assert not sent or (step.commands[-2] is Do.HALT and Do.MUTE in step.issued)


def test_nothing_is_thawed_after_it_was_handed_over() -> None:
    assert not any(Do.UNMUTE in step.issued for step in source_steps() if Do.ANNOUNCE_MOVED in step.issued)


def test_source_lets_go_once_and_only_by_decision_of_target_or_reader() -> None:
    for step in source_steps():
        assert step.issued.count(Do.DROP_REQUEST) == (1 if step.following is Source.COMMITTED else 0)
        assert Do.DROP_REQUEST not in step.commands or step.event in (SourceEvent.ADOPTED, SourceEvent.FOLLOWED)
        assert Do.ANNOUNCE_MOVED not in step.commands or step.event is SourceEvent.ADOPTED


def test_source_is_frozen_when_it_lets_go() -> None:
    assert all(Do.MUTE in step.issued for step in source_steps() if Do.DROP_REQUEST in step.issued)


def test_source_that_sent_the_request_thaws_only_at_its_end_or_by_decision_of_target_or_reader() -> None:
    """Neither a time-out nor a loss is such a decision."""
    thawed = [step for step in source_steps() if Do.UNMUTE in step.commands]
    sent = {step.event for step in thawed if step.state in (Source.HANDOVER, Source.DOUBT)}
    assert sent == {SourceEvent.ADOPT_REFUSED, SourceEvent.KEPT, SourceEvent.FINISHED, SourceEvent.CLIENT_GONE}


@pytest.mark.parametrize("event", [SourceEvent.TIMEOUT, SourceEvent.TARGET_LOST])
def test_source_without_an_answer_asks_its_reader(event: SourceEvent) -> None:
    assert source.TABLE[Source.HANDOVER][event] == (Source.DOUBT, (Do.ASK_READER,))
    assert source.TABLE[Source.DOUBT][SourceEvent.TIMEOUT] == (Source.DOUBT, (Do.ASK_READER,))


@pytest.mark.parametrize("event", [SourceEvent.KEPT, SourceEvent.FOLLOWED])
@pytest.mark.parametrize("state", sorted(set(Source) - {Source.HANDOVER, Source.DOUBT}))
def test_readers_decision_means_nothing_to_a_source_that_has_not_sent_the_request(
    state: Source, event: SourceEvent
) -> None:
    assert source.TABLE[state][event] == (state, ())


def test_target_is_cancelled_whenever_it_may_hold_something_in_vain() -> None:
    for step in source_steps():
        asked, ended = Do.PREPARE in step.issued, step.following is Source.ABORTED
        assert step.issued.count(Do.CANCEL_TARGET) == (1 if asked and ended else 0)


def test_move_is_announced_to_the_reader_only_once_the_target_agreed() -> None:
    for step in source_steps():
        assert step.issued.count(Do.ANNOUNCE_MOVING) <= 1
        assert Do.ANNOUNCE_MOVING not in step.commands or step.event in (
            SourceEvent.ACCEPTED_KV,
            SourceEvent.ACCEPTED_TOKENS,
            SourceEvent.FIRST_TOKEN,
        )
        assert Do.ANNOUNCE_MOVING in step.issued or Do.MUTE not in step.issued


def test_source_starts_at_most_one_activity_at_a_time_and_last() -> None:
    for step in source_steps():
        started = [command in source.ACTIVITIES for command in step.commands]
        assert sum(started) <= 1 and True not in started[:-1]


def test_source_waits_for_something_in_every_state_that_is_not_final() -> None:
    for step in source_steps():
        reported = step.event not in source.WORLD or step.following is not step.state
        if reported and step.following not in source.FINAL:
            assert step.commands[-1] in source.ACTIVITIES


@pytest.mark.parametrize(
    "state", [Source.PREPARE, Source.FOLLOW, Source.AWAIT, Source.COPY, Source.FREEZE, Source.HANDOVER]
)
def test_source_never_waits_for_the_target_for_ever(state: Source) -> None:
    assert source.TABLE[state][SourceEvent.TIMEOUT][0] is not state


@pytest.mark.parametrize("event", [SourceEvent.COPY_FAILED, SourceEvent.PREEMPTED, SourceEvent.TIMEOUT])
@pytest.mark.parametrize("state", [Source.COPY, Source.FREEZE])
def test_trouble_with_blocks_turns_the_move_into_one_by_tokens(state: Source, event: SourceEvent) -> None:
    following, commands = source.TABLE[state][event]
    assert following is Source.HANDOVER and commands[-1] is Do.ADOPT_TOKENS


def test_request_that_is_prefilled_is_neither_muted_nor_halted_before_its_first_token() -> None:
    for step in source_steps():
        if step.following in (Source.FOLLOW, Source.AWAIT):
            assert not {Do.ANNOUNCE_MOVING, Do.MUTE, Do.HALT, Do.UNMUTE} & set(step.issued), step


@pytest.mark.parametrize("event", [SourceEvent.COPY_FAILED, SourceEvent.TIMEOUT])
def test_trouble_with_blocks_of_a_prefill_has_its_first_token_awaited(event: SourceEvent) -> None:
    assert source.TABLE[Source.FOLLOW][event] == (Source.AWAIT, (Do.AWAIT_TOKEN,))


def test_prefill_that_begins_anew_is_followed_on() -> None:
    assert source.TABLE[Source.FOLLOW][SourceEvent.PREEMPTED] == (Source.FOLLOW, (Do.AWAIT_BLOCKS,))
    assert source.TABLE[Source.AWAIT][SourceEvent.PREEMPTED] == (Source.AWAIT, ())


def test_prefill_that_has_not_begun_is_not_repeated_at_the_target() -> None:
    assert source.TABLE[Source.FOLLOW][SourceEvent.UNBEGUN] == (Source.ABORTED, (Do.CANCEL_TARGET,))


def test_first_token_freezes_the_request_wherever_its_blocks_are() -> None:
    freeze = (Do.ANNOUNCE_MOVING, Do.MUTE)
    following = source.TABLE[Source.FOLLOW][SourceEvent.FIRST_TOKEN]
    assert following == (Source.FREEZE, (*freeze, Do.COPY_FINAL))
    without = source.TABLE[Source.AWAIT][SourceEvent.FIRST_TOKEN]
    assert without == (Source.HANDOVER, (*freeze, Do.HALT, Do.ADOPT_TOKENS))


@pytest.mark.parametrize("state", [Source.FOLLOW, Source.AWAIT])
@pytest.mark.parametrize("event", [SourceEvent.FINISHED, SourceEvent.CLIENT_GONE, SourceEvent.TARGET_LOST])
def test_end_during_the_prefill_only_frees_the_target(state: Source, event: SourceEvent) -> None:
    assert source.TABLE[state][event] == (Source.ABORTED, (Do.CANCEL_TARGET,))


@pytest.mark.parametrize("state", Source)
def test_second_order_is_refused_while_there_is_a_first(state: Source) -> None:
    refused = () if state in source.FINAL else (Do.REFUSE_SECOND,)
    assert source.TABLE[state][SourceEvent.ASKED_AGAIN] == (state, refused)


@pytest.mark.parametrize("event", [SourceEvent.FINISHED, SourceEvent.CLIENT_GONE])
@pytest.mark.parametrize("state", sorted(set(Source) - source.FINAL))
def test_move_ends_when_there_is_nothing_to_move(state: Source, event: SourceEvent) -> None:
    assert source.TABLE[state][event][0] is Source.ABORTED


@pytest.mark.parametrize("state", sorted(set(Source) - source.FINAL - {Source.HANDOVER, Source.DOUBT}))
def test_move_ends_when_there_is_nowhere_to_go(state: Source) -> None:
    assert source.TABLE[state][SourceEvent.TARGET_LOST][0] is Source.ABORTED


# --- the target ---------------------------------------------------------------------------------------


def test_room_is_given_back_exactly_once_when_it_was_kept() -> None:
    for step in target_steps():
        kept, given = step.issued.count(Act.RESERVE), step.issued.count(Act.RELEASE)
        assert kept <= 1 and given == (kept if step.following in TARGET_FINAL else 0)


def test_loading_is_stopped_before_the_request_runs_or_the_migration_ends() -> None:
    """Also when a chunk has just been loaded: another may be under way."""
    for step in target_steps():
        if Act.LOAD_ROUND in step.issued and step.following in (Target.ADOPTING, *TARGET_FINAL):
            assert Act.STOP_LOADING in step.issued
            assert Act.ADD_REQUEST not in step.commands or step.commands[0] is Act.STOP_LOADING


def test_target_aborts_only_a_request_that_it_added() -> None:
    assert all(Act.ADD_REQUEST in step.issued for step in target_steps() if Act.ABORT_REQUEST in step.issued)


def test_target_adds_the_request_at_most_once() -> None:
    assert all(step.issued.count(Act.ADD_REQUEST) <= 1 for step in target_steps())


@pytest.mark.parametrize(
    "event", [TargetEvent.CANCEL, TargetEvent.LEASE_EXPIRED, TargetEvent.CLIENT_GONE, TargetEvent.STOPPING]
)
@pytest.mark.parametrize("state", sorted(set(Target) - {Target.OWNED}))
def test_target_hears_of_the_end_in_every_state(state: Target, event: TargetEvent) -> None:
    following, _ = target.TABLE[state][event]
    finishes = state is Target.PROVISIONAL and event is TargetEvent.STOPPING
    assert following is (Target.PROVISIONAL if finishes else Target.CLOSED)


@pytest.mark.parametrize(
    "event", [TargetEvent.ATTACHED, TargetEvent.FINISHED, TargetEvent.CLIENT_GONE, TargetEvent.STOPPING]
)
def test_owner_may_get_any_event_but_cancel(event: TargetEvent) -> None:
    assert event in target.TABLE[Target.OWNED]


@pytest.mark.parametrize("state", [Target.RESERVED, Target.LOADING])
def test_request_may_arrive_with_or_without_its_blocks(state: Target) -> None:
    assert target.TABLE[state][TargetEvent.ADOPT][0] is Target.ADOPTING


@pytest.mark.parametrize("state", [Target.RESERVED, Target.LOADING])
def test_every_chunk_is_loaded_and_may_fail_without_consequences(state: Target) -> None:
    assert target.TABLE[state][TargetEvent.ROUND] == (Target.LOADING, (Act.LOAD_ROUND,))
    assert (
        target.TABLE[state][TargetEvent.LOADED] == target.TABLE[state][TargetEvent.LOAD_FAILED] == (Target.RESERVED, ())
    )


@pytest.mark.parametrize("event", [TargetEvent.LOADED, TargetEvent.LOAD_FAILED])
@pytest.mark.parametrize("state", [Target.ADOPTING, Target.CLOSED])
def test_late_results_of_loading_change_nothing(state: Target, event: TargetEvent) -> None:
    assert target.TABLE[state][event] == (state, ())


def test_request_that_may_run_is_aborted_when_the_migration_ends() -> None:
    for step in target_steps():
        if step.state in (Target.ADOPTING, Target.PROVISIONAL) and step.following is Target.CLOSED:
            assert (Act.ABORT_REQUEST in step.commands) == (step.event is not TargetEvent.ADD_FAILED)


def test_added_request_of_a_closed_migration_is_aborted() -> None:
    for step in target_steps():
        if step.event is TargetEvent.ADDED and step.following is Target.CLOSED:
            assert Act.ABORT_REQUEST in step.commands


def test_target_owns_only_requests_with_an_attached_reader() -> None:
    into = [step for step in target_steps() if step.following is Target.OWNED and step.state is not Target.OWNED]
    assert {(step.state, step.event) for step in into} == {(Target.PROVISIONAL, TargetEvent.ATTACHED)}


def test_target_never_aborts_a_request_that_it_owns() -> None:
    assert all(entry == (Target.OWNED, ()) for entry in target.TABLE[Target.OWNED].values())
    assert TargetEvent.CANCEL not in target.TABLE[Target.OWNED]


@pytest.mark.parametrize("state", Target)
def test_target_stays_closed(state: Target) -> None:
    following, commands = target.TABLE[state].get(TargetEvent.LEASE_EXPIRED, (None, ()))
    assert following is (Target.OWNED if state is Target.OWNED else Target.CLOSED)
    assert state not in TARGET_FINAL or commands == ()


# --- the reader ---------------------------------------------------------------------------------------

WORDS = {
    ReaderEvent.MOVE_ANNOUNCED,
    ReaderEvent.MOVED,
    ReaderEvent.IN_DOUBT,
    ReaderEvent.INVALID,
    ReaderEvent.OUTDATED,
    ReaderEvent.HOST_LOST,
}
READS = [ReaderState.READING, ReaderState.MOVING, ReaderState.FINDING]


@pytest.mark.parametrize("state", READS)
def test_reader_that_reads_takes_every_event(state: ReaderState) -> None:
    assert reader.TABLE[state].keys() >= WORDS


@pytest.mark.parametrize("state", sorted(reader.FINAL))
def test_reader_ends_for_good(state: ReaderState) -> None:
    for following, commands in reader.TABLE[state].values():
        assert following is state and set(commands) <= {ReaderCommand.RELEASE_SPEAKER}


@pytest.mark.parametrize("state", sorted(set(ReaderState) - {ReaderState.NEW}))
def test_sender_of_outdated_events_gets_the_order_to_end(state: ReaderState) -> None:
    assert reader.TABLE[state][ReaderEvent.OUTDATED] == (state, (ReaderCommand.RELEASE_SPEAKER,))


@pytest.mark.parametrize("state", sorted({*READS, ReaderState.PLACING}))
def test_client_that_leaves_ends_the_request_everywhere(state: ReaderState) -> None:
    assert reader.TABLE[state][ReaderEvent.CLIENT_LEFT] == (ReaderState.LEFT, (ReaderCommand.RELEASE_ALL,))


def test_request_is_placed_anew_only_in_a_new_term() -> None:
    for step in reader_steps():
        if ReaderCommand.PLACE in step.commands and step.event is not ReaderEvent.BEGIN:
            at = step.commands.index(ReaderCommand.PLACE)
            assert ReaderCommand.NEW_TERM in step.commands[:at]


def test_reader_that_asked_the_target_never_goes_back_to_the_source() -> None:
    for event, (following, commands) in reader.TABLE[ReaderState.FINDING].items():
        assert ReaderCommand.KEEP_SOURCE not in commands, event
        if following is ReaderState.READING:
            assert ReaderCommand.FOLLOW in commands


def test_reader_that_lets_the_source_go_on_forgets_the_target() -> None:
    for step in reader_steps():
        assert ReaderCommand.KEEP_SOURCE not in step.commands or step.following is ReaderState.READING


def test_reader_attaches_to_whom_it_follows() -> None:
    """To the target that it has found, it did so by asking."""
    for step in reader_steps():
        if ReaderCommand.FOLLOW in step.commands:
            assert (ReaderCommand.ATTACH in step.commands) == (step.event is ReaderEvent.MOVED)


def test_reader_starts_at_most_one_activity_at_a_time_and_last() -> None:
    for step in reader_steps():
        started = [command in reader.ACTIVITIES for command in step.commands]
        assert sum(started) <= 1 and True not in started[:-1]


def test_every_loss_of_a_host_that_had_the_request_is_reported_once() -> None:
    for step in reader_steps():
        had = step.event is ReaderEvent.HOST_LOST and step.state in (ReaderState.READING, ReaderState.MOVING)
        assert (ReaderCommand.REPORT_LOSS in step.commands) == had
