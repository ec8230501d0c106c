"""Requests whose prompt's beginning is copied first, between two replicas with paced engines."""

import asyncio

import pytest

from deployments.engine.tokens import expected
from deployments.replica.prefix_cache.fetching import LEAST_S, Fetches
from migration.protocol.core_messages import Prefilled
from migration.protocol.errors import PeerLost, Refused
from migration.protocol.messages import PathRequest
from migration.protocol.record import CopyOutcome, CopyRecord, Outcome
from migration.protocol.request import RequestSpec
from migration.run.donor import CopyOrder
from migration.run.source import Order
from policies.model import ReplicaId, Tokens
from policies.plan import Move, Path, Reason
from policies.prefix.copies import CopyReason, Fetch
from tests.migration.run.test_copies import A, B, CachedReplica, ids, make_cluster, prompt

pytestmark = pytest.mark.virtual_time

Cluster = dict[ReplicaId, CachedReplica]
FETCH = Fetch(A, Tokens(48), 0.01, 1.0)


@pytest.fixture
async def cluster() -> Cluster:
    """Replica a has the prompt."""
    made = make_cluster()
    await made[A].answer(prompt())
    return made


def fetches(cluster: Cluster) -> Fetches:
    """Those of replica b."""

    async def copy_here(donor: ReplicaId, order: CopyOrder) -> CopyRecord:
        return await cluster[donor].copies.copy(order, B)

    return Fetches(cluster[B].host, cluster[B].moves, copy_here)


async def ended(replica: CachedReplica, spec: RequestSpec) -> tuple[int, ...]:
    """The output of a request, once it has ended there."""
    async with asyncio.timeout(10):
        while spec.id not in replica.host._ended:
            await asyncio.sleep(0.001)
    return tuple(replica.host._ended[spec.id].outputs)


async def test_request_runs_behind_its_copy_and_computes_the_rest(cluster: Cluster) -> None:
    spec = prompt()
    fetches(cluster).submit(spec, 0, (), FETCH)
    (load,) = cluster[B].host.loads()
    assert load.id == spec.id and load.phase == "prefill"
    assert await ended(cluster[B], spec) == expected(ids(spec), 6)
    assert cluster[B].host.prompts == Prefilled(50, 48)
    assert cluster[A].copies.made.ended[CopyReason.FETCH, CopyOutcome.DONE] == 1
    assert cluster[A].idle and cluster[B].idle


@pytest.mark.parametrize("fault", ["silent", PeerLost("gone"), Refused("no room", PeerLost.cause)])
@pytest.mark.parametrize("call", ["prepare", "receive"])
async def test_request_whose_copy_fails_computes_its_prompt(
    cluster: Cluster, call: str, fault: Exception | str
) -> None:
    cluster[B].faults[call] = fault
    spec, began = prompt(), asyncio.get_running_loop().time()
    fetches(cluster).submit(spec, 0, (), Fetch(A, Tokens(48), 0.01, 0.2))
    assert await ended(cluster[B], spec) == expected(ids(spec), 6)
    assert cluster[B].host.prompts == Prefilled(50, 0)
    assert asyncio.get_running_loop().time() - began < 0.5
    await asyncio.sleep(1.0)
    assert cluster[A].idle and cluster[B].idle


async def test_request_does_not_wait_for_a_donor_that_does_not_answer(cluster: Cluster) -> None:
    async def silent(donor: ReplicaId, order: CopyOrder) -> CopyRecord:
        await asyncio.Event().wait()
        raise AssertionError

    spec, began = prompt(), asyncio.get_running_loop().time()
    Fetches(cluster[B].host, cluster[B].moves, silent).submit(spec, 0, (), Fetch(A, Tokens(48), 0.001, 0.001))
    assert await ended(cluster[B], spec) == expected(ids(spec), 6)
    assert LEAST_S < asyncio.get_running_loop().time() - began < 2 * LEAST_S + 0.2


async def test_request_whose_client_leaves_does_not_begin(cluster: Cluster) -> None:
    spec = prompt()
    fetches(cluster).submit(spec, 0, (), FETCH)
    cluster[B].moves.release(spec.id, None)
    await asyncio.sleep(1.0)
    assert not list(cluster[B].host.loads()) and cluster[B].host.prompts == Prefilled(0, 0)
    assert cluster[A].idle and cluster[B].idle


async def test_request_that_moves_meanwhile_runs_once(cluster: Cluster) -> None:
    cluster[B].faults["receive"] = "silent"
    spec = prompt()
    fetches(cluster).submit(spec, 0, (), Fetch(A, Tokens(48), 0.01, 0.3))
    await asyncio.sleep(0.01)
    cluster[B].moves.start(Order("m", spec.id, PathRequest.TOKENS, Reason.MANUAL), A)
    await asyncio.sleep(0.05)
    assert [load.id for load in cluster[A].host.loads()] == [spec.id] or spec.id in cluster[A].host._ended
    assert cluster[A].moves.attach(spec.id, 1, 0)
    assert await ended(cluster[A], spec) == expected(ids(spec), 6)
    await asyncio.sleep(1.0)
    assert cluster[B].host.prompts == Prefilled(0, 0) and cluster[B].idle


async def test_request_that_a_move_gives_back_runs_once(cluster: Cluster) -> None:
    """The move has it begin, and the end of the copy does not."""
    cluster[B].faults["receive"] = "silent"
    cluster[A].faults["adopt"] = Refused("no", PeerLost.cause)
    spec = prompt()
    fetches(cluster).submit(spec, 0, (), Fetch(A, Tokens(48), 0.01, 0.3))
    await asyncio.sleep(0.01)
    cluster[B].moves.start(Order("m", spec.id, PathRequest.TOKENS, Reason.MANUAL), A)
    assert await ended(cluster[B], spec) == expected(ids(spec), 6)
    await asyncio.sleep(1.0)
    assert cluster[B].idle


async def test_request_whose_prompt_is_copied_moves_on_behind_its_first_token(cluster: Cluster) -> None:
    spec = prompt()
    then = Move(spec.id, B, A, spec.prompt_tokens, Reason.DISAGGREGATE, 1, Path.KV)
    fetches(cluster).submit(spec, 0, (), FETCH, then)
    async with asyncio.timeout(10):
        while not (cluster[B].moves.records()[0].outcome and cluster[A].moves.attach(spec.id, 1, 0)):
            await asyncio.sleep(0.001)
    assert await ended(cluster[A], spec) == expected(ids(spec), 6)
    (record,) = cluster[B].moves.records()
    assert (record.outcome, record.path, record.tokens) == (Outcome.COMMITTED, Path.KV, 51)
    assert cluster[B].host.prompts == Prefilled(50, 48)
    await asyncio.sleep(1.0)
    assert cluster[A].idle and cluster[B].idle


async def test_refused_request_is_copied_nothing(cluster: Cluster) -> None:
    cluster[B].host.stopping = True
    with pytest.raises(Refused, match="stopping"):
        fetches(cluster).submit(prompt(), 0, (), FETCH)
    await asyncio.sleep(0.1)
    assert not cluster[A].copies.made.ended and cluster[B].idle
