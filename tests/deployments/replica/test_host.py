"""The requests on one replica, with an engine that yields a token at each order of a test."""

import asyncio
import os
from dataclasses import dataclass, field, replace

import pytest
from msgspec import structs

from deployments.engine.port import EngineDead, EngineProcesses, EngineStats, InvalidRequest, RequestFailed, Tie
from deployments.engine.tokens import pack
from deployments.replica.host import RequestHost, Run, queued_keys
from deployments.replica.outbox import Outboxes
from migration.protocol.core_messages import Adapter, Prefilled
from migration.protocol.errors import Refused, RequestGone, Stopping
from migration.protocol.messages import Fingerprint, PathRequest, Prepare, Tail
from migration.protocol.ports import HALTED, Generated, OutputSink
from migration.protocol.request import Delta, Extras, IngressId, Lost, Moving, RequestSpec, StreamEvent, Trait
from policies.causes import Cause
from policies.model import Blocks, Phase, ReplicaId, RequestId, Tokens
from policies.precedence import Precedence
from tests.deployments.engine.quick_engine import QuickEngine, prompt_of, tie
from tests.migration.shards import shards
from tests.migration.world import spec

R = RequestId("r")
HERE = spec().ingress


class StepEngine(QuickEngine):
    """Makes the steps that a test orders."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, tuple[int, ...]]] = []
        self.tails: list[Tail | None] = []
        self.discarded: list[str] = []
        self.ended: list[str] = []
        self.halting: set[str] = set()
        self.waiting = 0
        self._sinks: dict[str, OutputSink] = {}

    def add(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None
    ) -> None:
        self.started.append((key, outputs))
        self.tails.append(tail)
        self._sinks[key] = sink

    def abort(self, key: str) -> None:
        if self._sinks.pop(key, None):
            self.ended.append(key)

    def halt(self, key: str, left: int) -> None:
        self.halting.add(key)
        self.left = left

    def discard(self, tail: str) -> None:
        self.discarded.append(tail)

    def stats(self) -> EngineStats:
        return replace(super().stats(), waiting=self.waiting)

    async def step(self, *tokens: int, finish: str | None = None, key: str = "r.0") -> None:
        await self.give(Generated(tokens, finish), key)

    async def give(self, step: Generated | Exception, key: str = "r.0") -> None:
        """A run that was aborted gets nothing."""
        sink = self._sinks.get(key)
        if isinstance(step, Exception) or step.finish:
            self._sinks.pop(key, None)
        if sink is not None:
            sink.fail(step) if isinstance(step, Exception) else sink.take(step)
        await settle()


async def settle() -> None:
    """Let everything happen that can."""
    for _ in range(10):
        await asyncio.sleep(0)


@dataclass
class Desk:
    """A host, its engine, and its events: `published` to the ingress, `ended` to the migrations."""

    engine: StepEngine
    host: RequestHost
    boxes: Outboxes
    ended: list[tuple[RequestId, bool]] = field(default_factory=list)

    def published(self, ingress: IngressId = HERE) -> list[StreamEvent]:
        """The events since the last call."""
        box = self.boxes._box(ingress)
        events, box._events = box._events, []
        return events


def make_desk(room: int = 1_000) -> Desk:
    engine, boxes = StepEngine(), Outboxes(lambda: 0.0)
    desk = Desk(engine, RequestHost(engine, boxes, lambda: 0.0, lambda: room), boxes)
    desk.host.on_end = lambda request, by_client: desk.ended.append((request, by_client))
    return desk


async def running(tokens: int = 2, hop: int = 0, **knobs: int) -> Desk:
    """A desk whose request r has published that many tokens: 0, 1, ..."""
    desk = make_desk(**knobs)
    desk.host.submit(spec(), hop, ())
    await settle()
    for token in range(tokens):
        await desk.engine.step(token, key=f"r.{hop}")
    desk.published()
    return desk


def prepare(id: str = "new", prompt: int = 40, outputs: tuple[int, ...] = ()) -> Prepare:
    marks = Fingerprint("fake", "fake-cache", 4, shards(cell_bytes=16))
    return Prepare("m", spec(id, prompt), 0, 1, ReplicaId("a"), PathRequest.AUTO, marks, outputs)


def delta(index: int, *tokens: int, finish: str | None = None, hop: int = 0) -> Delta:
    return Delta(R, hop, index, tokens, finish)


# --- submit -------------------------------------------------------------------------------------------


async def test_tokens_are_published_as_they_come() -> None:
    desk = await running(0)
    await desk.engine.step(7)
    await desk.engine.step(8, 9)
    assert desk.published() == [delta(0, 7), delta(1, 8, 9)]


async def test_request_continues_after_the_tokens_it_has() -> None:
    desk = make_desk()
    desk.host.submit(spec(), 3, (1, 2))
    await desk.engine.step(7, key="r.3")
    assert desk.engine.started == [("r.3", (1, 2))]
    assert desk.published() == [delta(2, 7, hop=3)]


def broken_add(*_: object) -> None:
    raise AssertionError("a test")


async def test_request_that_the_engine_cannot_add_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = make_desk()
    monkeypatch.setattr(desk.engine, "add", broken_add)
    with pytest.raises(AssertionError):
        desk.host.submit(spec(), 0, ())
    assert not list(desk.host.loads()) and desk.published() == []
    monkeypatch.undo()
    desk.host.submit(spec(), 0, ())


@pytest.mark.parametrize("fetching", [True, False], ids=["behind a copy", "again"])
async def test_request_that_the_engine_cannot_continue_is_lost(fetching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = make_desk()
    desk.host.submit(spec(), 0, (), fetching=fetching)
    monkeypatch.setattr(desk.engine, "add", broken_add)
    if fetching:
        desk.host.begin(R, 0)
    else:
        desk.host.mute(R, 0)
        desk.host.halt(R, 0)
        desk.host.unmute(R, 0)
    assert desk.published() == [Lost(R, 0, "the engine failed: a test")]
    assert not list(desk.host.loads()) and desk.ended == [(R, False)]


async def test_stopping_replica_takes_no_request() -> None:
    desk = make_desk()
    desk.host.stopping = True
    with pytest.raises(Refused, match="stopping"):
        desk.host.submit(spec(), 0, ())


async def test_sleeping_replica_takes_no_request_so_that_its_reader_asks_again() -> None:
    desk = make_desk()
    desk.host.asleep = True
    with pytest.raises(Stopping) as refused:
        desk.host.submit(spec(), 0, ())
    assert refused.value.cause is Cause.ASLEEP
    desk.host.asleep = False
    desk.host.submit(spec(), 0, ())


@pytest.mark.parametrize(("prompt", "fits"), [(1024 - 60, True), (1024 - 59, False)])
async def test_request_must_fit_the_model(prompt: int, fits: bool) -> None:
    desk = make_desk()
    if fits:
        desk.host.submit(spec(prompt=prompt), 0, ())
    else:
        with pytest.raises(Refused, match="exceed the model's context"):
            desk.host.submit(spec(prompt=prompt), 0, ())
    assert len(list(desk.host.loads())) == fits


@pytest.mark.parametrize("hop", [0, 1], ids=["an older hop", "the same hop"])
async def test_request_that_runs_here_is_refused_under(hop: int) -> None:
    desk = await running(hop=1)
    with pytest.raises(Refused, match="under hop 1"):
        desk.host.submit(spec(), hop, ())


async def test_newer_hop_replaces_the_run() -> None:
    desk = await running()
    desk.host.submit(spec(), 2, (0, 1))
    await settle()
    assert desk.engine.ended == ["r.0"] and desk.host.snapshot(R).key == "r.2"
    await desk.engine.step(7, key="r.2")
    assert desk.published() == [delta(2, 7, hop=2)]


# --- ends ---------------------------------------------------------------------------------------------


async def test_end_of_the_output_ends_the_run() -> None:
    desk = await running(2)
    await desk.engine.step(7, finish="stop")
    assert desk.published() == [delta(2, 7, finish="stop")]
    assert desk.ended == [(R, False)] and not list(desk.host.loads())


@pytest.mark.parametrize(
    ("step", "event"),
    [
        (EngineDead("gone"), Lost(R, 0, "the engine died: gone", died=True)),
        (RequestFailed("odd"), Lost(R, 0, "the engine failed: odd")),
    ],
    ids=["dies", "fails"],
)
async def test_reader_learns_of_a_loss_when_the_engine(step: Exception, event: Lost) -> None:
    desk = await running()
    await desk.engine.give(step)
    assert desk.published() == [event]
    assert desk.ended == [(R, False)] and not list(desk.host.loads())


async def test_a_replica_whose_engine_has_died_takes_nothing() -> None:
    desk = await running()
    desk.engine.shutdown()
    desk.host.stopping = True
    desk.host.stopping = False  # It is called back.
    for take in (lambda: desk.host.submit(spec("other"), 0, ()), lambda: desk.host.accept(prepare("moved"))):
        with pytest.raises(Stopping, match="the engine died: it was shut down"):
            take()


async def test_a_replica_whose_engine_is_being_killed_takes_nothing_from_others() -> None:
    desk = await running()
    worker = await asyncio.create_subprocess_exec("sleep", "60")
    desk.engine.processes = EngineProcesses(os.getpid(), (worker.pid,))
    desk.host.submit(spec("fits"), 1, ())
    worker.kill()
    for take in (lambda: desk.host.submit(spec("other"), 1, ()), lambda: desk.host.accept(prepare("moved"))):
        with pytest.raises(Stopping, match="the engine is ending"):
            take()
    await worker.wait()


async def test_reader_learns_that_no_engine_would_take_the_request() -> None:
    desk = await running(0)
    await desk.engine.give(InvalidRequest("no grammar"))
    assert desk.published() == [Lost(R, 0, "no grammar", invalid=True)]


async def test_abort_is_for_one_hop_only_and_silent() -> None:
    desk = await running(hop=1)
    desk.host.abort(R, 0)
    assert desk.host.snapshot(R).hop == 1
    desk.host.abort(R, 1)
    await settle()
    assert desk.engine.ended == ["r.1"] and desk.published() == [] and desk.ended == []


async def test_client_that_leaves_ends_the_request_under_any_hop() -> None:
    desk = await running(hop=4)
    desk.host.client_gone(R)
    desk.host.client_gone(R)
    await settle()
    assert desk.engine.ended == ["r.4"] and desk.ended == [(R, True)] and desk.published() == []


async def test_dropped_request_ends_without_an_event() -> None:
    desk = await running()
    desk.host.drop(R, 0)
    await settle()
    assert desk.engine.ended == ["r.0"] and desk.ended == [] and desk.published() == []
    with pytest.raises(RequestGone):
        desk.host.drop(R, 0)


async def test_ingress_that_is_gone_takes_its_requests_along() -> None:
    desk = await running()
    desk.host.submit(replace(spec("other"), ingress=IngressId("elsewhere")), 0, ())
    desk.host.submit(spec("second"), 0, ())
    assert desk.host.forget_ingress(HERE) == 2
    assert [load.id for load in desk.host.loads()] == ["other"]
    assert desk.ended == [(R, True), ("second", True)]
    assert desk.host.forget_ingress(HERE) == 0


# --- resume -------------------------------------------------------------------------------------------


async def pooling(count: int, rest: bytes) -> Desk:
    """A desk whose `count` pooled requests have ended, each with that rest."""
    desk = make_desk()
    for number in range(count):
        desk.host.submit(replace(spec(f"p{number}", tokens=1), max_tokens=0, traits=frozenset({Trait.POOLED})), 0, ())
        await desk.engine.give(Generated((), "stop", rest), f"p{number}.0")
    return desk


async def test_a_pooled_output_is_published_and_can_be_read_again() -> None:
    desk = await pooling(1, b"vector")
    ended = Delta(RequestId("p0"), 0, 0, (), "stop", ((0, b"vector"),))
    assert desk.published() == [ended] and desk.ended == [(RequestId("p0"), False)]
    assert desk.host.resume(RequestId("p0"), 0, 0) and desk.published() == [ended]


async def test_the_outputs_that_are_kept_are_bounded_by_their_size() -> None:
    desk = await pooling(5, bytes(20 << 20))
    kept = [number for number in range(5) if desk.host.resume(RequestId(f"p{number}"), 0, 0)]
    assert kept == [2, 3, 4]
    assert desk.host._ended_bytes == 60 << 20


async def test_an_output_beyond_the_bound_is_published_all_the_same() -> None:
    desk = await pooling(1, bytes(65 << 20))
    assert len(desk.published()) == 1
    assert not desk.host.resume(RequestId("p0"), 0, 0) and desk.host._ended_bytes == 0


@pytest.mark.parametrize(("index", "again"), [(0, (0, 1, 2)), (2, (2,))])
async def test_reader_gets_the_published_output_again(index: int, again: tuple[int, ...]) -> None:
    desk = await running(3)
    assert desk.host.resume(R, 0, index)
    assert desk.published() == [delta(index, *again)]


async def test_reader_that_misses_nothing_gets_nothing() -> None:
    desk = await running(3)
    assert desk.host.resume(R, 0, 3)
    assert desk.published() == []


async def test_end_can_be_asked_for_after_the_run_has_ended() -> None:
    desk = await running(1)
    await desk.engine.step(1, finish="length")
    desk.published()
    assert desk.host.resume(R, 0, 1) and desk.host.resume(R, 0, 2)
    assert desk.published() == [delta(1, 1, finish="length"), delta(2, finish="length")]


async def test_what_is_kept_of_a_run_that_has_ended_has_no_body() -> None:
    desk = await running(1)
    (run,) = desk.host._runs.values()
    assert run.spec.body
    await desk.engine.step(1, finish="length")
    assert desk.host._ended[R] is run and not run.spec.body


async def test_withheld_output_is_not_published_again() -> None:
    desk = await running(1)
    desk.host.mute(R, 0)
    await desk.engine.step(1, finish="length")
    assert desk.host.resume(R, 0, 0)
    assert desk.published() == [delta(0, 0)]


@pytest.mark.parametrize(("request_id", "hop"), [("r", 1), ("unknown", 0)], ids=["another hop", "an unknown request"])
async def test_nothing_is_resumed_for(request_id: str, hop: int) -> None:
    desk = await running()
    assert not desk.host.resume(RequestId(request_id), hop, 0)
    assert desk.published() == []


@pytest.mark.parametrize("finish", [None, "stop"], ids=["in the middle", "with its end withheld"])
async def test_request_that_was_handed_over_is_not_resumed_here(finish: str | None) -> None:
    desk = await running()
    desk.host.mute(R, 0)
    await desk.engine.step(2, finish=finish)
    desk.host.drop(R, 0)
    assert not desk.host.resume(R, 0, 0)


async def test_request_that_was_lost_is_not_resumed() -> None:
    desk = await running()
    await desk.engine.give(EngineDead("gone"))
    assert not desk.host.resume(R, 0, 0)


# --- extras -----------------------------------------------------------------------------------------


async def scoring(resumed: tuple[int, ...] = ()) -> Desk:
    """A desk whose request r, with those tokens from elsewhere, got 7 in one step, then 8 and 9, both with a rest."""
    desk = make_desk()
    desk.host.submit(spec(logprobs=0), 0, resumed)
    await desk.engine.give(Generated((7,), None, b"7"))
    await desk.engine.give(Generated((8, 9), None, b"8 9"))
    return desk


async def test_extras_are_published_with_their_tokens() -> None:
    desk = await scoring(resumed=(5, 6))
    assert desk.published() == [
        structs.replace(delta(2, 7), extras=((2, b"7"),)),
        structs.replace(delta(3, 8, 9), extras=((3, b"8 9"),)),
    ]


async def test_extras_are_withheld_with_their_tokens() -> None:
    desk = await scoring()
    desk.published()
    desk.host.mute(R, 0)
    await desk.engine.give(Generated((10,), None, b"10"))
    assert desk.host.resume(R, 0, 1)
    assert desk.published() == [structs.replace(delta(1, 8, 9), extras=((1, b"8 9"),))]
    desk.host.unmute(R, 0)
    assert desk.published() == [structs.replace(delta(3, 10), extras=((3, b"10"),))]


@pytest.mark.parametrize(("index", "again"), [(5, ()), (3, ((3, b"8 9"),)), (2, ((2, b"7"), (3, b"8 9")))])
async def test_extras_are_given_again_with_their_tokens(index: int, again: Extras) -> None:
    desk = await scoring(resumed=(5, 6))
    desk.published()
    await desk.engine.step(10)
    desk.published()
    assert desk.host.resume(R, 0, index)
    (delta,) = desk.published()
    assert isinstance(delta, Delta) and (delta.index, delta.extras) == (index, again)


async def test_the_rest_of_an_end_without_tokens_is_published_with_it() -> None:
    desk = await scoring()
    desk.published()
    await desk.engine.give(Generated((), "stop", b"why"))
    assert desk.published() == [structs.replace(delta(3, finish="stop"), extras=((3, b"why"),))]
    assert desk.host.resume(R, 0, 3)
    assert desk.published() == [structs.replace(delta(3, finish="stop"), extras=((3, b"why"),))]


async def test_tokens_from_elsewhere_cannot_be_given_with_their_logprobs() -> None:
    """Their reader gets them by submitting anew; without logprobs it gets them here."""
    desk = await scoring(resumed=(5, 6))
    desk.published()
    assert not desk.host.resume(R, 0, 1) and desk.published() == []
    plain = make_desk()
    plain.host.submit(spec(), 0, (5, 6))
    assert plain.host.resume(R, 0, 1) and plain.published() == [delta(1, 6)]


# --- the source of a migration ------------------------------------------------------------------------


async def test_muted_request_is_frozen_at_its_published_output() -> None:
    desk = await running(2)
    frozen = desk.host.mute(R, 0)
    await desk.engine.step(2)
    assert desk.published() == []
    assert desk.host.snapshot(R) == frozen and frozen.outputs == (0, 1)


async def test_unmuted_request_publishes_the_withheld_output_once_and_goes_on() -> None:
    desk = await running(1)
    desk.host.mute(R, 0)
    await desk.engine.step(1)
    await desk.engine.step(2)
    desk.host.unmute(R, 0)
    desk.host.unmute(R, 0)
    await desk.engine.step(3)
    assert desk.published() == [delta(1, 1, 2), delta(3, 3)]


async def test_unmute_without_withheld_output_publishes_nothing() -> None:
    desk = await running()
    desk.host.mute(R, 0)
    desk.host.unmute(R, 0)
    desk.host.unmute(RequestId("unknown"), 0)
    assert desk.published() == []


async def test_end_while_muted_reaches_the_migration_and_is_published_on_unmute() -> None:
    desk = await running(1)
    desk.host.mute(R, 0)
    await desk.engine.step(1, finish="stop")
    assert desk.ended == [(R, False)] and desk.published() == []
    desk.host.unmute(R, 0)
    assert desk.published() == [delta(1, 1, finish="stop")] and not list(desk.host.loads())


@pytest.mark.parametrize("ends", [False, True], ids=["a token", "the end"])
async def test_migration_can_wait_for_the_next_output(ends: bool) -> None:
    desk = await running(2)
    waiting = [asyncio.create_task(desk.host.next_output(R, 0)) for _ in range(2)]
    await settle()
    assert not any(task.done() for task in waiting)
    if ends:
        desk.host.client_gone(R)
    else:
        await desk.engine.step(2)
    await asyncio.gather(*waiting)


async def halting() -> tuple[Desk, "asyncio.Task[None]"]:
    """A desk whose request r is to be halted behind its third token, and the wait for that."""
    desk = await running(2)
    waiting = asyncio.create_task(desk.host.halt_behind_token(R, 0))
    await settle()
    assert desk.engine.halting == {"r.0"} and not waiting.done()
    return desk, waiting


async def test_request_is_halted_behind_a_token_by_its_engine() -> None:
    desk, waiting = await halting()
    await desk.engine.step(2, finish=HALTED)
    await waiting
    assert desk.published() == [delta(2, 2)] and desk.ended == []
    frozen = desk.host.mute(R, 0)
    desk.host.halt(R, 0)
    await settle()
    assert frozen.outputs == (0, 1, 2) and [key for key, _ in desk.engine.started] == ["r.0"]
    desk.host.drop(R, 0)
    assert not list(desk.host.loads())


@pytest.mark.parametrize("when", ["before the token", "behind it", "frozen"])
async def test_request_that_was_to_be_halted_goes_on_if_it_stays(when: str) -> None:
    desk, waiting = await halting()
    if when == "before the token":
        desk.host.unmute(R, 0)
    await desk.engine.step(2, finish=HALTED)
    if when == "frozen":
        desk.host.mute(R, 0)
    if when != "before the token":
        desk.host.unmute(R, 0)
    await waiting
    await settle()
    assert desk.engine.started[1:] == [("r.0.1", (0, 1, 2))]
    await desk.engine.step(3, key="r.0.1")
    await desk.engine.step(4, finish="length", key="r.0.1")
    assert desk.published() == [delta(2, 2), delta(3, 3), delta(4, 4, finish="length")] and desk.ended == [(R, False)]


@pytest.mark.parametrize("end", ["its end", "its client"])
async def test_wait_for_the_token_ends_with_the_request(end: str) -> None:
    desk, waiting = await halting()
    if end == "its end":
        await desk.engine.step(2, finish="stop")
    else:
        desk.host.client_gone(R)
    await waiting
    assert not list(desk.host.loads())


async def halted(withheld: int = 0) -> Desk:
    """A desk whose request r has published two tokens, was muted, and halted after `withheld` more."""
    desk = await running(2)
    desk.host.mute(R, 0)
    for token in range(withheld):
        await desk.engine.step(2 + token)
    desk.host.halt(R, 0)
    await settle()
    return desk


async def test_halted_request_is_here_and_not_in_the_engine() -> None:
    desk = await halted()
    await desk.engine.step(2)
    assert desk.engine.ended == ["r.0"] and desk.host.snapshot(R).outputs == (0, 1)
    assert desk.published() == [] and [load.phase for load in desk.host.loads()] == [Phase.MOVING]


@pytest.mark.parametrize("withheld", [0, 2])
async def test_halted_request_is_continued_after_all_its_tokens_when_it_is_unmuted(withheld: int) -> None:
    desk = await halted(withheld)
    desk.host.unmute(R, 0)
    desk.host.unmute(R, 0)
    await settle()
    outputs = tuple(range(2 + withheld))
    assert desk.engine.started[1:] == [("r.0.1", outputs)]
    await desk.engine.step(9, key="r.0.1")
    assert [token for event in desk.published() for token in event.tokens] == [*outputs[2:], 9]  # type: ignore[union-attr]


async def test_halted_request_that_has_ended_is_not_continued() -> None:
    desk = await running(1)
    desk.host.mute(R, 0)
    await desk.engine.step(1, finish="stop")
    desk.host.halt(R, 0)
    desk.host.unmute(R, 0)
    await settle()
    assert desk.published() == [delta(1, 1, finish="stop")]
    assert len(desk.engine.started) == 1 and not list(desk.host.loads())


async def test_halted_request_can_be_halted_again() -> None:
    desk = await halted()
    desk.host.unmute(R, 0)
    await settle()
    desk.host.mute(R, 0)
    desk.host.halt(R, 0)
    await settle()
    assert desk.engine.ended == ["r.0", "r.0.1"]
    desk.host.unmute(R, 0)
    await settle()
    assert desk.engine.started[-1] == ("r.0.2", (0, 1))


async def test_halted_request_that_is_dropped_ends_without_an_event() -> None:
    desk = await halted()
    desk.host.drop(R, 0)
    assert desk.published() == [] and not list(desk.host.loads())


async def test_every_attempt_to_move_gets_a_hop_of_its_own() -> None:
    desk = await running(hop=2)
    assert [desk.host.next_hop(R), desk.host.next_hop(R)] == [3, 4]


async def test_announcements_follow_the_tokens_before_them() -> None:
    desk = await running(0)
    await desk.engine.step(0)
    moving = Moving(R, 0, 1, "b")
    desk.host.announce(moving)
    assert desk.published() == [delta(0, 0), moving]


@pytest.mark.parametrize(
    ("call", "hop"),
    [
        ("snapshot", ()),
        ("snapshot", (0,)),
        ("next_hop", ()),
        ("mute", (0,)),
        ("halt", (0,)),
        ("drop", (0,)),
        ("why_immovable", ()),
    ],
)
async def test_request_that_is_not_here_is_gone(call: str, hop: tuple[int, ...]) -> None:
    with pytest.raises(RequestGone, match="request r is not here"):
        getattr(make_desk().host, call)(R, *hop)


@pytest.mark.parametrize("call", ["snapshot", "mute", "halt", "drop"])
async def test_run_under_another_hop_is_another_run(call: str) -> None:
    """A migration that slept does nothing to what its reader has submitted here since."""
    desk = make_desk()
    desk.host.submit(spec(), 0, ())
    desk.host.submit(spec(), 7, ())
    with pytest.raises(RequestGone, match="request r is not here"):
        getattr(desk.host, call)(R, 0)
    desk.host.unmute(R, 0)
    assert desk.host.snapshot(R).hop == 7


async def test_request_that_the_engine_cannot_continue_stays() -> None:
    desk = await running()
    assert desk.host.why_immovable(R) is None
    tie(desk.engine)
    assert desk.host.why_immovable(R) is Tie.SEEDED
    assert [load.immovable for load in desk.host.loads()] == [Tie.SEEDED]


async def test_a_pooled_request_stays_whatever_its_engine_is() -> None:
    desk = make_desk()
    desk.host.submit(replace(spec(), max_tokens=0, traits=frozenset({Trait.POOLED})), 0, ())
    assert desk.host.why_immovable(R) is Tie.POOLED
    assert [load.immovable for load in desk.host.loads()] == [Tie.POOLED]


async def test_request_that_the_engine_cannot_continue_may_begin_there() -> None:
    desk = make_desk()
    tie(desk.engine)
    desk.host.submit(spec(), 0, ())
    with pytest.raises(Refused, match=r"exactly \(seeded sampling"):
        desk.host.submit(spec("other"), 0, (1,))


# --- the target of a migration ------------------------------------------------------------------------


def refusal(host: RequestHost, message: Prepare) -> tuple[Cause, str]:
    """Why a request cannot come."""
    with pytest.raises(Refused) as caught:
        host.accept(message)
    return caught.value.cause, str(caught.value)


async def test_room_is_that_of_the_engine_less_promised_room() -> None:
    host = make_desk(room=100).host
    host.accept(prepare(prompt=90, outputs=(1,) * 10))
    host.reserve("m", Tokens(60))
    assert host.reserved_tokens == 60
    host.accept(prepare(prompt=40))
    assert refusal(host, prepare(prompt=41)) == (Cause.NO_ROOM, "no room for 41 tokens")
    host.release("m")
    host.release("m")
    host.accept(prepare(prompt=100))
    assert host.reserved_tokens == 0


async def sharing(cached: int = 10, room: int = 12) -> Desk:
    """A desk with little room, whose request r decodes behind a prompt of ten blocks, of which so many are cached."""
    desk = await running(1, room=room)
    desk.engine._batch.take_in([*prompt_of(spec())], 0, pack(prompt_of(spec())[: 4 * cached]))
    return desk


def like_r(prompt: int) -> Prepare:
    """The migration of a request whose prompt begins like that of r, or is its beginning."""
    return replace(prepare(), spec=replace(spec("r", prompt), id=RequestId("new")))


@pytest.mark.parametrize(
    ("prompt", "cached", "needed"),
    [(51, 10, 11), (52, 10, 12), (20, 10, 4), (39, 7, 11)],
    ids=["all of r's blocks", "and all of the room", "not the block that its last token ends", "those in the cache"],
)
async def test_blocks_of_running_requests_need_no_room(prompt: int, cached: int, needed: int) -> None:
    desk = await sharing(cached)
    assert desk.host.accept(like_r(prompt)) == needed
    desk.host.reserve("m", Tokens(needed))
    assert refusal(desk.host, prepare(prompt=13 - needed)) == (Cause.NO_ROOM, f"no room for {13 - needed} tokens")


async def test_where_there_is_enough_room_it_is_kept_for_the_whole_context() -> None:
    desk = await sharing(room=60)
    assert desk.host.accept(like_r(51)) == 51
    desk.host.reserve("m", Tokens(51))
    assert refusal(desk.host, like_r(51)) == (Cause.NO_ROOM, "no room for 11 tokens")


@pytest.mark.parametrize("state", ["preempted", "halted", "ended"])
async def test_blocks_that_no_running_request_has_need_room(state: str) -> None:
    """They are in the prefix cache yet, and free: whoever needs memory takes them."""
    desk = await sharing()
    match state:
        case "preempted":
            desk.engine.waiting = 1
        case "halted":
            desk.host.mute(R, 0)
            desk.host.halt(R, 0)
        case "ended":
            await desk.engine.step(1, finish="stop")
    assert refusal(desk.host, like_r(40)) == (Cause.NO_ROOM, "no room for 40 tokens")


async def test_request_that_runs_here_cannot_come() -> None:
    desk = await running()
    assert refusal(desk.host, prepare("r")) == (Cause.ALREADY_THERE, "the request runs here already")


async def test_nothing_comes_to_a_replica_that_stops() -> None:
    host = make_desk().host
    host.stopping = True
    assert refusal(host, prepare()) == (Cause.STOPPING, "the replica is stopping")
    with pytest.raises(Refused, match="stopping"):
        await host.add(spec(), 1, (), None)


async def test_tail_of_an_adopted_request_is_given_to_its_first_run_only() -> None:
    desk, tail = make_desk(), Tail("m.tail", Blocks(1), 6)
    await desk.host.add(spec(), 1, (7,), tail)
    await settle()
    desk.host.mute(R, 1)
    desk.host.halt(R, 1)
    desk.host.unmute(R, 1)
    await settle()
    assert desk.engine.tails == [tail, None]


# --- loads --------------------------------------------------------------------------------------------


async def test_load_has_the_phase_of_a_request() -> None:
    desk = await running(0)
    assert [load.phase for load in desk.host.loads()] == [Phase.PREFILL]
    await desk.engine.step(0)
    (load,) = desk.host.loads()
    assert (load.phase, load.tokens, load.hop, load.label) == (Phase.DECODE, 41, 0, "label-r")
    desk.host.mute(R, 0)
    assert [load.phase for load in desk.host.loads()] == [Phase.MOVING]


async def test_load_has_the_adapter_of_a_request() -> None:
    desk = await running()
    desk.host.submit(replace(spec("sql"), adapter=Adapter("sql", 7, "/sql")), 0, ())
    assert [load.adapter for load in desk.host.loads()] == [None, 7]


@pytest.mark.parametrize(
    ("waiting", "queued"),
    [(0, ""), (1, "d"), (2, "cd"), (3, "bcd"), (4, "abcd"), (9, "abcd")],
)
def test_the_youngest_are_queued_those_without_a_token_first(waiting: int, queued: str) -> None:
    """a and b have tokens, c and d, which came later, have none."""
    runs = [Run(spec(id), 0, [1] if id in "ab" else [], 0.0, 0) for id in "abcd"]
    assert queued_keys(runs, waiting) == {f"{id}.0" for id in queued}


def test_by_priority_the_last_in_line_are_queued() -> None:
    priorities = {"a": 30, "b": 10, "c": 40, "d": 20}
    runs = [
        Run(replace(spec(id), priority=priority), 0, [1] if id in "ab" else [], 0.0, 0)
        for id, priority in priorities.items()
    ]
    found = [queued_keys(runs, waiting, by_priority=True) for waiting in (1, 2, 3)]
    assert found == [{"c.0"}, {"c.0", "d.0"}, {"a.0", "c.0", "d.0"}]


def test_a_run_that_was_continued_decodes_from_its_first_new_token_on() -> None:
    run = Run(spec(), 1, [1, 2], 0.0, 2, resumed_at=2)
    assert not run.decodes
    run.outputs.append(3)
    assert run.decodes


class Clock:
    """Time that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_silence_is_measured_while_requests_run() -> None:
    clock = Clock()
    engine, boxes = StepEngine(), Outboxes(clock)
    host = RequestHost(engine, boxes, clock, lambda: 1_000)
    clock.now = 50.0
    assert host.silent_s() == 0.0
    host.submit(spec(), 0, ())
    await settle()
    clock.now = 53.0
    assert host.silent_s() == 3.0
    await engine.step(0)
    assert host.silent_s() == 0.0
    clock.now = 60.0
    assert host.silent_s() == 7.0
    host.excuse_silence()
    assert host.silent_s() == 0.0


async def test_halted_requests_are_not_expected_to_get_tokens() -> None:
    clock = Clock()
    engine, boxes = StepEngine(), Outboxes(clock)
    host = RequestHost(engine, boxes, clock, lambda: 1_000)
    host.submit(spec(), 0, ())
    host.mute(R, 0)
    host.halt(R, 0)
    clock.now = 60.0
    assert host.silent_s() == 0.0
    host.unmute(R, 0)
    assert host.silent_s() == 0.0
    clock.now = 61.0
    assert host.silent_s() == 1.0


async def test_an_engine_that_is_given_up_loses_every_request_and_takes_none() -> None:
    desk = await running(2)
    desk.host.lose_all("it hangs")
    assert desk.published() == [Lost(R, 0, "it hangs", died=True)]
    assert desk.ended == [(R, False)]
    assert not list(desk.host.loads())
    with pytest.raises(Refused, match="stopping"):
        desk.host.submit(spec("other"), 0, ())


async def turns(*turns: float) -> Desk:
    """A desk with requests of 40 tokens and one of output, of these turns, which are their names, too."""
    desk = make_desk()
    for turn in turns:
        each = spec(f"{turn:g}", 40)
        desk.host.submit(replace(each, precedence=Precedence(arrived_s=turn)), 0, ())
        await desk.engine.step(7, key=f"{turn:g}.0")
    desk.published()
    return desk


async def test_requests_of_the_last_turns_are_given_back_until_enough_blocks_are_free() -> None:
    desk = await turns(2, 3, 1)
    # 41 tokens are 11 blocks of 4.
    assert desk.host.give_back(Blocks(12), 4) == 2
    assert desk.published() == [Lost(RequestId(each), 0, "the replica's KV pool shrinks") for each in ("3", "2")], (
        "their readers continue them elsewhere"
    )
    assert [load.id for load in desk.host.loads()] == ["1"]
    assert desk.engine.ended == ["3.0", "2.0"]
    assert desk.host.give_back(Blocks(0), 4) == 0


@pytest.mark.parametrize("why", ["it moves", "it waits without blocks", "no engine could continue it exactly"])
async def test_a_request_is_not_given_back_if(why: str) -> None:
    desk = await turns(1)
    match why:
        case "it moves":
            desk.host.mute(RequestId("1"), 0)
        case "it waits without blocks":
            desk.engine.waiting = 1
        case _:
            tie(desk.engine)
    assert desk.host.give_back(Blocks(12), 4) == 0 and not desk.published()


# --- prompts and the cache --------------------------------------------------------------------------------


async def test_a_prompt_counts_once_on_the_replica_on_which_its_request_began() -> None:
    desk = await running(0)
    await desk.engine.give(Generated((7,), prefilled=Prefilled(40, 32)))
    await desk.engine.give(Generated((8,)))
    assert desk.host.prompts == Prefilled(40, 32)
    # It is halted, and continues here: the engine prefills prompt and output.
    desk.host.mute(R, 0)
    desk.host.halt(R, 0)
    desk.host.unmute(R, 0)
    await desk.engine.give(Generated((9,), prefilled=Prefilled(42, 40)), key="r.0.1")
    # Another one came from elsewhere.
    desk.host.submit(spec("moved"), 1, (1, 2))
    await desk.engine.give(Generated((3,), prefilled=Prefilled(42, 40)), key="moved.1")
    assert desk.host.prompts == Prefilled(40, 32)


async def test_blocks_that_are_not_full_are_counted() -> None:
    desk = await running(3)  # 43 tokens
    assert (desk.host.partial_blocks(4), desk.host.partial_blocks(43)) == (1, 0)
    desk.host.mute(R, 0)
    desk.host.halt(R, 0)
    assert desk.host.partial_blocks(4) == 0


async def test_a_fetching_request_that_the_engine_does_not_take_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = make_desk()
    desk.host.submit(spec(), 0, (), fetching=True)

    def refuse(*_: object) -> None:
        raise ValueError("no such parameter")

    monkeypatch.setattr(desk.engine, "add", refuse)
    desk.host.begin(R, 0)
    assert desk.published() == [Lost(R, 0, "the engine failed: no such parameter")]
    assert not list(desk.host.loads()) and desk.ended == [(R, False)]
