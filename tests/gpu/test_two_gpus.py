"""Between two GPUs: NCCL from slot to slot, and slots mapped by the other GPU's worker.

Two Ray actors with a GPU each stand for replicas. What they share is what a migration sends anyway: the channel's
name and the size.
"""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from migration.kv.device import DeviceSegment
from migration.kv.staging import HEADER
from migration.protocol.messages import SlotRef
from migration.protocol.sizing import MIB, StagingSizes
from policies.model import Bytes, ReplicaId
from tests.migration.kv.kv_process import BLOCK_BYTES, Worker
from tests.migration.transport.transfers import content, timed, transfer

pytestmark = pytest.mark.integration

LIMIT_S = 3.0
"""The time limit for a silent peer, and for creating a pair's communicator in its first transfer."""
ABORT_S = 0.5
"""The longest time in which an abort ends a transfer's kernel."""


class Replica:
    """A replica's end of the transport. Errors are returned as the name of their type."""

    def __init__(self, name: str) -> None:
        from deployments.config import MigrationSettings
        from deployments.replica.transports import make_slots, make_transport

        config = MigrationSettings(transport="nccl", transfer_timeout_s=LIMIT_S)
        sizes = StagingSizes(workers=1, count=4, slot_bytes=8 * MIB)
        self._name = ReplicaId(name)
        self._transport = make_transport(config, sizes)
        self._slots = make_slots(config, sizes)

    async def ready(self) -> None:
        """Returns when the actor runs."""

    async def channel(self, target: str) -> str:
        """The channel of the next send to `target`."""
        return self._transport.channel(self._name, ReplicaId(target), 0)

    async def send(self, channel: str, size: int, seed: int) -> tuple[str, float]:
        """Send bytes made from `seed`; return the result and its seconds."""
        import numpy as np

        with await self._slots.lease(10) as (slot,):
            slot.payload[:size].set(np.frombuffer(content(size, seed), dtype=np.uint8))  # type: ignore[attr-defined]
            return await timed(self._transport.send(channel, slot, Bytes(HEADER + size)))

    async def receive(self, channel: str, size: int) -> tuple[str, float, str]:
        """Receive; return the result, its seconds, and the digest of the received bytes."""
        with await self._slots.lease(10) as (slot,):
            how, took = await timed(self._transport.receive(channel, SlotRef("", 0, 7), Bytes(HEADER + size), slot))
            came = slot.payload[:size].get()  # type: ignore[attr-defined]
            return how, took, hashlib.sha256(came.tobytes()).hexdigest()

    async def in_use(self) -> int:
        """The number of leased slots."""
        return self._slots.in_use


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray

    root = str(Path(__file__).parents[2])
    ray.init(num_gpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": root}})
    yield ray
    ray.shutdown()


@pytest.fixture
def pair(cluster: Any) -> Iterator[tuple[Any, Any]]:
    ends = make_replica(cluster, "a"), make_replica(cluster, "b")
    yield ends
    for end in ends:
        cluster.kill(end)


def make_replica(cluster: Any, name: str) -> Any:
    actor = cluster.remote(num_cpus=0, num_gpus=1, max_concurrency=32)(Replica).remote(name)
    cluster.get(actor.ready.remote())
    return actor


OK = ("ok", "ok", True)


async def test_bytes_arrive_unchanged(pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert [await transfer(a, b, "b", mib * MIB, seed=mib) for mib in (1, 8, 1)] == [OK] * 3


async def test_both_directions_transfer_at_once(pair: tuple[Any, Any]) -> None:
    a, b = pair
    ends = await asyncio.gather(transfer(a, b, "b", seed=1), transfer(b, a, "a", seed=2))
    assert list(ends) == [OK, OK]


async def test_sender_without_a_receiver_times_out_and_the_next_group_works(pair: tuple[Any, Any]) -> None:
    a, b = pair
    how, took = await a.send.remote(await a.channel.remote("b"), MIB, 1)
    assert how == "TransferTimeout" and took < LIMIT_S + ABORT_S
    assert await a.in_use.remote() == 0
    assert await transfer(a, b, "b") == OK


async def test_silent_receiver_is_aborted_and_the_next_group_works(pair: tuple[Any, Any]) -> None:
    """The ranks are connected, so the send's kernel is on the GPU at the time-out."""
    a, b = pair
    assert await transfer(a, b, "b") == OK
    how, took = await a.send.remote(await a.channel.remote("b"), 8 * MIB, 1)
    assert how == "TransferTimeout" and took < LIMIT_S + ABORT_S
    assert await a.in_use.remote() == 0
    assert await transfer(a, b, "b") == OK


async def test_silent_sender_is_aborted_and_the_next_group_works(pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert await transfer(a, b, "b") == OK
    channel = await a.channel.remote("b")
    how, took, _ = await b.receive.remote(channel, 8 * MIB)
    assert how == "TransferTimeout" and took < LIMIT_S + ABORT_S
    # The sender's next transfer fails.
    assert (await a.send.remote(channel, 8 * MIB, 1))[0] in ("TransferTimeout", "TransferFailed")
    assert await transfer(a, b, "b") == OK


async def test_transfer_to_a_dead_peer_fails_and_its_successor_works(cluster: Any, pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert await transfer(a, b, "b") == OK
    sending = asyncio.ensure_future(a.send.remote(await a.channel.remote("b"), 8 * MIB, 1))
    cluster.kill(b)
    assert (await sending)[0] in ("TransferTimeout", "TransferFailed")
    successor = make_replica(cluster, "c")
    assert await transfer(a, successor, "c") == OK
    cluster.kill(successor)


def test_worker_maps_slots_on_a_gpu_outside_its_visible_devices() -> None:
    """Transport cuda_ipc between replicas of two GPUs: Ray shows each process its own GPU only."""
    staging = DeviceSegment.create(HEADER + 4 * BLOCK_BYTES)
    with Worker("cuda", "LBNHC", seed=1, gpu="0") as source, Worker("cuda", "LBNHC", gpu="1") as target:
        staged = source.do("gather", blocks=[3, 30, 7], segment=staging.path, offset=0)
        loaded = target.do(
            "scatter", blocks=[5, 6], staged=3, skip=1, segment=staging.path, offset=0, ticket=staged["ticket"]
        )
        assert loaded == {}
        assert target.do("digest", blocks=[5, 6]) == source.do("digest", blocks=[30, 7])
    staging.close()
