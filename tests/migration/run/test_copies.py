"""Copies of cached prefixes between two replicas with paced engines, which read contexts from their blocks."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from deployments.engine.pace import read_pace
from deployments.engine.paced import PacedEngine
from deployments.engine.tokens import expected
from deployments.replica.host import RequestHost
from deployments.replica.moves import Moves
from deployments.replica.outbox import Outboxes
from deployments.replica.peers import PeerCalls
from deployments.replica.prefix_cache.copies import AT_ONCE, Copies
from migration.kv.staging import HEADER, HostSegment, Segments
from migration.protocol.continuing import plain_spec, to_spec
from migration.protocol.core_messages import Adapter, CoreRequest, encode_request
from migration.protocol.errors import PeerLost, Refused, TransferFailed
from migration.protocol.messages import PathRequest, SlotRef
from migration.protocol.ports import Generated, Slot
from migration.protocol.record import CopyOutcome
from migration.protocol.request import IngressId, RequestSpec
from migration.run.donor import CopyOrder
from migration.run.outputs import running
from migration.run.slots import Slots
from migration.run.source import Order
from migration.run.world import MigrationLimits, MigrationWorld
from migration.transport.shared import SharedSlots
from policies.causes import Cause
from policies.model import Bytes, ReplicaId, RequestId, Tokens
from policies.plan import Reason
from policies.prefix.copies import CopyReason
from tests.migration.world import POOL, LocalPeer, calls_of, loads_no_adapter

BLOCK = 4
SLOT_BLOCKS = 8
LIMITS = MigrationLimits(prepare_s=0.5, copy_s=0.5)
A, B = ReplicaId("a"), ReplicaId("b")

pytestmark = pytest.mark.virtual_time


@dataclass
class CachedReplica:
    """A replica around a paced engine."""

    id: ReplicaId
    engine: PacedEngine
    slots: Slots
    host: RequestHost
    moves: Moves
    copies: Copies
    calls: PeerCalls
    faults: dict[str, Exception | str] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Nothing is held: no block, slot, reservation, migration or copy."""
        stats = self.engine.stats()
        free = stats.free_blocks * stats.block_size == stats.capacity_tokens
        return free and not (
            self.slots.in_use or self.host.reserved_tokens or self.moves.pending or self.copies.outgoing
        )

    async def answer(self, spec: RequestSpec) -> tuple[tuple[int, ...], int]:
        """The output of a request that runs here, and the tokens of its prompt that were cached."""
        steps: list[Generated] = []
        async with running(self.engine, f"{spec.id}-{len(self.engine._outputs)}-{id(steps)}", spec) as outputs:
            steps += [step async for step in outputs]
        assert steps[0].prefilled is not None
        return tuple(token for step in steps for token in step.tokens), steps[0].prefilled.cached


class Noisy(SharedSlots):
    """Writes noise into a staged block on its way."""

    direct = shares_slots = False

    async def receive(self, channel: str, staged: SlotRef, size: Bytes, slot: Slot | None) -> SlotRef:
        segments = Segments()
        segments.get(staged.segment).view(staged.offset + HEADER + 5, 1)[0] ^= 1
        return staged


def make_cluster(
    lease_s: float = 5.0,
    transport: SharedSlots | None = None,
    blocks: int = 64,
    hides_handed_over: bool = False,
) -> dict[ReplicaId, CachedReplica]:
    cluster: dict[ReplicaId, CachedReplica] = {}
    clock = asyncio.get_running_loop().time
    pace = {"num_gpu_blocks_override": blocks, "block_size": BLOCK, "max_model_len": 200}
    for id in (A, B):
        engine = PacedEngine("m", read_pace(pace))
        host = RequestHost(engine, Outboxes(clock), clock, room_of(engine))
        slots = Slots(3, SLOT_BLOCKS * engine.fingerprint.shard_bytes, [HostSegment.create])
        parts = id, POOL, host, engine, transport or SharedSlots(), slots
        world = MigrationWorld(*parts, LIMITS, clock, time.time, hides_handed_over)
        moves = Moves(world, host, peer_in(cluster), lease_s)
        copies = Copies(world, engine, peer_in(cluster), loads_no_adapter, lease_s)
        calls = calls_of(id, moves, engine, LIMITS.adopt_s)
        cluster[id] = CachedReplica(id, engine, slots, host, moves, copies, calls)
    return cluster


def room_of(engine: PacedEngine) -> Callable[[], int]:
    return lambda: engine.stats().free_blocks * BLOCK


def peer_in(cluster: dict[ReplicaId, CachedReplica]) -> Callable[[ReplicaId], Any]:
    return lambda to: LocalPeer(cluster[to])  # type: ignore[arg-type]


@pytest.fixture
async def cluster() -> dict[ReplicaId, CachedReplica]:
    return make_cluster()


def prompt(tokens: int = 50) -> RequestSpec:
    return plain_spec("r", tuple(range(10, 10 + tokens)), 6)


def ids(spec: RequestSpec) -> tuple[int, ...]:
    return tuple(range(10, 10 + spec.prompt_tokens))


def order(spec: RequestSpec, id: str = "c", within_s: float | None = None) -> CopyOrder:
    return CopyOrder(id, spec, CopyReason.MANUAL, within_s=within_s)


async def test_copied_prefix_is_not_computed_and_gives_the_same_output(
    cluster: dict[ReplicaId, CachedReplica],
) -> None:
    a, b, spec = cluster[A], cluster[B], prompt()
    first, cached = await a.answer(spec)
    assert cached == 0
    record = await a.copies.copy(order(spec), B)
    assert (record.outcome, record.held, record.present, record.blocks) == (CopyOutcome.DONE, 12, 0, 12)
    assert record.bytes > 12 * a.engine.fingerprint.block_bytes
    assert await b.answer(spec) == (first, 48) == (expected(ids(spec), 6), 48)
    assert a.idle and b.idle


async def test_record_names_the_pool_of_the_donor(cluster: dict[ReplicaId, CachedReplica]) -> None:
    record = await cluster[A].copies.copy(order(prompt()), B)
    assert record.pool == record.to_json()["pool"] == POOL


async def test_only_blocks_that_the_target_lacks_are_sent(cluster: dict[ReplicaId, CachedReplica]) -> None:
    a, b, spec = cluster[A], cluster[B], prompt()
    await a.answer(spec)
    await b.answer(prompt(30))
    record = await a.copies.copy(order(spec), B)
    assert (record.held, record.present, record.blocks) == (12, 7, 5)
    record = await a.copies.copy(order(spec, "again"), B)
    assert (record.outcome, record.present, record.bytes) == (CopyOutcome.DONE, 12, 0)
    assert a.idle and b.idle


async def test_context_that_ends_with_a_full_block_is_copied_to_its_end(
    cluster: dict[ReplicaId, CachedReplica],
) -> None:
    spec = prompt(48)
    await cluster[A].answer(spec)
    assert (await cluster[A].copies.copy(order(spec), B)).blocks == 12
    assert (await cluster[B].answer(prompt(60)))[1] == 48


async def test_prefix_that_the_donor_does_not_have_is_not_copied(cluster: dict[ReplicaId, CachedReplica]) -> None:
    record = await cluster[A].copies.copy(order(prompt()), B)
    assert (record.outcome, record.cause) == (CopyOutcome.ABORTED, Cause.BLOCKS_GONE)
    assert record.error == "the replica has no block of this prefix"
    assert cluster[A].idle and cluster[B].idle


async def test_held_blocks_are_not_evicted_meanwhile(cluster: dict[ReplicaId, CachedReplica]) -> None:
    a, spec = cluster[A], prompt()
    await a.answer(spec)
    assert await a.engine.hold_prefix("h", spec, ()) == 12
    for number in range(4):  # 200 tokens each, and the cache has 256
        await a.answer(plain_spec(f"other-{number}", tuple(range(number, number + 150)), 5))
    assert a.engine.present(spec, ()).hbm == 12
    a.engine.release_prefix("h")
    for number in range(4):
        await a.answer(plain_spec(f"more-{number}", tuple(range(300 + number, 450 + number)), 5))
    assert a.engine.present(spec, ()).hbm < 12
    a.engine.release_prefix("h")


# --- failures -----------------------------------------------------------------------------------------


async def test_noise_in_a_copied_block_is_found() -> None:
    cluster = make_cluster(transport=Noisy())
    spec = prompt()
    first, _ = await cluster[A].answer(spec)
    record = await cluster[A].copies.copy(order(spec), B)
    assert record.outcome is CopyOutcome.ABORTED and "checksum" in (record.error or "")
    assert await cluster[B].answer(spec) == (first, 0)
    assert cluster[A].idle and cluster[B].idle


async def test_noise_that_nobody_looks_for_changes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostSegment, "is_intact", lambda *_: True)
    cluster = make_cluster(transport=Noisy())
    spec = prompt()
    first, _ = await cluster[A].answer(spec)
    assert (await cluster[A].copies.copy(order(spec), B)).outcome is CopyOutcome.DONE
    wrong, cached = await cluster[B].answer(spec)
    assert cached == 48 and wrong != first


@pytest.mark.parametrize(
    ("call", "fault", "cause"),
    [
        ("prepare", PeerLost("gone"), Cause.PEER_LOST),
        ("prepare", Refused("no", Cause.NO_ROOM), Cause.NO_ROOM),
        ("prepare", "silent", Cause.NO_ANSWER),
        ("load", TransferFailed("broken"), Cause.TRANSFER_FAILED),
        ("load", PeerLost("gone"), Cause.PEER_LOST),
        ("receive", TransferFailed("broken"), Cause.TRANSFER_FAILED),
        ("receive", "silent", Cause.NO_ANSWER),
    ],
)
async def test_failed_copy_leaves_nothing(
    cluster: dict[ReplicaId, CachedReplica], call: str, fault: Exception | str, cause: Cause
) -> None:
    a, b, spec = cluster[A], cluster[B], prompt()
    first, _ = await a.answer(spec)
    b.faults[call] = fault
    record = await a.copies.copy(order(spec), B)
    assert (record.outcome, record.cause) == (CopyOutcome.ABORTED, cause)
    assert a.copies.made.ended[CopyReason.MANUAL, CopyOutcome.ABORTED] == 1
    assert a.idle and b.idle
    assert (await b.answer(spec))[0] == first


async def test_lost_cancel_costs_the_target_its_lease_only() -> None:
    cluster = make_cluster(lease_s=2.0)
    a, b, spec = cluster[A], cluster[B], prompt()
    await a.answer(spec)
    b.faults |= {"load": TransferFailed("broken"), "cancel": PeerLost("gone")}
    assert (await a.copies.copy(order(spec), B)).outcome is CopyOutcome.ABORTED
    assert a.idle and b.moves.pending == 1
    await asyncio.sleep(2.1)
    assert b.idle


@pytest.mark.parametrize("ending", ["lease", "deadline", "target lost"])
async def test_copy_that_takes_too_long_ends(ending: str) -> None:
    cluster = make_cluster(lease_s=0.2 if ending == "lease" else 5.0)
    a, b, spec = cluster[A], cluster[B], prompt()
    await a.answer(spec)
    b.faults["receive"] = "silent"
    copying = asyncio.create_task(a.copies.copy(order(spec, within_s=0.2 if ending == "deadline" else None), B))
    await asyncio.sleep(0.1)
    assert not copying.done() and [copy.target for copy in a.copies.outgoing.values()] == [B]
    if ending == "target lost":
        a.copies.outgoing.follow([A])
    record = await copying
    assert record.outcome is CopyOutcome.ABORTED and record.duration_s < 0.25
    assert a.idle and b.idle


async def test_stopping_target_refuses_and_stopping_donor_goes_on(cluster: dict[ReplicaId, CachedReplica]) -> None:
    a, b, spec = cluster[A], cluster[B], prompt()
    await a.answer(spec)
    await b.answer(plain_spec("other", tuple(range(100, 150)), 5))
    a.moves.stop()
    assert (await a.copies.copy(order(spec), B)).outcome is CopyOutcome.DONE
    record = await b.copies.copy(order(plain_spec("other", tuple(range(100, 150)), 5), "back"), A)
    assert (record.outcome, record.cause) == (CopyOutcome.ABORTED, Cause.STOPPING)
    assert a.idle and b.idle


async def test_orders_that_make_no_sense_are_refused(cluster: dict[ReplicaId, CachedReplica]) -> None:
    a, b, spec = cluster[A], cluster[B], prompt()
    await a.answer(spec)
    with pytest.raises(Refused, match="on that replica already"):
        await a.copies.copy(order(spec), A)
    b.faults["prepare"] = "silent"
    copies = [asyncio.create_task(a.copies.copy(order(spec, str(number)), B)) for number in range(AT_ONCE)]
    await asyncio.sleep(0.01)
    with pytest.raises(Refused, match="under way already"):
        await a.copies.copy(order(spec, "0"), B)
    with pytest.raises(Refused, match="copies from this replica are under way") as many:
        await a.copies.copy(order(spec, "more"), B)
    assert many.value.cause is Cause.NO_SLOT
    await asyncio.gather(*copies)
    assert a.idle


async def test_context_without_its_adapter_is_not_held(cluster: dict[ReplicaId, CachedReplica]) -> None:
    adapted = replace(prompt(), adapter=Adapter("sql", 1, "/gone"))
    with pytest.raises(Refused) as refused:
        await cluster[A].copies.copy(order(adapted), B)
    assert refused.value.cause is Cause.ADAPTER and cluster[A].idle


async def test_copy_needs_equal_caches(cluster: dict[ReplicaId, CachedReplica]) -> None:
    a, b, spec = cluster[A], cluster[B], prompt()
    await a.answer(spec)
    b.engine.fingerprint = replace(b.engine.fingerprint, cache="another")
    record = await a.copies.copy(order(spec), B)
    assert (record.outcome, record.cause) == (CopyOutcome.ABORTED, Cause.FINGERPRINT)
    assert a.idle and b.idle


async def test_target_without_room_refuses(cluster: dict[ReplicaId, CachedReplica]) -> None:
    a, b, spec = cluster[A], cluster[B], prompt()
    await a.answer(spec)
    b.host.reserve("others", Tokens(60 * BLOCK))
    record = await a.copies.copy(order(spec), B)
    assert (record.outcome, record.cause) == (CopyOutcome.ABORTED, Cause.NO_ROOM)


# --- salts --------------------------------------------------------------------------------------------


def salted(salt: str | None, id: str = "r", max_tokens: int = 6) -> RequestSpec:
    request = CoreRequest(id, list(range(10, 60)), sampling_params={"max_tokens": max_tokens}, cache_salt=salt)
    return to_spec(request, encode_request(request), RequestId(id), "", IngressId(""))


async def test_copied_prefix_is_found_with_its_salt_only(cluster: dict[ReplicaId, CachedReplica]) -> None:
    await cluster[A].answer(salted("mine"))
    for salt in None, "another":
        record = await cluster[A].copies.copy(order(salted(salt), str(salt)), B)
        assert record.cause is Cause.BLOCKS_GONE
    assert (await cluster[A].copies.copy(order(salted("mine")), B)).blocks == 12
    found = {salt: (await cluster[B].answer(salted(salt, f"{salt}")))[1] for salt in (None, "another", "mine")}
    assert found == {None: 0, "another": 0, "mine": 48}


@pytest.mark.parametrize("path", [PathRequest.KV, PathRequest.TOKENS])
async def test_moved_request_keeps_its_salt(cluster: dict[ReplicaId, CachedReplica], path: PathRequest) -> None:
    a, b = cluster[A], cluster[B]
    a.host.submit(salted("mine", "moving", 100), 0, ())
    await asyncio.sleep(0.5)
    a.moves.start(Order("m", RequestId("moving"), path, Reason.MANUAL), B)
    async with asyncio.timeout(5):
        while not b.moves.attach(RequestId("moving"), 1, 0):
            await asyncio.sleep(0.01)
        while RequestId("moving") not in b.host._ended:
            await asyncio.sleep(0.01)
    assert tuple(b.host._ended[RequestId("moving")].outputs) == expected(ids(prompt()), 100)
    found = {salt: (await b.answer(salted(salt, f"{salt}")))[1] for salt in (None, "another", "mine")}
    assert found == {None: 0, "another": 0, "mine": 48}
