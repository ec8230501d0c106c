"""One migration between two replicas with paced engines: paths, faults at every step, ends at every moment."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deployments.engine.paced import PacedEngine
from deployments.engine.tokens import expected
from migration.kv.staging import HEADER, HostSegment
from migration.protocol.continuing import plain_spec
from migration.protocol.errors import BlocksGone, PeerLost, Refused, TransferFailed
from migration.protocol.layouts import Resharding
from migration.protocol.messages import Adopt, Chunk, CopyRound, PathRequest, Prepare, Shard, SlotRef, Tail
from migration.protocol.ports import Slot, Transport
from migration.protocol.record import CopyOutcome, Outcome
from migration.protocol.request import Doubt, Moving, RequestSpec, Trait
from migration.protocol.rounds import CopyLimits
from migration.run.donor import CopyOrder
from migration.run.world import MigrationLimits
from migration.transport.shared import SharedSlots
from policies.causes import Cause
from policies.model import Blocks, Bytes, Phase, ReplicaId, RequestId
from policies.prefix.copies import CopyReason
from policies.prefix.tree import HeldPrefix
from tests.deployments.engine.quick_engine import blocks_of, preempt, prompt_of, tie
from tests.migration.world import INGRESS, LIMITS, Pair, make_pair, spec

pytestmark = pytest.mark.virtual_time
KV, TOKENS, AUTO = PathRequest.KV, PathRequest.TOKENS, PathRequest.AUTO


@pytest.mark.parametrize("path", [KV, TOKENS, AUTO])
@pytest.mark.parametrize("after", [0, 1, 3, 4, 5, 30, 58])
async def test_output_of_a_moved_request_is_that_of_an_unmoved_one(path: PathRequest, after: int) -> None:
    pair, request = make_pair(), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, after)
    pair.move(request.id, path=path)
    record = await pair.settled()
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    assert record.outcome is Outcome.COMMITTED or record.error == "the request ended by itself"
    await pair.both_idle()


def compiling(pair: Pair, seconds: float, accepts: bool = True) -> None:
    """Have b compile a grammar for that long, and continue it or not."""

    async def check_grammar(spec: RequestSpec, outputs: tuple[int, ...]) -> None:
        assert Trait.STRUCTURED in spec.traits
        await asyncio.sleep(seconds)
        if not accepts:
            raise Refused("the engine cannot continue the grammar", Cause.GRAMMAR)

    pair.b.engine.check_grammar = check_grammar  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("compiles_s", "accepts", "error"),
    [
        (0.7, True, None),
        (0.0, False, "the engine cannot continue the grammar"),
        (0.9, True, "the grammar was not ready within 0.8 s"),
    ],
    ids=["committed", "refused", "late"],
)
async def test_a_request_stays_where_it_is_if_the_target_cannot_continue_its_grammar(
    compiles_s: float, accepts: bool, error: str | None
) -> None:
    pair = make_pair(limits=replace(LIMITS, adopt_s=0.8))
    compiling(pair, compiles_s, accepts)
    request = spec(tokens=900, structured_outputs={"regex": "a"})
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    assert (record.outcome, record.error) == (Outcome.REFUSED if error else Outcome.COMMITTED, error)
    assert record.cause is (Cause.GRAMMAR if error else None)
    assert await pair.finished(cursor) == expected(prompt_of(request), 900)
    assert not any(isinstance(event, Moving) for event in pair.events) or error is None
    await pair.both_idle()


async def test_a_request_that_ends_while_the_target_tries_its_grammar_leaves_no_room_kept() -> None:
    pair = make_pair()
    compiling(pair, 0.4)
    request = spec(structured_outputs={"regex": "a"})
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    assert (record.outcome, record.cause) == (Outcome.ABORTED, Cause.REQUEST_ENDED)
    await asyncio.sleep(0.5)
    assert pair.b.idle, "before any lease has run out"


@pytest.mark.parametrize("workers", [1, 2])
async def test_kv_blocks_come_from_outside(workers: int) -> None:
    pair, request = make_pair(workers=workers), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    assert record.path == "kv" and record.blocks >= 11 and record.bytes > record.blocks * 16
    assert pair.b.engine.blocks_loaded == record.blocks
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


@pytest.mark.parametrize("after", [2, 9, 30])
@pytest.mark.parametrize("common", [4, 39, 40, 41])
async def test_only_blocks_that_the_target_lacks_are_sent(common: int, after: int) -> None:
    pair, records = make_pair(), []
    ranges: list[tuple[int, int]] = []
    gather, begin_load = pair.a.engine.gather, pair.b.engine.load

    async def gathering(key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        ranges.append((first, last))
        return await gather(key, first, last, slots)

    async def loading(load: str, spec: RequestSpec, outputs: tuple[int, ...], first: Blocks, last: Blocks) -> None:
        ranges.append((first, last))
        await begin_load(load, spec, outputs, first, last)

    for name, own in (("r", range(100, 120)), ("s", range(200, 240))):
        prompt = (*range(5, 5 + common), *own)
        request = plain_spec(name, prompt, 60, ingress=INGRESS)
        cursor = pair.submit(request)
        await pair.until(cursor, after)
        pair.move(request.id)
        records.append(await pair.settled())
        assert await pair.finished(cursor) == expected(prompt_of(request), 60)
        await pair.both_idle()
        pair.a.engine.gather, pair.b.engine.load = gathering, loading  # type: ignore[method-assign]
    first, second = records
    assert all((r.outcome, r.path, r.error) == (Outcome.COMMITTED, "kv", None) and r.copy_s < 0.5 for r in records)
    assert (first.present, second.present) == (0, common // 4)
    assert second.present + second.blocks >= (common + 40 + after) // 4
    assert ranges and all(common // 4 <= begin < end for begin, end in ranges)


async def test_a_move_to_a_target_that_has_all_sends_the_tail_only() -> None:
    pair = make_pair()
    for name, sent in (("r", 12), ("s", 2)):
        request = plain_spec(name, tuple(range(5, 45)), 60, ingress=INGRESS)
        cursor = pair.submit(request)
        await pair.until(cursor, 9)
        pair.move(request.id)
        record = await pair.settled()
        assert await pair.finished(cursor) == expected(prompt_of(request), 60)
        assert (record.outcome, record.path) == (Outcome.COMMITTED, "kv")
        assert record.present + record.blocks >= 12 and record.blocks <= sent + 1
        await pair.both_idle()


@pytest.mark.parametrize("claimed", [1, 5, 11, 30])
async def test_blocks_that_the_target_has_lost_meanwhile_are_computed(claimed: int) -> None:
    pair, request = make_pair(), spec()
    pair.b.engine.present = lambda spec, outputs: HeldPrefix(claimed)  # type: ignore[method-assign]
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    assert record.outcome is Outcome.COMMITTED and record.present == min(claimed, 12)
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


@pytest.mark.parametrize(("path", "blocks"), [(KV, 12), (AUTO, 12), (TOKENS, None)])
async def test_first_round_is_announced_with_the_preparation(path: PathRequest, blocks: int | None) -> None:
    pair, request = make_pair(), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    prepared: list[Prepare] = []
    prepare = pair.b.moves.prepare
    pair.b.moves.prepare = lambda message: prepared.append(message) or prepare(message)  # type: ignore
    pair.move(request.id, path=path)
    await pair.settled()
    announced = prepared[0].first_round
    assert (announced and (announced.number, announced.first, announced.last)) == (blocks and (1, 0, blocks))


@pytest.mark.parametrize(
    ("workers", "workers_b", "rank"), [(1, 1, 0), (2, 2, 0), (2, 2, 1), (2, 1, 0), (2, 1, 1), (1, 2, 0)]
)
async def test_corrupted_blocks_of_any_worker_change_the_output(workers: int, workers_b: int, rank: int) -> None:
    pair, request = make_pair(workers=workers, workers_b=workers_b), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    gather = pair.a.engine.gather

    async def corrupt(key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        shards = await gather(key, first, last, slots)
        slots[rank].memory[HEADER : HEADER + 4] = b"\1\0\0\0"
        return shards

    pair.a.engine.gather = corrupt  # type: ignore[method-assign]
    pair.move(request.id)
    assert (await pair.settled()).outcome is Outcome.COMMITTED
    assert await pair.finished(cursor) != expected(prompt_of(request), 60)


def chunks_received(pair: Pair) -> list[int]:
    """The first blocks of the chunks of rounds that come to b by messages, as they come."""
    received: list[int] = []
    receive = pair.b.moves.receive

    async def noted(message: Chunk) -> None:
        if message.tail is None:
            received.append(message.first)
        await receive(message)

    pair.b.moves.receive = noted  # type: ignore[method-assign]
    return received


class FakeLinks:
    """The links of an engine's workers to those of `other`; faults are knobs."""

    def __init__(self, own: PacedEngine, other: PacedEngine, address: str) -> None:
        self.addresses: tuple[str, ...] = (address,)
        self.reachable = True
        self.fault: Exception | None = None
        self.pace_s = 0.0
        self.sent: list[tuple[int, int]] = []
        self.held: list[Tail] = []
        self._own, self._other = own, other

    async def reach(self, addresses: Sequence[str]) -> bool:
        return self.reachable and len(addresses) == 1

    async def send(
        self,
        key: str,
        first: Blocks,
        last: Blocks,
        slots: Sequence[Sequence[Slot]],
        blocks: Blocks,
        load: str,
        addresses: Sequence[str],
        cuts: Resharding | None = None,
    ) -> Bytes:
        if self.fault is not None:
            raise self.fault
        size = 0
        for low in range(first, last, blocks):
            await asyncio.sleep(self.pace_s)
            for _ in range(10):
                # A copier keeps a chunk until its load is admitted, or over.
                if self._other._slots.missing(load) is None:
                    await asyncio.sleep(0)
            high = Blocks(min(low + blocks, last))
            shards = await self._own.gather(key, Blocks(low), high, slots[-1])
            sent = shards if cuts is None else [shards[rank] for rank in cuts.senders]
            await self._other.put(load, Blocks(low), high, [shard.slot for shard in sent], cuts)
            self.sent.append((low, high))
            size += sum(shard.size for shard in shards)
        return Bytes(size)

    async def hold(
        self, tail: Tail, slots: Sequence[SlotRef], addresses: Sequence[str], cuts: Resharding | None = None
    ) -> None:
        await self._other.hold(tail, slots, cuts)
        self.held.append(tail)

    async def missing(self, load: str) -> int | None:
        return self._own._slots.missing(load)


def linked(transport: Transport | None = None, lease_s: float = 1.0, step_s: float = 0.001) -> tuple[Pair, FakeLinks]:
    """A pair whose workers exchange blocks by themselves, and those from a to b."""
    pair = make_pair(transport=transport, lease_s=lease_s, step_s=step_s)
    pair.a.engine.links = there = FakeLinks(pair.a.engine, pair.b.engine, "a")
    pair.b.engine.links = FakeLinks(pair.b.engine, pair.a.engine, "b")
    return pair, there


async def test_workers_of_one_node_exchange_blocks_without_messages() -> None:
    (pair, links), request = linked(), spec(prompt=100)
    received, cursor = chunks_received(pair), pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    assert record.path == "kv" and received == []
    assert 0 < links.sent[-1][1] <= record.blocks
    assert record.bytes >= sum(HEADER + (high - low) * 16 for low, high in links.sent)
    assert pair.b.engine.blocks_loaded >= record.blocks
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


@pytest.mark.parametrize("direct", [False, True], ids=["by messages", "between the workers"])
async def test_engine_stops_behind_the_token_at_which_the_request_is_frozen(direct: bool) -> None:
    """No step of the source computes a token that nobody reads."""
    (pair, links), request = linked(), spec(prompt=100)
    links.reachable = direct
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    halted: list[tuple[bool, str]] = []
    halt = pair.a.host.halt

    def note(request_id: RequestId, hop: int) -> None:
        halted.append((pair.a.host._runs[request_id].halted, request_id))
        halt(request_id, hop)

    pair.a.host.halt = note  # type: ignore[method-assign,assignment]
    pair.move(request.id)
    record = await pair.settled()
    assert record.path == "kv" and halted == [(True, request.id)]
    assert bool(links.held) is direct
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


@pytest.mark.parametrize("direct", [False, True], ids=["by messages", "between the workers"])
async def test_request_goes_on_if_its_target_is_lost_once_it_was_halted(direct: bool) -> None:
    (pair, links), request = linked(), spec(prompt=100)
    links.reachable = direct
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    halting = pair.a.host.halt_behind_token

    async def lose(request_id: RequestId, hop: int) -> None:
        await halting(request_id, hop)
        pair.a.moves.outgoing.follow([pair.a.id])
        await asyncio.sleep(0.01)

    pair.a.host.halt_behind_token = lose  # type: ignore[method-assign,assignment]
    pair.move(request.id)
    assert (await pair.settled()).outcome is Outcome.ABORTED
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


async def test_tail_that_the_other_workers_do_not_take_turns_the_move_into_one_by_tokens() -> None:
    (pair, links), request = linked(), spec(prompt=100)

    async def refuse(*_: Any) -> None:
        raise TransferFailed("the tail is not expected")

    links.hold = refuse  # type: ignore[method-assign, assignment]
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    assert record.path == "tokens" and "kv failed: the tail is not expected" in record.reason
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


@pytest.mark.parametrize("late", ["the confirmation", "the failure"])
async def test_request_is_not_handed_over_before_its_blocks_are_confirmed(late: str) -> None:
    (pair, links), request = linked(), spec(prompt=100)
    load, confirmed = pair.b.moves.load, asyncio.Event()

    async def slowly(message: CopyRound) -> None:
        await load(message)
        await asyncio.sleep(0.01)
        confirmed.set()
        if late == "the failure":
            raise TransferFailed("late")

    pair.b.moves.load = slowly  # type: ignore[method-assign]
    adopt, ready = pair.b.moves.adopt, list[bool]()

    async def noted(message: Adopt) -> None:
        ready.append(confirmed.is_set())
        await adopt(message)

    pair.b.moves.adopt = noted  # type: ignore[method-assign]
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    assert ready == [True] and record.path == ("kv" if late == "the confirmation" else "tokens")
    assert links.held and pair.b.engine._slots.held_tails == 0
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


@pytest.mark.parametrize("why", ["transport", "node", "target"])
async def test_blocks_come_by_messages_if_the_workers_cannot_exchange_them(why: str) -> None:
    transport = SharedSlots()
    transport.direct = why != "transport"
    (pair, links), request = linked(transport), spec()
    links.reachable = why != "node"
    if why == "target":
        pair.b.engine.links = None
    received, cursor = chunks_received(pair), pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    assert (await pair.settled()).path == "kv" and links.sent == [] and received
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


@pytest.mark.parametrize("fault", [TransferFailed("the worker is lost"), BlocksGone("preempted")])
async def test_failed_exchange_of_blocks_turns_the_move_into_one_by_tokens(fault: Exception) -> None:
    (pair, links), request = linked(), spec()
    links.fault = fault
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    assert record.path == "tokens" and str(fault) in record.reason
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


@pytest.mark.parametrize("progress", [True, False])
async def test_lease_of_a_long_round_lasts_while_blocks_arrive(progress: bool) -> None:
    """No message of the source comes meanwhile."""
    (pair, links), request = linked(lease_s=0.1, step_s=0.01), spec(prompt=700, tokens=300)
    links.pace_s = 0.02 if progress else 0.2
    cursor = pair.submit(request)
    await pair.until(cursor, 2)
    pair.move(request.id)
    record = await pair.settled()
    assert (record.path == "kv" and record.outcome is Outcome.COMMITTED) is progress
    assert await pair.finished(cursor) == expected(prompt_of(request), 300)


class OneRankFails(SharedSlots):
    """Rank 1's transfers fail at the end `at`; the other ranks' transfers are counted once they have ended."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.ended = 0

    def channel(self, source: ReplicaId, target: ReplicaId, rank: int) -> str:
        return str(rank)

    async def send(self, channel: str, slot: Slot, size: Bytes) -> None:
        await self._transfer("send", channel)

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        await self._transfer("receive", channel)
        return staged

    async def _transfer(self, end: str, channel: str) -> None:
        if end == self.at and channel == "1":
            raise TransferFailed("broken for one rank")
        try:
            await asyncio.sleep(0.01)
        finally:
            self.ended += 1


@pytest.mark.parametrize("at", ["send", "receive"])
async def test_one_failed_rank_fails_the_chunk_and_the_request_moves_by_tokens(at: str) -> None:
    transport = OneRankFails(at)
    pair, request = make_pair(workers=2, transport=transport), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    assert record.path == "tokens" and "broken for one rank" in record.reason
    assert pair.b.engine.blocks_loaded == 0 and transport.ended > 0
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


class CopiedSlots(SharedSlots):
    """Copies the bytes to a slot of the target, as a transport between nodes does."""

    shares_slots = False

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        assert slot is not None
        with HostSegment.open(staged.segment) as source:
            slot.memory[:size] = source.view(staged.offset, size)
        return SlotRef(slot.segment, slot.offset, staged.ticket)


@pytest.mark.parametrize("workers", [1, 2])
async def test_each_shard_is_received_in_a_slot_of_its_own_worker(workers: int) -> None:
    pair, request = make_pair(workers=workers, transport=CopiedSlots()), spec(prompt=300)
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    assert record.path == "kv" and pair.b.engine.blocks_loaded == record.blocks >= 75
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


class SentSlots(CopiedSlots):
    """A send lasts until its bytes have been received."""

    def __init__(self) -> None:
        self._received: dict[str, asyncio.Event] = {}

    def channel(self, source: ReplicaId, target: ReplicaId, rank: int) -> str:
        name = f"{source}-{target}-{len(self._received)}"
        self._received[name] = asyncio.Event()
        return name

    async def send(self, channel: str, slot: Slot, size: Bytes) -> None:
        await self._received[channel].wait()

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        received = await super().receive(channel, staged, size, slot)
        self._received[channel].set()
        return received


async def test_replicas_that_send_to_each_other_do_not_wait_for_each_others_slots() -> None:
    pair, requests = make_pair(transport=SentSlots()), {"a": spec("r", prompt=300), "b": spec("q", prompt=300)}
    cursors = {name: pair.submit(request, on=name) for name, request in requests.items()}
    for cursor in cursors.values():
        await pair.until(cursor, 10)
    pair.move(requests["a"].id, "a", "b")
    pair.move(requests["b"].id, "b", "a")
    for name, request in requests.items():
        record = await pair.settled(name)
        assert (record.outcome, record.path) == (Outcome.COMMITTED, "kv"), record
        assert await pair.finished(cursors[name]) == expected(prompt_of(request), 60)
    await pair.both_idle()


@pytest.mark.parametrize("transport", [SharedSlots, CopiedSlots], ids=["shared slots", "slots of either end"])
@pytest.mark.parametrize(("workers", "workers_b"), [(2, 1), (1, 2), (2, 4), (4, 2), (1, 4), (4, 1)])
async def test_requests_move_by_kv_between_unlike_numbers_of_workers(
    workers: int, workers_b: int, transport: type[SharedSlots]
) -> None:
    pair = make_pair(workers=workers, workers_b=workers_b, transport=transport(), slot_blocks=40)
    request = spec(prompt=100, tokens=120)
    cursor = pair.submit(request)
    for turn, (source, target) in enumerate([("a", "b"), ("b", "a")]):
        await pair.until(cursor, 20 * (turn + 1))
        pair.move(request.id, source, target, KV)
        record = await pair.settled(source)
        assert (record.outcome, record.path) == (Outcome.COMMITTED, "kv") and record.blocks, record
        assert pair.replica(target).engine.blocks_loaded >= record.blocks
    assert await pair.finished(cursor) == expected(prompt_of(request), 120)
    await pair.both_idle()


async def test_request_whose_blocks_fit_into_no_slot_of_the_target_moves_by_tokens() -> None:
    pair, request = make_pair(workers=4, workers_b=1, transport=CopiedSlots(), slot_blocks=2), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id, path=KV)
    assert (await pair.settled()).outcome is Outcome.REFUSED
    pair.move(request.id, path=AUTO)
    record = await pair.settled()
    assert record.path == "tokens" and "does not fit into a staging slot" in record.reason
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


async def test_requests_move_by_tokens_between_other_caches() -> None:
    pair, request = make_pair(cache_b="another type"), spec(tokens=120)
    cursor = pair.submit(request)
    for turn, (source, target) in enumerate([("a", "b"), ("b", "a")]):
        await pair.until(cursor, 20 * (turn + 1))
        pair.move(request.id, source, target, AUTO)
        record = await pair.settled(source)
        assert (record.outcome, record.path, record.blocks) == (Outcome.COMMITTED, "tokens", 0)
        assert "KV caches differ" in record.reason
    assert await pair.finished(cursor) == expected(prompt_of(request), 120)
    await pair.both_idle()


@pytest.mark.parametrize(("workers", "workers_b"), [(2, 1), (1, 2)])
async def test_prefixes_are_copied_between_unlike_numbers_of_workers(workers: int, workers_b: int) -> None:
    pair, request = make_pair(workers=workers, workers_b=workers_b), spec(prompt=40)
    await pair.finished(pair.submit(request))
    record = await pair.a.copies.copy(CopyOrder("c", request, CopyReason.MANUAL), pair.b.id)
    assert (record.outcome, record.held, record.present) == (CopyOutcome.DONE, 10, 0), record
    held = blocks_of(pair.a.engine)
    assert blocks_of(pair.b.engine) == {name: held[name] for name in pair.a.engine.names(request, ())}
    await pair.both_idle()


@pytest.mark.parametrize("workers", [1, 2])
async def test_back_and_forth(workers: int) -> None:
    pair, request = make_pair(workers=workers), spec(tokens=200)
    cursor = pair.submit(request)
    for turn, (source, target) in enumerate([("a", "b"), ("b", "a")] * 3):
        await pair.until(cursor, 20 * (turn + 1))
        pair.move(request.id, source, target, KV if turn % 2 else TOKENS)
        assert (await pair.settled(source)).outcome is Outcome.COMMITTED
    assert await pair.finished(cursor) == expected(prompt_of(request), 200)
    await pair.both_idle()


@pytest.mark.parametrize("workers", [1, 2])
async def test_long_context_moves_in_slot_sized_chunks(workers: int) -> None:
    pair, request = make_pair(workers=workers), spec(prompt=700)
    cursor = pair.submit(request)
    await pair.until(cursor, 2)
    pair.move(request.id)
    record = await pair.settled()
    assert record.outcome is Outcome.COMMITTED and record.blocks >= 175 and record.path == "kv"
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


async def test_stop_and_copy_moves_everything_in_the_pause() -> None:
    limits = MigrationLimits(copy=CopyLimits(max_rounds=0, final_blocks=0))
    pair, request = make_pair(limits=limits), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    assert record.outcome is Outcome.COMMITTED and record.rounds == 1 and record.blocks >= 11
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


@pytest.mark.parametrize("workers", [1, 2])
async def test_target_computes_only_the_tokens_behind_the_tail(workers: int) -> None:
    pair, request, tails = make_pair(workers=workers), spec(prompt=41), list[Tail]()
    hold = pair.b.engine.hold

    async def noted(tail: Tail, slots: Sequence[SlotRef], cuts: Resharding | None = None) -> None:
        tails.append(tail)
        await hold(tail, slots, cuts)

    pair.b.engine.hold = noted  # type: ignore[method-assign]
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id)
    record = await pair.settled()
    (read,) = tails
    assert record.tokens is not None and 1 <= record.tokens - read.tokens <= 3
    assert read.tokens % 4, "its last block is not full"
    computed = record.tokens - read.tokens
    assert pair.b.engine.stats().steps.prefilled == (computed if computed > 1 else 0), "a single token is decoded"
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


async def test_corrupted_tail_changes_the_output() -> None:
    pair, request = make_pair(), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    gather_tail = pair.a.engine.gather_tail

    async def corrupt(key: str, tail: Tail, slots: Sequence[Slot]) -> Sequence[Shard]:
        (shard,) = await gather_tail(key, tail, slots)
        pair.a.slots.segments[0].view(shard.slot.offset + HEADER, 4)[:] = b"\1\0\0\0"
        return [shard]

    pair.a.engine.gather_tail = corrupt  # type: ignore[method-assign]
    pair.move(request.id)
    record = await pair.settled()
    assert (record.outcome, record.path) == (Outcome.COMMITTED, "kv")
    assert await pair.finished(cursor) != expected(prompt_of(request), 60)


@pytest.mark.parametrize("call", ["gather_tail", "hold"])
async def test_tail_that_is_not_copied_turns_the_move_into_one_by_tokens(call: str) -> None:
    pair, request = make_pair(), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)

    async def fail(*_: object) -> None:
        raise TransferFailed("a test said so")

    for replica in (pair.a, pair.b):
        setattr(replica.engine, call, fail)
    pair.move(request.id)
    record = await pair.settled()
    assert (record.outcome, record.path, record.cause) == (Outcome.COMMITTED, "tokens", Cause.TRANSFER_FAILED)
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


async def test_tail_behind_blocks_that_were_evicted_is_not_read() -> None:
    pair, request = make_pair(), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    add = pair.b.host.add

    async def evict(*args):  # type: ignore[no-untyped-def]
        await pair.b.engine.reset_prefix_cache()
        await add(*args)

    pair.b.host.add = evict  # type: ignore[method-assign]
    pair.move(request.id)
    assert (record := await pair.settled()).path == "kv"
    assert pair.b.engine.stats().steps.prefilled == record.tokens
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


FAULTS = ["silent", PeerLost("dead"), Refused("no", Cause.NO_ROOM), TransferFailed("broken")]


@pytest.mark.parametrize("fault", FAULTS, ids=["silent", "dead", "refusing", "failing"])
@pytest.mark.parametrize("call", ["prepare", "receive", "adopt", "adopted", "cancel"])
@pytest.mark.parametrize("path", [KV, TOKENS])
async def test_a_fault_at_any_step_costs_no_token_and_leaks_nothing(
    call: str, fault: Exception | str, path: PathRequest
) -> None:
    limits = MigrationLimits(prepare_s=0.1, copy_s=0.1, final_s=0.1, adopt_s=0.1)
    pair, request = make_pair(limits=limits, lease_s=0.3), spec(tokens=400)
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.b.faults[call] = fault
    pair.move(request.id, path=path)
    record = await pair.settled()
    assert await pair.finished(cursor) == expected(prompt_of(request), 400)
    harmless = call == "cancel" or (call == "receive" and not isinstance(fault, PeerLost))
    assert (record.outcome is Outcome.COMMITTED) == (harmless or (call == "receive" and path is TOKENS))
    if call == "receive" and path is KV and harmless:
        assert record.path == "tokens" and "kv failed" in record.reason
    await pair.both_idle()


async def test_preempted_source_hands_over_tokens() -> None:
    pair, request = make_pair(), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    preempt(pair.a.engine)
    pair.move(request.id)
    record = await pair.settled()
    assert (record.outcome, record.path) == (Outcome.COMMITTED, "tokens")
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


async def test_blocks_evicted_before_the_hand_over_are_recomputed() -> None:
    pair, request = make_pair(), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    add = pair.b.host.add

    async def evict(*args):  # type: ignore[no-untyped-def]
        await pair.b.engine.reset_prefix_cache()
        await add(*args)

    pair.b.host.add = evict  # type: ignore[method-assign]
    pair.move(request.id)
    assert (await pair.settled()).outcome is Outcome.COMMITTED
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


async def test_full_target_refuses_and_nothing_happens() -> None:
    pair, request = make_pair(), spec()
    cursor = pair.submit(request)
    pair.b.room = 30
    await pair.until(cursor, 5)
    pair.move(request.id)
    record = await pair.settled()
    assert record.outcome is Outcome.REFUSED and "no room" in (record.error or "")
    assert not any(isinstance(e, Moving) for e in pair.events)
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


@pytest.mark.parametrize(
    ("cache", "path", "outcome", "taken"),
    [("other", KV, Outcome.REFUSED, "kv"), ("other", AUTO, Outcome.COMMITTED, "tokens")],
)
async def test_unlike_caches_exchange_tokens_only(cache: str, path: PathRequest, outcome: str, taken: str) -> None:
    pair, request = make_pair(cache_b=cache), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 5)
    pair.move(request.id, path=path)
    record = await pair.settled()
    assert (record.outcome, record.path) == (outcome, taken)
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


async def test_unlike_models_exchange_nothing() -> None:
    pair, request = make_pair(model_b="another"), spec()
    cursor = pair.submit(request)
    pair.move(request.id, path=AUTO)
    assert (await pair.settled()).outcome is Outcome.REFUSED
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


@pytest.mark.parametrize("call", ["prepare", "receive", "adopt", "adopted"])
async def test_client_leaves_in_the_middle(call: str) -> None:
    pair, request = make_pair(lease_s=0.3), spec(tokens=10_000 // 16)
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.b.faults[call] = "silent"
    pair.move(request.id)
    await asyncio.sleep(0.05)
    for replica in (pair.a, pair.b):
        replica.moves.release(request.id, None)
    await pair.both_idle()


async def test_second_move_of_the_same_request_is_refused() -> None:
    pair, request = make_pair(), spec()
    cursor = pair.submit(request)
    await pair.until(cursor, 2)
    pair.move(request.id)
    with pytest.raises(Refused, match="already moving"):
        pair.move(request.id)
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


async def test_request_that_the_engine_cannot_continue_stays() -> None:
    pair, request = make_pair(), spec()
    tie(pair.a.engine)
    pair.submit(request)
    with pytest.raises(Refused, match="seeded sampling"):
        pair.move(request.id)


async def test_unconfirmed_request_ends_with_its_lease() -> None:
    """The source lets go, but its reader does not come to the target."""
    pair, request = make_pair(lease_s=0.1), spec(tokens=600)
    pair.attach = False
    cursor = pair.submit(request)
    await pair.until(cursor, 5)
    pair.move(request.id)
    await pair.settled()
    await pair.both_idle()
    assert cursor.finish is None


async def test_the_readers_decision_outlasts_the_lease() -> None:
    pair, request = make_pair(lease_s=0.1), spec(tokens=400)
    cursor = pair.submit(request)
    await pair.until(cursor, 5)
    pair.move(request.id)
    assert await pair.finished(cursor) == expected(prompt_of(request), 400)


@pytest.mark.parametrize("words", [1, 3])
async def test_source_without_an_answer_goes_on_by_its_readers_decision(words: int) -> None:
    """Nobody answers its first questions: it stays silent, and asks again."""
    limits = MigrationLimits(adopt_s=0.05, doubt_s=0.05)
    pair, request = make_pair(limits=limits), spec(tokens=200)
    pair.b.faults["adopted"] = pair.b.faults["cancel"] = "silent"
    cursor = pair.submit(request)
    await pair.until(cursor, 5)
    pair.attach = False
    pair.move(request.id, path=TOKENS)
    async with asyncio.timeout(5):
        while sum(isinstance(event, Doubt) for event in pair.events) < words:
            await asyncio.sleep(0.001)
    frozen = len(cursor.tokens)
    assert [load.phase for load in pair.a.host.loads()] == [Phase.MOVING]
    pair.attach = True
    assert await pair.finished(cursor) == expected(prompt_of(request), 200)
    record = await pair.settled()
    assert (record.outcome, record.cause) == (Outcome.ABORTED, Cause.NO_ANSWER) and frozen < 200
    await pair.both_idle()


async def test_source_that_gets_no_answer_learns_from_its_reader_that_the_request_has_moved() -> None:
    limits = MigrationLimits(adopt_s=0.05, doubt_s=0.05)
    pair, request = make_pair(limits=limits), spec(tokens=400)
    pair.b.faults["adopted"] = "silent"
    cursor = pair.submit(request)
    await pair.until(cursor, 5)
    pair.attach = False
    pair.move(request.id, path=TOKENS)
    async with asyncio.timeout(5):
        while not any(isinstance(event, Doubt) for event in pair.events):
            await asyncio.sleep(0.001)
    assert pair.b.moves.attach(request.id, 1, cursor.next_index)
    cursor.advance(1)
    pair.attach = True
    record = await pair.settled()
    assert (record.outcome, record.error) == (Outcome.COMMITTED, None)
    assert await pair.finished(cursor) == expected(prompt_of(request), 400)
    await pair.both_idle()
