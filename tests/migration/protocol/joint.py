"""Source, target and reader wired to each other: every joint state that any order of events can lead to.

A joint state is the states of the three tables, what runs where, and what is in the air. Nothing has to happen: a
message that stays in the air is lost, a party that takes no more steps has died or stands still, and one that steps
again has woken up. Messages stay in the air once they have arrived, too: they may overtake each other, and each may
arrive again at any later time. What needs no cause within the model may happen at any time: time-outs, leases that run
out, broken streams, failed calls, ends, and a client that leaves.

The shells' part is modelled as they do it: the messages to the target as `Moves` and `TargetRun` take them, the words
to the reader by its own function `classify`. A copy's chunks and their results come in any number and order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from migration.protocol.request import Delta, Doubt, Moved, Moving, StreamEvent
from migration.protocol.tables import reader, source, target
from migration.protocol.tables.reader import TERM, ReaderCommand, ReaderEvent, ReaderState, classify
from migration.protocol.tables.source import SourceCommand, SourceEvent, SourceState
from migration.protocol.tables.target import TargetCommand, TargetEvent, TargetState
from policies.model import RequestId

R = RequestId("r")
SENT = {
    SourceCommand.PREPARE: "prepare",
    SourceCommand.COPY_FILLED: "round",
    SourceCommand.COPY_ROUND: "round",
    SourceCommand.COPY_FINAL: "round",
    SourceCommand.ADOPT_KV: "adopt",
    SourceCommand.ADOPT_TOKENS: "adopt",
    SourceCommand.CANCEL_TARGET: "cancel",
    SourceCommand.ANNOUNCE_MOVING: "moving",
    SourceCommand.ANNOUNCE_MOVED: "moved",
    SourceCommand.ASK_READER: "doubt",
}
"""The message that a command of the source sends."""

WORDS: dict[str, StreamEvent] = {
    "moving": Moving(R, 0, 1, "target"),
    "moved": Moved(R, 0, 1, 0, "target"),
    "doubt": Doubt(R, 0, 1),
}
"""The source's messages to the reader, beside tokens."""

ANY_TIME_AT_SOURCE = sorted(
    {
        *(source.WORLD - {SourceEvent.KEPT, SourceEvent.FOLLOWED}),
        *(SourceEvent.BEGIN, SourceEvent.TIMEOUT, SourceEvent.UNBEGUN, SourceEvent.FILLED, SourceEvent.FIRST_TOKEN),
        *(SourceEvent.COPIED_MORE, SourceEvent.COPIED_ENOUGH, SourceEvent.FINAL_COPIED, SourceEvent.COPY_FAILED),
    }
)
ANY_TIME_AT_TARGET = sorted(
    {
        *(TargetEvent.LEASE_EXPIRED, TargetEvent.CLIENT_GONE, TargetEvent.FINISHED, TargetEvent.STOPPING),
        *(TargetEvent.LOADED, TargetEvent.LOAD_FAILED),
    }
)
ANY_TIME_AT_READER = sorted(
    {
        *(ReaderEvent.SUBMITTED, ReaderEvent.NOT_PLACED, ReaderEvent.NOT_FOUND, ReaderEvent.HOST_LOST),
        *(ReaderEvent.OUT_OF_STEP, ReaderEvent.ENDED, ReaderEvent.INVALID, ReaderEvent.CLIENT_LEFT),
    }
)
"""Also a host that is given up though it lives."""


@dataclass(frozen=True, slots=True)
class Joint:
    """The three sessions, and what is in the air.

    `source_runs`, `target_runs`, `other_runs`: whether the request is in that engine; the other is the replica to which
    the reader submits in its second term. `asking`: the reader waits for its host's answer to an attach.
    """

    source: SourceState = SourceState.NEW
    target: TargetState = TargetState.NEW
    reader: ReaderState = ReaderState.PLACING
    hop: int = 0
    settled: int = 0
    asking: bool = False
    air: frozenset[str] = frozenset()
    source_runs: bool = True
    target_runs: bool = False
    other_runs: bool = False
    muted: bool = False
    closed_by: TargetEvent | None = None

    @property
    def claims(self) -> dict[str, int]:
        """The replicas that claim the request, each with the term under which it does."""
        claims = {
            "source": self.source_runs and not self.muted,
            "target": self.target_runs and self.target is TargetState.OWNED,
            "other": self.other_runs,
        }
        return {name: int(name == "other") for name, claimed in claims.items() if claimed}

    @property
    def term(self) -> int:
        """The reader's."""
        return self.hop // TERM

    def without(self, message: str) -> "Joint":
        return replace(self, air=self.air - {message})

    def with_(self, message: str) -> "Joint":
        return replace(self, air=self.air | {message})


# --- each of the three --------------------------------------------------------------------------------


def at_source(joint: Joint, event: SourceEvent) -> Iterator[Joint]:
    """The source takes an event, if it may."""
    if event not in source.TABLE[joint.source]:
        return
    following, commands = source.TABLE[joint.source][event]
    sent = {SENT[command] for command in commands if command in SENT}
    muted = joint.muted
    for command in commands:
        muted = {SourceCommand.MUTE: True, SourceCommand.UNMUTE: False}.get(command, muted)
    ended = SourceCommand.DROP_REQUEST in commands or event in (SourceEvent.FINISHED, SourceEvent.CLIENT_GONE)
    yield replace(
        joint, source=following, air=joint.air | sent, muted=muted, source_runs=joint.source_runs and not ended
    )


def at_target(joint: Joint, event: TargetEvent) -> Iterator[Joint]:
    """The target takes an event, if it may."""
    if event not in target.TABLE[joint.target]:
        return
    following, commands = target.TABLE[joint.target][event]
    closed = following is TargetState.CLOSED and joint.target is not TargetState.CLOSED
    runs = joint.target_runs or event is TargetEvent.ADDED
    ended = TargetCommand.ABORT_REQUEST in commands or event in (TargetEvent.CLIENT_GONE, TargetEvent.FINISHED)
    yield replace(
        joint, target=following, target_runs=runs and not ended, closed_by=event if closed else joint.closed_by
    )


def at_reader(joint: Joint, event: ReaderEvent, speaker: str = "") -> Iterator[Joint]:
    """The reader takes an event, if it may. A third term would only outdate what the second does.

    That the reader has a replica end the request needs no message: its lease on the request may run out at any time.
    Only the order that informs the source of the target does.
    """
    if event not in reader.TABLE[joint.reader]:
        return
    following, commands = reader.TABLE[joint.reader][event]
    if ReaderCommand.NEW_TERM in commands and joint.term:
        return
    after = replace(joint, reader=following)
    for command in commands:
        match command:
            case ReaderCommand.NEW_TERM:
                after = replace(after, hop=TERM, asking=False)
            case ReaderCommand.FOLLOW:
                after = replace(after, hop=1)
            case ReaderCommand.ATTACH if after.hop == 1:
                after = replace(after, asking=True).with_("attach")
            case ReaderCommand.FIND:
                after = after.with_("find")
            case ReaderCommand.KEEP_SOURCE:
                after = replace(after, settled=1).with_("keep")
            case ReaderCommand.RELEASE_SPEAKER if after.hop == 1 and speaker == "source":
                after = after.with_("follow")
            case ReaderCommand.RELEASE_OTHERS if after.hop == 1:
                after = after.with_("follow")
            case _:
                pass
    yield replace(after, other_runs=after.other_runs or (event is ReaderEvent.SUBMITTED and after.term > 0))


def receives(joint: Joint, word: StreamEvent, speaker: str) -> Iterator[Joint]:
    """The reader receives an event; an early one stays in the air."""
    event = classify(word, joint.hop, joint.settled)
    if event is not None:
        yield from at_reader(joint, event, speaker)


# --- what is in the air -------------------------------------------------------------------------------

Arrival = Callable[[Joint], Iterator[Joint]]


def prepare(joint: Joint) -> Iterator[Joint]:
    """The target answers; a repeated message finds a migration that it knows."""
    if TargetEvent.PREPARE_FITS not in target.TABLE[joint.target]:
        yield joint.with_("refused")
    for after in at_target(joint, TargetEvent.PREPARE_FITS):
        yield after.with_("accepted")
    for after in at_target(joint, TargetEvent.PREPARE_REFUSED):
        yield after.with_("refused")


def adopt(joint: Joint) -> Iterator[Joint]:
    """The target answers at once, or once its engine has: to a repeated message as to the first one."""
    if TargetEvent.ADOPT not in target.TABLE[joint.target]:
        yield joint.with_("not adopted")
        return
    _, commands = target.TABLE[joint.target][TargetEvent.ADOPT]
    for after in at_target(joint, TargetEvent.ADOPT):
        if TargetCommand.ADD_REQUEST in commands:
            yield after.with_("adding")
        elif after.target is not TargetState.ADOPTING:
            yield after.with_("adopted")


def adding(joint: Joint) -> Iterator[Joint]:
    """The engine has taken the request, or has not, and says so once; the migration may be closed by then."""
    rest = joint.without("adding")
    for after in at_target(rest, TargetEvent.ADD_FAILED):
        yield after.with_("not adopted")
    for after in at_target(rest, TargetEvent.ADDED):
        yield after.with_("not adopted" if after.target is TargetState.CLOSED else "adopted")


def attach(answer: str) -> Arrival:
    def arrive(joint: Joint) -> Iterator[Joint]:
        if joint.target in (TargetState.PROVISIONAL, TargetState.OWNED):
            for after in at_target(joint, TargetEvent.ATTACHED):
                yield after.with_(answer)

    return arrive


def attached(joint: Joint) -> Iterator[Joint]:
    """The answer to one call of the reader's, and to no later one."""
    yield replace(joint.without("attached"), asking=False)


def accepted(joint: Joint) -> Iterator[Joint]:
    for event in (SourceEvent.ACCEPTED_KV, SourceEvent.ACCEPTED_TOKENS, SourceEvent.ACCEPTED_EARLY):
        yield from at_source(joint, event)


def source_takes(event: SourceEvent) -> Arrival:
    return lambda joint: at_source(joint, event)


def target_takes(event: TargetEvent) -> Arrival:
    return lambda joint: at_target(joint, event)


def source_says(word: str) -> Arrival:
    return lambda joint: receives(joint, WORDS[word], "source")


ARRIVALS: dict[str, Arrival] = {
    "prepare": prepare,
    "accepted": accepted,
    "refused": source_takes(SourceEvent.TARGET_REFUSED),
    "round": target_takes(TargetEvent.ROUND),
    "adopt": adopt,
    "adding": adding,
    "adopted": source_takes(SourceEvent.ADOPTED),
    "not adopted": source_takes(SourceEvent.ADOPT_REFUSED),
    "cancel": target_takes(TargetEvent.CANCEL),
    **{word: source_says(word) for word in WORDS},
    "attach": attach("attached"),
    "attached": attached,
    "find": attach("found"),
    "found": lambda joint: at_reader(joint, ReaderEvent.FOUND),
    "keep": source_takes(SourceEvent.KEPT),
    "follow": source_takes(SourceEvent.FOLLOWED),
}


READ = reader.FINAL
DEAD: dict[str, Callable[[Joint], bool]] = {
    "accepted": lambda j: j.source is not SourceState.PREPARE,
    "refused": lambda j: j.source is not SourceState.PREPARE,
    "round": lambda j: j.target not in (TargetState.NEW, TargetState.RESERVED, TargetState.LOADING),
    "adopted": lambda j: j.source is not SourceState.HANDOVER,
    "not adopted": lambda j: j.source is not SourceState.HANDOVER,
    "cancel": lambda j: j.target in (TargetState.OWNED, TargetState.CLOSED),
    "moving": lambda j: j.hop > 0 or j.settled > 0 or j.reader in READ,
    "moved": lambda j: j.hop > 0 or j.settled > 0 or j.reader in READ,
    "doubt": lambda j: j.hop > 0 or j.reader in READ,
    "attach": lambda j: j.target is TargetState.CLOSED or (j.target is TargetState.OWNED and not j.asking),
    "attached": lambda j: not j.asking,
    "find": lambda j: (
        j.target is TargetState.CLOSED or (j.target is TargetState.OWNED and j.reader is not ReaderState.FINDING)
    ),
    "found": lambda j: j.reader is not ReaderState.FINDING,
    "keep": lambda j: j.source in source.FINAL,
    "follow": lambda j: j.source in source.FINAL,
}
"""True if a message can change nothing any more, in this state or a later one.

`prepare` and `adopt` never are: that a target which has closed takes neither again is for the walk to find out.
"""


def tidy(joint: Joint) -> Joint:
    """The same state without dead messages."""
    gone = {message for message in joint.air if message in DEAD and DEAD[message](joint)}
    return replace(joint, air=joint.air - gone) if gone else joint


# --- all that can happen ------------------------------------------------------------------------------


def walk(start: Joint | None = None) -> Iterator[Joint]:
    """Every joint state that can be reached, those of the fewest steps first."""
    states = [start or Joint()]
    found = set(states)
    for joint in states:
        yield joint
        fresh = [after for after in dict.fromkeys(joint_steps(joint)) if after not in found]
        found.update(fresh)
        states += fresh


def joint_steps(joint: Joint) -> Iterator[Joint]:
    """Whatever can happen next."""
    return map(tidy, _steps(joint))


def _steps(joint: Joint) -> Iterator[Joint]:
    for event in ANY_TIME_AT_SOURCE:
        yield from at_source(joint, event)
    if joint.target is not TargetState.NEW:
        for at in ANY_TIME_AT_TARGET:
            yield from at_target(joint, at)
    for read in ANY_TIME_AT_READER:
        yield from at_reader(joint, read)
    yield from receives(joint, Delta(R, 0, 0, ()), "source")
    if joint.target_runs:
        yield from receives(joint, Delta(R, 1, 0, ()), "target")
    for message in sorted(joint.air):
        yield from ARRIVALS[message](joint)
