"""The audit of cached KV by recomputation, on paced engines, whose tokens follow from the content of the blocks."""

import asyncio
import random
from dataclasses import replace

import pytest

from deployments.cache.occupancy import Recomputed
from deployments.engine.port import RequestFailed
from deployments.replica.prefix_cache.contexts import PastContexts
from deployments.replica.prefix_cache.recomputing import TOLERANCE, Recomputation, _NextToken
from migration.protocol.core_messages import Adapter
from migration.protocol.messages import Tail
from migration.protocol.ports import OutputSink
from migration.protocol.request import RequestSpec
from tests.deployments.replica.test_evacuation import BLOCKS, remembering, request, serve
from tests.migration.run.test_copies import A, CachedReplica, salted
from tests.migration.world import loads_no_adapter

pytestmark = pytest.mark.virtual_time


def recomputation(replica: CachedReplica, contexts: PastContexts | None = None) -> Recomputation:
    return Recomputation(replica.engine, contexts or replica.host.contexts, loads_no_adapter, random.Random(0))


def spoil(replica: CachedReplica, spec: RequestSpec, block: int) -> None:
    """Change a byte in a cached block of a context."""
    name = replica.engine.names(spec, ())[block]
    replica.engine._batch.pool.named[name].held[5] ^= 1


async def test_right_blocks_give_the_same_token_and_stay() -> None:
    a = remembering()[A]
    for number in (1, 2, 3):
        await serve(a, request(number))
    names = dict(a.engine.mirror.hbm.counts)
    audit = recomputation(a)
    for _ in range(20):
        assert await audit.check() is Recomputed.EQUAL
    assert audit.ended == {Recomputed.EQUAL: 20} and a.engine.mirror.hbm.counts == names and a.idle


@pytest.mark.parametrize("block", [0, 5, 9])
async def test_wrong_block_is_found_and_deleted(block: int, caplog: pytest.LogCaptureFixture) -> None:
    a = remembering()[A]
    await serve(a, request(1))
    spoil(a, request(1), block)
    assert (await a.answer(request(1)))[1] == 40
    audit = recomputation(a)
    with caplog.at_level("ERROR", "ray.serve"):
        assert await audit.check() is Recomputed.DIFFERENT
    assert f"cached KV was wrong, {BLOCKS} blocks are deleted" in caplog.text
    assert a.engine.present(request(1), ()).hbm == 0
    assert await audit.check() is Recomputed.SKIPPED, "nothing of it is cached any more"


async def test_context_whose_adapter_is_gone_is_skipped() -> None:
    adapted = PastContexts(lambda: 1 << 20, lambda: 0.0)
    adapted.add(replace(request(1), adapter=Adapter("sql", 1, "/gone")), ())
    assert await recomputation(remembering()[A], adapted).check() is Recomputed.SKIPPED


async def test_blocks_of_a_salt_are_those_that_are_recomputed() -> None:
    a = remembering()[A]
    await serve(a, salted("mine"))
    spoil(a, salted("mine"), 3)
    assert await recomputation(a).check() is Recomputed.DIFFERENT
    assert not a.engine.mirror.hbm.counts


async def test_nothing_is_recomputed_without_a_context_or_its_blocks() -> None:
    a = remembering()[A]
    audit = recomputation(a)
    assert await audit.check() is Recomputed.SKIPPED
    await serve(a, request(1))
    await a.engine.delete(None)
    assert await audit.check() is Recomputed.SKIPPED
    await serve(a, request(1, tokens=2))
    contexts = PastContexts(lambda: 1 << 20, lambda: 0.0)
    contexts.add(request(2, tokens=3), ())
    assert await recomputation(a, contexts).check() is Recomputed.SKIPPED, "no block is full"


async def test_blocks_that_leave_the_cache_meanwhile_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    a = remembering()[A]
    await serve(a, request(1))
    names, add = a.engine.names(request(1), ()), a.engine.add

    def evict(
        key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None
    ) -> None:
        a.engine._batch.pool.delete(frozenset(names))
        add(key, spec, outputs, sink, tail)

    monkeypatch.setattr(a.engine, "add", evict)
    assert await recomputation(a).check() is Recomputed.SKIPPED


async def test_engine_that_fails_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    a = remembering()[A]
    await serve(a, request(1))

    def fail(key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None) -> None:
        asyncio.get_running_loop().call_soon(sink.fail, RequestFailed("no"))

    monkeypatch.setattr(a.engine, "add", fail)
    assert await recomputation(a).check() is Recomputed.SKIPPED
    assert a.engine.present(request(1), ()).hbm == 10


def test_tokens_agree_up_to_rounding() -> None:
    one = _NextToken(1, {1: -0.70, 2: -0.71, 3: -5.0}, 32)
    assert one.agrees(one)
    assert one.agrees(_NextToken(2, {1: -0.71, 2: -0.70}, 0)), "two tokens are equally likely"
    assert not one.agrees(_NextToken(1, {1: -0.70 - 1.1 * TOLERANCE}, 0)), "another probability"
    assert not one.agrees(_NextToken(3, {1: -0.70, 3: -0.71}, 0)), "unlikely by the other"
    assert not one.agrees(_NextToken(4, {1: -0.70, 4: -0.70}, 0)), "unknown to the other"
