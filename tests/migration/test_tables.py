"""The two tables: what holds on every path through one, and through both wired to each other.

`steps` walks a table with everything commanded so far (counted up to two), so a statement about all its steps is
one about all event sequences. `joint_steps` walks both tables and the messages between them; a message that stays
in the air is a lost one.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Generic, TypeVar

import pytest

from migration import source, target
from migration.errors import IllegalEvent
from migration.source import Command as Do
from migration.source import Event as Asked
from migration.source import State as Source
from migration.table import Session, Table
from migration.target import Command as Act
from migration.target import Event as Heard
from migration.target import State as Target

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
C = TypeVar("C", bound=StrEnum)
Node = TypeVar("Node", bound=Hashable)

WORLD = {
    Asked.FINISHED,
    Asked.PREEMPTED,
    Asked.CLIENT_GONE,
    Asked.SOURCE_STOPPING,
    Asked.TARGET_LOST,
    Asked.ASKED_AGAIN,
}
TARGET_FINAL = {Target.OWNED, Target.CLOSED}
TARGET_RESULTS = {
    Heard.LOADED: Act.LOAD_CHUNK,
    Heard.LOAD_FAILED: Act.LOAD_CHUNK,
    Heard.ADDED: Act.ADD_REQUEST,
    Heard.ADD_FAILED: Act.ADD_REQUEST,
}


@dataclass(frozen=True, slots=True)
class Step(Generic[S, E, C]):
    """One event of one path; `told` counts each command up to and with this step, as far as two."""

    state: S
    event: E
    following: S
    commands: tuple[C, ...]
    told: tuple[C, ...]


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
        state, told = node
        for event, (following, commands) in table[state].items():
            if event in results and results[event] not in told:
                continue
            counts = Counter(told + commands)
            after = tuple(sorted(c for c in counts for _ in range(min(2, counts[c]))))
            found.append(Step(state, event, following, commands, after))
            yield following, after

    beginning: tuple[S, tuple[C, ...]] = (start, ())
    reachable(beginning, successors)
    return found


@cache
def source_steps() -> list[Step[Source, Asked, Do]]:
    return steps(source.TABLE, Source.NEW, {})


@cache
def target_steps() -> list[Step[Target, Heard, Act]]:
    return steps(target.TABLE, Target.NEW, TARGET_RESULTS)


# --- either table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", Source)
def test_source_takes_legal_events_and_is_unchanged_by_illegal_ones(state: Source) -> None:
    for event in Asked:
        check_feed(Session(source.TABLE, state), event)


@pytest.mark.parametrize("state", Target)
def test_target_takes_legal_events_and_is_unchanged_by_illegal_ones(state: Target) -> None:
    for event in Heard:
        check_feed(Session(target.TABLE, state), event)


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
    session.feed(Asked.BEGIN)
    with pytest.raises(IllegalEvent):
        session.feed(Asked.ADOPTED)
    assert (session.state, session.history) == (Source.PREPARE, [Asked.BEGIN])


@pytest.mark.parametrize("state", Source)
def test_source_can_always_reach_an_end(state: Source) -> None:
    ends = set(reachable(state, lambda s: [following for following, _ in source.TABLE[s].values()]))
    assert ends & source.FINAL


@pytest.mark.parametrize("state", Target)
def test_target_can_always_reach_an_end(state: Target) -> None:
    ends = set(reachable(state, lambda s: [following for following, _ in target.TABLE[s].values()]))
    assert ends & TARGET_FINAL


def test_every_state_event_and_command_is_used() -> None:
    for told, states, events, commands in (
        (source_steps(), set(Source), set(Asked), set(Do)),
        (target_steps(), set(Target), set(Heard), set(Act)),
    ):
        assert {step.state for step in told} == states
        assert {step.event for step in told} == events
        assert {command for step in told for command in step.commands} == commands


# --- the source ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(source.FINAL))
def test_source_ends_for_good(state: Source) -> None:
    assert all(entry == (state, ()) for entry in source.TABLE[state].values())


@pytest.mark.parametrize("state", Source)
def test_world_events_are_legal_in_every_state(state: Source) -> None:
    assert source.TABLE[state].keys() >= WORLD


def test_freeze_is_undone_exactly_when_the_source_keeps_the_request() -> None:
    ended = [step for step in source_steps() if step.following in source.FINAL]
    assert any(Do.MUTE in step.told for step in ended)
    for step in ended:
        frozen, thawed = step.told.count(Do.MUTE), step.told.count(Do.UNMUTE)
        assert thawed == (frozen if step.following is Source.ABORTED else 0)


def test_source_freezes_and_thaws_at_most_once() -> None:
    assert all(step.told.count(Do.MUTE) <= 1 and step.told.count(Do.UNMUTE) <= 1 for step in source_steps())


def test_nothing_is_thawed_after_it_was_handed_over() -> None:
    assert not any(Do.UNMUTE in step.told for step in source_steps() if Do.ANNOUNCE_MOVED in step.told)


@pytest.mark.parametrize("command", [Do.ANNOUNCE_MOVED, Do.DROP_REQUEST, Do.COMMIT_TARGET])
def test_source_lets_go_once_and_only_on_adopted(command: Do) -> None:
    for step in source_steps():
        assert step.told.count(command) == (1 if step.following is Source.COMMITTED else 0)
        assert command not in step.commands or step.event is Asked.ADOPTED


def test_source_is_frozen_when_it_lets_go() -> None:
    assert all(Do.MUTE in step.told for step in source_steps() if Do.ANNOUNCE_MOVED in step.told)


def test_target_is_cancelled_whenever_it_may_hold_something_in_vain() -> None:
    for step in source_steps():
        asked, ended = Do.PREPARE in step.told, step.following is Source.ABORTED
        assert step.told.count(Do.CANCEL_TARGET) == (1 if asked and ended else 0)


def test_reader_is_told_of_a_move_only_once_the_target_agreed() -> None:
    for step in source_steps():
        assert step.told.count(Do.ANNOUNCE_MOVING) <= 1
        assert Do.ANNOUNCE_MOVING not in step.commands or step.event in (Asked.ACCEPTED_KV, Asked.ACCEPTED_TOKENS)
        assert Do.ANNOUNCE_MOVING in step.told or Do.MUTE not in step.told


def test_source_starts_at_most_one_activity_at_a_time_and_last() -> None:
    for step in source_steps():
        started = [command in source.ACTIVITIES for command in step.commands]
        assert sum(started) <= 1 and True not in started[:-1]


def test_source_waits_for_something_in_every_state_that_is_not_final() -> None:
    for step in source_steps():
        reported = step.event not in WORLD or step.following is not step.state
        if reported and step.following not in source.FINAL:
            assert step.commands[-1] in source.ACTIVITIES


@pytest.mark.parametrize("state", [Source.PREPARE, Source.COPY, Source.FREEZE, Source.HANDOVER])
def test_source_never_waits_for_ever(state: Source) -> None:
    assert source.TABLE[state][Asked.TIMEOUT][0] is not state


@pytest.mark.parametrize("event", [Asked.COPY_FAILED, Asked.PREEMPTED, Asked.TIMEOUT])
@pytest.mark.parametrize("state", [Source.COPY, Source.FREEZE])
def test_trouble_with_blocks_turns_the_move_into_one_by_tokens(state: Source, event: Asked) -> None:
    following, commands = source.TABLE[state][event]
    assert following is Source.HANDOVER and commands[-1] is Do.ADOPT_TOKENS


@pytest.mark.parametrize("state", Source)
def test_second_order_is_refused_while_there_is_a_first(state: Source) -> None:
    refused = () if state in source.FINAL else (Do.REFUSE_SECOND,)
    assert source.TABLE[state][Asked.ASKED_AGAIN] == (state, refused)


@pytest.mark.parametrize("event", [Asked.FINISHED, Asked.CLIENT_GONE, Asked.TARGET_LOST])
@pytest.mark.parametrize("state", sorted(set(Source) - source.FINAL))
def test_move_ends_when_there_is_nothing_to_move_or_nowhere_to_go(state: Source, event: Asked) -> None:
    assert source.TABLE[state][event][0] is Source.ABORTED


# --- the target ---------------------------------------------------------------------------------------


def test_room_is_given_back_exactly_once_when_it_was_kept() -> None:
    for step in target_steps():
        kept, given = step.told.count(Act.RESERVE), step.told.count(Act.RELEASE)
        assert kept <= 1 and given == (kept if step.following in TARGET_FINAL else 0)


def test_loading_is_stopped_before_the_request_runs_or_the_migration_ends() -> None:
    """Also when a chunk has just been loaded: another may be under way."""
    for step in target_steps():
        if Act.LOAD_CHUNK in step.told and step.following in (Target.ADOPTING, *TARGET_FINAL):
            assert Act.STOP_LOADING in step.told
            assert Act.ADD_REQUEST not in step.commands or step.commands[0] is Act.STOP_LOADING


def test_target_aborts_only_what_it_added() -> None:
    assert all(Act.ADD_REQUEST in step.told for step in target_steps() if Act.ABORT_REQUEST in step.told)


def test_target_adds_the_request_at_most_once() -> None:
    assert all(step.told.count(Act.ADD_REQUEST) <= 1 for step in target_steps())


@pytest.mark.parametrize("event", [Heard.CANCEL, Heard.LEASE_EXPIRED, Heard.CLIENT_GONE, Heard.STOPPING])
@pytest.mark.parametrize("state", sorted(set(Target) - {Target.OWNED}))
def test_target_hears_of_the_end_in_every_state(state: Target, event: Heard) -> None:
    following, _ = target.TABLE[state][event]
    finishes = state is Target.PROVISIONAL and event is Heard.STOPPING
    assert following is (Target.PROVISIONAL if finishes else Target.CLOSED)


@pytest.mark.parametrize("event", [Heard.COMMIT, Heard.ATTACHED, Heard.FINISHED, Heard.CLIENT_GONE, Heard.STOPPING])
def test_owner_may_be_told_anything_but_cancel(event: Heard) -> None:
    assert event in target.TABLE[Target.OWNED]


@pytest.mark.parametrize("state", [Target.RESERVED, Target.LOADING])
def test_request_may_arrive_whatever_became_of_its_blocks(state: Target) -> None:
    assert target.TABLE[state][Heard.ADOPT][0] is Target.ADOPTING


@pytest.mark.parametrize("state", [Target.RESERVED, Target.LOADING])
def test_every_chunk_is_loaded_and_may_fail_without_consequences(state: Target) -> None:
    assert target.TABLE[state][Heard.CHUNK] == (Target.LOADING, (Act.LOAD_CHUNK,))
    assert target.TABLE[state][Heard.LOADED] == target.TABLE[state][Heard.LOAD_FAILED] == (Target.RESERVED, ())


@pytest.mark.parametrize("event", [Heard.LOADED, Heard.LOAD_FAILED])
@pytest.mark.parametrize("state", [Target.ADOPTING, Target.CLOSED])
def test_late_results_of_loading_change_nothing(state: Target, event: Heard) -> None:
    assert target.TABLE[state][event] == (state, ())


def test_request_that_may_run_is_aborted_when_the_migration_ends() -> None:
    for step in target_steps():
        if step.state in (Target.ADOPTING, Target.PROVISIONAL) and step.following is Target.CLOSED:
            assert (Act.ABORT_REQUEST in step.commands) == (step.event is not Heard.ADD_FAILED)


def test_added_request_of_a_closed_migration_is_aborted() -> None:
    for step in target_steps():
        if step.event is Heard.ADDED and step.following is Target.CLOSED:
            assert Act.ABORT_REQUEST in step.commands


def test_target_owns_only_what_was_confirmed() -> None:
    into = [step for step in target_steps() if step.following is Target.OWNED and step.state is not Target.OWNED]
    assert {(step.state, step.event) for step in into} == {
        (Target.PROVISIONAL, Heard.COMMIT),
        (Target.PROVISIONAL, Heard.ATTACHED),
    }


def test_target_never_aborts_what_it_owns() -> None:
    assert all(entry == (Target.OWNED, ()) for entry in target.TABLE[Target.OWNED].values())
    assert Heard.CANCEL not in target.TABLE[Target.OWNED]


@pytest.mark.parametrize("state", Target)
def test_target_stays_closed(state: Target) -> None:
    following, commands = target.TABLE[state].get(Heard.LEASE_EXPIRED, (None, ()))
    assert following is (Target.OWNED if state is Target.OWNED else Target.CLOSED)
    assert state not in TARGET_FINAL or commands == ()


# --- both, wired to each other ------------------------------------------------------------------------

MESSAGES = {
    Do.PREPARE: "prepare",
    Do.COPY_ROUND: "chunk",
    Do.COPY_FINAL: "chunk",
    Do.ADOPT_KV: "adopt",
    Do.ADOPT_TOKENS: "adopt",
    Do.COMMIT_TARGET: "commit",
    Do.CANCEL_TARGET: "cancel",
    Do.ANNOUNCE_MOVED: "moved",
}
"""What a command puts into the air. "moved" goes to the reader, who then attaches to the target."""

REPLIES = {
    "accepted": {Asked.ACCEPTED_KV, Asked.ACCEPTED_TOKENS},
    "refused": {Asked.TARGET_REFUSED},
    "loaded": {Asked.COPIED_MORE, Asked.COPIED_ENOUGH, Asked.FINAL_COPIED},
    "failed": {Asked.COPY_FAILED, Asked.ADOPT_FAILED},
    "added": {Asked.ADOPTED},
}
ANY_TIME_AT_SOURCE = {*WORLD, Asked.BEGIN, Asked.TIMEOUT, Asked.COPY_FAILED, Asked.COPIED_ENOUGH, Asked.FINAL_COPIED}
"""A round that finds nothing to copy, and one that cannot gather, say nothing to the target."""
ANY_TIME_AT_TARGET = {Heard.LEASE_EXPIRED, Heard.CLIENT_GONE, Heard.FINISHED, Heard.STOPPING}
MAX_ACTIVITY = 4


@dataclass(frozen=True, slots=True)
class Joint:
    """Both sessions, and what is in the air: messages and replies, each with the activity it belongs to.

    `source_runs`, `target_runs`: whether the request is in that engine. `closed_by` is what closed the target.
    """

    source: Source = Source.NEW
    target: Target = Target.NEW
    activity: int = 0
    air: frozenset[tuple[str, int]] = frozenset()
    source_runs: bool = True
    target_runs: bool = False
    muted: bool = False
    closed_by: Heard | None = None

    def without(self, item: tuple[str, int]) -> "Joint":
        return replace(self, air=self.air - {item})

    def with_(self, kind: str, activity: int) -> "Joint":
        return replace(self, air=self.air | {(kind, activity)})


def at_source(joint: Joint, event: Asked) -> Iterator[Joint]:
    """The source takes an event, if it may."""
    if event not in source.TABLE[joint.source] or (event is Asked.COPIED_MORE and joint.activity >= MAX_ACTIVITY):
        return
    following, commands = source.TABLE[joint.source][event]
    after = replace(joint, source=following)
    for command in commands:
        if command in source.ACTIVITIES:
            after = replace(after, activity=after.activity + 1)
        if command in MESSAGES:
            after = after.with_(MESSAGES[command], after.activity)
        if command in (Do.MUTE, Do.UNMUTE):
            after = replace(after, muted=command is Do.MUTE)
        if command is Do.DROP_REQUEST:
            after = replace(after, source_runs=False)
    yield after


def at_target(joint: Joint, event: Heard) -> Joint:
    """The target takes an event. KeyError: the shell would have fed an illegal one."""
    following, commands = target.TABLE[joint.target][event]
    closed = following is Target.CLOSED and joint.target is not Target.CLOSED
    runs = joint.target_runs or event is Heard.ADDED
    return replace(
        joint,
        target=following,
        target_runs=runs and Act.ABORT_REQUEST not in commands,
        closed_by=event if closed else joint.closed_by,
    )


def deliver(joint: Joint, item: tuple[str, int]) -> Iterator[Joint]:
    """A message arrives at the target, as `Moves` and `TargetRun` treat it."""
    (kind, activity), rest = item, joint.without(item)
    known = joint.target not in (Target.NEW, *TARGET_FINAL)
    match kind:
        case "prepare" if joint.target is Target.NEW:
            yield at_target(rest, Heard.PREPARE_FITS).with_("accepted", activity)
            yield at_target(rest, Heard.PREPARE_REFUSED).with_("refused", activity)
        case "chunk" | "adopt":
            event, work = {"chunk": (Heard.CHUNK, "loading"), "adopt": (Heard.ADOPT, "adding")}[kind]
            if known and event in target.TABLE[joint.target]:
                yield at_target(rest, event).with_(work, activity)
            else:
                yield rest.with_("failed", activity)
        case "loading":
            yield if_allowed(rest, Heard.LOADED).with_("loaded", activity)
            yield if_allowed(rest, Heard.LOAD_FAILED).with_("failed", activity)
        case "adding":
            yield if_allowed(rest, Heard.ADD_FAILED).with_("failed", activity)
            added = at_target(rest, Heard.ADDED)
            yield added.with_("failed" if added.target is Target.CLOSED else "added", activity)
        case "commit" if known:
            yield at_target(rest, Heard.COMMIT)
        case "cancel" if known:
            yield at_target(rest, Heard.CANCEL)
        case "moved" if joint.target is Target.PROVISIONAL:
            yield at_target(rest, Heard.ATTACHED)


def if_allowed(joint: Joint, event: Heard) -> Joint:
    return at_target(joint, event) if event in target.TABLE[joint.target] else joint


def joint_steps(joint: Joint) -> Iterator[Joint]:
    """Whatever can happen next. Nothing has to: what stays in the air is lost."""
    for event in sorted(ANY_TIME_AT_SOURCE):
        yield from at_source(joint, event)
    for heard in sorted(ANY_TIME_AT_TARGET):
        if joint.target is not Target.NEW and heard in target.TABLE[joint.target]:
            yield at_target(joint, heard)
    for item in sorted(joint.air):
        kind, activity = item
        if kind not in REPLIES:
            yield from deliver(joint, item)
        elif activity == joint.activity:
            for event in sorted(REPLIES[kind]):
                yield from at_source(joint.without(item), event)


@cache
def joints() -> list[Joint]:
    return reachable(Joint(), joint_steps)


def test_pair_can_end_in_every_way() -> None:
    ends = {(j.source, j.target) for j in joints()}
    assert ends >= {
        (Source.COMMITTED, Target.OWNED),
        (Source.COMMITTED, Target.CLOSED),
        (Source.ABORTED, Target.CLOSED),
        (Source.REFUSED, Target.CLOSED),
    }


def test_never_two_owners() -> None:
    assert not [j for j in joints() if j.target is Target.OWNED and j.source is not Source.COMMITTED]


def test_never_no_owner_unless_a_lease_ran_out_or_the_client_left() -> None:
    lost = [j for j in joints() if j.source is Source.COMMITTED and j.target is Target.CLOSED]
    assert {j.closed_by for j in lost} == {Heard.LEASE_EXPIRED, Heard.CLIENT_GONE}


def test_source_that_lets_go_has_been_told_that_the_target_runs_the_request() -> None:
    for joint in joints():
        if joint.source is Source.COMMITTED and joint.target is not Target.CLOSED:
            assert joint.target in (Target.PROVISIONAL, Target.OWNED) and joint.target_runs


def test_source_runs_the_request_until_it_lets_go() -> None:
    assert all(j.source_runs == (j.source is not Source.COMMITTED) for j in joints())


def test_source_that_keeps_the_request_publishes_it() -> None:
    assert not [j for j in joints() if j.muted and j.source in (Source.ABORTED, Source.REFUSED)]


def test_target_that_closed_runs_nothing_once_its_work_has_ended() -> None:
    for joint in joints():
        assert not (joint.target is Target.CLOSED and joint.target_runs)


def test_leases_and_time_outs_end_whatever_was_lost() -> None:
    """From every joint state, without another message: the source times out, the target's lease expires."""
    for joint in joints():
        held = target.TABLE[joint.target].get(Heard.LEASE_EXPIRED)
        assert joint.target in (Target.NEW, *TARGET_FINAL) or (held is not None and held[0] is Target.CLOSED)
        assert set(reachable(joint.source, after_time_out)) & source.FINAL or joint.source is Source.NEW


def after_time_out(state: Source) -> list[Source]:
    entry = source.TABLE[state].get(Asked.TIMEOUT)
    return [entry[0]] if entry else []
