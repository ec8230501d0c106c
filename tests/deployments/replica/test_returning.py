"""Contexts that return to the replica of their prefill, between two replicas with paced engines."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from deployments.replica.prefix_cache.returning import Returns
from migration.protocol.errors import PeerLost, Refused
from migration.protocol.record import CopyOutcome, CopyRecord
from migration.protocol.request import RequestSpec
from migration.run.donor import CopyOrder
from policies.model import ReplicaId, RequestId
from policies.plan import Move, Path, Reason
from policies.prefix.copies import CopyReason
from policies.prefix.returning import AT_MOST, CHECK_S, PATIENCE_S
from tests.migration.run.test_copies import A, B, make_cluster, prompt
from tests.migration.run.test_kept import handed_over
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time


def returning(tokens: int = 50, name: str = "r", to: ReplicaId = A) -> RequestSpec:
    return replace(prompt(tokens), id=RequestId(name), returns_to=to)


@dataclass
class Notes:
    """Returns of replica b whose copies are only noted."""

    waits: bool = False
    copied: list[str] = field(default_factory=list)
    fault: Exception | None = None

    def __post_init__(self) -> None:
        self.returns = Returns(B, self.copy, lambda: self.waits, now)

    async def copy(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        assert (order.reason, to) == (CopyReason.RETURN, A)
        self.copied.append(order.spec.id)
        await asyncio.sleep(0.01)
        if self.fault is not None:
            raise self.fault
        return CopyRecord(order.id, B, to, order.reason, "", CopyOutcome.DONE)


async def test_what_a_replica_has_decoded_is_found_where_it_was_prefilled() -> None:
    cluster = make_cluster()
    b = cluster[B]
    b.host.on_context = Returns(B, b.copies.copy, lambda: b.moves.exchanging, now).add
    await handed_over(cluster, returning())
    outputs = tuple(b.host._ended[RequestId("r")].outputs)
    async with asyncio.timeout(10):
        while not b.copies.made.ended:
            await asyncio.sleep(0.001)
    assert b.copies.made.ended == {(CopyReason.RETURN, CopyOutcome.DONE): 1}
    context = replace(prompt(), id=RequestId("next"))
    assert [cluster[each].engine.present(context, outputs).hbm for each in (A, B)] == [13, 13], "55 tokens of 4 a block"
    await asyncio.sleep(1.0)
    assert cluster[A].idle and b.idle


@pytest.mark.parametrize("spec", [prompt(), returning(to=B)], ids=["not asked for", "prefilled here"])
async def test_other_contexts_do_not_return(spec: RequestSpec) -> None:
    made = Notes()
    made.returns.add(spec, (1, 2))
    await asyncio.sleep(1.0)
    assert made.copied == []


async def test_contexts_return_one_at_a_time_and_the_oldest_first() -> None:
    made = Notes()
    for name in "xyz":
        made.returns.add(returning(name=name), ())
    await asyncio.sleep(0.015)
    assert made.copied == ["x", "y"]
    await asyncio.sleep(1.0)
    assert made.copied == ["x", "y", "z"]


async def test_contexts_wait_while_others_copy_and_not_for_ever() -> None:
    made = Notes(waits=True)
    made.returns.add(returning(name="x"), ())
    await asyncio.sleep(PATIENCE_S - 1)
    made.returns.add(returning(name="y"), ())
    await asyncio.sleep(2.0)
    assert made.copied == []
    made.waits = False
    await asyncio.sleep(2 * CHECK_S)
    assert made.copied == ["y"]


async def test_newest_contexts_are_kept() -> None:
    made = Notes(waits=True)
    for number in range(AT_MOST + 2):
        made.returns.add(returning(name=str(number)), ())
    made.waits = False
    await asyncio.sleep(5.0)
    assert made.copied == [str(number) for number in range(2, AT_MOST + 2)]


@pytest.mark.parametrize("fault", [Refused("too many", PeerLost.cause), PeerLost("gone")])
async def test_copy_that_fails_holds_up_no_other(fault: Exception) -> None:
    made = Notes(fault=fault)
    made.returns.add(returning(name="x"), ())
    made.returns.add(returning(name="y"), ())
    await asyncio.sleep(1.0)
    assert made.copied == ["x", "y"]


async def test_closed_returns_make_no_copies() -> None:
    made = Notes(waits=True)
    made.returns.add(returning(), ())
    made.returns.close()
    made.waits = False
    await asyncio.sleep(1.0)
    assert made.copied == []


async def test_migration_is_exchanging_while_its_blocks_are_on_their_way() -> None:
    cluster = make_cluster()
    cluster[B].faults["receive"] = "silent"
    source, target = cluster[A].moves, cluster[B].moves
    assert not source.exchanging and not target.exchanging
    spec = prompt()
    source.submit(spec, 0, (), Move(spec.id, A, B, spec.prompt_tokens, Reason.DISAGGREGATE, 1, Path.KV))
    seen = set[tuple[bool, bool]]()
    async with asyncio.timeout(10):
        while not source.records()[0].outcome:
            seen.add((source.exchanging, target.exchanging))
            await asyncio.sleep(0.001)
    assert seen >= {(False, False), (True, True)}
    assert not source.exchanging
