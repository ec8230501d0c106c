"""Mirrors and the prompt tree while requests move, replicas die, caches are emptied and reports are lost, together."""

import asyncio
import contextlib
from random import Random

import pytest

from deployments.engine.paced import PacedEngine
from migration.protocol.continuing import plain_spec
from migration.protocol.errors import MigrationError
from migration.protocol.messages import PathRequest
from migration.run.source import Order
from migration.transport.shared import SharedSlots
from policies.decision.observation import Pool
from policies.decision.reports import Reporter, Roster
from policies.model import SOLE_POOL, Blocks, ReplicaId, ReplicaLoad, ReplicaState, Tokens
from policies.plan import Reason
from policies.prefix.change import Tier
from policies.prefix.tree import PromptTree
from tests.migration.world import INGRESS, LIMITS, Replica

PACE = {
    "num_gpu_blocks_override": 40,
    "block_size": 4,
    "max_model_len": 120,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "decode_s": 0.004,
    "decode_s_per_seq": 0.0,
    "prefill_tokens_per_s": 4000.0,
}

pytestmark = pytest.mark.virtual_time


class SmallService:
    """Three paced replicas with migrations between them, and a scheduler that adds up their reports."""

    def __init__(self, draw: Random) -> None:
        self.draw = draw
        self.replicas: dict[ReplicaId, Replica] = {}
        self.reporters: dict[ReplicaId, Reporter] = {}
        self.roster, self.tree = Roster(), PromptTree(0.05)
        self.homes: dict[str, ReplicaId] = {}
        self.committed = 0
        self.readers: list[asyncio.Task[None]] = []

    async def open(self, name: str) -> None:
        engine = await PacedEngine.start("model", PACE)
        replica = Replica(name, self.replicas, engine, SharedSlots(), 0.2, LIMITS)
        self.replicas[replica.id], self.reporters[replica.id] = replica, Reporter()
        self.readers.append(asyncio.create_task(self._read(replica)))

    async def _read(self, replica: Replica) -> None:
        async for _ in replica.outboxes.read(INGRESS):
            pass

    async def kill(self, name: ReplicaId) -> None:
        """Kill a replica; another one starts."""
        self.replicas.pop(name).engine.shutdown()
        del self.reporters[name]
        self.roster.forget(name)
        for other in self.replicas.values():
            other.moves.outgoing.follow(self.replicas)
        await self.open(f"{name}'")

    def submit(self, number: int) -> None:
        begin = Random(self.draw.randrange(4)).choices(range(3, 500), k=self.draw.randrange(4, 60))
        spec = plain_spec(f"r{number}", tuple(begin), self.draw.randrange(1, 50), ingress=INGRESS)
        self.homes[spec.id] = home = self.draw.choice(sorted(self.replicas))
        self.replicas[home].moves.submit(spec, 0, ())

    def move(self, number: int) -> None:
        running = [(home, load.id) for home, replica in self.replicas.items() for load in replica.host.loads()]
        if not running:
            return
        source, request = self.draw.choice(sorted(running))
        target = self.draw.choice(sorted(self.replicas.keys() - {source}))
        order = Order(f"m{number}", request, self.draw.choice([PathRequest.KV, PathRequest.TOKENS]), Reason.MANUAL)
        with contextlib.suppress(MigrationError):
            self.replicas[source].moves.start(order, target)

    def epoch(self) -> None:
        """Gather reports, some of whose answers are lost, and add them up; the scheduler may have just started."""
        if self.draw.random() < 0.2:
            self.roster, self.tree = Roster(), PromptTree(0.05)
        for name, replica in self.replicas.items():
            load = ReplicaLoad(name, ReplicaState.RUNNING, "node", Tokens(160), 4, Blocks(40), 8, ())
            for _ in range(1 + (self.draw.random() < 0.2)):
                report = self.reporters[name].report(
                    load, self.roster.version(name), cache=replica.engine.mirror.change
                )
            self.roster.take(report)
        observed = self.roster.observe(Pool(SOLE_POOL))
        for name, change in observed.caches.items():
            self.tree.apply(name, change)
        for name in observed.lost:
            self.tree.forget(name)
        self.tree.check_integrity()

    def check_mirrors(self) -> None:
        """The mirror of every replica has what its engine's pool has."""
        for name, replica in self.replicas.items():
            named = replica.engine._batch.pool.named
            assert replica.engine.mirror.exact and replica.engine.mirror.hbm.counts == dict.fromkeys(named, 1), name


@pytest.mark.parametrize("seed", range(12))
async def test_the_tree_is_the_union_of_mirrors_that_equal_their_pools(seed: int) -> None:
    service = SmallService(draw := Random(seed))
    for name in "abc":
        await service.open(name)
    for number in range(60):
        name = draw.choice(sorted(service.replicas))
        engine = service.replicas[name].engine
        match draw.choice(["submit", "submit", "submit", "move", "move", "delete", "reset", "kill", "wait"]):
            case "submit":
                service.submit(number)
            case "move":
                service.move(number)
            case "delete":
                names = sorted(engine.mirror.hbm.counts)
                await engine.delete(None if draw.random() < 0.3 else draw.sample(names, len(names) // 3))
            case "reset":
                await engine.reset_prefix_cache()
            case "kill" if draw.random() < 0.3:
                await service.kill(name)
        for _ in range(draw.randrange(6)):
            await asyncio.sleep(0.003)
            service.check_mirrors()
        service.epoch()
        for name, replica in service.replicas.items():
            held = set(replica.engine.mirror.hbm.counts)
            assert service.tree.blocks(name, Tier.HBM) == len(held)
            assert {each for each in held if name in service.tree.match([each])} == held
        assert set(service.tree.replicas) == set(service.replicas)
    committed = [r.outcome for replica in service.replicas.values() for r in replica.moves.records()]
    assert committed, "nothing moved"
    for reader in service.readers:
        reader.cancel()
