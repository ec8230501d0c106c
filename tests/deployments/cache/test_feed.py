"""The feed, over a real socket: a scripted engine publishes as vLLM does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from deployments.cache import feed
from deployments.cache.feed import CacheFeed, EventFolder
from deployments.cache.mirror import Mirror, Resync
from migration.kv.cache_events import PoolContents, decode_batch, encode_names

_encoder = msgspec.msgpack.Encoder()


def stored(*names: int) -> BlockStored:
    return BlockStored(list(names), 5, list(range(32)), 32, None, "GPU", None, extra_keys=[("salt",)], group_idx=0)


class PublishingEngine:
    """Publishes batches on a feed's endpoint. `loses` the next messages; `contents` are published if asked for."""

    def __init__(self, folder: EventFolder) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.PUB)
        self.socket.bind(folder.endpoint)
        self.contents: list[int] = []
        self.asked = 0
        self.loses = 0
        self.silent = False
        self._number = 0

    async def publish(self, *events: Any) -> None:
        number, self._number = self._number, self._number + 1
        if self.loses:
            self.loses -= 1
            return
        payload = _encoder.encode(KVEventBatch(ts=0.0, events=list(events), data_parallel_rank=0))
        await self.socket.send_multipart((b"", number.to_bytes(8, "big"), payload))

    @contextlib.asynccontextmanager
    async def ask(self) -> AsyncIterator[None]:
        self.asked += 1
        if not self.silent:
            await self.publish(PoolContents(encode_names(self.contents)))
        yield


@contextlib.asynccontextmanager
async def following(audit_s: float = 60.0) -> AsyncIterator[tuple[PublishingEngine, Mirror, CacheFeed]]:
    """A feed whose mirror is exact."""
    folder, mirror = EventFolder(), Mirror()
    engine = PublishingEngine(folder)
    following = CacheFeed(mirror, folder, engine.ask, audit_s)
    try:
        await until(lambda: mirror.exact)
        yield engine, mirror, following
    finally:
        following.close()
        engine.socket.close(linger=0)


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are taken soon, and a request whose answer came before the subscription is made again soon."""
    monkeypatch.setattr(feed, "ANSWER_S", 0.05)
    monkeypatch.setattr(feed, "CATCH_UP_S", 0.005)


async def test_the_mirror_follows_the_engine() -> None:
    async with following() as (engine, mirror, _):
        await engine.publish(stored(1, 2), stored(1 << 63))
        await engine.publish(BlockRemoved([2], "GPU", group_idx=0))
        await until(lambda: mirror.hbm.counts == {1: 1, 1 << 63: 1})
        await engine.publish(AllBlocksCleared(), stored(4))
        await until(lambda: mirror.hbm.counts == {4: 1})
        assert mirror.exact


async def test_whoever_looks_at_the_mirror_need_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with following() as (engine, mirror, follower):
        monkeypatch.setattr(feed, "CATCH_UP_S", 60.0)
        await asyncio.sleep(0.02)  # for the last turn with the short time
        for name in range(1, 4):
            await engine.publish(stored(name))

        def there() -> bool:
            follower.catch_up()
            return mirror.hbm.counts == {1: 1, 2: 1, 3: 1}

        await until(there)


async def test_a_lost_message_is_noticed_with_the_next_one_and_repaired() -> None:
    async with following() as (engine, mirror, _):
        before = engine.asked
        engine.loses, engine.contents = 1, [1, 3]
        await engine.publish(stored(1))
        await engine.publish(stored(3))
        await until(lambda: mirror.hbm.counts == {1: 1, 3: 1} and mirror.exact)
        assert engine.asked == before + 1 and mirror.resyncs[Resync.EVENTS_LOST] == 1


async def test_the_audit_repairs_a_mirror_whose_last_message_was_lost() -> None:
    async with following(audit_s=0.1) as (engine, mirror, _):
        engine.loses, engine.contents = 1, [1]
        await engine.publish(stored(1))
        await until(lambda: mirror.hbm.counts == {1: 1})
        assert mirror.resyncs[Resync.EVENTS_LOST] == 1


async def test_the_audit_repairs_a_corrupted_mirror() -> None:
    async with following(audit_s=0.1) as (engine, mirror, _):
        engine.contents = [1]
        await engine.publish(stored(1))
        await until(lambda: mirror.hbm.counts == {1: 1})
        mirror.hbm._counts = {2: 1}
        await until(lambda: mirror.resyncs[Resync.AUDIT] and mirror.hbm.counts == {1: 1})


async def test_a_request_without_an_answer_is_made_again() -> None:
    async with following() as (engine, mirror, follower):
        engine.silent, before = True, engine.asked
        follower.resync()
        await until(lambda: engine.asked >= before + 3)
        engine.silent = False
        checks = mirror.checks
        await until(lambda: mirror.checks > checks)


async def test_the_folder_does_not_outlive_the_connection() -> None:
    async with following() as (engine, mirror, _):
        folder = Path(engine.socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("ipc://")).parent
        await until(lambda: not folder.exists())
        await engine.publish(stored(1))
        await until(lambda: mirror.hbm.counts == {1: 1})


def test_a_folder_is_removed_once() -> None:
    folder = EventFolder()
    path = Path(folder.endpoint.removeprefix("ipc://")).parent
    folder.remove()
    assert not path.exists()
    path.mkdir()
    folder.remove()
    path.rmdir()


async def test_events_that_cannot_be_read_turn_the_mirror_off() -> None:
    async with following() as (engine, mirror, _):
        await engine.publish(stored(b"a hash as bytes"))  # type: ignore[arg-type]
        await until(lambda: mirror.off is not None)
        assert "cannot be read" in str(mirror.off)


def test_vllms_events_are_read_without_their_tokens() -> None:
    events = decode_batch(_encoder.encode(KVEventBatch(ts=1.5, events=[stored(7), BlockRemoved([8], None)])))
    assert [(type(event).__name__, event.block_hashes) for event in events] == [  # type: ignore[union-attr]
        ("BlocksStored", [7]),
        ("BlocksRemoved", [8]),
    ]


async def test_while_it_is_paused_the_engine_is_asked_for_nothing_and_the_mirror_is_exact() -> None:
    async with following(audit_s=0.01) as (engine, mirror, feed):
        engine.contents = [1, 2]
        await feed.pause()
        assert mirror.exact and mirror.hbm.blocks == 2
        asked = engine.asked
        feed.resync()
        await asyncio.sleep(0.1)
        assert engine.asked == asked
        feed.resume()
        await until(lambda: engine.asked > asked)
