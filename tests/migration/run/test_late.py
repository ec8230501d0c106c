"""Every shell on every row of its table, with the activities that the row ends finishing late all the same.

The proof about the tables holds for what runs if their shells keep one promise: entering another state ends the
activity of the former one, and its result counts no more, whatever it is. The cases come from the tables: for each row,
the shortest path to its state, with activities that report what the path needs. The activities that the row has left
behind then end in every way that an activity may end. Nothing may be different from a run in which they end as they are
ordered to: neither the history nor the record, nor what was called.

A target's activities are its callers', and its table takes late results: they may change nothing but that a request
that was added too late is aborted.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar, cast

import pytest

from migration.protocol import errors
from migration.protocol.continuing import plain_spec
from migration.protocol.errors import IllegalEvent, MigrationError, Refused, RequestGone, TransferFailed
from migration.protocol.messages import Adopt, CopyRound, Fingerprint, PathRequest, Prepare
from migration.protocol.ports import Hosted, Loss, LossKind, PrefixHolds
from migration.protocol.reading import Reader
from migration.protocol.request import Delta, Doubt, Lost, Moved, Moving, StreamEvent
from migration.protocol.tables import donor, reader, source, target
from migration.protocol.tables.donor import DonorCommand, DonorEvent, DonorState
from migration.protocol.tables.reader import ReaderCommand, ReaderEvent, ReaderState
from migration.protocol.tables.source import SourceCommand, SourceEvent, SourceState
from migration.protocol.tables.target import TargetCommand, TargetEvent, TargetState
from migration.run.donor import CopyOrder, DonorRun
from migration.run.reader import NotServed, ReaderRun, ReaderWorld
from migration.run.source import Order, SourceRun
from migration.run.target import TargetRun
from migration.run.world import MigrationLimits, MigrationWorld
from policies.causes import Cause
from policies.model import SOLE_POOL, Blocks, ReplicaId, RequestId, Tokens
from policies.plan import Reason
from policies.prefix.copies import CopyReason
from tests.migration.shards import shards
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time
R = RequestId("r")
A, B = ReplicaId("a"), ReplicaId("b")
SPEC = plain_spec("r", (1, 2, 3, 4, 5), 8)
MARKS = Fingerprint("model", "cache", 4, shards())


def family(kind: type[MigrationError]) -> Iterator[type[MigrationError]]:
    for heir in kind.__subclasses__():
        yield heir
        yield from family(heir)


def failures() -> list[Exception]:
    """One of each error that a call to a peer, an engine or a transport may raise."""
    kinds = sorted(family(MigrationError), key=lambda kind: kind.__name__)
    kinds = [kind for kind in kinds if kind.__module__ == errors.__name__]
    return [TimeoutError(), RuntimeError("late"), *(kind("late", Cause.UNEXPECTED) for kind in kinds)]


class Activity:
    """Ends as a test has it end: with an error, or with a result. `stubborn`: also after it was cancelled."""

    def __init__(self, command: StrEnum, stubborn: bool) -> None:
        self.command = command
        self.end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.cancelled = False
        self._stubborn = stubborn

    async def run(self) -> Any:
        while not self.end.done():
            try:
                await asyncio.wait([self.end])
            except asyncio.CancelledError:
                self.cancelled = True
                if not self._stubborn:
                    raise
        if isinstance(end := self.end.result(), Exception):
            raise end
        return end


class Calls:
    """Any port: keeps the calls, and answers those in `answers`."""

    def __init__(self, name: str, log: list[object], **answers: Any) -> None:
        self._name = name
        self._log = log
        self._answers = answers

    def __getattr__(self, call: str) -> Any:
        if call in self._answers:
            return self._answers[call]
        return lambda *arguments, **_: self._log.append((self._name, call, *arguments))


class Shell:
    """A shell whose activities are `Activity`, and that has done `calls`."""

    table: ClassVar[Any]
    new: ClassVar[StrEnum]
    final: ClassVar[frozenset[StrEnum]]
    activities: ClassVar[frozenset[StrEnum]]
    """The commands that begin one."""

    def __init__(self, stubborn: bool) -> None:
        self.calls: list[object] = []
        self.begun: list[Activity] = []
        self.started: asyncio.Task[Any] | None = None
        self._stubborn = stubborn

    async def act(self, command: StrEnum, *_: object) -> Any:
        """Carry out the command to begin an activity."""
        self.begun.append(Activity(command, self._stubborn))
        return await self.begun[-1].run()

    @classmethod
    def reported(cls, state: Any, event: Any) -> bool:
        """True for a row whose event only an activity reports."""
        raise NotImplementedError

    @classmethod
    def unheard(cls, state: Any, event: Any) -> bool:
        """True for a row that the shell does not feed, so that a path has no use for it."""
        raise NotImplementedError

    @property
    def session(self) -> Any:
        raise NotImplementedError

    def feed(self, event: Any) -> None:
        """Have an event happen."""
        raise NotImplementedError

    def result(self, event: Any) -> Any:
        """The result of an activity that reports an event."""
        return event

    def lates(self) -> Sequence[Any]:
        """Every end that an activity may have."""
        raise NotImplementedError

    @property
    def seen(self) -> object:
        """All that a late activity may not change."""
        return [*self.session.history], [*self.calls]

    def close(self) -> None:
        """Have it come to an end."""
        raise NotImplementedError


async def settle() -> None:
    """Let everything happen that needs no time."""
    for _ in range(10):
        await asyncio.sleep(0)


class QueueShell(Shell):
    """A shell with one queue of events, from its activities and from the world."""

    events: ClassVar[type[StrEnum]]
    world: ClassVar[frozenset[Any]]
    last: ClassVar[StrEnum]
    """An event of the world with which everything ends."""
    names: ClassVar[dict[Any, str]] = {}

    def __init__(self, stubborn: bool) -> None:
        super().__init__(stubborn)
        self._run = self.make(self.calls)
        for command in self.activities:
            name = self.names.get(command, f"_{command}")
            assert hasattr(self._run, name)
            setattr(self._run, name, partial(self.act, command))

    def make(self, calls: list[object]) -> Any:
        """The shell's own run."""
        raise NotImplementedError

    @classmethod
    def reported(cls, state: Any, event: Any) -> bool:
        return event not in cls.world and event != "begin"

    @classmethod
    def unheard(cls, state: Any, event: Any) -> bool:
        return state in cls.final or (state is cls.new and event != "begin")

    @property
    def session(self) -> Any:
        return self._run._session

    def feed(self, event: Any) -> None:
        if event == "begin":
            self.started = asyncio.create_task(self._run.run())
        else:
            self._run.post(event)

    def lates(self) -> Sequence[Any]:
        return [*sorted(set(self.events) - self.world), *failures()]

    @property
    def seen(self) -> object:
        return super().seen, self._run.record

    def close(self) -> None:
        self._run.post(self.last)


class SourceShell(QueueShell):
    table, new, final, activities = source.TABLE, SourceState.NEW, source.FINAL, source.ACTIVITIES
    events, world, last = SourceEvent, source.WORLD, SourceEvent.CLIENT_GONE

    def make(self, calls: list[object]) -> SourceRun:
        hosted = Hosted(SPEC, 0, "r.0", (7,), True)
        host = Calls("host", calls, snapshot=lambda *_: hosted, mute=lambda *_: hosted, next_hop=lambda _: 1)
        return SourceRun(Order("m", R, PathRequest.AUTO, Reason.MANUAL), *parts(calls, host))


class DonorShell(QueueShell):
    table, new, final, activities = donor.TABLE, DonorState.NEW, donor.DONOR_FINAL, donor.DONOR_ACTIVITIES
    events, world, last = DonorEvent, donor.DONOR_WORLD, DonorEvent.EXPIRED
    names: ClassVar = {DonorCommand.HOLD: "_take_hold"}

    def make(self, calls: list[object]) -> DonorRun:
        order, holds = CopyOrder("m", SPEC, CopyReason.MANUAL), Calls("holds", calls)
        return DonorRun(order, *parts(calls, Calls("host", calls)), cast(PrefixHolds, holds), lease_s=100.0)


def parts(calls: list[object], host: Any) -> tuple[Any, MigrationWorld]:
    """A peer, and a world around a host."""

    async def cancel(migration: str) -> None:
        calls.append(("peer", "cancel", migration))

    async def computed(key: str) -> Tokens:
        raise RuntimeError("an engine's own error")

    peer = Calls("peer", calls, id=B, cancel=cancel)
    blocks: Any = Calls("blocks", calls, fingerprint=MARKS, computed=computed)
    rest: Any = Calls("rest", calls)
    return peer, MigrationWorld(A, SOLE_POOL, host, blocks, rest, rest, MigrationLimits(), now, lambda: 0.0)


class ReaderShell(Shell):
    table, new, final, activities = reader.TABLE, ReaderState.NEW, reader.FINAL, reader.ACTIVITIES

    def __init__(self, stubborn: bool) -> None:
        super().__init__(stubborn)
        self._reader = Reader()

        async def yes(*arguments: object) -> bool:
            self.calls.append(arguments)
            return True

        hosts: Any = Calls("hosts", self.calls, attach=yes, keep=yes, release=yes, awake=(A, B))
        listener: Any = Calls("listener", self.calls)
        journal: Any = Calls("journal", [])
        world = ReaderWorld(hosts, journal, now, patience_s=1.0, max_engine_losses=2)
        self._run = ReaderRun(SPEC, self._reader, listener, world)
        for command in self.activities:
            assert hasattr(self._run, f"_{command}")
            setattr(self._run, f"_{command}", partial(self.act, command))

    async def _start(self) -> None:
        with contextlib.suppress(NotServed):
            await self._run.start()

    async def act(self, command: StrEnum, *arguments: object) -> Any:
        if command is ReaderCommand.PLACE:
            self._reader.submitting(A)
        return await super().act(command, *arguments)

    @classmethod
    def reported(cls, state: Any, event: Any) -> bool:
        results = {ReaderEvent.SUBMITTED, ReaderEvent.NOT_PLACED, ReaderEvent.FOUND, ReaderEvent.NOT_FOUND}
        return event in results or (state is ReaderState.PLACING and event is ReaderEvent.HOST_LOST)

    @classmethod
    def unheard(cls, state: Any, event: Any) -> bool:
        heard = {ReaderEvent.HOST_LOST, ReaderEvent.OUT_OF_STEP, ReaderEvent.OUTDATED, ReaderEvent.CLIENT_LEFT}
        return state in cls.final and event not in heard

    @property
    def session(self) -> Any:
        return self._reader.session

    def feed(self, event: Any) -> None:
        run, hop, index = self._run, self._reader.cursor.hop, self._reader.cursor.next_index
        words: dict[ReaderEvent, StreamEvent] = {
            ReaderEvent.MOVE_ANNOUNCED: Moving(R, hop, hop + 1, B),
            ReaderEvent.MOVED: Moved(R, hop, hop + 1, index, B),
            ReaderEvent.IN_DOUBT: Doubt(R, hop, hop + 1),
            ReaderEvent.INVALID: Lost(R, hop, "not a grammar", invalid=True),
            ReaderEvent.OUTDATED: Delta(R, hop - 1, index, (5,)),
            ReaderEvent.ENDED: Delta(R, hop, index, (5,), "stop"),
        }
        if (word := words.get(event)) is not None:
            run.take(word, self._reader.host)
        elif event is ReaderEvent.BEGIN:
            self.started = asyncio.create_task(self._start())
        elif event is ReaderEvent.HOST_LOST:
            run.host_lost(self._reader.host, "it died")
        elif event is ReaderEvent.OUT_OF_STEP:
            run.reconnected(self._reader.host)
        elif event is ReaderEvent.CLIENT_LEFT:
            run.leave()

    def result(self, event: Any) -> Any:
        made = self._reader
        return {
            ReaderEvent.SUBMITTED: made.submitted,
            ReaderEvent.NOT_PLACED: made.not_placed,
            ReaderEvent.FOUND: made.found,
            ReaderEvent.NOT_FOUND: made.not_found,
            ReaderEvent.HOST_LOST: partial(made.host_lost, "it did not answer"),
        }[event]

    def lates(self) -> Sequence[Any]:
        reports = [self.result(event) for event in ReaderEvent if self.reported(ReaderState.PLACING, event)]
        return [*reports, *failures(), NotServed(Loss(LossKind.UNAVAILABLE, "late"))]

    @property
    def seen(self) -> object:
        return super().seen, self._reader.host, self._reader.cursor, self._reader.resubmissions

    def close(self) -> None:
        self._run.leave()


Path = tuple[Any, ...]


def paths(kind: type[Shell]) -> dict[Any, Path]:
    """The shortest way to every state."""
    found: dict[Any, Path] = {kind.new: ()}
    for state in (new := [kind.new]):
        for event, (following, _) in kind.table[state].items():
            if following not in found and not kind.unheard(state, event):
                found[following] = (*found[state], event)
                new.append(following)
    return found


async def go(kind: type[Shell], path: Path, stubborn: bool = False) -> tuple[Shell, Activity | None]:
    """A shell that has gone a path, and the activity that runs."""
    shell, runs = kind(stubborn), False
    for event in path:
        state = shell.session.state
        if kind.unheard(state, event):
            shell.feed(event)
            await settle()
            assert shell.session.state is state
            continue
        if kind.reported(state, event):
            shell.begun[-1].end.set_result(shell.result(event))
        else:
            shell.feed(event)
        await settle()
        following, commands = kind.table[state][event]
        assert shell.session.history[-1] is event and shell.session.state is following
        ended = following is not state or kind.reported(state, event)
        runs = bool(kind.activities.intersection(commands)) or (runs and not ended)
    running = [activity for activity in shell.begun if not activity.end.done() and not activity.cancelled]
    assert running == (shell.begun[-1:] if runs else []), "the activity that runs"
    return shell, running[0] if running else None


async def finish(shell: Shell) -> None:
    """End a shell with all its tasks, none of which may fail."""
    shell.close()
    await settle()
    for activity in shell.begun:
        if not activity.end.done():
            assert activity.cancelled
            activity.end.set_result(TimeoutError())
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


async def seen_after(kind: type[Shell], path: Path, late: int | None) -> tuple[int, list[object]]:
    """What is seen behind a path and at the end, and the number of ways in which what it has left behind may end.

    That ends in the way number `late`, or (None) as it is ordered to.
    """
    shell, running = await go(kind, path, stubborn=late is not None)
    left, ways = [activity for activity in shell.begun if activity.cancelled], shell.lates()
    for activity in left if late is not None else ():
        activity.end.set_result(ways[late or 0])
    await settle()
    seen = [shell.seen]
    if running is not None:
        # It counts as if there had been no other one.
        state, known = shell.session.state, len(shell.session.history)
        event = next(event for event in kind.table[state] if kind.reported(state, event))
        running.end.set_result(shell.result(event))
        await settle()
        assert shell.session.history[known] is event
    await finish(shell)
    return len(ways) if left else 0, [*seen, shell.seen]


SHELLS = [SourceShell, DonorShell, ReaderShell]
STATES = [pytest.param(kind, state, id=f"{kind.__name__}-{state}") for kind in SHELLS for state in kind.table]


def rows(kind: type[Shell], state: StrEnum) -> Iterator[Path]:
    """The ways through the rows of a state."""
    way = paths(kind)[state]
    return ((*way, event) for event in kind.table[state] if state is not kind.new or not kind.unheard(state, event))


@pytest.mark.parametrize(("kind", "state"), STATES)
async def test_activity_that_ends_late_changes_nothing(kind: type[Shell], state: StrEnum) -> None:
    for path in rows(kind, state):
        ways, ordered = await seen_after(kind, path, None)
        for late in range(0 if kind.unheard(state, path[-1]) else ways):
            assert (await seen_after(kind, path, late))[1] == ordered, (path, late)


@pytest.mark.parametrize(("kind", "state"), STATES)
async def test_activity_that_fails_is_an_event(kind: type[Shell], state: StrEnum) -> None:
    for path in rows(kind, state):
        for failure in failures() if kind.activities.intersection(kind.table[state][path[-1]][1]) else ():
            shell, running = await go(kind, path)
            assert running is not None
            known = len(shell.session.history)
            if running.command is not SourceCommand.ASK_READER or isinstance(failure, (TimeoutError, RequestGone)):
                # Nobody is waited for who could fail otherwise.
                running.end.set_result(failure)
                await settle()
                assert len(shell.session.history) > known, (path, failure)
            now_in = shell.session.state
            waits = now_in not in kind.final and any(kind.reported(now_in, event) for event in kind.table[now_in])
            assert not waits or not shell.begun[-1].end.done(), "something runs"
            await finish(shell)


# --- the target ---------------------------------------------------------------------------------------

LOAD, ADD = TargetCommand.LOAD_ROUND, TargetCommand.ADD_REQUEST
RESULTS = {
    TargetEvent.LOADED: LOAD,
    TargetEvent.LOAD_FAILED: LOAD,
    TargetEvent.ADDED: ADD,
    TargetEvent.ADD_FAILED: ADD,
}
"""The activities that report an event."""
TARGET_FINAL = (TargetState.OWNED, TargetState.CLOSED)
MOST_LOADS = 2


class TargetShell:
    """A target whose loads and additions are `Activity`."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.begun: list[Activity] = []
        self.ended: list[str] = []
        self.callers: list[asyncio.Task[None]] = []
        self.fits = True
        host: Any = Calls("host", self.calls, accept=self._accept, add=partial(self._act, ADD))
        blocks: Any = Calls("blocks", self.calls, fingerprint=MARKS, links=None, load=partial(self._act, LOAD))
        rest: Any = Calls("rest", self.calls, direct=False)
        message = Prepare("m", SPEC, 0, 1, A, PathRequest.TOKENS, MARKS, ())
        self.run = TargetRun(message, host, blocks, rest, rest, 10.0, self.ended.append)

    def _accept(self, message: Prepare) -> Tokens:
        if not self.fits:
            raise Refused("no room", Cause.NO_ROOM)
        return Tokens(5)

    async def _act(self, name: TargetCommand, *_: object) -> None:
        activity = Activity(name, stubborn=True)
        self.begun.append(activity)
        await activity.run()

    def feed(self, event: TargetEvent) -> None:
        """Have an event happen."""
        match event:
            case TargetEvent.PREPARE_FITS | TargetEvent.PREPARE_REFUSED:
                self.fits = event is TargetEvent.PREPARE_FITS
                with contextlib.suppress(Refused):
                    self.run.prepare()
            case TargetEvent.ROUND:
                number = len(self.begun) + 1
                message = CopyRound("m", number, Blocks(number - 1), Blocks(number), 0, ())
                self.callers.append(asyncio.create_task(self.run.load(message)))
            case TargetEvent.ADOPT:
                self.callers.append(asyncio.create_task(self.run.adopt(Adopt("m", 0, ()))))
            case TargetEvent.ATTACHED:
                assert self.run.attach()
            case event if event in RESULTS:
                fails = event in (TargetEvent.LOAD_FAILED, TargetEvent.ADD_FAILED)
                self.unfinished(RESULTS[event])[0].end.set_result(TransferFailed("a test") if fails else None)
            case _:
                self.run.post(event)

    def unfinished(self, *commands: StrEnum) -> list[Activity]:
        return [activity for activity in self.begun if activity.command in commands and not activity.end.done()]


Place = tuple[TargetState, int, int]
"""A state, and the loads and additions that have not ended."""


def target_rows() -> dict[tuple[TargetState, TargetEvent, int, int], tuple[TargetEvent, ...]]:
    """The shortest way through every row, with each number of loads and additions that may not have ended."""
    found: dict[Place, tuple[TargetEvent, ...]] = {(TargetState.NEW, 0, 0): ()}
    rows = {}
    for place in (new := [*found]):
        state, loads, additions = place
        for event, (following, commands) in target.TABLE[state].items():
            under_way = {LOAD: loads, ADD: additions}
            if (name := RESULTS.get(event)) is not None:
                under_way[name] -= 1
            under_way[LOAD] += event is TargetEvent.ROUND
            under_way[ADD] += ADD in commands
            if not 0 <= min(under_way.values()) <= max(under_way.values()) <= MOST_LOADS:
                continue
            rows[(state, event, loads, additions)] = way = (*found[place], event)
            after = (following, under_way[LOAD], under_way[ADD])
            if after not in found:
                found[after] = way
                new.append(after)
    return rows


def test_every_row_of_the_target_is_gone() -> None:
    rows = {(state, event) for state, row in target.TABLE.items() for event in row}
    assert {(state, event) for state, event, *_ in target_rows()} == rows


@pytest.mark.parametrize("state", TargetState)
async def test_late_end_of_a_target_changes_nothing(state: TargetState) -> None:
    for row, way in target_rows().items():
        for late in [None, *failures()] if row[0] is state else ():
            if not await ends_late(way, late):
                break


async def ends_late(way: Sequence[TargetEvent], late: Exception | None) -> bool:
    """Go a way; then everything that was ordered to end, and has not, ends: well, or with an error. True if any has."""
    shell, state = TargetShell(), TargetState.NEW
    for event in way:
        following, _ = target.TABLE[state][event]
        shell.feed(event)
        await settle()
        assert shell.run._session.history[-1] is event and shell.run.state is following, way
        state = following
    loading, adopting = state in (TargetState.RESERVED, TargetState.LOADING), state is TargetState.ADOPTING
    assert all(load.cancelled != loading for load in shell.unfinished(LOAD)), way
    added = [] if adopting else shell.unfinished(ADD)
    left = added + ([] if loading else shell.unfinished(LOAD))
    calls = [*shell.calls, *([("host", "abort", R, 1)] if added and late is None else [])]
    for activity in left:
        activity.end.set_result(late)
    await settle()
    assert shell.run.state is state and shell.calls == calls, (way, late)
    assert shell.ended == (["m"] if state in TARGET_FINAL else [])
    for activity in shell.unfinished(LOAD, ADD):
        activity.end.set_result(TransferFailed("the end"))
    await asyncio.sleep(100.0)
    assert shell.run.state in TARGET_FINAL or state is TargetState.NEW
    held = [call[1] for call in shell.calls if isinstance(call, tuple) and call[1] in ("reserve", "release")]
    assert held == (["reserve", "release"] if TargetEvent.PREPARE_FITS in way else [])
    answers = await asyncio.gather(*shell.callers, return_exceptions=True)
    assert not any(isinstance(answer, IllegalEvent) for answer in answers) or isinstance(late, IllegalEvent)
    return bool(left)
