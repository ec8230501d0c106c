"""The target's side of a migration, as a literal table. The theory of operation heads `table.py`.

Rules of this file:
  1. Whatever the target holds for a migration is under a lease until it owns the request: room that was
     reserved, blocks that were loaded, and the adopted request itself (PROVISIONAL). LEASE_EXPIRED frees it, so a
     source that dies or goes silent leaves nothing behind.
  2. Only the request's reader makes it the owner (ATTACHED), and only once it runs the request. The source cannot: it
     does not know whether the reader still follows it.
  3. It may refuse, and it may fail to load a round, without consequences: the source then hands over tokens.
  4. CLOSED and OWNED are final. A message that comes late to CLOSED does nothing; CANCEL to OWNED is illegal.
  5. A repeated ADOPT adds nothing. Its answer follows from the state to which the first one has led: ADOPTING answers
     both once the engine has, PROVISIONAL and OWNED confirm, CLOSED refuses. A refusal of what runs here would have the
     source go on beside it: so ADD_REQUEST goes on when the call that began it is cancelled. CLOSED is never left, by
     ADOPT or PREPARE_FITS: the source may have its refusal, and go on.
"""

from collections.abc import Mapping
from enum import StrEnum

from migration.protocol.tables.table import Session


class TargetState(StrEnum):
    """Where the target's side stands."""

    NEW = "new"
    RESERVED = "reserved"
    LOADING = "loading"
    ADOPTING = "adopting"
    PROVISIONAL = "provisional"
    OWNED = "owned"
    CLOSED = "closed"


class TargetEvent(StrEnum):
    """Messages of the source, results of our own activities, and the world."""

    PREPARE_FITS = "prepare_fits"
    PREPARE_REFUSED = "prepare_refused"
    ROUND = "round"
    ADOPT = "adopt"
    CANCEL = "cancel"

    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    ADDED = "added"
    ADD_FAILED = "add_failed"

    ATTACHED = "attached"
    LEASE_EXPIRED = "lease_expired"
    CLIENT_GONE = "client_gone"
    FINISHED = "finished"
    STOPPING = "stopping"


class TargetCommand(StrEnum):
    """Commands to the shell."""

    RESERVE = "reserve"
    RELEASE = "release"
    LOAD_ROUND = "load_round"
    STOP_LOADING = "stop_loading"
    ADD_REQUEST = "add_request"
    ABORT_REQUEST = "abort_request"


_S, _E, _C = TargetState, TargetEvent, TargetCommand
_RELEASE = (_S.CLOSED, (_C.RELEASE,))
_STOP = (_S.CLOSED, (_C.STOP_LOADING, _C.RELEASE))
_ABORT = (_S.CLOSED, (_C.ABORT_REQUEST, _C.RELEASE))

TABLE: Mapping[TargetState, Mapping[TargetEvent, tuple[TargetState, tuple[TargetCommand, ...]]]] = {
    _S.NEW: {
        _E.PREPARE_FITS: (_S.RESERVED, (_C.RESERVE,)),
        _E.PREPARE_REFUSED: (_S.CLOSED, ()),
        _E.CANCEL: (_S.CLOSED, ()),
        _E.LEASE_EXPIRED: (_S.CLOSED, ()),
        _E.CLIENT_GONE: (_S.CLOSED, ()),
        _E.STOPPING: (_S.CLOSED, ()),
    },
    _S.RESERVED: {
        _E.ROUND: (_S.LOADING, (_C.LOAD_ROUND,)),
        # Of two rounds under way, the first to end led here: the other one has to be stopped as well.
        _E.LOADED: (_S.RESERVED, ()),
        _E.LOAD_FAILED: (_S.RESERVED, ()),
        _E.ADOPT: (_S.ADOPTING, (_C.STOP_LOADING, _C.ADD_REQUEST)),
        _E.CANCEL: _STOP,
        _E.LEASE_EXPIRED: _STOP,
        _E.CLIENT_GONE: _STOP,
        _E.STOPPING: _STOP,
    },
    _S.LOADING: {
        # The source may know of the end of a round before this table does.
        _E.ROUND: (_S.LOADING, (_C.LOAD_ROUND,)),
        _E.LOADED: (_S.RESERVED, ()),
        _E.LOAD_FAILED: (_S.RESERVED, ()),
        # The source gave up on blocks (time-out) and hands over tokens.
        _E.ADOPT: (_S.ADOPTING, (_C.STOP_LOADING, _C.ADD_REQUEST)),
        _E.CANCEL: _STOP,
        _E.LEASE_EXPIRED: _STOP,
        _E.CLIENT_GONE: _STOP,
        _E.STOPPING: _STOP,
    },
    _S.ADOPTING: {
        _E.ADDED: (_S.PROVISIONAL, ()),
        _E.ADD_FAILED: _RELEASE,
        # Repeated, here and in the states behind this one.
        _E.ADOPT: (_S.ADOPTING, ()),
        # A load that was stopped may still report.
        _E.LOADED: (_S.ADOPTING, ()),
        _E.LOAD_FAILED: (_S.ADOPTING, ()),
        _E.CANCEL: _ABORT,
        _E.LEASE_EXPIRED: _ABORT,
        _E.CLIENT_GONE: _ABORT,
        _E.STOPPING: _ABORT,
    },
    _S.PROVISIONAL: {
        _E.ATTACHED: (_S.OWNED, (_C.RELEASE,)),
        _E.ADOPT: (_S.PROVISIONAL, ()),
        # It ended before anyone confirmed; its end was published under the new hop and waits at the reader.
        _E.FINISHED: (_S.PROVISIONAL, ()),
        _E.CANCEL: _ABORT,
        _E.LEASE_EXPIRED: _ABORT,
        _E.CLIENT_GONE: _ABORT,
        # Stopping replicas finish or evacuate what they run; a provisional request is one of these.
        _E.STOPPING: (_S.PROVISIONAL, ()),
    },
    _S.OWNED: {
        # A reader requests missed events again.
        _E.ATTACHED: (_S.OWNED, ()),
        _E.ADOPT: (_S.OWNED, ()),
        _E.LEASE_EXPIRED: (_S.OWNED, ()),
        _E.CLIENT_GONE: (_S.OWNED, ()),
        _E.FINISHED: (_S.OWNED, ()),
        _E.STOPPING: (_S.OWNED, ()),
    },
    _S.CLOSED: {
        _E.CANCEL: (_S.CLOSED, ()),
        _E.LOADED: (_S.CLOSED, ()),
        _E.LOAD_FAILED: (_S.CLOSED, ()),
        _E.ADDED: (_S.CLOSED, (_C.ABORT_REQUEST,)),
        _E.ADD_FAILED: (_S.CLOSED, ()),
        _E.LEASE_EXPIRED: (_S.CLOSED, ()),
        _E.CLIENT_GONE: (_S.CLOSED, ()),
        _E.FINISHED: (_S.CLOSED, ()),
        _E.STOPPING: (_S.CLOSED, ()),
    },
}

TargetSession = Session[TargetState, TargetEvent, TargetCommand]


def new_session() -> TargetSession:
    """A session before its first event."""
    return Session(TABLE, TargetState.NEW)
