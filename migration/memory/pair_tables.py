"""One half of a pair, as a literal table (see `migration.protocol.tables.table`).

Two replicas of a model give each other layers. The lower replica keeps layers [0, h), the upper replica [h, n), and
each runs its layers for the requests of both. The lower replica leads: it asks. From then on both halves are alike.

Rules of this file:
  1. A half gives only layers that it will not keep, one layer at a time. The boundary is fixed when the pair begins, so
     no layer is ever given by both halves: at every moment one half holds the layer, or has ended.
  2. The buddy's answer to the last of a layer's KV is its promise to keep the layer and this KV for the epoch, until
     they are freed or the connection ends. The promise binds nobody else: if it is lost, so is the connection.
  3. A half that has given nothing, or has everything back, is HOME. It keeps its promises until the buddy is HOME, too.
  4. Whoever undoes, undoes alone: the buddy sees that it is no longer paired, and follows (UNDO).
  5. A buddy that is lost takes the KV of all own requests along. No step yields a token from then on, until vLLM has
     forgotten all KV, the pool has the size of a whole replica, and all parameters are loaded (RESTORING). Requests are
     computed anew, from their tokens. A half that cannot be whole again is given up, and its replica is replaced.
  6. Within a pair's beginning and end the replica holds no more than before: first the pool shrinks, so that the
     KV of one layer may be in two places (FITTING), and that all parameters are here again (SHRINKING).
  7. A call to the engine that fails otherwise than foreseen leaves a half of which nobody knows what it holds. It is
     given up in every state (CALL_FAILED).

UNDO may come in every state, and more than once.
"""

from collections.abc import Mapping
from enum import StrEnum

from migration.protocol.tables.table import Session


class HalfState(StrEnum):
    """Where a half stands."""

    ASKING = "asking"
    LINKING = "linking"
    FITTING = "fitting"
    GIVING = "giving"
    PAIRED = "paired"
    SHRINKING = "shrinking"
    LOADING = "loading"
    RETURNING = "returning"
    HOME = "home"
    RESTORING = "restoring"
    OVER = "over"


class PairEvent(StrEnum):
    """The first block comes from activities, the second from the world."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    LINKED = "linked"
    LINK_FAILED = "link_failed"
    FITS = "fits"
    GIVEN = "given"
    ALL_GIVEN = "all_given"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    RETURNED = "returned"
    ALL_RETURNED = "all_returned"
    BUDDY_HOME = "buddy_home"
    RESTORED = "restored"
    RESTORE_FAILED = "restore_failed"

    UNDO = "undo"
    BUDDY_LOST = "buddy_lost"
    CALL_FAILED = "call_failed"
    ENGINE_ENDED = "engine_ended"


class PairAction(StrEnum):
    """Commands to the shell. The first block starts an activity."""

    ASK = "ask"
    LINK = "link"
    FIT = "fit"
    GIVE_LAYER = "give_layer"
    SHRINK = "shrink"
    LOAD = "load"
    RETURN_LAYER = "return_layer"
    AWAIT_BUDDY = "await_buddy"
    RESTORE = "restore"

    GROW = "grow"
    CLOSE = "close"
    GIVE_UP = "give_up"


_S, _E, _A = HalfState, PairEvent, PairAction
_Row = tuple[HalfState, tuple[PairAction, ...]]

_HOME: _Row = (_S.HOME, (_A.AWAIT_BUDDY,))
_WHOLE: _Row = (_S.OVER, (_A.CLOSE, _A.GROW))
_UNDO: _Row = (_S.SHRINKING, (_A.SHRINK,))
_RESTORE: _Row = (_S.RESTORING, (_A.RESTORE,))
_LOST: _Row = (_S.OVER, (_A.GIVE_UP,))


def _world(undo: _Row, lost: _Row) -> Mapping[PairEvent, _Row]:
    return {_E.UNDO: undo, _E.BUDDY_LOST: lost, _E.CALL_FAILED: _LOST, _E.ENGINE_ENDED: (_S.OVER, ())}


TABLE: Mapping[HalfState, Mapping[PairEvent, _Row]] = {
    _S.ASKING: {
        _E.ACCEPTED: (_S.LINKING, (_A.LINK,)),
        _E.REFUSED: _WHOLE,
        # The buddy may have accepted, and given layers.
        **_world(undo=_HOME, lost=_WHOLE),
    },
    _S.LINKING: {
        _E.LINKED: (_S.FITTING, (_A.FIT,)),
        _E.LINK_FAILED: _HOME,
        **_world(undo=_HOME, lost=_WHOLE),
    },
    _S.FITTING: {
        _E.FITS: (_S.GIVING, (_A.GIVE_LAYER,)),
        **_world(undo=_HOME, lost=_WHOLE),
    },
    _S.GIVING: {
        _E.GIVEN: (_S.GIVING, (_A.GIVE_LAYER,)),
        _E.ALL_GIVEN: (_S.PAIRED, (_A.GROW,)),
        **_world(undo=_UNDO, lost=_RESTORE),
    },
    _S.PAIRED: {**_world(undo=_UNDO, lost=_RESTORE)},
    _S.SHRINKING: {
        _E.FITS: (_S.LOADING, (_A.LOAD,)),
        **_world(undo=(_S.SHRINKING, ()), lost=_RESTORE),
    },
    _S.LOADING: {
        _E.LOADED: (_S.RETURNING, (_A.RETURN_LAYER,)),
        # The buddy waits for its layers, and this half cannot give them.
        _E.LOAD_FAILED: _LOST,
        **_world(undo=(_S.LOADING, ()), lost=_RESTORE),
    },
    _S.RETURNING: {
        _E.RETURNED: (_S.RETURNING, (_A.RETURN_LAYER,)),
        _E.ALL_RETURNED: _HOME,
        **_world(undo=(_S.RETURNING, ()), lost=_RESTORE),
    },
    _S.HOME: {
        _E.BUDDY_HOME: _WHOLE,
        **_world(undo=(_S.HOME, ()), lost=_WHOLE),
    },
    _S.RESTORING: {
        _E.RESTORED: _WHOLE,
        _E.RESTORE_FAILED: _LOST,
        **_world(undo=(_S.RESTORING, ()), lost=(_S.RESTORING, ())),
    },
    _S.OVER: {
        **_world(undo=(_S.OVER, ()), lost=(_S.OVER, ())),
    },
}

AT_HOME = frozenset({HalfState.HOME, HalfState.OVER})
"""The states in which a half needs nothing of its buddy."""
TOGETHER = frozenset({HalfState.ASKING, HalfState.LINKING, HalfState.FITTING, HalfState.GIVING, HalfState.PAIRED})
"""PAIRED, and the states on the way there."""


def new_half(leads: bool) -> Session[HalfState, PairEvent, PairAction]:
    """The session of a half: of the one that asks, or of the one that has accepted."""
    return Session(TABLE, HalfState.ASKING if leads else HalfState.LINKING)
