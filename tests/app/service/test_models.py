"""Orders find the pool of their request or replica, among several."""

from app.service.models import of_one_pool, order_where_found
from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected
from policies.model import PoolId

CHAT, CODE = PoolId("Engine-chat"), PoolId("Engine-code")


async def answered(**answers: MoveAnswer) -> tuple[MoveAnswer, list[PoolId]]:
    """The answer to an order, and the pools that have got it; `answers` are those of both, in their order."""
    asked = []

    async def order(pool: PoolId) -> MoveAnswer:
        asked.append(pool)
        return answers["chat" if pool == CHAT else "code"]

    return await order_where_found([CHAT, CODE], order), asked


UNKNOWN = MoveRejected(404, "no replica 'x' is running", {"replicas": ["b"]})


async def test_the_first_pool_that_knows_it_answers() -> None:
    assert await answered(chat=MoveAccepted("m"), code=UNKNOWN) == (MoveAccepted("m"), [CHAT])
    assert await answered(chat=UNKNOWN, code=MoveAccepted("m")) == (MoveAccepted("m"), [CHAT, CODE])


async def test_a_refusal_by_the_pool_that_knows_it_is_the_answer() -> None:
    refused = MoveRejected(422, "the only replica cannot be drained")
    assert await answered(chat=refused, code=MoveAccepted("m")) == (refused, [CHAT])


async def test_what_no_pool_knows_is_refused_with_the_replicas_of_all() -> None:
    other = MoveRejected(404, "no replica 'x' is running", {"replicas": ["a", "c"]})
    expected = MoveRejected(404, "no replica 'x' is running", {"replicas": ["a", "b", "c"]})
    assert (await answered(chat=UNKNOWN, code=other))[0] == expected
    request = MoveRejected(404, "no running request has the id or label 'x'")
    assert (await answered(chat=request, code=request))[0] == request


async def test_an_order_about_replicas_of_two_pools_says_so() -> None:
    other = MoveRejected(404, "no replica 'b' is running", {"replicas": ["a", "c"]})
    answer, _ = await answered(chat=UNKNOWN, code=other)
    refused = of_one_pool(answer, ("a", "b"))
    assert isinstance(refused, MoveRejected)
    assert (refused.status, "two models" in refused.message) == (422, True)
    assert of_one_pool(answer, ("a", "x")) == answer
    assert of_one_pool(MoveAccepted("a"), ("a", "b")) == MoveAccepted("a")
