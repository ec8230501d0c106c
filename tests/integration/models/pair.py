"""Two replicas without Ray, in this process: requests move between them by Mell's own protocol.

Both may be on one engine of vLLM. They share no KV: each has a salt of its own, with which its requests' blocks have
other names in the prefix cache. So a move by KV copies blocks to other blocks, and a move by tokens computes them anew,
as between two engines.
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
from deployments.replica.copies import Copies
from deployments.replica.host import RequestHost
from deployments.replica.moves import Moves
from deployments.replica.outbox import Outboxes
from deployments.replica.transports import make_slots, make_transport, size_slots
from migration.protocol.continuing import plain_spec
from migration.protocol.core_messages import decode_request, encode_request
from migration.protocol.cursor import Cursor
from migration.protocol.errors import Refused
from migration.protocol.messages import Adopt, Chunk, CopyRound, PathRequest, Prepare, Prepared
from migration.protocol.record import CopyRecord, MigrationRecord
from migration.protocol.request import Delta, IngressId, Lost, Moved, RequestSpec
from migration.run.donor import CopyOrder
from migration.run.source import Order
from migration.run.world import MigrationWorld
from policies.model import ReplicaId, RequestId, Tokens
from policies.plan import Reason
from policies.prefix.copies import CopyReason

INGRESS = IngressId("ingress")
BLOCK, BLOCKS = 32, 256
CHUNK = 2 * BLOCK
"""The most tokens of a step of the shared engines: a prompt takes many steps."""
SIZES: Mapping[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": BLOCKS, "max_num_seqs": 16}


def salted(spec: RequestSpec, replica: str) -> RequestSpec:
    """The request as it runs on a replica."""
    request = msgspec.structs.replace(decode_request(spec.body), cache_salt=replica)
    return replace(spec, body=encode_request(request, spec.body[1:]))


class DirectPeer:
    """Implements `Peer`: calls another replica of this process."""

    def __init__(self, replica: "RealReplica") -> None:
        self.id = replica.id
        self._moves = replica.moves

    async def prepare(self, message: Prepare) -> Prepared:
        return self._moves.prepare(replace(message, spec=salted(message.spec, self.id)))

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
    """A replica as `EngineReplica` makes it, without Serve."""

    def __init__(self, name: str, engine: VllmEngine, replicas: "dict[ReplicaId, RealReplica]") -> None:
        self.id = ReplicaId(name)
        self.engine = engine
        self.outboxes = Outboxes(time.monotonic)
        self.host = RequestHost(engine, self.outboxes, time.monotonic, lambda: 1_000_000)
        settings = MigrationSettings()
        sizes = size_slots(settings, engine.fingerprint, engine.max_context, False)
        self.slots = make_slots(settings, sizes)
        self.transport = make_transport(settings, sizes)
        world = MigrationWorld(
            self.id,
            self.host,
            engine,
            self.transport,
            self.slots,
            settings.limits,
            time.monotonic,
            time.time,
        )
        self.moves = Moves(world, self.host, lambda to: DirectPeer(replicas[to]), settings.lease_s)
        self.copies = Copies(world, engine, lambda to: DirectPeer(replicas[to]), settings.lease_s)


class EnginePair:
    """Replicas a and b, and one reader of both."""

    def __init__(self, engine: VllmEngine, other: VllmEngine | None = None) -> None:
        """Both on one engine, unless b has another one."""
        self.engine = engine
        self.replicas: dict[ReplicaId, RealReplica] = {}
        for name, own in (("a", engine), ("b", other or engine)):
            replica = RealReplica(name, own, self.replicas)
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
        **sampling: Any,
    ) -> "tuple[tuple[int, ...], list[MigrationRecord]]":
        """The output of a request, and its moves: behind that many tokens each, to the other replica, by that path."""
        spec, cursor = self._submit(name, prompt, tokens, on, sampling)
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
        spec, cursor = self._submit(name, prompt, tokens, on, sampling)
        await self[on].engine.computed_beyond(self[on].host.snapshot(spec.id).key, Tokens(beyond))
        record = await self._move(spec, on, "a" if on == "b" else "b", PathRequest.KV)
        await self._until(spec, lambda: cursor.finish is not None)
        return tuple(cursor.tokens), record

    def names(self, replica: str, prompt: Sequence[int]) -> Sequence[int]:
        """The names of a prompt's blocks on a replica."""
        return self[replica].engine.names(salted(plain_spec("names", tuple(prompt), 1, ingress=INGRESS), replica), ())

    async def copy(self, name: str, prompt: Sequence[int], source: str, target: str) -> CopyRecord:
        """Copy the blocks of a prompt from one replica to the other."""
        spec = salted(plain_spec(name, tuple(prompt), 1, ingress=INGRESS), source)
        return await self[source].copies.copy(CopyOrder(name, spec, CopyReason.MANUAL), ReplicaId(target))

    def _submit(
        self, name: str, prompt: Sequence[int], tokens: int, on: str, sampling: Mapping[str, Any]
    ) -> tuple[RequestSpec, Cursor]:
        spec = salted(plain_spec(name, tuple(prompt), tokens, ingress=INGRESS, **sampling), on)
        self.cursors[spec.id] = cursor = Cursor()
        self[on].moves.submit(spec, 0, ())
        return spec, cursor

    def close(self) -> None:
        for task in self._readers:
            task.cancel()
        for replica in self.replicas.values():
            replica.slots.close()

    async def _move(self, spec: RequestSpec, source: str, target: str, path: PathRequest) -> MigrationRecord:
        self._moves += 1
        moves = self[source].moves
        id = f"m{self._moves}"
        moves.start(Order(id, spec.id, path, Reason.MANUAL), ReplicaId(target))
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
            raise AssertionError(f"request {spec.id} was lost: {self.lost[spec.id]}")

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
async def pair_of_engines(model: str, **kwargs: Any) -> AsyncIterator[EnginePair]:
    """Two replicas, each on an engine with these arguments."""
    os.environ |= {**CPU_ENV, "VLLM_NO_USAGE_STATS": "1"}
    engines = [await VllmEngine.start(model, {**CPU_ENGINE, **SIZES, **kwargs}) for _ in range(2)]
    pair = EnginePair(*engines)
    try:
        yield pair
    finally:
        pair.close()
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
