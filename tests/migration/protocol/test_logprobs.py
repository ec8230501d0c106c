"""Logprobs on their way: packed, and with their tokens through every hop."""

import math
from dataclasses import replace

import pytest

from migration.protocol.cursor import Cursor
from migration.protocol.messages import PathRequest
from migration.protocol.request import Delta, Moved, TokenLogprobs, pack_logprobs, unpack_logprobs
from policies.model import RequestId
from tests.deployments.engine.fake_engine import expected_logprobs
from tests.migration.world import make_pair, spec

R = RequestId("r")


@pytest.mark.parametrize("top", [(), ((5, -0.5),), ((5, -0.5), (2**31 - 1, -math.inf), (0, -2.25))], ids=len)
def test_packing_is_reversible(top: tuple[tuple[int, float], ...]) -> None:
    packed = pack_logprobs(-0.125, [token for token, _ in top], [value for _, value in top])
    assert unpack_logprobs(packed) == TokenLogprobs(-0.125, top) and len(packed) == 4 + 8 * len(top)


def scored(index: int, *tokens: int, hop: int = 0) -> Delta:
    """Each token's logprobs name it."""
    return Delta(R, hop, index, tokens, None, tuple(b"%d" % token for token in tokens))


def names(cursor: Cursor) -> list[int]:
    return [int(packed) for packed in cursor.logprobs]


def test_logprobs_come_with_their_tokens_once() -> None:
    cursor = Cursor()
    for delta in (scored(0, 10, 11), scored(0, 10, 11), scored(1, 11, 12), scored(1, 99, hop=-1)):
        cursor.feed(delta)
    assert names(cursor) == cursor.tokens == [10, 11, 12]


def test_logprobs_that_came_early_wait_for_their_hop() -> None:
    cursor = Cursor()
    cursor.feed(scored(0, 10))
    cursor.feed(scored(1, 11, hop=1))
    assert names(cursor) == [10]
    cursor.moved(Moved(R, 0, 1, 1, "b"))
    assert names(cursor) == cursor.tokens == [10, 11]


def test_logprobs_that_the_reader_has_are_not_delivered_again() -> None:
    cursor = Cursor()
    cursor.feed(scored(0, 10, 11))
    cursor.logprobs.popleft()
    cursor.feed(scored(0, 10, 11, 12))
    assert names(cursor) == [11, 12]


@pytest.mark.parametrize("path", [PathRequest.KV, PathRequest.TOKENS])
async def test_a_moved_request_has_the_logprobs_of_an_unmoved_one(path: PathRequest) -> None:
    pair, request = make_pair(), spec(tokens=200)
    request = replace(request, sampling=replace(request.sampling, logprobs=3))
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id, path=path)
    await pair.finished(cursor)
    assert cursor.hop == 1
    assert tuple(cursor.logprobs) == expected_logprobs(request.prompt, 200, 3)
    for reader in pair.readers:
        reader.cancel()


async def test_a_request_without_logprobs_carries_none() -> None:
    pair = make_pair()
    await pair.finished(cursor := pair.submit(spec()))
    deltas = [event for event in pair.events if isinstance(event, Delta)]
    assert deltas and all(delta.logprobs == () for delta in deltas) and not cursor.logprobs
    for reader in pair.readers:
        reader.cancel()
