"""The collective transport between processes: Ray actors as replicas, each with its own staging slots.

The actors exchange only the two values that a migration's messages carry: the channel's name and the size.
"""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from migration.protocol.messages import SlotRef
from migration.protocol.ports import Slot
from migration.protocol.sizing import MIB
from policies.model import Bytes, ReplicaId
from tests.counts import LONG_ONLY
from tests.integration.conftest import ROOT, Stage
from tests.migration.transport.transfers import content, timed, transfer

pytestmark = LONG_ONLY

LIMIT_S = 2.0
"""The time limit for a silent peer."""


class Replica:
    """A replica's end of the transport. Errors are returned as the name of their type."""

    def __init__(self, name: str, slots: int = 4, slot_bytes: int = 8 * MIB) -> None:
        from migration.run.slots import Slots
        from migration.transport import gloo_group
        from migration.transport.collective import CollectiveGroups

        gloo_group.register(LIMIT_S)
        self._name = ReplicaId(name)
        self._transport = CollectiveGroups(gloo_group.BACKEND, LIMIT_S, threads=8)
        self._slots = Slots(slots, slot_bytes)
        self._held: dict[str, Slot] = {}

    async def ready(self) -> None:
        """Returns when the actor runs."""

    async def channel(self, target: str) -> str:
        """The channel of the next send to `target`."""
        return self._transport.channel(self._name, ReplicaId(target), 0)

    async def send(self, channel: str, size: int, seed: int) -> tuple[str, float]:
        """Send bytes made from `seed`; return the result and its seconds."""
        with await self._slots.lease(10) as (slot,):
            slot.memory[:size] = content(size, seed)
            return await timed(self._transport.send(channel, slot, Bytes(size)))

    async def receive(self, channel: str, size: int) -> tuple[str, float, str]:
        """Receive; return the result, its seconds, and the digest of the received bytes."""
        with await self._slots.lease(10) as (slot,):
            how, took = await timed(self._transport.receive(channel, SlotRef("", 0, 7), Bytes(size), slot))
            return how, took, hashlib.sha256(slot.memory[:size]).hexdigest()

    async def init_only(self, channel: str) -> float:
        """Seconds for joining a group whose other end does not exist."""
        started = time.monotonic()
        self._transport._join(channel, 1)
        return time.monotonic() - started

    async def in_use(self) -> int:
        """The number of leased slots."""
        return self._slots.in_use


@pytest.fixture(scope="module")
def cluster(stage: Stage) -> Iterator[Any]:
    import ray

    stage.clear()
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def pair(cluster: Any) -> tuple[Any, Any]:
    return make_replica(cluster, "a"), make_replica(cluster, "b")


def make_replica(cluster: Any, name: str) -> Any:
    actor = cluster.remote(num_cpus=0, max_concurrency=32)(Replica).remote(name)
    cluster.get(actor.ready.remote())
    return actor


@pytest.mark.parametrize(("mib", "back"), [(1, False), (8, True)], ids=["there", "and back"])
async def test_bytes_arrive_unchanged(pair: tuple[Any, Any], mib: int, back: bool) -> None:
    source, target = reversed(pair) if back else pair
    assert await transfer(source, target, "a" if back else "b", mib * MIB, seed=mib) == ("ok", "ok", True)


async def test_chunks_of_a_channel_arrive_in_order(pair: tuple[Any, Any]) -> None:
    a, b = pair
    for seed in range(5):
        assert await transfer(a, b, "b", MIB, seed) == ("ok", "ok", True)


async def test_both_directions_and_other_pairs_transfer_at_once(cluster: Any, pair: tuple[Any, Any]) -> None:
    (a, b), c = pair, make_replica(cluster, "c")
    ends = [(a, b, "b"), (b, a, "a"), (a, c, "c"), (c, b, "b"), (b, c, "c")]
    results = await asyncio.gather(*(transfer(s, t, name, MIB, i) for i, (s, t, name) in enumerate(ends)))
    assert results == [("ok", "ok", True)] * len(ends)
    cluster.kill(c)


async def test_joining_a_group_does_not_wait_for_the_other_end(pair: tuple[Any, Any]) -> None:
    assert await pair[0].init_only.remote("nobody>a#1") < 0.5


async def test_sender_without_a_receiver_times_out_and_the_channel_is_renewed(pair: tuple[Any, Any]) -> None:
    a, b = pair
    channel = await a.channel.remote("b")
    how, took = await a.send.remote(channel, MIB, 1)
    assert how in ("TransferTimeout", "TransferFailed") and took < 3 * LIMIT_S
    assert await a.in_use.remote() == 0
    assert await transfer(a, b, "b", MIB) == ("ok", "ok", True)


async def test_receiver_without_a_sender_times_out_and_the_sender_renews_the_channel(pair: tuple[Any, Any]) -> None:
    a, b = pair
    assert await transfer(a, b, "b", MIB) == ("ok", "ok", True)
    channel = await a.channel.remote("b")
    how, took, _ = await b.receive.remote(channel, MIB)
    assert how == "TransferTimeout" and took < 2 * LIMIT_S
    # The sender's next transfer fails at once.
    late = asyncio.ensure_future(b.receive.remote(channel, MIB))
    assert (await a.send.remote(channel, MIB, 1))[0] == "TransferFailed"
    assert await transfer(a, b, "b", MIB) == ("ok", "ok", True)
    assert (await late)[0] == "TransferFailed"


async def test_death_of_a_peer_ends_a_transfer_before_the_time_limit(cluster: Any, pair: tuple[Any, Any]) -> None:
    a, d = pair[0], make_replica(cluster, "d")
    assert await transfer(a, d, "d", MIB) == ("ok", "ok", True)
    channel = await a.channel.remote("d")
    sending = asyncio.ensure_future(a.send.remote(channel, 8 * MIB, 1))
    await asyncio.sleep(0.2)
    cluster.kill(d)
    how, took = await sending
    assert how in ("TransferTimeout", "TransferFailed") and took < LIMIT_S
    assert await a.in_use.remote() == 0


async def test_restarted_peer_is_reached_through_a_new_channel(cluster: Any, pair: tuple[Any, Any]) -> None:
    a, e = pair[0], make_replica(cluster, "e")
    assert await transfer(a, e, "e", MIB) == ("ok", "ok", True)
    cluster.kill(e)
    await a.send.remote(await a.channel.remote("e"), MIB, 1)
    assert await transfer(a, make_replica(cluster, "e"), "e", MIB) == ("ok", "ok", True)
