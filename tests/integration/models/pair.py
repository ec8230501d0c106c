"""Two replicas without Ray, in this process: requests move between them by Mell's own protocol.

Both may be on one engine of vLLM. They share no KV then: each has a salt of its own, with which its requests' blocks
have other names in the prefix cache. So a move by KV copies blocks to other blocks, and a move by tokens computes them
anew, as between two engines.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from app.settings import CPU_ENGINE, CPU_ENV
from deployments.config import MigrationSettings
from deployments.engine.vllm_engine import VllmEngine
from deployments.replica.host import RequestHost
from deployments.replica.moves import Moves
from deployments.replica.outbox import Outboxes
from deployments.replica.prefix_cache.copies import Copies
from deployments.replica.prefix_cache.returning import Returns
from deployments.replica.transports import make_slots, make_transport, size_slots
from migration.memory.run import begin
from migration.protocol.continuing import apart, plain_spec
from migration.protocol.core_messages import decode_request, encode_request
from migration.protocol.cursor import Cursor
from migration.protocol.errors import Refused
from migration.protocol.messages import Adopt, Chunk, CopyRound, PathRequest, Prepare, Prepared
from migration.protocol.record import CopyRecord, MigrationRecord
from migration.protocol.request import Delta, IngressId, Lost, Moved, RequestSpec
from migration.run.donor import CopyOrder
from migration.run.source import Order
from migration.run.world import MigrationWorld
from policies.causes import Cause
from policies.model import SOLE_POOL, Blocks, ReplicaId, RequestId, Tokens
from policies.plan import Reason
from policies.prefix.copies import CopyReason
from tests.migration.world import loads_no_adapter

INGRESS = IngressId("ingress")
BLOCK, BLOCKS = 32, 256
CHUNK = 2 * BLOCK
"""The most tokens of a step of the shared engines: a prompt takes many steps."""
SIZES: Mapping[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": BLOCKS, "max_num_seqs": 16}


class RequestLostError(AssertionError):
    """An engine has ended a request before its end."""


def salted(spec: RequestSpec, replica: str) -> RequestSpec:
    """The request as it runs on a replica."""
    request = msgspec.structs.replace(decode_request(spec.body), cache_salt=replica)
    return replace(spec, body=encode_request(request, spec.body[1:]))


class DirectPeer:
    """Implements `Peer`: calls another replica of this process."""

    def __init__(self, replica: "RealReplica") -> None:
        self.id = replica.id
        self._replica = replica
        self._moves = replica.moves

    async def prepare(self, message: Prepare) -> Prepared:
        if not message.copies:
            await self._replica.engine.check_grammar(message.spec, message.outputs)
        return self._moves.prepare(replace(message, spec=self._replica.own(message.spec)))

    async def load(self, message: CopyRound) -> None:
        await self._moves.load(message)

    async def receive(self, message: Chunk) -> None:
        await self._moves.receive(message)

    async def renew(self, migration: str) -> None:
        self._moves.renew(migration)

    async def adopt(self, message: Adopt) -> None:
        await self._moves.adopt(message)

    async def cancel(self, migration: str) -> None:
        self._moves.cancel(migration)

    async def resumed(self, migration: str) -> float | None:
        return await self._moves.resumed(migration)


class RealReplica:
    """A replica as `EngineReplica` makes it, without Serve. It `shares` its engine with another one, or not."""

    def __init__(
        self, name: str, engine: VllmEngine, replicas: "dict[ReplicaId, RealReplica]", shares: bool = True
    ) -> None:
        self.id = ReplicaId(name)
        self.engine = engine
        self._shares = shares
        self.outboxes = Outboxes(time.monotonic)
        self.host = RequestHost(engine, self.outboxes, time.monotonic, lambda: 1_000_000)
        settings = MigrationSettings()
        sizes = size_slots(settings, engine.fingerprint, engine.max_context, False)
        self.slots = make_slots(settings, sizes)
        self.transport = make_transport(settings, sizes)
        self._world = MigrationWorld(
            self.id,
            SOLE_POOL,
            self.host,
            engine,
            self.transport,
            self.slots,
            settings.limits,
            time.monotonic,
            time.time,
        )
        self.moves = Moves(self._world, self.host, lambda to: DirectPeer(replicas[to]), settings.lease_s)
        self.copies = Copies(
            self._world, engine, lambda to: DirectPeer(replicas[to]), loads_no_adapter, settings.lease_s
        )
        self.returns = Returns(self.id, self.copies.copy, lambda: False, time.monotonic)
        self.host.on_context = self.returns.add

    def own(self, spec: RequestSpec) -> RequestSpec:
        """The request as it runs here."""
        return salted(spec, self.id) if self._shares else spec

    def hide_handed_over(self, hides: bool) -> None:
        """Have the moves from here leave nothing for others at their targets, or leave it again."""
        self.moves._world = replace(self._world, hides_handed_over=hides)


class EnginePair:
    """Replicas a and b, and one reader of both."""

    def __init__(self, engine: VllmEngine, other: VllmEngine | None = None) -> None:
        """Both on one engine, unless b has another one."""
        self.engine = engine
        self.replicas: dict[ReplicaId, RealReplica] = {}
        for name, own in (("a", engine), ("b", other or engine)):
            replica = RealReplica(name, own, self.replicas, shares=other is None)
            self.replicas[replica.id] = replica
        self.cursors: dict[RequestId, Cursor] = {}
        self.lost: dict[RequestId, str] = {}
        self.refusals: list[str] = []
        """The reasons of orders that the replica of the request refused."""
        self._changed = asyncio.Condition()
        self._readers = [asyncio.create_task(self._read(replica)) for replica in self.replicas.values()]
        self._moves = 0

    def __getitem__(self, name: str) -> RealReplica:
        return self.replicas[ReplicaId(name)]

    async def run(
        self,
        name: str,
        prompt: Sequence[int],
        tokens: int,
        moves: Sequence[tuple[int, str]] = (),
        on: str = "a",
        tenant: str | None = None,
        **sampling: Any,
    ) -> "tuple[tuple[int, ...], list[MigrationRecord]]":
        """The output of a request, and its moves: behind that many tokens each, to the other replica, by that path."""
        spec = self._spec(name, prompt, tokens, on, tenant, sampling)
        cursor = self._start(spec, on)
        records: list[MigrationRecord] = []
        here, there = on, "a" if on == "b" else "b"
        for at, path in moves:
            await self._until(spec, lambda at=at: len(cursor.tokens) >= at or cursor.finish is not None)
            if cursor.finish is not None:
                break
            try:
                records.append(await self._move(spec, here, there, PathRequest(path)))
            except Refused as error:
                self.refusals.append(str(error))
                continue
            if records[-1].outcome == "committed":
                here, there = there, here
        await self._until(spec, lambda: cursor.finish is not None)
        return tuple(cursor.tokens), records

    async def run_and_move_early(
        self, name: str, prompt: Sequence[int], tokens: int, beyond: int, on: str = "a", **sampling: Any
    ) -> tuple[tuple[int, ...], MigrationRecord]:
        """The output of a request that is ordered to move by KV once more than `beyond` tokens of it are computed."""
        spec = self._spec(name, prompt, tokens, on, None, sampling)
        cursor = self._start(spec, on)
        await self[on].engine.computed_beyond(self[on].host.snapshot(spec.id).key, Tokens(beyond))
        record = await self._move(spec, on, "a" if on == "b" else "b", PathRequest.KV)
        await self._until(spec, lambda: cursor.finish is not None)
        return tuple(cursor.tokens), record

    async def hand_over(
        self,
        name: str,
        prompt: Sequence[int],
        tokens: int,
        tenant: str,
        returns: bool,
        back: int | None,
        sampling: Mapping[str, Any],
    ) -> tuple[tuple[int, ...], MigrationRecord]:
        """The output of a request that is prefilled on a and decodes on b; its move is ordered with it.

        Its KV is for requests of the `tenant` alone. Its context `returns` to a, or not. Behind `back` tokens it moves
        to a, and then on to b.
        """
        spec = self._spec(name, prompt, tokens, "a", tenant, sampling)
        spec = replace(spec, returns_to=ReplicaId("a") if returns else None)
        cursor = self._start(spec, "a")
        record = await self._move(spec, "a", "b", PathRequest.KV, Reason.DISAGGREGATE)
        if back is not None:
            await self._until(spec, lambda: len(cursor.tokens) >= back)
            for source, target in ("ba", "ab"):
                if cursor.finish is None:
                    again = await self._move(spec, source, target, PathRequest.KV)
                    assert again.outcome == "committed" or again.cause is Cause.REQUEST_ENDED, again
        await self._until(spec, lambda: cursor.finish is not None)
        return tuple(cursor.tokens), record

    def names(self, replica: str, prompt: Sequence[int], tenant: str | None = None) -> Sequence[int]:
        """The names of a prompt's blocks on a replica."""
        return self[replica].engine.names(self._spec("names", prompt, 1, replica, tenant, {}), ())

    async def copy(self, name: str, prompt: Sequence[int], source: str, target: str) -> CopyRecord:
        """Copy the blocks of a prompt from one replica to the other."""
        order = CopyOrder(name, self._spec(name, prompt, 1, source, None, {}), CopyReason.MANUAL)
        return await self[source].copies.copy(order, ReplicaId(target))

    def _spec(
        self, name: str, prompt: Sequence[int], tokens: int, on: str, tenant: str | None, sampling: Mapping[str, Any]
    ) -> RequestSpec:
        spec = plain_spec(name, tuple(prompt), tokens, ingress=INGRESS, **sampling)
        return self[on].own(spec if tenant is None else apart(spec, tenant))

    def _start(self, spec: RequestSpec, on: str) -> Cursor:
        self.cursors[spec.id] = cursor = Cursor()
        self[on].moves.submit(spec, 0, ())
        return cursor

    def close(self) -> None:
        for task in self._readers:
            task.cancel()
        for replica in self.replicas.values():
            replica.returns.close()
            replica.slots.close()

    async def _move(
        self, spec: RequestSpec, source: str, target: str, path: PathRequest, reason: Reason = Reason.MANUAL
    ) -> MigrationRecord:
        self._moves += 1
        moves = self[source].moves
        id = f"m{self._moves}"
        moves.start(Order(id, spec.id, path, reason), ReplicaId(target))
        async with asyncio.timeout(30):
            while True:
                (record,) = (record for record in moves.records() if record.id == id)
                if record.outcome is not None:
                    return record
                await asyncio.sleep(0.001)

    async def _until(self, spec: RequestSpec, holds: Any) -> None:
        async with asyncio.timeout(120), self._changed:
            await self._changed.wait_for(lambda: holds() or spec.id in self.lost)
        if spec.id in self.lost:
            raise RequestLostError(f"request {spec.id} was lost: {self.lost[spec.id]}")

    async def _read(self, replica: RealReplica) -> None:
        async for batch in replica.outboxes.read(INGRESS):
            async with self._changed:
                for event in batch:
                    cursor = self.cursors[event.request]
                    match event:
                        case Delta():
                            cursor.feed(event)
                        case Moved():
                            cursor.moved(event)
                            self.replicas[ReplicaId(event.target)].moves.attach(
                                event.request, event.next_hop, cursor.next_index
                            )
                        case Lost():
                            self.lost[event.request] = event.reason
                self._changed.notify_all()


@asynccontextmanager
async def pair_of_engines(
    model: str, others: Mapping[str, Any] | None = None, declared: float | None = None, **kwargs: Any
) -> AsyncIterator[EnginePair]:
    """Two replicas, each on an engine with these arguments; b's has the `others` instead of, or beside them.

    `declared` makes their pools elastic: they can have so many times as many blocks.
    """
    os.environ |= {**CPU_ENV, "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    engines: list[VllmEngine] = []
    try:
        for own in ({}, others or {}):
            settings = {**CPU_ENGINE, **SIZES, **kwargs, **own}
            engines.append(await VllmEngine.start(model, settings, declared=declared))
            if memory := engines[-1].memory:
                await begin(memory, Blocks(settings["num_gpu_blocks_override"] - 1))
        pair = EnginePair(*engines)
        try:
            yield pair
        finally:
            pair.close()
    finally:
        for engine in engines:
            engine.shutdown()


@asynccontextmanager
async def engine_pair(model: str, dram_gib: float = 0.0, **kwargs: Any) -> AsyncIterator[EnginePair]:
    """Two replicas on an engine with these arguments, and a tier of host memory of that size."""
    os.environ |= {**CPU_ENV, "VLLM_NO_USAGE_STATS": "1"}
    engine = await VllmEngine.start(model, {**CPU_ENGINE, **SIZES, **kwargs}, dram_gib=dram_gib)
    pair = EnginePair(engine)
    try:
        yield pair
    finally:
        pair.close()
        engine.shutdown()


def prompt_of(length: int, name: str) -> list[int]:
    """Token ids that no other name has."""
    draw = random.Random(name)
    return [draw.randrange(3, 480) for _ in range(length)]
