"""The states of a replica's KV pool, as a literal table (see `migration.protocol.tables.table`).

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

LESS is an order below what the replica holds, MORE any other one, SAME the one that it follows already.
"""

from collections.abc import Mapping
from enum import StrEnum

from migration.protocol.tables.table import Session


class PoolState(StrEnum):
    """Where the pool stands."""

    SETTLED = "settled"
    FITTING = "fitting"
    WAITING = "waiting"
    RELEASING = "releasing"
    GROWING = "growing"
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
    CALL_FAILED = "call_failed"

    LESS = "less"
    MORE = "more"
    SAME = "same"
    ENGINE_ENDED = "engine_ended"


class PoolCommand(StrEnum):
    """Commands to the shell. The first block starts an activity."""

    FIT = "fit"
    AWAIT_ROOM = "await_room"
    RELEASE = "release"
    GROW = "grow"

    ANNOUNCE = "announce"
    GIVE_BACK = "give_back"
    NOTE_RELEASED = "note_released"
    NOTE_FAILED = "note_failed"


_S, _E, _C = PoolState, PoolEvent, PoolCommand
_SHRINK = (_S.FITTING, (_C.ANNOUNCE, _C.FIT))
_GROW = (_S.GROWING, (_C.GROW,))
_FAILED = (_S.SETTLED, (_C.NOTE_FAILED,))


def _orders(state: PoolState) -> Mapping[PoolEvent, tuple[PoolState, tuple[PoolCommand, ...]]]:
    """The rows of the world, alike in every state of an engine that lives."""
    return {_E.LESS: _SHRINK, _E.MORE: _GROW, _E.SAME: (state, ()), _E.ENGINE_ENDED: (_S.OVER, ())}


TABLE: Mapping[PoolState, Mapping[PoolEvent, tuple[PoolState, tuple[PoolCommand, ...]]]] = {
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
        _E.GROWN: (_S.SETTLED, (_C.ANNOUNCE,)),
        _E.CALL_FAILED: _FAILED,
        **_orders(_S.GROWING),
    },
    _S.OVER: {event: (_S.OVER, ()) for event in (_E.LESS, _E.MORE, _E.SAME, _E.ENGINE_ENDED)},
}


def order_event(state: PoolState, blocks: int, ordered: int, held: int, failed: bool = False) -> PoolEvent:
    """The event that an order is to a pool that was `ordered` to have other blocks, and may have memory for `held`.

    After a resize that has `failed`, the same order is a new one.
    """
    if blocks == ordered and (state is not PoolState.SETTLED or (held == blocks and not failed)):
        return PoolEvent.SAME
    return PoolEvent.LESS if blocks < held else PoolEvent.MORE


def new_pool() -> Session[PoolState, PoolEvent, PoolCommand]:
    """The session of a pool that has its size."""
    return Session(TABLE, PoolState.SETTLED)
