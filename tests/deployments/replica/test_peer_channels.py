"""Calls between replicas: every method and error over a real connection, and channels that break."""

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from deployments.api.protocols import CONTROL_METHODS, PEER_METHODS, ControlApi, PeerApi
from deployments.channels import listening
from deployments.channels.calling import CallerEnd
from deployments.channels.links import CallLink, CallLinks
from deployments.channels.listening import ChannelListener
from deployments.channels.wire import ChannelOffer
from deployments.replica.peers import ChannelPeer, PeerCalls
from migration.memory.pair_run import PairProposal
from migration.protocol.continuing import plain_spec
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import (
    BlocksGone,
    LoadOver,
    MigrationError,
    PeerLost,
    Refused,
    RequestGone,
    Stopping,
    TransferFailed,
    TransferTimeout,
)
from migration.protocol.layouts import reshard
from migration.protocol.messages import (
    Adopt,
    Chunk,
    CopyRound,
    Fingerprint,
    PathRequest,
    Prepare,
    Prepared,
    Shard,
    SlotRef,
    Tail,
)
from migration.protocol.record import CopyOutcome, CopyRecord
from migration.protocol.request import IngressId
from migration.run.donor import CopyOrder
from policies.causes import Cause
from policies.model import Blocks, Bytes, ReplicaId
from policies.plan import Path
from policies.prefix.copies import CopyReason
from policies.prefix.evacuation import CachedContext
from tests.migration.shards import shards

OWN, OTHER = ReplicaId("own"), ReplicaId("other")
SPEC = replace(
    plain_spec("r", (1, 2), 9, "label", IngressId("i"), seed=3, temperature=1.0),
    body=(b"\x00\xff", b"a tensor"),
    adapter=Adapter("x", 7, "/x", is_3d_lora_weight=True),
    returns_to=OWN,
)
ROUND = CopyRound("m", 1, Blocks(0), Blocks(9), 3, (5, 6))
TAIL = Tail("m.tail", Blocks(9), 150)
CUTS = reshard(shards(2, heads=2), shards(1, heads=2))
MARKS = Fingerprint("model", "cache", 16, shards(2, heads=2, block_size=16))
PREPARE = Prepare("m", SPEC, 3, 4, OWN, PathRequest.AUTO, MARKS, (1, 2), ROUND)
SHARDS = (Shard(SlotRef("/dev/shm/a", 64, 2**63), Bytes(7)), Shard(SlotRef("/dev/shm/b", 0, 1), Bytes(9)))
CHUNK = Chunk("m", 1, Blocks(2), Blocks(4), SHARDS, ("a", "b"), TAIL)
ORDER = CopyOrder("copy", SPEC, CopyReason.FETCH, (4,), 0.5)
RECORD = CopyRecord("copy", OTHER, OWN, CopyReason.FETCH, "done", CopyOutcome.DONE, cause=Cause.NO_ROOM, copy_s=0.25)
PROPOSAL = PairProposal(1 << 40, ReplicaId("a"), OWN, 2, 4, "model", "\0address", 5.0)
CALLS: list[tuple[str, tuple[Any, ...], Any]] = [
    ("prepare", (PREPARE,), Prepared(Path.KV, 10.0, ("w0", "w1"), Blocks(2))),
    ("prepare", (PREPARE,), Prepared(Path.KV, 10.0, cuts=CUTS, chunk=Blocks(7))),
    ("prepare", (PREPARE,), Prepared(Path.TOKENS, 10.0, reason="unlike")),
    ("prepare", (replace(PREPARE, first_round=None),), Prepared(Path.TOKENS, 10.0)),
    ("load", (ROUND,), None),
    ("receive", (CHUNK,), None),
    ("receive", (replace(CHUNK, tail=None),), None),
    ("renew", ("m",), None),
    ("adopt", (Adopt("m", 5, (8, 9), TAIL),), None),
    ("adopt", (Adopt("m", 5, ()),), None),
    ("cancel", ("m",), None),
    ("resumed", ("m",), 0.125),
    ("resumed", ("m",), None),
    ("copy_prefix", (ORDER, OWN), RECORD),
    ("propose_pair", (PROPOSAL,), "an address"),
    ("pair_state", (1 << 40,), "paired"),
    ("pair_state", (1,), None),
]


class Target:
    """Implements `PeerApi`: notes its calls, and answers each with `answer`, an exception or a coroutine."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.answer: Any = None

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        return partial(self._take, method)

    async def _take(self, method: str, *arguments: object) -> Any:
        self.calls.append((method, arguments))
        if isinstance(self.answer, Exception):
            raise self.answer
        return await self.answer() if callable(self.answer) else self.answer


class Offers:
    """The other replica's offers of channels."""

    def __init__(self, listener: ChannelListener, target: Target) -> None:
        self.listener, self.target = listener, target
        self.offered = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def offer(self, replica: ReplicaId) -> ChannelOffer:
        assert replica == OTHER
        self.offered += 1
        await self.gate.wait()
        return self.listener.offer_calls(self.target, PEER_METHODS)

    async def control(self) -> ChannelOffer:
        return self.listener.offer_calls(self.target, CONTROL_METHODS)


@pytest.fixture
async def replicas() -> AsyncIterator[Offers]:
    made = Offers(await ChannelListener.start("127.0.0.1"), Target())
    yield made
    made.listener.close()


@pytest.fixture
async def channels(replicas: Offers) -> AsyncIterator[CallLinks]:
    made = CallLinks(replicas.offer, PEER_METHODS)
    yield made
    made.close()


@pytest.fixture
def peer(channels: CallLinks) -> ChannelPeer:
    return ChannelPeer(channels, OTHER)


def ends(channels: CallLinks) -> CallerEnd:
    opened = channels.at(OTHER)._opened
    assert opened is not None
    return opened.result()


@pytest.mark.parametrize(("method", "arguments", "answer"), CALLS, ids=[name for name, _, _ in CALLS])
async def test_calls_and_answers_arrive_as_they_were_sent(
    replicas: Offers, peer: ChannelPeer, method: str, arguments: tuple[Any, ...], answer: object
) -> None:
    replicas.target.answer = answer
    assert await getattr(peer, method)(*arguments) == answer
    assert replicas.target.calls == [(method, arguments)]


def test_every_method_is_tried() -> None:
    assert {name for name, _, _ in CALLS} == set(PEER_METHODS)


@pytest.mark.parametrize(
    "error",
    [
        Refused("no room", Cause.NO_ROOM),
        Stopping("it stops"),
        RequestGone("no request"),
        PeerLost("its own peer"),
        TransferFailed("no blocks"),
        TransferTimeout("too late"),
        BlocksGone("preempted"),
        LoadOver("over"),
        TransferFailed("other", Cause.MIGRATION_GONE),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_arrive_with_class_text_and_cause(
    replicas: Offers, peer: ChannelPeer, error: MigrationError
) -> None:
    replicas.target.answer = error
    with pytest.raises(type(error)) as found:
        await peer.adopt(Adopt("m", 0, ()))
    assert (type(found.value), str(found.value), found.value.cause) == (type(error), str(error), error.cause)


async def test_a_defect_is_logged_where_it_is_and_tells_the_caller_nothing(
    replicas: Offers, peer: ChannelPeer, caplog: pytest.LogCaptureFixture
) -> None:
    replicas.target.answer = KeyError("a secret")
    with caplog.at_level(logging.ERROR), pytest.raises(MigrationError, match=r"^internal error$") as found:
        await peer.renew("m")
    assert type(found.value) is MigrationError and found.value.cause is Cause.UNEXPECTED
    assert "a secret" in caplog.text


async def test_a_result_that_cannot_travel_is_a_defect(
    replicas: Offers, peer: ChannelPeer, caplog: pytest.LogCaptureFixture
) -> None:
    replicas.target.answer = object()
    with caplog.at_level(logging.ERROR), pytest.raises(MigrationError, match=r"^internal error$"):
        await peer.resumed("m")
    assert "object cannot travel" in caplog.text


async def test_arrays_of_numbers_travel(replicas: Offers) -> None:
    """A scheduler gets those of the contexts that a replica has cached."""
    found = (CachedContext(3, array("Q", [1, 2**64 - 1]), 0.5, 1),)
    replicas.target.answer = found
    link = CallLink("replica", lambda: replicas.control(), CONTROL_METHODS)
    (context,) = await link.call(ControlApi.cached_contexts, 7)
    assert context == found[0]._replace(names=[1, 2**64 - 1])
    link.close()


async def test_calls_wait_for_none_of_the_others(replicas: Offers, peer: ChannelPeer) -> None:
    """The source waits for a load of seconds, and sends chunks meanwhile."""
    loaded = asyncio.Event()
    replicas.target.answer = loaded.wait
    loading = asyncio.create_task(peer.load(ROUND))
    async with asyncio.timeout(10):
        while not replicas.target.calls:
            await asyncio.sleep(0.001)
    replicas.target.answer = None
    await peer.receive(CHUNK)
    assert not loading.done()
    loaded.set()
    with pytest.raises(Exception, match="Expected `null`"):
        await loading  # True is no answer of `load`
    assert [name for name, _ in replicas.target.calls] == ["load", "receive"]


async def test_calls_begin_in_their_order(replicas: Offers, peer: ChannelPeer) -> None:
    await peer.renew("first")
    await asyncio.gather(*(peer.renew(str(number)) for number in range(50)))
    assert [arguments for _, arguments in replicas.target.calls[1:]] == [(str(number),) for number in range(50)]


async def test_first_calls_share_one_channel(replicas: Offers, channels: CallLinks, peer: ChannelPeer) -> None:
    replicas.gate.clear()
    calls = [asyncio.create_task(peer.renew("m")) for _ in range(3)]
    await asyncio.sleep(0.01)
    calls[0].cancel()
    replicas.gate.set()
    await asyncio.gather(*calls[1:])
    assert replicas.offered == 1 and len(replicas.target.calls) == 2


async def test_a_replica_that_cannot_be_reached_is_tried_again(
    replicas: Offers, peer: ChannelPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.channels.links._OFFER_S", 0.01)
    replicas.gate.clear()
    with pytest.raises(PeerLost, match="offered no channel"):
        await peer.renew("m")
    replicas.gate.set()
    await peer.renew("m")
    assert replicas.offered == 2


async def test_a_channel_that_breaks_ends_its_calls_and_is_opened_again(
    replicas: Offers, channels: CallLinks, peer: ChannelPeer
) -> None:
    replicas.target.answer = asyncio.Event().wait
    adopting = asyncio.create_task(peer.adopt(Adopt("m", 0, ())))
    while not replicas.target.calls:
        await asyncio.sleep(0.001)
    ends(channels)._transport.abort()
    with pytest.raises(PeerLost, match="did not answer"):
        await adopting
    replicas.target.answer = None
    await peer.renew("m")
    assert replicas.offered == 2


async def test_calls_under_way_go_on_at_the_target_if_the_channel_breaks(
    replicas: Offers, channels: CallLinks, peer: ChannelPeer
) -> None:
    """As those through Ray do: an adoption that is cut off in its midst would leave half of a request."""
    done, gate = asyncio.Event(), asyncio.Event()

    async def adopt() -> None:
        await gate.wait()
        done.set()

    replicas.target.answer = adopt
    adopting = asyncio.create_task(peer.adopt(Adopt("m", 0, ())))
    while not replicas.target.calls:
        await asyncio.sleep(0.001)
    ends(channels)._transport.abort()
    with pytest.raises(PeerLost):
        await adopting
    gate.set()
    async with asyncio.timeout(5):
        await done.wait()


async def test_a_replica_that_leaves_keeps_its_channel_for_calls_under_way(
    replicas: Offers, channels: CallLinks, peer: ChannelPeer
) -> None:
    resumed = asyncio.Event()

    async def answer() -> float:
        await resumed.wait()
        return 0.5

    replicas.target.answer = answer
    waiting = asyncio.create_task(peer.resumed("m"))
    while not replicas.target.calls:
        await asyncio.sleep(0.001)
    end = ends(channels)
    channels.forget(OTHER)
    await asyncio.sleep(0)
    assert end.lost and not end._transport.is_closing(), "no new calls, but answers"
    resumed.set()
    assert await waiting == 0.5 and end._transport.is_closing()


async def test_a_forgotten_replica_may_come_back(replicas: Offers, channels: CallLinks, peer: ChannelPeer) -> None:
    await peer.renew("m")
    end = ends(channels)
    channels.forget(OTHER)
    await asyncio.sleep(0)
    assert end._transport.is_closing()
    await ChannelPeer(channels, OTHER).renew("m")
    assert replicas.offered == 2


async def test_an_offer_is_withdrawn_if_nobody_comes(replicas: Offers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "ADMISSION_S", 0.01)
    replicas.listener.offer_calls(replicas.target, PEER_METHODS)
    assert replicas.listener._sessions
    await asyncio.sleep(0.05)
    assert not replicas.listener._sessions


def test_the_callee_takes_every_method() -> None:
    assert all(callable(getattr(PeerCalls, name)) for name in PEER_METHODS)
    assert PEER_METHODS.keys() == {name for name in dir(PeerApi) if not name.startswith("_")}
