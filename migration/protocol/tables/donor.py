"""The donor's side of a copy, as a literal table. The theory of operation of all tables heads `table.py`.

A copy is the copying half of a migration. The donor holds a prefix of a context that its prefix cache has, and sends
its blocks to another replica's cache; no request moves. The other side is that of a migration's target (`target.py`),
which is cancelled behind its last round instead of adopting a request.

Rules of this file:
  1. The donor reads blocks only while it holds them. Whatever ends the copy releases the hold (RELEASE), exactly once.
  2. The hold is under a lease of the donor's own (EXPIRED), which no message renews: whoever is gone, the blocks become
     free again. So is all that the target keeps, under the target's lease; FREE_TARGET only makes that earlier.
  3. A copy is never needed. Whatever fails ends in ABORTED, and a request that could have used the blocks computes
     them.
  4. DONE and ABORTED are final. Events of the world may still come; they do nothing.

A donor that is about to stop goes on: a copy may save its cache. Events of the world, legal in every state: EXPIRED
(the lease, or the time in which somebody needs the blocks, is over), TARGET_LOST (dead or stopping).
"""

from collections.abc import Mapping
from enum import StrEnum

from migration.protocol.tables.table import Session


class DonorState(StrEnum):
    """Where the donor's side stands."""

    NEW = "new"
    HOLD = "hold"
    PREPARE = "prepare"
    COPY = "copy"
    DONE = "done"
    ABORTED = "aborted"


class DonorEvent(StrEnum):
    """The first block comes from activities, the second from the world."""

    BEGIN = "begin"
    HELD = "held"
    HOLD_FAILED = "hold_failed"
    ACCEPTED = "accepted"
    ALL_PRESENT = "all_present"
    TARGET_REFUSED = "target_refused"
    COPIED = "copied"
    COPY_FAILED = "copy_failed"
    TIMEOUT = "timeout"

    EXPIRED = "expired"
    TARGET_LOST = "target_lost"


class DonorCommand(StrEnum):
    """Commands to the shell. The first block starts an activity."""

    HOLD = "hold"
    PREPARE = "prepare"
    COPY_BLOCKS = "copy_blocks"

    RELEASE = "release"
    FREE_TARGET = "free_target"


DONOR_FINAL = frozenset({DonorState.DONE, DonorState.ABORTED})
DONOR_ACTIVITIES = frozenset({DonorCommand.HOLD, DonorCommand.PREPARE, DonorCommand.COPY_BLOCKS})

_S, _E, _C = DonorState, DonorEvent, DonorCommand

DONOR_WORLD = frozenset({_E.EXPIRED, _E.TARGET_LOST})
"""Events that no activity reports: they may come at any time."""

_GIVE_UP = (_S.ABORTED, (_C.RELEASE,))
_END_BOTH = (_S.ABORTED, (_C.RELEASE, _C.FREE_TARGET))
_FINISH = (_S.DONE, (_C.RELEASE, _C.FREE_TARGET))


def _all(
    events: frozenset[DonorEvent], entry: tuple[DonorState, tuple[DonorCommand, ...]]
) -> Mapping[DonorEvent, tuple[DonorState, tuple[DonorCommand, ...]]]:
    return dict.fromkeys(sorted(events), entry)


TABLE: Mapping[DonorState, Mapping[DonorEvent, tuple[DonorState, tuple[DonorCommand, ...]]]] = {
    _S.NEW: {
        _E.BEGIN: (_S.HOLD, (_C.HOLD,)),
        **_all(DONOR_WORLD, (_S.ABORTED, ())),
    },
    _S.HOLD: {
        _E.HELD: (_S.PREPARE, (_C.PREPARE,)),
        # Nothing of the prefix is here any more, or the engine could not hold it.
        _E.HOLD_FAILED: _GIVE_UP,
        # The engine may hold the blocks later than this: the release reaches it behind the hold.
        _E.TIMEOUT: _GIVE_UP,
        **_all(DONOR_WORLD, _GIVE_UP),
    },
    _S.PREPARE: {
        _E.ACCEPTED: (_S.COPY, (_C.COPY_BLOCKS,)),
        _E.ALL_PRESENT: _FINISH,
        _E.TARGET_REFUSED: _GIVE_UP,
        # The target may have reserved room.
        _E.TIMEOUT: _END_BOTH,
        **_all(DONOR_WORLD, _END_BOTH),
    },
    _S.COPY: {
        _E.COPIED: _FINISH,
        _E.COPY_FAILED: _END_BOTH,
        _E.TIMEOUT: _END_BOTH,
        **_all(DONOR_WORLD, _END_BOTH),
    },
    _S.DONE: _all(DONOR_WORLD, (_S.DONE, ())),
    _S.ABORTED: _all(DONOR_WORLD, (_S.ABORTED, ())),
}

DonorSession = Session[DonorState, DonorEvent, DonorCommand]


def new_session() -> DonorSession:
    """A session that has not begun."""
    return Session(TABLE, DonorState.NEW)
