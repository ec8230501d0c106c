"""The reader's side of a request, as a literal table. The theory of operation heads `table.py`.

Rules of this file:
  1. Only the reader makes an owner: of the replica that takes its submission, of the target to which it attaches
     (FOUND, MOVED), of the source in doubt that gets KEEP_SOURCE.
  2. One attempt to move gets one answer. After KEEP_SOURCE the reader never follows that attempt; once it has asked
     the target, it never returns to the source, whatever the target answers.
  3. A replica that is given up is outdated: giving it up begins a new term (NEW_TERM), a range of hops whose first
     only the reader deals out. Events under an older hop are dropped, and their sender gets the order to end the
     request (RELEASE_*).
  4. Activities (PLACE, FIND) run one at a time and report by an event. Entering another state, or beginning an
     activity, ends the one that runs; its late result is never fed.
  5. FINISHED, FAILED and LEFT are final. Events may still come; whoever still runs the request gets the order to end.

`Cursor` keeps the tokens, `classify` maps a replica's event to one of the table, `Reader` puts them together.
"""

from collections.abc import Mapping
from enum import StrEnum

from migration.protocol.request import Delta, Doubt, Lost, Moved, Moving, StreamEvent
from migration.protocol.tables.table import Session


class ReaderState(StrEnum):
    """Where the reader stands. While it reads, MOVING means that it could ask a target for the request."""

    NEW = "new"
    PLACING = "placing"
    READING = "reading"
    MOVING = "moving"
    FINDING = "finding"
    FINISHED = "finished"
    FAILED = "failed"
    LEFT = "left"


class ReaderEvent(StrEnum):
    """Results of the reader's own calls; events of replicas; the client."""

    BEGIN = "begin"
    SUBMITTED = "submitted"
    NOT_PLACED = "not_placed"
    FOUND = "found"
    NOT_FOUND = "not_found"
    HOST_LOST = "host_lost"
    OUT_OF_STEP = "out_of_step"

    MOVE_ANNOUNCED = "move_announced"
    MOVED = "moved"
    IN_DOUBT = "in_doubt"
    INVALID = "invalid"
    OUTDATED = "outdated"
    ENDED = "ended"

    CLIENT_LEFT = "client_left"


class ReaderCommand(StrEnum):
    """Commands to the shell. The first block starts an activity."""

    PLACE = "place"
    FIND = "find"

    REPORT_LOSS = "report_loss"
    NEW_TERM = "new_term"
    FOLLOW = "follow"
    ATTACH = "attach"
    KEEP_SOURCE = "keep_source"
    RELEASE_SPEAKER = "release_speaker"
    RELEASE_OTHERS = "release_others"
    RELEASE_ALL = "release_all"
    DELIVER_LOSS = "deliver_loss"


FINAL = frozenset({ReaderState.FINISHED, ReaderState.FAILED, ReaderState.LEFT})
ACTIVITIES = frozenset({ReaderCommand.PLACE, ReaderCommand.FIND})
TERM = 1 << 16
"""Hops in a term: those from `n * TERM` on belong to the reader's n-th placement of the request. The reader deals out
the first of each; the replicas that have the request in turn deal out the others, one per attempt to move it."""

_S, _E, _C = ReaderState, ReaderEvent, ReaderCommand
_AGAIN = (_S.PLACING, (_C.NEW_TERM, _C.PLACE))
_FOLLOW = (_S.READING, (_C.FOLLOW, _C.ATTACH))
_KEEP = (_S.READING, (_C.KEEP_SOURCE,))
_END = (_S.FINISHED, (_C.RELEASE_OTHERS,))
_FAIL = (_S.FAILED, (_C.RELEASE_ALL, _C.DELIVER_LOSS))
_LEAVE = (_S.LEFT, (_C.RELEASE_ALL,))


def _over(state: ReaderState) -> Mapping[ReaderEvent, tuple[ReaderState, tuple[ReaderCommand, ...]]]:
    """Nothing counts any more; whoever still runs the request is released."""
    row: dict[ReaderEvent, tuple[ReaderState, tuple[ReaderCommand, ...]]] = {event: (state, ()) for event in _E}
    del row[_E.BEGIN]
    told = (_E.OUTDATED, _E.MOVE_ANNOUNCED, _E.MOVED, _E.IN_DOUBT)
    return row | {event: (state, (_C.RELEASE_SPEAKER,)) for event in told}


TABLE: Mapping[ReaderState, Mapping[ReaderEvent, tuple[ReaderState, tuple[ReaderCommand, ...]]]] = {
    _S.NEW: {
        _E.BEGIN: (_S.PLACING, (_C.PLACE,)),
        _E.CLIENT_LEFT: (_S.LEFT, ()),
    },
    _S.PLACING: {
        _E.SUBMITTED: (_S.READING, (_C.RELEASE_OTHERS,)),
        _E.NOT_PLACED: _FAIL,
        # The replica that was asked did not answer. It may have taken the request all the same.
        _E.HOST_LOST: _AGAIN,
        _E.OUT_OF_STEP: (_S.PLACING, ()),
        _E.OUTDATED: (_S.PLACING, (_C.RELEASE_SPEAKER,)),
        # Tokens may overtake the answer to the submission.
        _E.ENDED: _END,
        _E.CLIENT_LEFT: _LEAVE,
    },
    _S.READING: {
        _E.HOST_LOST: (_S.PLACING, (_C.REPORT_LOSS, _C.NEW_TERM, _C.PLACE)),
        _E.OUT_OF_STEP: (_S.READING, (_C.ATTACH,)),
        _E.MOVE_ANNOUNCED: (_S.MOVING, ()),
        _E.MOVED: _FOLLOW,
        _E.IN_DOUBT: _KEEP,
        _E.INVALID: _FAIL,
        _E.OUTDATED: (_S.READING, (_C.RELEASE_SPEAKER,)),
        _E.ENDED: _END,
        _E.CLIENT_LEFT: _LEAVE,
    },
    _S.MOVING: {
        # The target may run the request by now: no need to compute anew what it has.
        _E.HOST_LOST: (_S.FINDING, (_C.REPORT_LOSS, _C.FIND)),
        _E.OUT_OF_STEP: (_S.MOVING, (_C.ATTACH,)),
        # An earlier attempt has failed; the source knows that its target will never run the request.
        _E.MOVE_ANNOUNCED: (_S.MOVING, ()),
        _E.MOVED: _FOLLOW,
        _E.IN_DOUBT: _KEEP,
        _E.INVALID: _FAIL,
        _E.OUTDATED: (_S.MOVING, (_C.RELEASE_SPEAKER,)),
        _E.ENDED: _END,
        _E.CLIENT_LEFT: _LEAVE,
    },
    _S.FINDING: {
        _E.FOUND: (_S.READING, (_C.FOLLOW, _C.RELEASE_OTHERS)),
        _E.NOT_FOUND: _AGAIN,
        _E.HOST_LOST: (_S.FINDING, ()),
        _E.OUT_OF_STEP: (_S.FINDING, ()),
        _E.MOVE_ANNOUNCED: (_S.FINDING, ()),
        _E.MOVED: _FOLLOW,
        # The source lives after all, but the target has been asked, and may own the request by that.
        _E.IN_DOUBT: (_S.FINDING, ()),
        _E.INVALID: _FAIL,
        _E.OUTDATED: (_S.FINDING, (_C.RELEASE_SPEAKER,)),
        _E.ENDED: _END,
        _E.CLIENT_LEFT: _LEAVE,
    },
    _S.FINISHED: _over(_S.FINISHED),
    _S.FAILED: _over(_S.FAILED),
    _S.LEFT: _over(_S.LEFT),
}

ReaderSession = Session[ReaderState, ReaderEvent, ReaderCommand]


def classify(word: StreamEvent, hop: int, settled: int) -> ReaderEvent | None:
    """The table's event for an event of a replica, to a reader at `hop`; None if it changes nothing or comes early.

    `settled` is the newest hop that the reader will not follow, since it had the source keep the request. A delta of
    the current hop is the cursor's business and no event.
    """
    if word.hop < hop:
        ends = isinstance(word, Lost | Moved) or (isinstance(word, Delta) and word.finish is not None)
        return None if ends else ReaderEvent.OUTDATED
    if word.hop > hop:
        return None
    match word:
        case Moving():
            return ReaderEvent.MOVE_ANNOUNCED if word.next_hop > settled else None
        case Moved():
            return ReaderEvent.MOVED if word.next_hop > settled else None
        case Doubt():
            return ReaderEvent.IN_DOUBT
        case Lost():
            return ReaderEvent.INVALID if word.invalid else ReaderEvent.HOST_LOST
        case Delta():
            return None
