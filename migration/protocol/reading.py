"""One request as its reader has it: the table's session, the cursor, and where the request is. Nothing waits here.

Every method takes one thing that happened and returns the actions that follow from it, in order.
`migration.run.reader` carries them out, and decides nothing.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from migration.protocol.cursor import Cursor, GapError
from migration.protocol.request import Delta, Doubt, Extras, Lost, Moved, Moving, StreamEvent
from migration.protocol.tables.reader import FINAL, TABLE, TERM, ReaderCommand, ReaderEvent, ReaderState, classify
from migration.protocol.tables.table import Session
from policies.model import ReplicaId

_OVER = sys.maxsize
"""The hop of a reader that reads no more: every word is outdated."""


@dataclass(slots=True)
class Output:
    """Output tokens [index, index + len(tokens)) of a request, of one engine step or of several that came together.

    `finish` is vLLM's finish reason on the last output, which may lack tokens; None on all others. Not frozen: one
    is made for every engine step of every request, and freezing doubles its cost.
    """

    index: int
    tokens: tuple[int, ...]
    extras: Extras = ()
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """Find a replica that runs the request under the reader's hop; `lost` is not to be asked if there is another.

    `anew` after a replica was lost that had the request or may have it.
    """

    lost: ReplicaId | None
    anew: bool


@dataclass(frozen=True, slots=True)
class FindRequest:
    """Ask a target whether it runs the request under `hop`; if so, it is read from output token `index` on."""

    target: ReplicaId
    hop: int
    index: int


@dataclass(frozen=True, slots=True)
class AttachHost:
    """Have the host publish what it has from output token `index` on, and confirm that it runs the request."""

    host: ReplicaId
    hop: int
    index: int


@dataclass(frozen=True, slots=True)
class KeepRequest:
    """Have a source in doubt go on: the reader does not follow the request to `next_hop`."""

    source: ReplicaId
    hop: int
    next_hop: int


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """Have a replica end its runs of the request under hops below `hop`, or under any if that is None."""

    replica: ReplicaId
    hop: int | None


@dataclass(frozen=True, slots=True)
class Followed:
    """The request's host is another replica from output token `index` on."""

    host: ReplicaId
    index: int


@dataclass(frozen=True, slots=True)
class HostGone:
    """The host is given up."""

    host: ReplicaId
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The request cannot be served: no engine takes it, for that reason, or (None) no replica does."""

    invalid: str | None


Action = Output | PlaceRequest | FindRequest | AttachHost | KeepRequest | ReleaseRequest | Followed | HostGone | GiveUp


class SegmentOrigin(StrEnum):
    """The reason why a replica got the request."""

    FIRST = "first"
    MIGRATION = "migration"
    RESUBMISSION = "resubmission"


class Reader:
    """One request. `host` runs it, or is being asked to; `moves` and `resubmissions` count how it came there.

    `engine_losses` are the hosts whose engines have died with it on board: it may have caused their ends.
    `over` is true in a final state: nothing is read any more.
    `touched` are the replicas that may run it under whatever hop and have not been released.
    """

    def __init__(self, outputs: Iterable[int] = ()) -> None:
        """`outputs` are the tokens that the request has already."""
        self.session = Session(TABLE, ReaderState.NEW)
        self.cursor = Cursor(tokens=list(outputs))
        self.host = ReplicaId("")
        self.touched: set[ReplicaId] = set()
        self.moves = 0
        self.resubmissions = 0
        self.engine_losses = 0
        self.over = False
        self._move: Moving | None = None
        self._next = ReplicaId("")
        self._settled = 0
        self._term = 0
        self._early: list[tuple[StreamEvent, ReplicaId]] = []
        self._missed = False
        self._reason = ""

    @property
    def state(self) -> ReaderState:
        """Where the reader stands."""
        return self.session.state

    @property
    def origin(self) -> SegmentOrigin:
        """The reason why a replica is asked to take the request."""
        return SegmentOrigin.RESUBMISSION if self.resubmissions or self.cursor.tokens else SegmentOrigin.FIRST

    # --- its own calls --------------------------------------------------------------------------------

    def begin(self) -> list[Action]:
        """Begin to serve the request."""
        return self._feed(ReaderEvent.BEGIN)

    def submitting(self, replica: ReplicaId) -> None:
        """The request is on its way to a replica, whose events count from now on."""
        self.host = replica
        self.touched.add(replica)

    def submitted(self) -> list[Action]:
        """The host has taken the request."""
        actions = self._feed(ReaderEvent.SUBMITTED)
        if self._missed:
            self._missed = False
            actions += self._feed(ReaderEvent.OUT_OF_STEP)
        return [*actions, *self._replay()]

    def not_placed(self) -> list[Action]:
        """No replica takes the request."""
        return self._feed(ReaderEvent.NOT_PLACED)

    def found(self) -> list[Action]:
        """The target runs the request: it is the host."""
        self.session.check(ReaderEvent.FOUND)
        move = self._move
        assert move is not None, "the target that was asked"
        index, self._next = self.cursor.next_index, ReplicaId(move.target)
        fresh = self.cursor.advance(move.next_hop)
        return [*self._feed(ReaderEvent.FOUND, index=index), *self._outputs(index, fresh), *self._replay()]

    def not_found(self) -> list[Action]:
        """The target does not run the request, or did not answer."""
        return self._feed(ReaderEvent.NOT_FOUND)

    def host_lost(self, reason: str, died: bool = False) -> list[Action]:
        """The host died (`died`), cannot be reached, or does not have the request."""
        self._reason = reason
        self._count_loss(died)
        return self._feed(ReaderEvent.HOST_LOST)

    def out_of_step(self) -> list[Action]:
        """Events of the host may be missing."""
        if self.state is ReaderState.PLACING:
            self._missed = True
        return self._feed(ReaderEvent.OUT_OF_STEP)

    def leave(self) -> list[Action]:
        """Nobody wants the output any more."""
        return self._feed(ReaderEvent.CLIENT_LEFT)

    # --- events of replicas ---------------------------------------------------------------------------

    def take(self, word: StreamEvent, replica: ReplicaId) -> list[Action]:
        """An event of a replica, in whatever order events come."""
        hop = _OVER if self.over else self.cursor.hop
        if isinstance(word, Delta) and word.hop >= hop:
            return self._take_tokens(word)
        event = classify(word, hop, self._settled)
        if word.hop > hop or (self.state is ReaderState.PLACING and word.hop == hop):
            # Of the next host, or of one that has not answered yet: it counts once that is the host.
            self._early.append((word, replica))
            return []
        return self._heard(event, word, replica) if event is not None else []

    def _take_tokens(self, delta: Delta) -> list[Action]:
        index = self.cursor.next_index
        try:
            fresh = self.cursor.feed(delta)
        except GapError:
            return self.out_of_step()
        return self._outputs(index, fresh)

    def _outputs(self, index: int, tokens: tuple[int, ...]) -> list[Action]:
        """The fresh tokens, and the end if there is one."""
        cursor = self.cursor
        if not tokens and cursor.finish is None:
            return []
        extras = tuple(cursor.extras)
        cursor.extras.clear()
        output = Output(index, tokens, extras, cursor.finish)
        return [output] if cursor.finish is None else [output, *self._feed(ReaderEvent.ENDED)]

    def _heard(self, event: ReaderEvent, word: StreamEvent, replica: ReplicaId) -> list[Action]:
        if isinstance(word, Moved) and event is ReaderEvent.MOVED:
            return self._moved(word)
        if isinstance(word, Lost):
            self._reason = word.reason
            self._count_loss(word.died)
        if isinstance(word, Moving) and event is ReaderEvent.MOVE_ANNOUNCED and self.state is not ReaderState.FINDING:
            self._move = word
            self.touched.add(ReplicaId(word.target))
        if isinstance(word, Doubt) and event is ReaderEvent.IN_DOUBT and self.state is not ReaderState.FINDING:
            self._settled, self._move = max(self._settled, word.next_hop), None
        return self._feed(event, speaker=replica)

    def _count_loss(self, died: bool) -> None:
        """Count the host's engine if it died with the request: not before it had taken it, and once."""
        self.engine_losses += died and self.state in (ReaderState.READING, ReaderState.MOVING)

    def _moved(self, word: Moved) -> list[Action]:
        """The host let go. Its successor may have done so in its turn, and may have been read first: that follows."""
        self.session.check(ReaderEvent.MOVED)
        index = self.cursor.next_index
        try:
            fresh = self.cursor.moved(word)
        except GapError:
            return self.out_of_step()
        self.touched.discard(self.host)
        self._next = ReplicaId(word.target)
        return [*self._feed(ReaderEvent.MOVED, index=index), *self._outputs(index, fresh), *self._replay()]

    def _replay(self) -> list[Action]:
        """Take the events that came early: the hop is another one now, or the host has answered."""
        early, self._early = self._early, []
        return [action for word, replica in early for action in self.take(word, replica)]

    # --- the table ------------------------------------------------------------------------------------

    def _feed(self, event: ReaderEvent, speaker: ReplicaId | None = None, index: int = 0) -> list[Action]:
        before = self.state
        commands = self.session.feed(event)
        self.over = self.state in FINAL
        return [action for command in commands for action in self._execute(command, before, speaker, index)]

    def _execute(
        self, command: ReaderCommand, before: ReaderState, speaker: ReplicaId | None, index: int
    ) -> Iterator[Action]:
        cursor, over = self.cursor, self.over
        match command:
            case ReaderCommand.REPORT_LOSS:
                yield HostGone(self.host, self._reason)
            case ReaderCommand.NEW_TERM:
                self._term += 1
                self._move = None
                cursor.advance(self._term * TERM)
                self._early.clear()
                self.resubmissions += before is not ReaderState.PLACING
            case ReaderCommand.PLACE:
                yield PlaceRequest(self.host or None, anew=before is not ReaderState.PLACING)
            case ReaderCommand.FIND if self._move is not None:
                yield FindRequest(ReplicaId(self._move.target), self._move.next_hop, cursor.next_index)
            case ReaderCommand.FOLLOW:
                self.host, self._move = self._next, None
                self.touched.add(self.host)
                self.moves += 1
                yield Followed(self.host, index)
            case ReaderCommand.ATTACH:
                yield AttachHost(self.host, cursor.hop, cursor.next_index)
            case ReaderCommand.KEEP_SOURCE:
                yield KeepRequest(self.host, cursor.hop, self._settled)
            case ReaderCommand.RELEASE_SPEAKER if speaker is not None:
                yield ReleaseRequest(speaker, None if over else cursor.hop)
            case ReaderCommand.RELEASE_OTHERS:
                yield from self._release(self.touched - {self.host}, None if over else cursor.hop)
            case ReaderCommand.RELEASE_ALL:
                yield from self._release(self.touched, None)
            case ReaderCommand.DELIVER_LOSS:
                yield GiveUp(self._reason if before is not ReaderState.PLACING else None)

    def _release(self, replicas: set[ReplicaId], hop: int | None) -> Iterator[Action]:
        released = sorted(replicas)
        self.touched -= replicas
        for replica in released:
            yield ReleaseRequest(replica, hop)
