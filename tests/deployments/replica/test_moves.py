"""The migrations of a replica, message by message. Whole moves: tests/migration."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from deployments.engine.tokens import expected
from deployments.replica.moves import Moves
from migration.protocol.errors import Refused, RequestGone, TransferFailed
from migration.protocol.messages import Adopt, Chunk, CopyRound, PathRequest, Prepare, Shard, SlotRef, Tail
from migration.protocol.ports import Slot
from migration.protocol.record import Outcome
from migration.protocol.request import RequestSpec
from migration.run.source import Order
from migration.transport.shared import SharedSlots
from policies.causes import Cause
from policies.model import Blocks, Bytes, ReplicaId, RequestId
from policies.plan import Path, Reason
from tests.deployments.engine.quick_engine import prompt_of
from tests.migration.world import Pair, make_pair, spec

A, B = ReplicaId("a"), ReplicaId("b")

pytestmark = pytest.mark.virtual_time


class Copying(SharedSlots):
    """Takes a slot at the target too, as a transport between nodes does; what it "receives" is `arrived`."""

    direct = shares_slots = False

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        assert slot is not None
        return SlotRef(slot.segment, slot.offset, 0)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = make_pair(lease_s=5.0)
    yield made
    for reader in made.readers:
        reader.cancel()


def prepare(pair: Pair, id: str = "m", request: RequestSpec | None = None, outputs: tuple[int, ...] = ()) -> Prepare:
    wanted = request or spec()
    return Prepare(id, wanted, 0, 1, A, PathRequest.AUTO, pair.a.engine.fingerprint, outputs)


def chunk(first: int, last: int, round: int = 1) -> Chunk:
    return Chunk("m", round, Blocks(first), Blocks(last), (Shard(SlotRef("", 0, 0), Bytes(80)),), ("a>b/0#1:0",))


async def adopted(pair: Pair, id: str = "m") -> Moves:
    """Replica b's migrations, with one request that it runs provisionally."""
    moves = pair.b.moves
    moves.prepare(prepare(pair, id))
    await moves.adopt(Adopt(id, 0, ()))
    return moves


def failing(*_: object) -> None:
    raise RuntimeError("a test")


def runs(pair: Pair, on: str = "b") -> list[str]:
    return [load.id for load in pair.replica(on).host.loads()]


# --- leading ------------------------------------------------------------------------------------------


async def test_request_does_not_move_to_where_it_is(pair: Pair) -> None:
    pair.submit(spec())
    with pytest.raises(Refused, match="on that replica already"):
        pair.move(RequestId("r"), "a", "a")


async def test_request_that_is_not_here_does_not_move(pair: Pair) -> None:
    with pytest.raises(RequestGone):
        pair.move(RequestId("r"))


async def test_refused_order_leaves_no_record(pair: Pair) -> None:
    pair.submit(spec())
    with pytest.raises(Refused):
        pair.move(RequestId("r"), "a", "a")
    assert pair.a.moves.records() == [] and pair.a.moves.pending == 0


async def test_order_is_answered_with_the_record_as_it_stands(pair: Pair) -> None:
    pair.submit(spec())
    record = pair.a.moves.start(Order("m", RequestId("r"), PathRequest.TOKENS, Reason.DRAIN), B)
    assert (record.state, record.outcome, record.path, record.reason) == ("new", None, Path.TOKENS, "drain")
    assert (record.source, record.target, record.label) == (A, B, "label-r")


async def test_records_are_newest_first_and_running_ones_before_those(pair: Pair) -> None:
    names = ("one", "two", "three", "four")
    for name in names:
        pair.submit(spec(name, tokens=600))
    for name in names[:2]:
        pair.a.moves.start(Order(f"m-{name}", RequestId(name), PathRequest.TOKENS, Reason.DRAIN), B)
        await pair.settled()
    pair.b.faults["prepare"] = "silent"
    for name in names[2:]:
        pair.a.moves.start(Order(f"m-{name}", RequestId(name), PathRequest.TOKENS, Reason.DRAIN), B)
    assert [r.id for r in pair.a.moves.records()] == ["m-four", "m-three", "m-two", "m-one"]


async def test_every_migration_is_recorded_once(pair: Pair) -> None:
    recorded = list[str]()
    pair.a.moves._on_record = lambda record: recorded.append(f"{record.id} {record.outcome}")
    pair.submit(spec())
    pair.a.moves.start(Order("m", RequestId("r"), PathRequest.TOKENS, Reason.DRAIN), B)
    await pair.settled()
    assert recorded == ["m committed"]


async def test_move_ends_as_its_target_leaves(pair: Pair) -> None:
    pair.submit(spec(tokens=600))
    pair.b.faults["prepare"] = "silent"
    pair.move(RequestId("r"))
    pair.a.moves.outgoing.follow([A, B])
    await asyncio.sleep(0.01)
    assert pair.a.moves.pending == 1
    pair.a.moves.outgoing.follow([A])
    record = await pair.settled()
    assert (record.outcome, record.error) == (Outcome.ABORTED, "the target died or is stopping")
    assert runs(pair, "a") == ["r"]


async def test_client_that_leaves_ends_the_move_and_the_request(pair: Pair) -> None:
    pair.submit(spec(tokens=600))
    pair.b.faults["prepare"] = "silent"
    pair.move(RequestId("r"))
    await asyncio.sleep(0)
    pair.a.moves.release(RequestId("r"), None)
    record = await pair.settled()
    assert (record.outcome, record.error) == (Outcome.ABORTED, "the client left")
    assert runs(pair, "a") == []


async def test_stopping_replica_still_moves_its_requests_away(pair: Pair) -> None:
    cursor = pair.submit(spec(tokens=600))
    await pair.until(cursor, 2)
    pair.a.moves.stop()
    pair.move(RequestId("r"))
    assert (await pair.settled()).outcome is Outcome.COMMITTED
    with pytest.raises(Refused, match="stopping"):
        pair.a.moves.submit(spec("new"), 0, ())


async def test_tokens_that_rode_on_a_lost_chunk_are_handed_over_again(pair: Pair) -> None:
    cursor = pair.submit(spec())
    await pair.until(cursor, 2)
    gather = pair.a.engine.gather

    async def slow(*args: Any) -> Any:
        await pair.until(cursor, len(cursor.tokens) + 5)
        return await gather(*args)

    pair.a.engine.gather = slow  # type: ignore[assignment,method-assign]
    pair.b.faults["receive"] = TransferFailed("broken")
    pair.move(RequestId("r"))
    record = await pair.settled()
    assert (record.outcome, record.path) == (Outcome.COMMITTED, Path.TOKENS)
    assert await pair.finished(cursor) == expected(prompt_of(spec()), 60)


# --- following ----------------------------------------------------------------------------------------


async def test_room_is_kept_for_the_context_until_the_migration_ends(pair: Pair) -> None:
    pair.b.moves.prepare(prepare(pair, outputs=(1, 2)))
    assert pair.b.host.reserved_tokens == 42 and pair.b.moves.pending == 1
    pair.b.moves.cancel("m")
    assert pair.b.idle


async def test_refused_migration_holds_nothing(pair: Pair) -> None:
    pair.b.room = 10
    with pytest.raises(Refused, match="no room for 40 tokens"):
        pair.b.moves.prepare(prepare(pair))
    assert pair.b.idle


@pytest.mark.parametrize("call", ["accept", "reserve", "present", "expect"])
async def test_preparation_that_fails_holds_nothing(pair: Pair, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the replica can be drained: nothing would end the migration later."""
    at = pair.b.host if hasattr(pair.b.host, call) else pair.b.engine
    monkeypatch.setattr(at, call, failing)
    with pytest.raises(RuntimeError):
        pair.b.moves.prepare(prepare(pair))
    assert pair.b.idle
    monkeypatch.undo()
    pair.b.moves.prepare(prepare(pair, "another"))


@pytest.mark.parametrize(("path", "call"), [(PathRequest.KV, "discard"), (PathRequest.TOKENS, "abort")])
async def test_end_of_a_migration_that_fails_holds_nothing(
    pair: Pair, path: PathRequest, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.b.moves.prepare(replace(prepare(pair), path=path))
    if path is PathRequest.TOKENS:
        await pair.b.moves.adopt(Adopt("m", 0, ()))
    monkeypatch.setattr(pair.b.engine, call, failing)
    with pytest.raises(RuntimeError):
        pair.b.moves.cancel("m")
    assert (pair.b.moves.pending, pair.b.host.reserved_tokens, runs(pair)) == (0, 0, [])


async def test_migration_is_prepared_once(pair: Pair) -> None:
    pair.b.moves.prepare(prepare(pair))
    with pytest.raises(Refused, match="under way here already"):
        pair.b.moves.prepare(prepare(pair))
    assert pair.b.host.reserved_tokens == 40


async def test_migration_that_has_ended_is_not_prepared_again(pair: Pair) -> None:
    """The source has its answer, and may run the request."""
    moves = await adopted(pair)
    moves.cancel("m")
    with pytest.raises(Refused, match="has ended here"):
        moves.prepare(prepare(pair))
    assert pair.b.idle


async def test_unknown_migrations_are_harmless(pair: Pair) -> None:
    moves = pair.b.moves
    moves.keep(RequestId("unknown"), 0, 1)
    moves.cancel("unknown")
    moves.release(RequestId("unknown"), None)
    assert not moves.attach(RequestId("unknown"), 0, 0)
    for call in (moves.adopt(Adopt("unknown", 0, ())), moves.receive(replace(chunk(0, 1), migration="unknown"))):
        with pytest.raises(Refused, match="no longer has this migration"):
            await call
    assert pair.b.idle


async def test_adopted_request_is_owned_once_its_reader_attaches(pair: Pair) -> None:
    moves = await adopted(pair)
    assert pair.b.host.reserved_tokens == 40
    assert moves.attach(RequestId("r"), 1, 0)
    assert (moves.pending, pair.b.host.reserved_tokens, runs(pair)) == (0, 0, ["r"])
    moves.cancel("m")
    assert runs(pair) == ["r"]


async def test_repeated_adopt_is_answered_as_the_first_one(pair: Pair) -> None:
    """A refusal would have the source go on, beside the request that runs here."""
    moves = await adopted(pair)
    outputs = pair.b.host.snapshot(RequestId("r")).outputs
    await moves.adopt(Adopt("m", 0, ()))
    assert moves.attach(RequestId("r"), 1, 0)
    await moves.adopt(Adopt("m", 0, ()))
    assert pair.b.host.snapshot(RequestId("r")).outputs[: len(outputs)] == outputs and runs(pair) == ["r"]
    moves.release(RequestId("r"), None)
    await moves.adopt(Adopt("m", 0, ()))
    assert pair.b.idle


@pytest.mark.parametrize("error", [None, Refused("no room", Cause.NO_ROOM)])
async def test_adopt_that_is_repeated_before_the_answer_waits_for_it(
    pair: Pair, error: Refused | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, calls = asyncio.Event(), list[int]()

    async def add(_spec: RequestSpec, hop: int, *_: object) -> None:
        calls.append(hop)
        await added.wait()
        if error is not None:
            raise error

    monkeypatch.setattr(pair.b.host, "add", add)
    pair.b.moves.prepare(prepare(pair))
    answers = [asyncio.create_task(pair.b.moves.adopt(Adopt("m", 0, ()))) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not any(answer.done() for answer in answers)
    added.set()
    got = await asyncio.gather(*answers, return_exceptions=True)
    assert calls == [1] and [type(each) for each in got] == [type(error)] * 2


async def test_adopt_goes_on_without_its_caller(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may have the request already: a refusal of what was repeated would have the source run it, too."""
    add, proceed = pair.b.host.add, asyncio.Event()

    async def slow(request: RequestSpec, hop: int, outputs: tuple[int, ...], tail: Tail | None) -> None:
        await add(request, hop, outputs, tail)
        await proceed.wait()

    monkeypatch.setattr(pair.b.host, "add", slow)
    pair.b.moves.prepare(prepare(pair))
    first = asyncio.create_task(pair.b.moves.adopt(Adopt("m", 0, ())))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    repeated = asyncio.create_task(pair.b.moves.adopt(Adopt("m", 0, ())))
    await asyncio.sleep(0.01)
    assert not repeated.done() and runs(pair) == ["r"]
    proceed.set()
    await repeated
    assert pair.b.moves.attach(RequestId("r"), 1, 0) and runs(pair) == ["r"]


async def test_adopt_that_is_repeated_behind_the_end_is_refused(pair: Pair) -> None:
    moves = await adopted(pair)
    moves.cancel("m")
    with pytest.raises(Refused, match="no longer has this migration"):
        await moves.adopt(Adopt("m", 0, ()))
    assert pair.b.idle


async def test_reader_of_another_hop_confirms_nothing(pair: Pair) -> None:
    moves = await adopted(pair)
    assert not moves.attach(RequestId("r"), 0, 0)
    assert moves.pending == 1


async def test_cancelled_migration_aborts_the_adopted_request(pair: Pair) -> None:
    moves = await adopted(pair)
    moves.cancel("m")
    await asyncio.sleep(0)
    assert runs(pair) == [] and moves.pending == 0


async def test_unconfirmed_migration_ends_with_its_lease() -> None:
    pair = make_pair(lease_s=0.02)
    moves = await adopted(pair)
    async with asyncio.timeout(5):
        while moves.pending:
            await asyncio.sleep(0.005)
    assert runs(pair) == [] and pair.b.host.reserved_tokens == 0


async def test_client_that_leaves_ends_a_provisional_request(pair: Pair) -> None:
    moves = await adopted(pair)
    moves.release(RequestId("r"), None)
    assert runs(pair) == [] and moves.pending == 0


async def test_request_that_moves_on_before_its_reader_attaches_leaves_nothing(pair: Pair) -> None:
    pair.attach = False
    cursor = pair.submit(spec(tokens=600))
    await pair.until(cursor, 2)
    for source, target in ("ab", "ba"):
        pair.move(RequestId("r"), source, target)
        assert (await pair.settled(source)).outcome is Outcome.COMMITTED
    assert pair.b.idle and runs(pair, "a") == ["r"]
    assert pair.a.moves.attach(RequestId("r"), 2, 0)


async def test_adopt_that_lacks_tokens_is_refused_and_gives_the_room_back(pair: Pair) -> None:
    pair.b.moves.prepare(prepare(pair, outputs=(1, 2)))
    with pytest.raises(Refused, match="output tokens 2 to 3 are missing"):
        await pair.b.moves.adopt(Adopt("m", 3, (4,)))
    assert pair.b.idle


async def test_adopted_request_continues_after_all_tokens(pair: Pair) -> None:
    pair.b.moves.prepare(prepare(pair, outputs=(1, 2)))
    await pair.b.moves.adopt(Adopt("m", 1, (2, 3)))
    snapshot = pair.b.host.snapshot(RequestId("r"))
    assert (snapshot.hop, snapshot.outputs[:3]) == (1, (1, 2, 3))


async def test_stopping_replica_ends_incoming_migrations_and_keeps_arrived_requests(pair: Pair) -> None:
    moves = await adopted(pair)
    moves.prepare(prepare(pair, "later", spec("other")))
    moves.stop()
    assert moves.pending == 1 and runs(pair) == ["r"]
    with pytest.raises(Refused, match="stopping"):
        moves.prepare(prepare(pair, "last", spec("third")))


async def loading(pair: Pair) -> list[asyncio.Task[None]]:
    """A round under way at replica b, one of whose chunks has failed, and a chunk of a round that has not begun."""

    async def fail(*_: object) -> None:
        raise TransferFailed("broken")

    pair.b.engine.put = fail  # type: ignore[assignment,method-assign]
    moves = pair.b.moves
    moves.prepare(prepare(pair))
    load = asyncio.create_task(moves.load(CopyRound("m", 1, Blocks(0), Blocks(8), 0, ())))
    later = asyncio.create_task(moves.receive(chunk(8, 12, round=2)))
    with pytest.raises(TransferFailed, match="broken"):
        await moves.receive(chunk(0, 4))
    assert not load.done() and not later.done() and pair.b.slots.in_use == 1
    return [load, later]


@pytest.mark.parametrize("end", ["cancel", "adopt"])
async def test_round_and_chunks_that_wait_end_with_the_copying(end: str) -> None:
    pair = make_pair(transport=Copying(), lease_s=5.0)
    loads = await loading(pair)
    if end == "cancel":
        pair.b.moves.cancel("m")
    else:
        await pair.b.moves.adopt(Adopt("m", 0, ()))
    await asyncio.wait(loads, timeout=1)
    assert all(isinstance(load.exception(), TransferFailed) for load in loads)
    assert pair.b.slots.in_use == 0


class Loads:
    """In the place of an engine's `load`: the loads that have begun, and ended; each waits for `filled`."""

    def __init__(self) -> None:
        self.filled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun: list[str] = []
        self.ended: list[str] = []

    async def __call__(
        self, load: str, spec: RequestSpec, outputs: tuple[int, ...], first: Blocks, last: Blocks
    ) -> None:
        self.begun.append(f"{load} [{first}, {last}) of {spec.prompt_tokens + len(outputs)}")
        try:
            await asyncio.shield(self.filled)
        finally:
            self.ended.append(load)


FIRST_ROUND = CopyRound("m", 1, Blocks(0), Blocks(8), 0, ())


def prepared_loading(pair: Pair, path: PathRequest = PathRequest.AUTO) -> Loads:
    """Replica b's loads after a preparation that has the first round begin."""
    pair.b.engine.load = loads = Loads()  # type: ignore[method-assign]
    pair.b.moves.prepare(replace(prepare(pair), path=path, first_round=FIRST_ROUND))
    return loads


async def test_target_begins_the_first_round_once_before_its_message(pair: Pair) -> None:
    loads = prepared_loading(pair)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert loads.begun == ["m.1 [0, 8) of 40"]
    round = asyncio.create_task(pair.b.moves.load(FIRST_ROUND))
    await asyncio.sleep(0.01)
    assert not round.done()
    loads.filled.set_result(None)
    await round
    assert len(loads.begun) == 1
    second = CopyRound("m", 2, Blocks(8), Blocks(9), 0, ())
    await pair.b.moves.load(second)
    assert loads.begun[1:] == ["m.2 [8, 9) of 40"]


@pytest.mark.parametrize("end", ["cancel", "adopt", "lease"])
async def test_first_round_without_a_message_ends_with_the_copying(end: str) -> None:
    pair = make_pair(lease_s=0.02)
    loads = prepared_loading(pair)
    await asyncio.sleep(0.01)
    match end:
        case "cancel":
            pair.b.moves.cancel("m")
        case "adopt":
            await pair.b.moves.adopt(Adopt("m", 0, ()))
    await asyncio.sleep(0.02)
    assert loads.ended == ["m.1"]


async def test_first_round_that_failed_before_its_message_fails_it(pair: Pair) -> None:
    loads = prepared_loading(pair)
    loads.filled.set_exception(TransferFailed("the engine is full"))
    await asyncio.sleep(0.01)
    with pytest.raises(TransferFailed, match="the engine is full"):
        await pair.b.moves.load(FIRST_ROUND)


@pytest.mark.parametrize("why", ["tokens are asked for", "the caches differ"])
async def test_request_that_comes_by_tokens_begins_no_round(why: str) -> None:
    pair = make_pair(cache_b="other" if why == "the caches differ" else "fake-cache")
    loads = prepared_loading(pair, PathRequest.TOKENS if why == "tokens are asked for" else PathRequest.AUTO)
    await asyncio.sleep(0.01)
    assert loads.begun == []


async def test_chunk_may_overtake_its_round() -> None:
    pair = make_pair(transport=Copying(), lease_s=5.0)
    moves = pair.b.moves
    moves.prepare(prepare(pair))
    put: list[tuple[str, int]] = []

    async def note(load: str, first: int, *_: object) -> None:
        put.append((load, first))

    pair.b.engine.put = note  # type: ignore[assignment,method-assign]
    early = asyncio.create_task(moves.receive(chunk(0, 4)))
    await asyncio.sleep(0.01)
    assert put == []
    load = asyncio.create_task(moves.load(CopyRound("m", 1, Blocks(0), Blocks(4), 0, ())))
    await early
    assert put == [("m.1", 0)]
    moves.cancel("m")
    with pytest.raises(TransferFailed, match="ended while blocks were loaded"):
        await load


@pytest.mark.parametrize("when", ["while its chunk waits", "before its chunk comes"])
async def test_chunk_that_its_load_did_not_need_is_dropped(when: str) -> None:
    """The cache held its blocks: a request that comes back, for example."""
    pair = make_pair(transport=Copying(), lease_s=5.0)
    moves, cached = pair.b.moves, asyncio.Event()

    async def held(*_: object) -> None:
        await cached.wait()

    async def ended(*_: object) -> None:
        await cached.wait()
        await asyncio.sleep(0.001)  # the worker's answer
        raise TransferFailed("the load has ended")

    pair.b.engine.load = held  # type: ignore[assignment,method-assign]
    pair.b.engine.put = ended  # type: ignore[assignment,method-assign]
    moves.prepare(prepare(pair))
    load = asyncio.create_task(moves.load(CopyRound("m", 1, Blocks(0), Blocks(4), 0, ())))
    if when == "before its chunk comes":
        cached.set()
        await load
    late = asyncio.create_task(moves.receive(chunk(0, 4)))
    await asyncio.sleep(0.01)
    cached.set()
    await asyncio.gather(load, late)
    assert pair.b.slots.in_use == 0


async def test_chunk_of_a_round_that_failed_fails() -> None:
    pair = make_pair(transport=Copying(), lease_s=5.0)

    async def fail(*_: object) -> None:
        raise TransferFailed("no room")

    pair.b.engine.load = fail  # type: ignore[assignment,method-assign]
    pair.b.moves.prepare(prepare(pair))
    with pytest.raises(TransferFailed, match="no room"):
        await pair.b.moves.load(CopyRound("m", 1, Blocks(0), Blocks(4), 0, ()))
    with pytest.raises(TransferFailed, match="the round has ended"):
        await pair.b.moves.receive(chunk(0, 4))


async def test_chunk_after_the_copying_is_refused(pair: Pair) -> None:
    moves = await adopted(pair)
    with pytest.raises(Refused, match="provisional here"):
        await moves.receive(chunk(0, 4))
