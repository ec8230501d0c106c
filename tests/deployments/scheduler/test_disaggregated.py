"""Prefill and decoding on replicas of their own: the live scheduler, and real migrations between fake engines."""

import asyncio
from pathlib import Path as FilePath
from typing import Any

import pytest

from deployments.api.calls import PlaceCall
from deployments.config import SchedulerConfig
from deployments.engine.tokens import expected
from deployments.scheduler.deployment import LiveScheduler
from migration.protocol.record import MigrationRecord, Outcome
from migration.run.source import Order
from policies.cluster.changes import Arrival
from policies.decision.deciding import SchedulerMemory
from policies.decision.limits import Mode
from policies.decision.placement import Place
from policies.model import SOLE_POOL, ReplicaId, ReplicaLoad, ReplicaState, Role
from policies.paths.prices import Profile
from policies.plan import Path, Reason
from simulator.command.replay import play
from simulator.workload.recording import read_recording
from tests.deployments.engine.quick_engine import prompt_of, set_pace
from tests.deployments.scheduler.fakes import (
    AnsweringReplica,
    FakeClaims,
    FakeListing,
    FakeModes,
    Present,
    Reporting,
    make_ports,
)
from tests.deployments.scheduler.test_scheduler import FakeScaler
from tests.migration.world import LIMITS, Pair, Replica, make_pair, spec
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time

PROFILE = Profile("node", "cache", 1.0)


class PairFleet:
    """Implements `RemoteReplicas[ControlApi]` for a pair of replicas."""

    def __init__(self, pair: Pair) -> None:
        self._replicas = {replica.id: replica for replica in (pair.a, pair.b)}
        self._reporting = Reporting()
        self.ordered: list[Order] = []

    def at(self, replica: ReplicaId, routed: bool = True) -> AnsweringReplica:
        return AnsweringReplica(self, replica)

    def forget(self, replica: ReplicaId) -> None:
        pass

    async def answer(self, replica: ReplicaId, call: str, *args: Any) -> Any:
        asked = self._replicas[replica]
        await asyncio.sleep(0)
        if call == "move":
            order, target, _ = args
            self.ordered.append(order)
            return asked.moves.start(order, target)
        _, version = args
        return self._reporting.report(self._present(asked), version, now())

    def _present(self, replica: Replica) -> Present:
        stats = replica.engine.stats()
        load = ReplicaLoad(
            replica.id,
            ReplicaState.RUNNING,
            "node",
            stats.capacity_tokens,
            stats.block_size,
            stats.free_blocks,
            stats.max_requests,
            tuple(replica.host.loads()),
            "model",
        )
        return Present(load, tuple(replica.moves.records()), PROFILE)


def replayed(folder: FilePath) -> tuple[int, bool]:
    """The number of arrivals in the recording there, and True if a replay decides as it was decided."""
    terms, epochs = read_recording(*folder.iterdir())
    played = list(play(SchedulerMemory(terms), epochs))
    return sum(len(epoch.entries) for epoch, _ in played), all(same for _, same in played)


async def test_requests_are_prefilled_on_one_replica_and_decode_on_the_other(tmp_path: FilePath) -> None:
    pair = make_pair(step_s=0.02)
    for replica in (pair.a, pair.b):
        set_pace(replica.engine, max_num_batched_tokens=8)
    config = SchedulerConfig(
        policy="best_fit", mode=Mode.ACT, epoch_s=0.5, bounds=(2, 2), prefill_replicas=1, record=str(tmp_path)
    )
    ids = (pair.a.id, pair.b.id)
    listing, fleet = FakeListing(dict.fromkeys(ids)), PairFleet(pair)
    core = LiveScheduler(
        ReplicaId("s"),
        config,
        3,
        [make_ports(SOLE_POOL, fleet, ids, listing, FakeScaler(2, 2))],
        now,
        now,
        FakeModes(),
        FakeClaims(),
    )
    loop = asyncio.create_task(core.run())
    await core._epochs.ready.wait()
    await asyncio.sleep(1.0)
    role = {r["id"]: r["role"] for r in (await core.state(SOLE_POOL))["replicas"]}
    assert sorted(role.values()) == [Role.DECODE, Role.PREFILL]
    (prefills,) = (replica for replica, its in role.items() if its == Role.PREFILL)
    asked = []
    for number in range(5):
        request = spec(f"r{number}", prompt=100, tokens=40)
        (placed,) = await core.place((PlaceCall(SOLE_POOL, Arrival(request.id, request.prompt_tokens), "", ()),))
        assert isinstance(placed, Place) and placed.replica == prefills
        assert placed.then is not None and placed.then.target != prefills
        asked.append((request, pair.submit(request, placed.replica, placed.then)))
        await asyncio.sleep(0.15)
    for request, cursor in asked:
        assert await pair.finished(cursor) == expected(prompt_of(request), 40)
    await pair.both_idle()
    loop.cancel()
    core.close()
    records: list[MigrationRecord] = pair.replica(prefills).moves.records()
    assert [(r.outcome, r.path, r.trigger) for r in records] == [(Outcome.COMMITTED, Path.KV, Reason.DISAGGREGATE)] * 5
    assert all(r.rounds > LIMITS.copy.max_rounds and r.tokens == 101 for r in records), "each followed its prefill"
    assert not fleet.ordered, "every order came with the submission"
    assert replayed(tmp_path) == (5, True)
    assert not [r for r in (pair.a, pair.b) if r.id != prefills and r.moves.records()]
