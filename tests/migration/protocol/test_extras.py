"""What engines yield beside tokens, on its way with these tokens through every hop."""

import pytest

from migration.protocol.core_messages import Prefilled, decode_logprobs, encode_prefilled
from migration.protocol.cursor import Cursor
from migration.protocol.messages import PathRequest
from migration.protocol.request import Delta, Moved
from policies.model import RequestId
from tests.deployments.engine.quick_engine import expected_logprobs, prompt_of
from tests.migration.world import make_pair, spec

R = RequestId("r")


def scored(index: int, *tokens: int, hop: int = 0) -> Delta:
    """Each token was a step of its own, whose rest names it."""
    return Delta(R, hop, index, tokens, None, tuple((index + i, b"%d" % token) for i, token in enumerate(tokens)))


def names(cursor: Cursor) -> list[int]:
    return [int(rest) for _, rest in cursor.extras]


def test_extras_come_with_their_tokens_once() -> None:
    cursor = Cursor()
    for delta in (scored(0, 10, 11), scored(0, 10, 11), scored(1, 11, 12), scored(1, 99, hop=-1)):
        cursor.feed(delta)
    assert names(cursor) == cursor.tokens == [10, 11, 12]
    assert [index for index, _ in cursor.extras] == [0, 1, 2]


def test_extras_that_came_early_wait_for_their_hop() -> None:
    cursor = Cursor()
    cursor.feed(scored(0, 10))
    cursor.feed(scored(1, 11, hop=1))
    assert names(cursor) == [10]
    cursor.moved(Moved(R, 0, 1, 1, "b"))
    assert names(cursor) == cursor.tokens == [10, 11]


def test_extras_that_the_reader_has_are_not_delivered_again() -> None:
    cursor = Cursor()
    cursor.feed(scored(0, 10, 11))
    cursor.extras.clear()
    cursor.feed(scored(0, 10, 11, 12))
    assert names(cursor) == [12]


def test_extras_of_an_end_without_tokens_come_with_it() -> None:
    cursor = Cursor()
    cursor.feed(scored(0, 10))
    cursor.feed(Delta(R, 0, 1, (), "stop", ((1, b"5"),)))
    cursor.feed(Delta(R, 0, 1, (), "stop", ((1, b"5"),)))
    assert names(cursor) == [10, 5] and cursor.finish == "stop"


@pytest.mark.parametrize("path", [PathRequest.KV, PathRequest.TOKENS])
async def test_moved_request_has_the_logprobs_of_an_unmoved_one(path: PathRequest) -> None:
    pair, request = make_pair(), spec(tokens=200, logprobs=3)
    cursor = pair.submit(request)
    await pair.until(cursor, 10)
    pair.move(request.id, path=path)
    await pair.finished(cursor)
    assert cursor.hop == 1
    assert [index for index, _ in cursor.extras] == [*range(200)]
    assert [decode_logprobs(rest) for _, rest in cursor.extras] == expected_logprobs(prompt_of(request), 200, 3)
    for reader in pair.readers:
        reader.cancel()


async def test_request_of_tokens_alone_carries_the_figures_of_its_prefill() -> None:
    pair = make_pair()
    await pair.finished(cursor := pair.submit(spec()))
    deltas = [event for event in pair.events if isinstance(event, Delta)]
    figures = ((0, encode_prefilled(Prefilled(40, 0))),)
    assert tuple(cursor.extras) == deltas[0].extras == figures and not any(delta.extras for delta in deltas[1:])
    for reader in pair.readers:
        reader.cancel()
