"""Between two GPUs: NCCL from slot to slot, and slots that the other GPU's worker maps.

Two Ray actors with a GPU each stand for replicas. What they share is what a migration sends anyway: the channel's
name and the size.
"""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from migration.kv.device import DeviceSegment
from migration.kv.staging import HEADER
from migration.messages import SlotRef
from policies.model import Bytes, ReplicaId
from tests.migration.kv_process import BLOCK_BYTES, Worker

pytestmark = pytest.mark.integration

MIB = 1 << 20
LIMIT_S = 3.0
"""After which a silent peer is given up. The first transfer of a pair makes its communicator, within the same limit."""


class Replica:
    """A replica's end of the transport. Errors come back as the name of their type, so that tests can compare."""

    def __init__(self, name: str) -> None:
        from deployments.config import MigrationConfig
        from deployments.transports import make_slots, make_transport

        config = MigrationConfig(transport="nccl", transfer_timeout_s=LIMIT_S, slot_bytes=8 * MIB)
        self._name = ReplicaId(name)
        self._transport = make_transport(config)
        self._slots = make_slots(config)

    async def ready(self) -> None:
        """Returns once the actor runs."""

    async def channel(self, target: str) -> str:
        """The channel that the next send to `target` uses."""
        return self._transport.channel(self._name, ReplicaId(target))

    async def send(self, channel: str, size: int, seed: int) -> tuple[str, float]:
        """Send bytes made from `seed`; return how that ended, and the seconds it took."""
        import numpy as np

        with await self._slots.lease(10) as slot:
            slot.payload[:size].set(np.frombuffer(content(size, seed), dtype=np.uint8))  # type: ignore[attr-defined]
            return await timed(self._transport.send(channel, slot, Bytes(HEADER + size)))

    async def receive(self, channel: str, size: int) -> tuple[str, float, str]:
        """Receive; return how that ended, the seconds it took, and the digest of what came."""
        with await self._slots.lease(10) as slot:
            how, took = await timed(self._transport.receive(channel, SlotRef("", 0, 7), Bytes(HEADER + size), slot))
            came = slot.payload[:size].get()  # type: ignore[attr-defined]
            return how, took, hashlib.sha256(came.tobytes()).hexdigest()

    async def in_use(self) -> int:
        """Slots that are lent."""
        return self._slots.in_use


async def timed(work: Any) -> tuple[str, float]:
    started = time.monotonic()
    try:
        await work
    except Exception as error:
        return type(error).__name__, time.monotonic() - started
    return "ok", time.monotonic() - started


def content(size: int, seed: int) -> bytes:
    """Bytes in which no part is like another."""
    return hashlib.shake_128(seed.to_bytes(4, "little")).digest(size)


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


async def transfer(source: Any, target: Any, name: str, size: int = MIB, seed: int = 1) -> tuple[str, str, bool]:
    """One chunk from source to target `name`: how either end fared, and whether the bytes are equal."""
    channel = await source.channel.remote(name)
    sent, received = await asyncio.gather(source.send.remote(channel, size, seed), target.receive.remote(channel, size))
    return sent[0], received[0], received[2] == hashlib.sha256(content(size, seed)).hexdigest()


OK = ("ok", "ok", True)


async def test_bytes_arrive_as_they_were_sent(pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert [await transfer(a, b, "b", mib * MIB, seed=mib) for mib in (1, 8, 1)] == [OK] * 3


async def test_both_directions_at_once(pair: tuple[Any, Any]) -> None:
    a, b = pair
    ends = await asyncio.gather(transfer(a, b, "b", seed=1), transfer(b, a, "a", seed=2))
    assert list(ends) == [OK, OK]


async def test_sender_without_a_receiver_gives_up_and_the_next_group_works(pair: tuple[Any, Any]) -> None:
    a, b = pair
    how, took = await a.send.remote(await a.channel.remote("b"), MIB, 1)
    assert how == "TransferTimeout" and took < 2 * LIMIT_S
    assert await a.in_use.remote() == 0
    assert await transfer(a, b, "b") == OK


async def test_silent_receiver_is_aborted_and_the_next_group_works(pair: tuple[Any, Any]) -> None:
    """The two are connected: the send's kernel is on the GPU when the time is up."""
    a, b = pair
    assert await transfer(a, b, "b") == OK
    how, took = await a.send.remote(await a.channel.remote("b"), 8 * MIB, 1)
    assert how == "TransferTimeout" and took < 2 * LIMIT_S
    assert await a.in_use.remote() == 0
    assert await transfer(a, b, "b") == OK


async def test_silent_sender_is_aborted_and_the_next_group_works(pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert await transfer(a, b, "b") == OK
    channel = await a.channel.remote("b")
    how, took, _ = await b.receive.remote(channel, 8 * MIB)
    assert how == "TransferTimeout" and took < 2 * LIMIT_S
    # The sender learns of it by its next transfer.
    assert (await a.send.remote(channel, 8 * MIB, 1))[0] in ("TransferTimeout", "TransferFailed")
    assert await transfer(a, b, "b") == OK


async def test_peer_that_dies_is_given_up_and_its_successor_works(cluster: Any, pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert await transfer(a, b, "b") == OK
    sending = asyncio.ensure_future(a.send.remote(await a.channel.remote("b"), 8 * MIB, 1))
    cluster.kill(b)
    assert (await sending)[0] in ("TransferTimeout", "TransferFailed")
    successor = make_replica(cluster, "c")
    assert await transfer(a, successor, "c") == OK
    cluster.kill(successor)


def test_worker_maps_slots_on_a_gpu_that_it_does_not_see() -> None:
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
