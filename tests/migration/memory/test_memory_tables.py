"""The table of a replica's memory, walked with its engine: every order of events, calls that were given up included."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest

from migration.memory.tables import TABLE, PoolCommand, PoolEvent, PoolState, new_pool, order_event
from migration.protocol.errors import IllegalEvent
from migration.protocol.tables.table import Table
from policies.memory.plan import ASLEEP, MemoryPlan
from policies.model import Blocks

PLANS = (*(MemoryPlan(Blocks(size)) for size in (1, 2, 3)), ASLEEP)
TWO = PLANS[1]


@dataclass(frozen=True, slots=True)
class PoolAndEngine:
    """A replica's side, and its engine's: `size` blocks handed out, of which requests have `used`; `pages` are in
    memory, and so are parameters if it is `loaded`.
    """

    state: PoolState = PoolState.SETTLED
    activity: PoolCommand | None = None
    plan: MemoryPlan = TWO
    holds: MemoryPlan = TWO
    announced: int = 2
    failed: bool = False
    closed: bool = False
    size: int = 2
    used: int = 0
    pages: int = 2
    loaded: bool = True

    @property
    def ordered(self) -> int:
        """The ordered blocks."""
        return self.plan.blocks or 0

    @property
    def held(self) -> int:
        """The blocks whose memory it reports."""
        return self.holds.blocks or 0


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
        case PoolCommand.DROP:
            return replace(at, size=0, pages=0, loaded=False)
        case PoolCommand.LOAD:
            return replace(at, size=at.ordered, pages=at.ordered, loaded=True)
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
        case PoolCommand.EMPTY:
            yield at, PoolEvent.OVERDUE if at.used else PoolEvent.EMPTY
        case PoolCommand.DROP:
            yield done, PoolEvent.DROPPED
            yield replace(at, loaded=False), PoolEvent.DROP_FAILED
        case PoolCommand.LOAD:
            yield done, PoolEvent.LOADED
            yield at, PoolEvent.LOAD_FAILED
            yield at, PoolEvent.LOAD_HOPELESS
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
                at = replace(at, announced=at.ordered)
            case PoolCommand.NOTE_GROWN:
                at = replace(at, failed=False)
            case PoolCommand.NOTE_RELEASED:
                at = replace(at, holds=at.plan, failed=False)
            case PoolCommand.NOTE_ASLEEP | PoolCommand.NOTE_AWAKE:
                at = replace(at, holds=ASLEEP if command is PoolCommand.NOTE_ASLEEP else at.plan, failed=False)
            case PoolCommand.NOTE_FAILED | PoolCommand.NOTE_NOT_LOADED:
                at = replace(at, failed=True)
            case PoolCommand.CLOSE | PoolCommand.OPEN:
                at = replace(at, closed=command is PoolCommand.CLOSE)
            case PoolCommand.GROW | PoolCommand.LOAD:
                at = replace(at, holds=MemoryPlan(Blocks(max(at.held, at.ordered))), activity=command)
            case PoolCommand.FIT | PoolCommand.AWAIT_ROOM | PoolCommand.RELEASE | PoolCommand.EMPTY | PoolCommand.DROP:
                at = replace(at, activity=command)
    return at


def following(table: Table[PoolState, PoolEvent, PoolCommand], at: PoolAndEngine) -> Iterator[PoolAndEngine]:
    """All states after one event. A call that is given up was made in the engine, or not."""
    for engine, event in results(at):
        yield fed(table, engine, event)
    for before, plan in product({at, performed(at)}, PLANS):
        event = order_event(at.state, plan, at.plan, at.holds, at.failed)
        yield fed(table, replace(before, plan=plan), event)
    if at.used < at.size and (at.used or not at.closed):
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
    if at.loaded and at.holds == ASLEEP:
        yield "parameters are in memory that are not reported: the ledger would give it to others"
    if (at.used or not at.closed) and not at.loaded and at.state is not PoolState.OVER:
        yield "an engine without parameters has requests, or may get some"
    if at.state is PoolState.SETTLED and at.closed:
        yield "a settled replica takes no requests"
    if at.state is PoolState.ASLEEP and not at.failed and (at.loaded, at.pages, at.holds) != (False, 0, ASLEEP):
        yield "a sleeping replica has memory"
    if at.state is PoolState.SETTLED and not at.failed and (at.size, at.announced) != (at.ordered, at.ordered):
        yield "a settled pool has not the ordered size"
    if at.state is PoolState.SETTLED and not at.failed and at.held != at.ordered:
        yield "a settled replica holds more than it was ordered to"
    if (at.activity is None) is not (at.state in (PoolState.SETTLED, PoolState.ASLEEP, PoolState.OVER)):
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
    assert states > 1000, "the walk is not empty"


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
    "dropped with requests": (
        PoolState.EMPTYING,
        PoolEvent.OVERDUE,
        (PoolState.DROPPING, (PoolCommand.GIVE_BACK, PoolCommand.DROP)),
        "an engine without parameters has requests",
    ),
    "asleep without closing": (
        PoolState.SETTLED,
        PoolEvent.SLEEP,
        (PoolState.EMPTYING, (PoolCommand.ANNOUNCE, PoolCommand.EMPTY)),
        "an engine without parameters has requests",
    ),
    "asleep before memory is given back": (
        PoolState.EMPTYING,
        PoolEvent.EMPTY,
        (PoolState.DROPPING, (PoolCommand.NOTE_ASLEEP, PoolCommand.DROP)),
        "parameters are in memory that are not reported",
    ),
    "awake again without its parameters": (
        PoolState.DROPPING,
        PoolEvent.MORE,
        (PoolState.GROWING, (PoolCommand.OPEN, PoolCommand.GROW)),
        "an engine without parameters has requests",
    ),
    "open before it has loaded": (
        PoolState.ASLEEP,
        PoolEvent.MORE,
        (PoolState.LOADING, (PoolCommand.OPEN, PoolCommand.LOAD)),
        "an engine without parameters has requests",
    ),
    "awake and closed": (
        PoolState.LOADING,
        PoolEvent.LOADED,
        (PoolState.SETTLED, (PoolCommand.NOTE_AWAKE, PoolCommand.ANNOUNCE)),
        "a settled replica takes no requests",
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
        of_the_world = {PoolEvent.LESS, PoolEvent.MORE, PoolEvent.SAME, PoolEvent.SLEEP, PoolEvent.ENGINE_ENDED}
        assert of_the_world <= row.keys()
