"""The source's side of a migration, as a literal table.

Rules of this file:
  1. Until COMMITTED the source owns the request. It alone decides: the request changes hands in the instant
     that it announces `Moved` to the reader, which it does only on ADOPTED. There is no second owner to wait for,
     because the reader's cursor drops every hop that was not announced.
  2. Freezing is muting. The engine goes on computing; tokens after the freeze are withheld, not lost. So every
     abort is the same single command, UNMUTE, and costs the client only the pause.
  3. KV is a cache. Whatever goes wrong with blocks turns the migration into one by tokens; only what goes
     wrong with the target ends it.
  4. Activities (PREPARE, COPY_ROUND, COPY_FINAL, ADOPT_*) run one at a time and report by an event. Entering
     another state ends a running activity; its late result is never fed.
  5. COMMITTED, ABORTED and REFUSED are final. Events of the world (not of activities) may still come; they do nothing.

Events of the world, legal in every state: FINISHED (the request ended by itself: EOS, max_tokens, or a stop
string found by the reader), PREEMPTED (its blocks are gone), CLIENT_GONE, SOURCE_STOPPING, TARGET_LOST (dead or
stopping), ASKED_AGAIN (a second move of the same request).
"""

from collections.abc import Mapping
from enum import StrEnum

from migration.table import Session


class State(StrEnum):
    """Where the source's side stands."""

    NEW = "new"
    PREPARE = "prepare"
    COPY = "copy"
    FREEZE = "freeze"
    HANDOVER = "handover"
    COMMITTED = "committed"
    ABORTED = "aborted"
    REFUSED = "refused"


class Event(StrEnum):
    """What happened. The first block comes from activities, the second from the world."""

    BEGIN = "begin"
    ACCEPTED_KV = "accepted_kv"
    ACCEPTED_TOKENS = "accepted_tokens"
    TARGET_REFUSED = "target_refused"
    COPIED_MORE = "copied_more"
    COPIED_ENOUGH = "copied_enough"
    COPY_FAILED = "copy_failed"
    FINAL_COPIED = "final_copied"
    ADOPTED = "adopted"
    ADOPT_FAILED = "adopt_failed"
    TIMEOUT = "timeout"

    FINISHED = "finished"
    PREEMPTED = "preempted"
    CLIENT_GONE = "client_gone"
    SOURCE_STOPPING = "source_stopping"
    TARGET_LOST = "target_lost"
    ASKED_AGAIN = "asked_again"


class Command(StrEnum):
    """What the shell is to do. The first block starts an activity."""

    PREPARE = "prepare"
    COPY_ROUND = "copy_round"
    COPY_FINAL = "copy_final"
    ADOPT_KV = "adopt_kv"
    ADOPT_TOKENS = "adopt_tokens"

    ANNOUNCE_MOVING = "announce_moving"
    MUTE = "mute"
    UNMUTE = "unmute"
    ANNOUNCE_MOVED = "announce_moved"
    DROP_REQUEST = "drop_request"
    COMMIT_TARGET = "commit_target"
    CANCEL_TARGET = "cancel_target"
    REFUSE_SECOND = "refuse_second"


FINAL = frozenset({State.COMMITTED, State.ABORTED, State.REFUSED})
ACTIVITIES = frozenset(
    {Command.PREPARE, Command.COPY_ROUND, Command.COPY_FINAL, Command.ADOPT_KV, Command.ADOPT_TOKENS}
)

_S, _E, _C = State, Event, Command
_GIVE_UP = (_S.ABORTED, (_C.CANCEL_TARGET,))
_THAW = (_S.ABORTED, (_C.UNMUTE, _C.CANCEL_TARGET))
_STAY_ONLY = {
    _E.FINISHED: (),
    _E.PREEMPTED: (),
    _E.CLIENT_GONE: (),
    _E.SOURCE_STOPPING: (),
    _E.TARGET_LOST: (),
    _E.ASKED_AGAIN: (),
}


def _final(state: State) -> Mapping[Event, tuple[State, tuple[Command, ...]]]:
    return {event: (state, commands) for event, commands in _STAY_ONLY.items()}


TABLE: Mapping[State, Mapping[Event, tuple[State, tuple[Command, ...]]]] = {
    _S.NEW: {
        _E.BEGIN: (_S.PREPARE, (_C.PREPARE,)),
        _E.FINISHED: (_S.ABORTED, ()),
        _E.PREEMPTED: (_S.NEW, ()),
        _E.CLIENT_GONE: (_S.ABORTED, ()),
        _E.SOURCE_STOPPING: (_S.NEW, ()),
        _E.TARGET_LOST: (_S.ABORTED, ()),
        _E.ASKED_AGAIN: (_S.NEW, (_C.REFUSE_SECOND,)),
    },
    _S.PREPARE: {
        _E.ACCEPTED_KV: (_S.COPY, (_C.ANNOUNCE_MOVING, _C.COPY_ROUND)),
        _E.ACCEPTED_TOKENS: (_S.HANDOVER, (_C.ANNOUNCE_MOVING, _C.MUTE, _C.ADOPT_TOKENS)),
        _E.TARGET_REFUSED: (_S.REFUSED, ()),
        _E.TIMEOUT: _GIVE_UP,
        _E.FINISHED: _GIVE_UP,
        # Nothing was copied yet: the first round finds the request decoding again, or fails into tokens.
        _E.PREEMPTED: (_S.PREPARE, ()),
        _E.CLIENT_GONE: _GIVE_UP,
        # A replica that stops wants its requests moved all the more.
        _E.SOURCE_STOPPING: (_S.PREPARE, ()),
        _E.TARGET_LOST: _GIVE_UP,
        _E.ASKED_AGAIN: (_S.PREPARE, (_C.REFUSE_SECOND,)),
    },
    _S.COPY: {
        _E.COPIED_MORE: (_S.COPY, (_C.COPY_ROUND,)),
        _E.COPIED_ENOUGH: (_S.FREEZE, (_C.MUTE, _C.COPY_FINAL)),
        _E.COPY_FAILED: (_S.HANDOVER, (_C.MUTE, _C.ADOPT_TOKENS)),
        _E.TIMEOUT: (_S.HANDOVER, (_C.MUTE, _C.ADOPT_TOKENS)),
        _E.FINISHED: _GIVE_UP,
        # The blocks are gone here; the target may hold those already copied, and recomputes the rest.
        _E.PREEMPTED: (_S.HANDOVER, (_C.MUTE, _C.ADOPT_TOKENS)),
        _E.CLIENT_GONE: _GIVE_UP,
        _E.SOURCE_STOPPING: (_S.COPY, ()),
        _E.TARGET_LOST: _GIVE_UP,
        _E.ASKED_AGAIN: (_S.COPY, (_C.REFUSE_SECOND,)),
    },
    _S.FREEZE: {
        _E.FINAL_COPIED: (_S.HANDOVER, (_C.ADOPT_KV,)),
        _E.COPY_FAILED: (_S.HANDOVER, (_C.ADOPT_TOKENS,)),
        _E.TIMEOUT: (_S.HANDOVER, (_C.ADOPT_TOKENS,)),
        _E.FINISHED: _THAW,
        _E.PREEMPTED: (_S.HANDOVER, (_C.ADOPT_TOKENS,)),
        _E.CLIENT_GONE: _THAW,
        _E.SOURCE_STOPPING: (_S.FREEZE, ()),
        _E.TARGET_LOST: _THAW,
        _E.ASKED_AGAIN: (_S.FREEZE, (_C.REFUSE_SECOND,)),
    },
    _S.HANDOVER: {
        _E.ADOPTED: (_S.COMMITTED, (_C.ANNOUNCE_MOVED, _C.DROP_REQUEST, _C.COMMIT_TARGET)),
        _E.ADOPT_FAILED: _THAW,
        _E.TIMEOUT: _THAW,
        # The end is known here and withheld: publishing it is faster than having it computed again.
        _E.FINISHED: _THAW,
        _E.PREEMPTED: (_S.HANDOVER, ()),
        _E.CLIENT_GONE: _THAW,
        _E.SOURCE_STOPPING: (_S.HANDOVER, ()),
        _E.TARGET_LOST: _THAW,
        _E.ASKED_AGAIN: (_S.HANDOVER, (_C.REFUSE_SECOND,)),
    },
    _S.COMMITTED: _final(_S.COMMITTED),
    _S.ABORTED: _final(_S.ABORTED),
    _S.REFUSED: _final(_S.REFUSED),
}

SourceSession = Session[State, Event, Command]


def new_session() -> SourceSession:
    """A session that has not begun."""
    return Session(TABLE, State.NEW)
