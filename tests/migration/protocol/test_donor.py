"""The donor's table: on every path through it, and walked together with the target's.

A joint state is the state of both sessions, what each has taken, and the messages in the air. Nothing has to happen: a
message that stays in the air is lost, a late one arrives at any later time, and a side that takes no more steps is
dead. Time-outs and leases may run out at any time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest

from migration.protocol.tables import donor, target
from migration.protocol.tables.donor import (
    DONOR_ACTIVITIES,
    DONOR_FINAL,
    DONOR_WORLD,
    DonorCommand,
    DonorEvent,
    DonorState,
)
from migration.protocol.tables.target import TargetCommand, TargetEvent, TargetState
from tests.migration.protocol.test_tables import check_feed, reachable, steps

Entry = tuple[DonorState, tuple[DonorCommand, ...]]
Rows = Mapping[DonorState, Mapping[DonorEvent, Entry]]
HOLDING = (DonorState.HOLD, DonorState.PREPARE, DonorState.COPY)


# --- the table alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", DonorState)
def test_donor_takes_legal_events_and_is_unchanged_by_illegal_ones(state: DonorState) -> None:
    for event in DonorEvent:
        session = donor.new_session()
        session.state = state
        check_feed(session, event)


@pytest.mark.parametrize("state", DonorState)
def test_donor_can_always_reach_an_end(state: DonorState) -> None:
    ends = set(reachable(state, lambda s: [following for following, _ in donor.TABLE[s].values()]))
    assert ends & DONOR_FINAL


@pytest.mark.parametrize("state", sorted(DONOR_FINAL))
def test_donor_ends_for_good(state: DonorState) -> None:
    assert all(entry == (state, ()) for entry in donor.TABLE[state].values())


@pytest.mark.parametrize("state", DonorState)
def test_world_events_are_legal_in_every_state(state: DonorState) -> None:
    assert donor.TABLE[state].keys() >= DONOR_WORLD


@pytest.mark.parametrize("state", HOLDING)
@pytest.mark.parametrize("event", [*sorted(DONOR_WORLD), DonorEvent.TIMEOUT])
def test_whatever_is_lost_ends_the_copy(state: DonorState, event: DonorEvent) -> None:
    following, commands = donor.TABLE[state][event]
    assert following is DonorState.ABORTED and DonorCommand.RELEASE in commands


def test_what_is_held_is_released_exactly_once() -> None:
    for step in steps(donor.TABLE, DonorState.NEW, {}):
        held, released = DonorCommand.HOLD in step.issued, step.issued.count(DonorCommand.RELEASE)
        assert released == (held and step.following in DONOR_FINAL)


def test_target_is_freed_exactly_if_it_may_keep_something() -> None:
    """A target that has refused keeps nothing."""
    for step in steps(donor.TABLE, DonorState.NEW, {}):
        if step.state in DONOR_FINAL:
            continue
        ends = step.following in DONOR_FINAL
        asked = DonorCommand.PREPARE in step.issued and step.event is not DonorEvent.TARGET_REFUSED
        assert (DonorCommand.FREE_TARGET in step.commands) == (ends and asked)


def test_donor_starts_one_activity_at_a_time_and_waits_for_it() -> None:
    for step in steps(donor.TABLE, DonorState.NEW, {}):
        started = [command for command in step.commands if command in DONOR_ACTIVITIES]
        assert started == ([] if step.following in DONOR_FINAL else list(step.commands[-1:]))
        assert step.following in DONOR_FINAL or len(started) == 1


# --- both tables --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JointCopy:
    """Both sessions, and what is in the air.

    `held`: the donor's engine holds the prefix. `reserved`: the target keeps room. `arrived`: the target's cache has
    all blocks. `reading`: blocks were read without a hold.
    """

    donor: DonorState = DonorState.NEW
    target: TargetState = TargetState.NEW
    air: frozenset[str] = frozenset()
    held: bool = False
    reserved: bool = False
    arrived: bool = False
    reading: bool = False

    def without(self, message: str) -> "JointCopy":
        return replace(self, air=self.air - {message})

    def with_(self, message: str) -> "JointCopy":
        return replace(self, air=self.air | {message})


SENT = {
    DonorCommand.PREPARE: "prepare",
    DonorCommand.COPY_BLOCKS: "round",
    DonorCommand.FREE_TARGET: "cancel",
}
ANY_TIME_AT_DONOR = (
    *(DonorEvent.BEGIN, DonorEvent.HELD, DonorEvent.HOLD_FAILED, DonorEvent.COPY_FAILED, DonorEvent.TIMEOUT),
    *sorted(DONOR_WORLD),
)
ANY_TIME_AT_TARGET = (TargetEvent.LEASE_EXPIRED, TargetEvent.STOPPING, TargetEvent.LOAD_FAILED)


def at_donor(joint: JointCopy, event: DonorEvent, table: Rows) -> Iterator[JointCopy]:
    """The donor takes an event, if it may."""
    if event not in table[joint.donor]:
        return
    following, commands = table[joint.donor][event]
    after = replace(joint, donor=following)
    for command in commands:
        match command:
            case DonorCommand.HOLD:
                after = replace(after, held=True)
            case DonorCommand.RELEASE:
                after = replace(after, held=False)
        if command in SENT:
            after = after.with_(SENT[command])
    yield replace(after, reading=after.reading or (following is DonorState.COPY and not after.held))


def at_target(joint: JointCopy, event: TargetEvent) -> Iterator[JointCopy]:
    """The target takes an event, if it may."""
    if event not in target.TABLE[joint.target]:
        return
    following, commands = target.TABLE[joint.target][event]
    after = replace(joint, target=following)
    if TargetCommand.RESERVE in commands:
        after = replace(after, reserved=True)
    if TargetCommand.RELEASE in commands:
        after = replace(after, reserved=False)
    yield after


def prepare(joint: JointCopy, table: Rows) -> Iterator[JointCopy]:
    for after in at_target(joint, TargetEvent.PREPARE_FITS):
        yield after.with_("accepted")
    for after in at_target(joint, TargetEvent.PREPARE_REFUSED):
        yield after.with_("refused")


def accepted(joint: JointCopy, table: Rows) -> Iterator[JointCopy]:
    yield from at_donor(joint, DonorEvent.ACCEPTED, table)
    for after in at_donor(joint, DonorEvent.ALL_PRESENT, table):
        yield replace(after, arrived=True)


def load_round(joint: JointCopy, table: Rows) -> Iterator[JointCopy]:
    if TargetEvent.ROUND not in target.TABLE[joint.target]:
        yield joint.with_("not loaded")
    for loading in at_target(joint, TargetEvent.ROUND):
        yield loading.with_("blocks")


def blocks(joint: JointCopy, table: Rows) -> Iterator[JointCopy]:
    """All blocks of the round, which come from the donor's hold, or a part of them."""
    for after in at_target(joint, TargetEvent.LOADED) if joint.held else ():
        yield replace(after, arrived=True).with_("loaded")
    for after in at_target(joint, TargetEvent.LOAD_FAILED):
        yield after.with_("not loaded")


def cancel(joint: JointCopy, table: Rows) -> Iterator[JointCopy]:
    """A target that does not know the copy yet ignores it: it has overtaken the preparation."""
    yield joint
    if joint.target is not TargetState.NEW:
        yield from at_target(joint, TargetEvent.CANCEL)


def result(event: DonorEvent) -> Callable[[JointCopy, Rows], Iterator[JointCopy]]:
    return lambda joint, table: at_donor(joint, event, table)


ARRIVALS: dict[str, Callable[[JointCopy, Rows], Iterator[JointCopy]]] = {
    "prepare": prepare,
    "accepted": accepted,
    "refused": result(DonorEvent.TARGET_REFUSED),
    "round": load_round,
    "blocks": blocks,
    "loaded": result(DonorEvent.COPIED),
    "not loaded": result(DonorEvent.COPY_FAILED),
    "cancel": cancel,
}


def joint_steps(joint: JointCopy, table: Rows) -> Iterator[JointCopy]:
    """Whatever can happen next."""
    for event in ANY_TIME_AT_DONOR:
        yield from at_donor(joint, event, table)
    if joint.target is not TargetState.NEW:
        for at in ANY_TIME_AT_TARGET:
            yield from at_target(joint, at)
    for message in sorted(joint.air):
        yield from ARRIVALS[message](joint.without(message), table)


def walk(table: Rows) -> list[JointCopy]:
    """Every joint state that can be reached."""
    return reachable(JointCopy(), lambda joint: list(joint_steps(joint, table)))


@cache
def joints() -> list[JointCopy]:
    return walk(donor.TABLE)


Law = Callable[[JointCopy], bool]

LAWS: dict[str, Law] = {
    "nothing is held before or behind the copy": lambda j: j.held == (j.donor in HOLDING),
    "blocks are read only while they are held": lambda j: not j.reading,
    "a copy that is done has arrived": lambda j: j.arrived or j.donor is not DonorState.DONE,
    "no request is adopted": lambda j: (
        j.target in (TargetState.NEW, TargetState.RESERVED, TargetState.LOADING, TargetState.CLOSED)
    ),
    "room is kept only by an open target": lambda j: (
        j.reserved == (j.target in (TargetState.RESERVED, TargetState.LOADING))
    ),
    "a donor that has ended has told the target, or its lease does": lambda j: (
        j.donor not in DONOR_FINAL or not j.reserved or TargetEvent.LEASE_EXPIRED in target.TABLE[j.target]
    ),
}


def broken(states: Iterable[JointCopy]) -> set[str]:
    """The laws that do not hold in all states."""
    return {name for joint in states for name, law in LAWS.items() if not law(joint)}


def test_laws_hold_in_every_joint_state() -> None:
    assert len(joints()) > 40 and broken(joints()) == set()


def test_walk_comes_to_every_state_of_a_copy() -> None:
    assert {j.donor for j in joints()} == set(DonorState)
    ends = {(j.donor, j.target) for j in joints()}
    assert ends >= {
        (DonorState.DONE, TargetState.CLOSED),
        (DonorState.DONE, TargetState.RESERVED),
        (DonorState.ABORTED, TargetState.NEW),
        (DonorState.ABORTED, TargetState.LOADING),
        (DonorState.COPY, TargetState.CLOSED),
    }


def test_leases_free_both_ends_whatever_was_lost_and_whoever_died() -> None:
    """From every joint state, without another message."""
    for joint in joints():
        for after in at_donor(joint, DonorEvent.EXPIRED, donor.TABLE):
            assert not after.held
        for freed in at_target(joint, TargetEvent.LEASE_EXPIRED):
            assert not freed.reserved


FAULTS: dict[str, tuple[DonorState, DonorEvent, Entry, str]] = {
    "donor that keeps its hold when the target does not answer": (
        DonorState.PREPARE,
        DonorEvent.TIMEOUT,
        (DonorState.ABORTED, (DonorCommand.FREE_TARGET,)),
        "nothing is held before or behind the copy",
    ),
    "donor that releases too early": (
        DonorState.PREPARE,
        DonorEvent.ACCEPTED,
        (DonorState.COPY, (DonorCommand.RELEASE, DonorCommand.COPY_BLOCKS)),
        "blocks are read only while they are held",
    ),
    "donor that takes a failed copy for a done one": (
        DonorState.COPY,
        DonorEvent.COPY_FAILED,
        (DonorState.DONE, (DonorCommand.RELEASE, DonorCommand.FREE_TARGET)),
        "a copy that is done has arrived",
    ),
    "donor that takes an accepted copy for a done one": (
        DonorState.PREPARE,
        DonorEvent.ACCEPTED,
        (DonorState.DONE, (DonorCommand.RELEASE, DonorCommand.FREE_TARGET)),
        "a copy that is done has arrived",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_row_breaks_a_law(fault: str) -> None:
    state, event, row, law = FAULTS[fault]
    assert law in broken(walk({**donor.TABLE, state: {**donor.TABLE[state], event: row}}))
