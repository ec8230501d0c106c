"""What requests find of those that were handed over, on the replica of their prefill and where they decoded."""

import asyncio
from dataclasses import replace

import pytest

from deployments.engine.tokens import expected
from migration.protocol.record import MigrationRecord, Outcome
from migration.protocol.request import RequestSpec
from migration.run.donor import CopyOrder
from policies.model import ReplicaId, RequestId
from policies.plan import Move, Path, Reason
from policies.prefix.copies import CopyReason
from tests.migration.run.test_copies import A, B, CachedReplica, ids, make_cluster, prompt

pytestmark = pytest.mark.virtual_time

Cluster = dict[ReplicaId, CachedReplica]


async def handed_over(cluster: Cluster, spec: RequestSpec, reason: Reason = Reason.DISAGGREGATE) -> MigrationRecord:
    """Run a request that is prefilled on a and decodes on b, to its end."""
    source, target = cluster[A], cluster[B]
    source.moves.submit(spec, 0, (), Move(spec.id, A, B, spec.prompt_tokens, reason, 1, Path.KV))
    async with asyncio.timeout(10):
        while not (source.moves.records()[0].outcome and target.moves.attach(spec.id, 1, 0)):
            await asyncio.sleep(0.001)
        while spec.id not in target.host._ended:
            await asyncio.sleep(0.001)
    assert tuple(target.host._ended[spec.id].outputs) == expected(ids(spec), 6)
    record = source.moves.records()[0]
    assert (record.outcome, record.path) == (Outcome.COMMITTED, Path.KV)
    return record


@pytest.mark.parametrize("hides", [False, True], ids=["kept", "hidden"])
async def test_next_request_finds_the_prompt_on_both_or_where_it_was_prefilled(hides: bool) -> None:
    cluster = make_cluster(hides_handed_over=hides)
    first = await handed_over(cluster, prompt())
    again = await handed_over(cluster, replace(prompt(), id=RequestId("again")))
    assert first.present == 0 and first.blocks > 0
    assert (again.present, again.blocks) == ((0, first.blocks) if hides else (first.blocks, 0))
    assert [(await cluster[each].answer(prompt()))[1] for each in (A, B)] == [48, 0 if hides else 48]
    assert cluster[A].idle and cluster[B].idle


async def test_request_that_moves_for_another_reason_is_found() -> None:
    cluster = make_cluster(hides_handed_over=True)
    await handed_over(cluster, prompt(), Reason.MANUAL)
    assert (await cluster[B].answer(prompt()))[1] == 48


async def test_hand_over_of_a_prompt_and_copy_of_it_have_the_same_account() -> None:
    moved, cluster = await handed_over(make_cluster(), prompt()), make_cluster()
    await cluster[A].answer(prompt())
    copied = await cluster[A].copies.copy(CopyOrder.of(prompt(), (), CopyReason.MANUAL, 5.0), B)
    assert (moved.present, moved.blocks, moved.bytes) == (copied.present, copied.blocks, copied.bytes)
    assert copied.blocks == 12 and copied.copy_s > 0 and moved.copy_s > 0
