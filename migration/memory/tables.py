"""The states of a replica's memory, as a literal table (see `migration.protocol.tables.table`).

Rules of this file:
  1. A shrink is announced first: requests that do not fit leave by moves, and arrivals count with the new size.
  2. The pool shrinks only if all of its requests fit (FITS). Else it waits for room; OVERDUE, requests that hold the
     excess are given back to their readers, which continue them elsewhere from their tokens.
  3. Memory is given back behind the last used block that was in it, and taken before a block is handed out. So the
     replica holds the larger of two sizes until RELEASED, and from the order on if it grows.
  4. A call to the engine that fails ends the resize where it stands, and counts as failed. The memory that the replica
     may have stays counted. The same order, repeated, begins it anew.
  5. An order may come in every state. It begins anew from wherever the pool is: the shell ends the activity under way
     and never feeds its result.
  6. A replica falls asleep in two steps. It closes, and its requests leave as before a stop (EMPTYING); OVERDUE, they
     are given back. Then its prefix cache, its pool and its parameters are dropped.
  7. It wakes by LOADING, which ends with the ordered pool, and only then opens. A load that fails leaves it ASLEEP.
     After the third in a row, the engine is given up (LOAD_HOPELESS): its replica is replaced.

LESS is an order below what the replica holds, MORE any other one, SAME the one that it follows already, SLEEP that to
hold neither parameters nor blocks.
"""

from collections.abc import Mapping
from enum import StrEnum

from migration.protocol.tables.table import Session
from policies.memory.plan import MemoryPlan


class PoolState(StrEnum):
    """Where the pool stands; in the second block the replica is not awake."""

    SETTLED = "settled"
    FITTING = "fitting"
    WAITING = "waiting"
    RELEASING = "releasing"
    GROWING = "growing"

    EMPTYING = "emptying"
    DROPPING = "dropping"
    ASLEEP = "asleep"
    LOADING = "loading"

    OVER = "over"


class PoolEvent(StrEnum):
    """The first block comes from activities, the second from the world."""

    FITS = "fits"
    EXCEEDS = "exceeds"
    LOOK_AGAIN = "look_again"
    OVERDUE = "overdue"
    RELEASED = "released"
    RELEASE_FAILED = "release_failed"
    GROWN = "grown"
    EMPTY = "empty"
    DROPPED = "dropped"
    DROP_FAILED = "drop_failed"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    LOAD_HOPELESS = "load_hopeless"
    CALL_FAILED = "call_failed"

    LESS = "less"
    MORE = "more"
    SAME = "same"
    SLEEP = "sleep"
    ENGINE_ENDED = "engine_ended"


class PoolCommand(StrEnum):
    """Commands to the shell. The first block starts an activity."""

    FIT = "fit"
    AWAIT_ROOM = "await_room"
    RELEASE = "release"
    GROW = "grow"
    EMPTY = "empty"
    DROP = "drop"
    LOAD = "load"

    CLOSE = "close"
    OPEN = "open"
    ANNOUNCE = "announce"
    GIVE_BACK = "give_back"
    NOTE_RELEASED = "note_released"
    NOTE_GROWN = "note_grown"
    NOTE_FAILED = "note_failed"
    NOTE_ASLEEP = "note_asleep"
    NOTE_AWAKE = "note_awake"
    NOTE_NOT_LOADED = "note_not_loaded"
    GIVE_UP = "give_up"


_S, _E, _C = PoolState, PoolEvent, PoolCommand
_Row = tuple[PoolState, tuple[PoolCommand, ...]]
_SHRINK: _Row = (_S.FITTING, (_C.ANNOUNCE, _C.FIT))
_GROW: _Row = (_S.GROWING, (_C.GROW,))
_SLEEP: _Row = (_S.EMPTYING, (_C.CLOSE, _C.ANNOUNCE, _C.EMPTY))
_DROP: _Row = (_S.DROPPING, (_C.DROP,))
_LOAD: _Row = (_S.LOADING, (_C.LOAD,))
_FAILED: _Row = (_S.SETTLED, (_C.NOTE_FAILED,))
_NOT_DROPPED: _Row = (_S.ASLEEP, (_C.NOTE_FAILED,))
_NOT_LOADED: _Row = (_S.ASLEEP, (_C.NOTE_NOT_LOADED,))


def _orders(state: PoolState) -> Mapping[PoolEvent, _Row]:
    """The rows of the world, alike in every state of a replica that is awake."""
    return {
        _E.LESS: _SHRINK,
        _E.MORE: _GROW,
        _E.SAME: (state, ()),
        _E.SLEEP: _SLEEP,
        _E.ENGINE_ENDED: (_S.OVER, ()),
    }


def _orders_asleep(state: PoolState) -> Mapping[PoolEvent, _Row]:
    """The rows of the world, alike in every state of a replica that may lack parameters."""
    return {
        _E.LESS: _LOAD,
        _E.MORE: _LOAD,
        _E.SAME: (state, ()),
        _E.SLEEP: _DROP,
        _E.ENGINE_ENDED: (_S.OVER, ()),
    }


TABLE: Mapping[PoolState, Mapping[PoolEvent, _Row]] = {
    _S.SETTLED: {**_orders(_S.SETTLED)},
    _S.FITTING: {
        _E.FITS: (_S.RELEASING, (_C.RELEASE,)),
        _E.EXCEEDS: (_S.WAITING, (_C.AWAIT_ROOM,)),
        _E.CALL_FAILED: _FAILED,
        **_orders(_S.FITTING),
    },
    _S.WAITING: {
        _E.LOOK_AGAIN: (_S.FITTING, (_C.FIT,)),
        _E.OVERDUE: (_S.FITTING, (_C.GIVE_BACK, _C.FIT)),
        _E.CALL_FAILED: _FAILED,
        **_orders(_S.WAITING),
    },
    _S.RELEASING: {
        _E.RELEASED: (_S.SETTLED, (_C.NOTE_RELEASED,)),
        # The blocks stay withheld, and the bytes stay counted.
        _E.RELEASE_FAILED: _FAILED,
        _E.CALL_FAILED: _FAILED,
        **_orders(_S.RELEASING),
    },
    _S.GROWING: {
        _E.GROWN: (_S.SETTLED, (_C.ANNOUNCE, _C.NOTE_GROWN)),
        _E.CALL_FAILED: _FAILED,
        **_orders(_S.GROWING),
    },
    _S.EMPTYING: {
        _E.EMPTY: _DROP,
        _E.CALL_FAILED: (_S.SETTLED, (_C.OPEN, _C.NOTE_FAILED)),
        _E.OVERDUE: (_S.EMPTYING, (_C.GIVE_BACK, _C.EMPTY)),
        **_orders(_S.EMPTYING),
        _E.LESS: (_S.FITTING, (_C.OPEN, _C.ANNOUNCE, _C.FIT)),
        _E.MORE: (_S.GROWING, (_C.OPEN, _C.GROW)),
    },
    _S.DROPPING: {
        _E.DROPPED: (_S.ASLEEP, (_C.NOTE_ASLEEP,)),
        # The bytes stay counted.
        _E.DROP_FAILED: _NOT_DROPPED,
        _E.CALL_FAILED: _NOT_DROPPED,
        **_orders_asleep(_S.DROPPING),
    },
    _S.ASLEEP: {**_orders_asleep(_S.ASLEEP)},
    _S.LOADING: {
        _E.LOADED: (_S.SETTLED, (_C.NOTE_AWAKE, _C.ANNOUNCE, _C.OPEN)),
        _E.LOAD_FAILED: _NOT_LOADED,
        _E.CALL_FAILED: _NOT_LOADED,
        _E.LOAD_HOPELESS: (_S.OVER, (_C.NOTE_NOT_LOADED, _C.GIVE_UP)),
        **_orders_asleep(_S.LOADING),
    },
    _S.OVER: {event: (_S.OVER, ()) for event in (_E.LESS, _E.MORE, _E.SAME, _E.SLEEP, _E.ENGINE_ENDED)},
}


def order_event(
    state: PoolState, plan: MemoryPlan, ordered: MemoryPlan, held: MemoryPlan, failed: bool = False
) -> PoolEvent:
    """The event that an order is to a replica that was `ordered` to have another plan, and may have memory for `held`.

    With an activity under way the same order is followed already; at rest, if it holds no more, is awake if it should
    be, and nothing has `failed`.
    """
    is_at_rest = state is PoolState.SETTLED or state is PoolState.ASLEEP
    has_it = held == plan and not failed and plan.is_awake is (state is PoolState.SETTLED)
    if plan == ordered and (has_it or not is_at_rest):
        return PoolEvent.SAME
    if plan.blocks is None:
        return PoolEvent.SLEEP
    return PoolEvent.LESS if plan.blocks < (held.blocks or 0) else PoolEvent.MORE


def new_pool() -> Session[PoolState, PoolEvent, PoolCommand]:
    """The session of a pool that has its size."""
    return Session(TABLE, PoolState.SETTLED)
