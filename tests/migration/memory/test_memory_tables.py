"""The table of a KV pool, walked with its engine: every order of events, calls that were given up included."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest

from migration.memory.tables import TABLE, PoolCommand, PoolEvent, PoolState, new_pool, order_event
from migration.protocol.errors import IllegalEvent
from migration.protocol.tables.table import Table

SIZES = (1, 2, 3)
ACTIVITIES = {PoolCommand.FIT, PoolCommand.AWAIT_ROOM, PoolCommand.RELEASE, PoolCommand.GROW}


@dataclass(frozen=True, slots=True)
class PoolAndEngine:
    """A replica's side, and its engine's: `size` blocks handed out, of which `used`; `pages` are in memory."""

    state: PoolState = PoolState.SETTLED
    activity: PoolCommand | None = None
    ordered: int = 2
    announced: int = 2
    held: int = 2
    failed: bool = False
    size: int = 2
    used: int = 0
    pages: int = 2


def performed(at: PoolAndEngine) -> PoolAndEngine:
    """The engine, once the call of the activity has been made there."""
    match at.activity:
        case PoolCommand.FIT:
            grown = max(at.size, at.ordered)
            size = at.ordered if at.used <= at.ordered else grown
            return replace(at, size=size, pages=max(at.pages, grown))
        case PoolCommand.RELEASE:
            return replace(at, pages=max(at.size, at.ordered))
        case PoolCommand.GROW:
            size = max(at.size, at.ordered)
            return replace(at, size=size, pages=max(at.pages, size))
    return at


def results(at: PoolAndEngine) -> Iterator[tuple[PoolAndEngine, PoolEvent]]:
    """The engine behind the activity, and the activity's result."""
    done = performed(at)
    match at.activity:
        case PoolCommand.FIT:
            yield done, PoolEvent.FITS if done.size == at.ordered else PoolEvent.EXCEEDS
        case PoolCommand.AWAIT_ROOM:
            yield at, PoolEvent.LOOK_AGAIN
            yield at, PoolEvent.OVERDUE
        case PoolCommand.RELEASE:
            yield done, PoolEvent.RELEASED
            yield at, PoolEvent.RELEASE_FAILED
        case PoolCommand.GROW:
            yield done, PoolEvent.GROWN
    if at.activity is not None:
        yield at, PoolEvent.ENGINE_ENDED
        yield at, PoolEvent.CALL_FAILED
        yield done, PoolEvent.CALL_FAILED


def fed(table: Table[PoolState, PoolEvent, PoolCommand], at: PoolAndEngine, event: PoolEvent) -> PoolAndEngine:
    """What the shell makes of an event."""
    state, commands = table[at.state][event]
    at = replace(at, state=state, activity=at.activity if event is PoolEvent.SAME else None)
    for command in commands:
        match command:
            case PoolCommand.ANNOUNCE:
                at = replace(at, announced=at.ordered, failed=at.failed and at.state is not PoolState.SETTLED)
            case PoolCommand.NOTE_RELEASED:
                at = replace(at, held=at.ordered, failed=False)
            case PoolCommand.NOTE_FAILED:
                at = replace(at, failed=True)
            case PoolCommand.GROW:
                at = replace(at, held=max(at.held, at.ordered), activity=command)
            case PoolCommand.FIT | PoolCommand.AWAIT_ROOM | PoolCommand.RELEASE:
                at = replace(at, activity=command)
    return at


def following(table: Table[PoolState, PoolEvent, PoolCommand], at: PoolAndEngine) -> Iterator[PoolAndEngine]:
    """All states after one event. A call that is given up was made in the engine, or not."""
    for engine, event in results(at):
        yield fed(table, engine, event)
    for before, blocks in product({at, performed(at)}, SIZES):
        event = order_event(at.state, blocks, at.ordered, at.held, at.failed)
        yield fed(table, replace(before, ordered=blocks), event)
    if at.used < at.size:
        yield replace(at, used=at.used + 1)
    if at.used:
        yield replace(at, used=at.used - 1)


def faults(at: PoolAndEngine) -> Iterator[str]:
    """What must never be."""
    if at.pages > at.held:
        yield "memory is in use that is not reported: the ledger would give it to others"
    if at.size > at.held:
        yield "blocks are handed out that have no memory"
    if at.used > at.size:
        yield "a request has a block that is not handed out"
    if at.state is not PoolState.OVER and at.announced > max(at.size, at.ordered):
        yield "more is announced than there will be"
    if at.state is PoolState.SETTLED and not at.failed and (at.size, at.announced) != (at.ordered, at.ordered):
        yield "a settled pool has not the ordered size"
    if at.state is PoolState.SETTLED and not at.failed and at.held != at.ordered:
        yield "a settled replica holds more than it was ordered to"
    if (at.activity is None) is not (at.state in (PoolState.SETTLED, PoolState.OVER)):
        yield "a state lasts that nothing ends, or something goes on in one that is over"


def walked(table: Table[PoolState, PoolEvent, PoolCommand]) -> tuple[int, set[str]]:
    """The number of states, and all that must not be in one of them."""
    begin = PoolAndEngine()
    seen, todo, found = {begin}, deque([begin]), set[str]()
    while todo:
        at = todo.popleft()
        found.update(faults(at))
        for state in following(table, at):
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return len(seen), found


def test_no_state_holds_more_than_it_reports_and_every_pool_settles() -> None:
    states, found = walked(TABLE)
    assert not found
    assert states > 400, "the walk is not empty"


BROKEN: dict[str, tuple[PoolState, PoolEvent, tuple[PoolState, tuple[PoolCommand, ...]], str]] = {
    "memory counted as given back before it is": (
        PoolState.FITTING,
        PoolEvent.FITS,
        (PoolState.RELEASING, (PoolCommand.NOTE_RELEASED, PoolCommand.RELEASE)),
        "memory is in use that is not reported",
    ),
    "shrunk without giving memory back": (
        PoolState.FITTING,
        PoolEvent.FITS,
        (PoolState.SETTLED, ()),
        "a settled replica holds more",
    ),
    "settled although requests exceed it": (
        PoolState.FITTING,
        PoolEvent.EXCEEDS,
        (PoolState.SETTLED, ()),
        "a settled pool has not the ordered size",
    ),
    "grown while an earlier shrink gives memory back": (
        PoolState.RELEASING,
        PoolEvent.MORE,
        (PoolState.SETTLED, ()),
        "a settled pool has not the ordered size",
    ),
    "waiting for nothing": (
        PoolState.FITTING,
        PoolEvent.EXCEEDS,
        (PoolState.WAITING, ()),
        "a state lasts that nothing ends",
    ),
}


@pytest.mark.parametrize("name", [*BROKEN])
def test_a_broken_row_is_found(name: str) -> None:
    state, event, row, fault = BROKEN[name]
    table = {**TABLE, state: {**TABLE[state], event: row}}
    _, found = walked(table)
    assert any(each.startswith(fault) for each in found), found


@pytest.mark.parametrize(("state", "event"), [*product(PoolState, PoolEvent)])
def test_an_illegal_event_changes_nothing(state: PoolState, event: PoolEvent) -> None:
    pool = new_pool()
    pool.state = state
    if event in TABLE[state]:
        pool.feed(event)
        assert pool.state is TABLE[state][event][0]
        return
    with pytest.raises(IllegalEvent):
        pool.feed(event)
    assert (pool.state, pool.history) == (state, [])


def test_an_order_may_come_in_every_state() -> None:
    for row in TABLE.values():
        assert {PoolEvent.LESS, PoolEvent.MORE, PoolEvent.SAME, PoolEvent.ENGINE_ENDED} <= row.keys()
