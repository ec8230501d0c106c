"""The source's side of a migration, as a literal table. The theory of operation heads `table.py`.

Rules of this file:
  1. Until it sends the request (ADOPT_*), the source keeps it by itself: whatever fails ends in ABORTED, unmuted.
  2. From then on it is muted until it knows where the request is. It lets go on ADOPTED; it goes on when the target
     refused. Any other answer, or none, leaves it in DOUBT: the target may run the request, and the reader may have
     taken it from there. The source asks the reader (ASK_READER, again and again) and obeys: KEPT or FOLLOWED.
  3. Freezing is muting. Tokens after the freeze are withheld, not lost. As the source sends the request, it takes it
     out of its own engine too (HALT), which would compete with the target's first step for nothing. Every abort is
     the same single command, UNMUTE, which continues the request from its tokens.
  4. KV is a cache. Whatever goes wrong with blocks turns the migration into one by tokens; only what goes
     wrong with the target ends it.
  5. A request whose prompt is still being computed is followed (FOLLOW): blocks are copied as the prefill fills them,
     and the freeze comes right behind its first token. It needs nothing of the target until then, so nothing is muted
     before, and whatever fails leaves it where it is; without blocks (AWAIT) it is handed over by tokens, unless its
     prefill has not even begun (UNBEGUN).
  6. COMMITTED, ABORTED and REFUSED are final. Events of the world (not of activities) may still come; they do nothing.

Events of the world, legal in every state: FINISHED (the request ended by itself: EOS, max_tokens, or a stop
string found by the reader), PREEMPTED (its blocks are gone), CLIENT_GONE (its reader left, or reads it elsewhere),
SOURCE_STOPPING, TARGET_LOST (dead or stopping), ASKED_AGAIN (a second move of the same request). So are the reader's
answers, KEPT and FOLLOWED, which mean something only to a source that has sent the request.
"""

from collections.abc import Mapping
from enum import StrEnum

from migration.protocol.tables.table import Session


class SourceState(StrEnum):
    """Where the source's side stands."""

    NEW = "new"
    PREPARE = "prepare"
    FOLLOW = "follow"
    AWAIT = "await"
    COPY = "copy"
    FREEZE = "freeze"
    HANDOVER = "handover"
    DOUBT = "doubt"
    COMMITTED = "committed"
    ABORTED = "aborted"
    REFUSED = "refused"


class SourceEvent(StrEnum):
    """The first block comes from activities, the second from the world."""

    BEGIN = "begin"
    ACCEPTED_KV = "accepted_kv"
    ACCEPTED_TOKENS = "accepted_tokens"
    ACCEPTED_EARLY = "accepted_early"
    TARGET_REFUSED = "target_refused"
    UNBEGUN = "unbegun"
    FILLED = "filled"
    FIRST_TOKEN = "first_token"
    COPIED_MORE = "copied_more"
    COPIED_ENOUGH = "copied_enough"
    COPY_FAILED = "copy_failed"
    FINAL_COPIED = "final_copied"
    ADOPTED = "adopted"
    ADOPT_REFUSED = "adopt_refused"
    TIMEOUT = "timeout"

    FINISHED = "finished"
    PREEMPTED = "preempted"
    CLIENT_GONE = "client_gone"
    SOURCE_STOPPING = "source_stopping"
    TARGET_LOST = "target_lost"
    ASKED_AGAIN = "asked_again"
    KEPT = "kept"
    FOLLOWED = "followed"


class SourceCommand(StrEnum):
    """Commands to the shell. The first block starts an activity."""

    PREPARE = "prepare"
    AWAIT_BLOCKS = "await_blocks"
    COPY_FILLED = "copy_filled"
    AWAIT_TOKEN = "await_token"
    COPY_ROUND = "copy_round"
    COPY_FINAL = "copy_final"
    ADOPT_KV = "adopt_kv"
    ADOPT_TOKENS = "adopt_tokens"
    ASK_READER = "ask_reader"

    ANNOUNCE_MOVING = "announce_moving"
    MUTE = "mute"
    HALT = "halt"
    UNMUTE = "unmute"
    ANNOUNCE_MOVED = "announce_moved"
    DROP_REQUEST = "drop_request"
    CANCEL_TARGET = "cancel_target"
    REFUSE_SECOND = "refuse_second"


FINAL = frozenset({SourceState.COMMITTED, SourceState.ABORTED, SourceState.REFUSED})
ACTIVITIES = frozenset(
    {
        SourceCommand.PREPARE,
        SourceCommand.AWAIT_BLOCKS,
        SourceCommand.COPY_FILLED,
        SourceCommand.AWAIT_TOKEN,
        SourceCommand.COPY_ROUND,
        SourceCommand.COPY_FINAL,
        SourceCommand.ADOPT_KV,
        SourceCommand.ADOPT_TOKENS,
        SourceCommand.ASK_READER,
    }
)

_S, _E, _C = SourceState, SourceEvent, SourceCommand
_GIVE_UP = (_S.ABORTED, (_C.CANCEL_TARGET,))
_THAW = (_S.ABORTED, (_C.UNMUTE, _C.CANCEL_TARGET))
_ASK = (_S.DOUBT, (_C.ASK_READER,))
_FOLLOW = (_S.FOLLOW, (_C.AWAIT_BLOCKS,))
_AWAIT = (_S.AWAIT, (_C.AWAIT_TOKEN,))

WORLD = frozenset(
    {
        _E.FINISHED,
        _E.PREEMPTED,
        _E.CLIENT_GONE,
        _E.SOURCE_STOPPING,
        _E.TARGET_LOST,
        _E.ASKED_AGAIN,
        _E.KEPT,
        _E.FOLLOWED,
    }
)
"""Events that no activity reports: they may come at any time."""


def _nothing(
    state: SourceState, *events: SourceEvent
) -> Mapping[SourceEvent, tuple[SourceState, tuple[SourceCommand, ...]]]:
    return {event: (state, ()) for event in events}


TABLE: Mapping[SourceState, Mapping[SourceEvent, tuple[SourceState, tuple[SourceCommand, ...]]]] = {
    _S.NEW: {
        _E.BEGIN: (_S.PREPARE, (_C.PREPARE,)),
        _E.FINISHED: (_S.ABORTED, ()),
        _E.PREEMPTED: (_S.NEW, ()),
        _E.CLIENT_GONE: (_S.ABORTED, ()),
        _E.SOURCE_STOPPING: (_S.NEW, ()),
        _E.TARGET_LOST: (_S.ABORTED, ()),
        _E.ASKED_AGAIN: (_S.NEW, (_C.REFUSE_SECOND,)),
        **_nothing(_S.NEW, _E.KEPT, _E.FOLLOWED),
    },
    _S.PREPARE: {
        _E.ACCEPTED_KV: (_S.COPY, (_C.ANNOUNCE_MOVING, _C.COPY_ROUND)),
        _E.ACCEPTED_TOKENS: (_S.HANDOVER, (_C.ANNOUNCE_MOVING, _C.MUTE, _C.HALT, _C.ADOPT_TOKENS)),
        # The request is still being prefilled.
        _E.ACCEPTED_EARLY: _FOLLOW,
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
        **_nothing(_S.PREPARE, _E.KEPT, _E.FOLLOWED),
    },
    _S.FOLLOW: {
        _E.FILLED: (_S.FOLLOW, (_C.COPY_FILLED,)),
        _E.COPIED_MORE: _FOLLOW,
        _E.FIRST_TOKEN: (_S.FREEZE, (_C.ANNOUNCE_MOVING, _C.MUTE, _C.COPY_FINAL)),
        # The prefill goes on, and the target has to repeat it.
        _E.COPY_FAILED: _AWAIT,
        _E.TIMEOUT: _AWAIT,
        # Its turn has not come here: behind the wait, a prefill at the target would be a second one.
        _E.UNBEGUN: _GIVE_UP,
        _E.FINISHED: _GIVE_UP,
        # The prefill begins anew. What is copied is at the target, and waits for the rest.
        _E.PREEMPTED: _FOLLOW,
        _E.CLIENT_GONE: _GIVE_UP,
        _E.SOURCE_STOPPING: (_S.FOLLOW, ()),
        _E.TARGET_LOST: _GIVE_UP,
        _E.ASKED_AGAIN: (_S.FOLLOW, (_C.REFUSE_SECOND,)),
        **_nothing(_S.FOLLOW, _E.KEPT, _E.FOLLOWED),
    },
    _S.AWAIT: {
        _E.FIRST_TOKEN: (_S.HANDOVER, (_C.ANNOUNCE_MOVING, _C.MUTE, _C.HALT, _C.ADOPT_TOKENS)),
        _E.TIMEOUT: _GIVE_UP,
        _E.FINISHED: _GIVE_UP,
        _E.PREEMPTED: (_S.AWAIT, ()),
        _E.CLIENT_GONE: _GIVE_UP,
        _E.SOURCE_STOPPING: (_S.AWAIT, ()),
        _E.TARGET_LOST: _GIVE_UP,
        _E.ASKED_AGAIN: (_S.AWAIT, (_C.REFUSE_SECOND,)),
        **_nothing(_S.AWAIT, _E.KEPT, _E.FOLLOWED),
    },
    _S.COPY: {
        _E.COPIED_MORE: (_S.COPY, (_C.COPY_ROUND,)),
        _E.COPIED_ENOUGH: (_S.FREEZE, (_C.MUTE, _C.COPY_FINAL)),
        _E.COPY_FAILED: (_S.HANDOVER, (_C.MUTE, _C.HALT, _C.ADOPT_TOKENS)),
        _E.TIMEOUT: (_S.HANDOVER, (_C.MUTE, _C.HALT, _C.ADOPT_TOKENS)),
        # In the end of this state the request may be halted already.
        _E.FINISHED: _THAW,
        # The blocks are gone here; the target may hold those already copied, and recomputes the rest.
        _E.PREEMPTED: (_S.HANDOVER, (_C.MUTE, _C.HALT, _C.ADOPT_TOKENS)),
        _E.CLIENT_GONE: _THAW,
        _E.SOURCE_STOPPING: (_S.COPY, ()),
        _E.TARGET_LOST: _THAW,
        _E.ASKED_AGAIN: (_S.COPY, (_C.REFUSE_SECOND,)),
        **_nothing(_S.COPY, _E.KEPT, _E.FOLLOWED),
    },
    _S.FREEZE: {
        _E.FINAL_COPIED: (_S.HANDOVER, (_C.HALT, _C.ADOPT_KV)),
        _E.COPY_FAILED: (_S.HANDOVER, (_C.HALT, _C.ADOPT_TOKENS)),
        _E.TIMEOUT: (_S.HANDOVER, (_C.HALT, _C.ADOPT_TOKENS)),
        _E.FINISHED: _THAW,
        _E.PREEMPTED: (_S.HANDOVER, (_C.HALT, _C.ADOPT_TOKENS)),
        _E.CLIENT_GONE: _THAW,
        _E.SOURCE_STOPPING: (_S.FREEZE, ()),
        _E.TARGET_LOST: _THAW,
        _E.ASKED_AGAIN: (_S.FREEZE, (_C.REFUSE_SECOND,)),
        **_nothing(_S.FREEZE, _E.KEPT, _E.FOLLOWED),
    },
    _S.HANDOVER: {
        _E.ADOPTED: (_S.COMMITTED, (_C.ANNOUNCE_MOVED, _C.DROP_REQUEST)),
        # The target's own word: it does not run the request and never will under this hop.
        _E.ADOPT_REFUSED: _THAW,
        _E.TIMEOUT: _ASK,
        # The source has the end and withholds it. Publishing it claims nothing: only a reader of this source takes it.
        _E.FINISHED: _THAW,
        _E.PREEMPTED: (_S.HANDOVER, ()),
        _E.CLIENT_GONE: _THAW,
        _E.SOURCE_STOPPING: (_S.HANDOVER, ()),
        # Seen from here. The target may live, run the request, and have its reader.
        _E.TARGET_LOST: _ASK,
        _E.ASKED_AGAIN: (_S.HANDOVER, (_C.REFUSE_SECOND,)),
        _E.KEPT: (_S.HANDOVER, ()),
        _E.FOLLOWED: (_S.COMMITTED, (_C.DROP_REQUEST,)),
    },
    _S.DOUBT: {
        _E.TIMEOUT: _ASK,
        _E.FINISHED: _THAW,
        _E.PREEMPTED: (_S.DOUBT, ()),
        _E.CLIENT_GONE: _THAW,
        _E.SOURCE_STOPPING: (_S.DOUBT, ()),
        _E.TARGET_LOST: (_S.DOUBT, ()),
        _E.ASKED_AGAIN: (_S.DOUBT, (_C.REFUSE_SECOND,)),
        _E.KEPT: _THAW,
        _E.FOLLOWED: (_S.COMMITTED, (_C.DROP_REQUEST,)),
    },
    _S.COMMITTED: _nothing(_S.COMMITTED, *WORLD),
    _S.ABORTED: _nothing(_S.ABORTED, *WORLD),
    _S.REFUSED: _nothing(_S.REFUSED, *WORLD),
}

SourceSession = Session[SourceState, SourceEvent, SourceCommand]


def new_session() -> SourceSession:
    """A session that has not begun."""
    return Session(TABLE, SourceState.NEW)
