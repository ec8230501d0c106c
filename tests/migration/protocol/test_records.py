"""The record of a migration: the moved context, the times of copying and resuming, and the predictions."""

import asyncio
from typing import Any

import pytest

from migration.protocol.errors import PeerLost
from migration.protocol.messages import PathRequest
from migration.protocol.record import MigrationRecord, Outcome, Recent
from migration.run.source import Order
from migration.run.world import MigrationLimits
from policies.model import ReplicaId, RequestId
from policies.plan import Path, Reason
from tests.deployments.engine.quick_engine import set_pace
from tests.migration.world import POOL, Pair, make_pair, spec

pytestmark = pytest.mark.virtual_time
KV, TOKENS = PathRequest.KV, PathRequest.TOKENS
A, B = ReplicaId("a"), ReplicaId("b")
R = RequestId("r")
SLOW_S = 0.15


async def moving(pair: Pair, path: PathRequest = KV) -> None:
    """Begin to move a request of 40 prompt tokens that has decoded a few."""
    await pair.until(pair.submit(spec(tokens=600)), 10)
    pair.move(R, path=path)


async def moved(pair: Pair, path: PathRequest = KV) -> MigrationRecord:
    """The record of such a move."""
    await moving(pair, path)
    return await pair.settled()


async def test_a_record_names_the_pool_of_its_source() -> None:
    record = await moved(make_pair())
    assert record.pool == record.to_json()["pool"] == POOL


@pytest.mark.parametrize("path", [KV, TOKENS])
async def test_tokens_are_the_context_that_was_handed_over(path: PathRequest) -> None:
    pair = make_pair()
    record = await moved(pair, path)
    assert record.tokens == 40 + pair.b.host._runs[R].resumed_at >= 50


async def test_copying_takes_time_only_where_blocks_are_copied() -> None:
    by_kv, by_tokens = await moved(make_pair()), await moved(make_pair(), TOKENS)
    assert by_kv.duration_s is not None and 0 < by_kv.copy_s <= by_kv.duration_s
    assert by_tokens.copy_s == 0 and not by_tokens.fell_back


async def test_copies_that_were_given_up_count() -> None:
    pair = make_pair()
    pair.b.faults["receive"] = "silent"
    record = await moved(pair)
    assert (record.path, record.fell_back) == (Path.TOKENS, True) and record.copy_s > 0


@pytest.mark.parametrize("path", [KV, TOKENS])
async def test_a_request_resumes_with_the_first_token_of_the_target(path: PathRequest) -> None:
    """The target's first step comes after all that the source sees."""
    pair = make_pair()
    add = pair.b.host.add

    async def slow(*args: Any) -> None:
        set_pace(pair.b.engine, decode_s=SLOW_S)
        await add(*args)

    pair.b.host.add = slow  # type: ignore[method-assign,assignment]
    record = await moved(pair, path)
    assert record.outcome is Outcome.COMMITTED and record.pause_s is not None and record.duration_s is not None
    assert record.resume_s is not None and record.resume_s >= SLOW_S
    assert record.whole_s == record.duration_s - record.pause_s + record.resume_s


async def test_the_source_is_done_with_a_request_before_it_resumes() -> None:
    """Neither a stop of the source nor another move waits for the record."""
    pair = make_pair()
    set_pace(pair.b.engine, decode_s=10 * SLOW_S)
    await moving(pair, TOKENS)
    async with asyncio.timeout(5):
        while pair.b.host._runs.get(R) is None or pair.a.moves.pending:
            await asyncio.sleep(0.001)
    [early] = pair.a.moves.records()
    assert not pair.b.host._runs[R].first.is_set()
    assert (early.outcome, early.resume_s, early.whole_s) == (Outcome.COMMITTED, None, None)
    pair.b.moves.release(R, None)
    await pair.settled()


@pytest.mark.parametrize("fault", ["silent", PeerLost("dead")], ids=["silent", "dead"])
async def test_without_the_targets_report_the_record_has_no_resumption(fault: Exception | str) -> None:
    pair = make_pair(limits=MigrationLimits(resume_s=0.05))
    pair.b.faults["resumed"] = fault
    record = await moved(pair)
    assert (record.outcome, record.resume_s, record.whole_s) == (Outcome.COMMITTED, None, None)


async def test_a_request_that_ends_before_it_resumes_leaves_the_record_without() -> None:
    pair = make_pair()
    set_pace(pair.b.engine, decode_s=10 * SLOW_S)
    await moving(pair, TOKENS)
    async with asyncio.timeout(5):
        while pair.a.moves.pending or R not in pair.b.host._runs:
            await asyncio.sleep(0.001)
    pair.b.moves.release(R, None)
    assert (await pair.settled()).resume_s is None


async def test_a_stopping_source_records_as_well() -> None:
    pair = make_pair()
    await moving(pair)
    pair.a.moves.stop()
    assert (await pair.settled()).resume_s is not None


async def test_a_migration_without_a_freeze_has_no_tokens() -> None:
    pair = make_pair()
    pair.b.room = 10
    record = await moved(pair)
    assert record.outcome is Outcome.REFUSED
    assert (record.tokens, record.copy_s, record.resume_s) == (None, 0.0, None)


async def test_a_failed_hand_over_has_frozen_tokens_and_no_resumption() -> None:
    pair = make_pair()
    pair.b.faults["adopt"] = PeerLost("dead")
    record = await moved(pair)
    assert record.outcome is Outcome.ABORTED and record.tokens is not None
    assert record.resume_s is None and record.whole_s is None


async def test_predictions_are_in_the_record_from_its_beginning() -> None:
    pair = make_pair()
    await pair.until(pair.submit(spec(tokens=600)), 10)
    order = Order("m", R, TOKENS, Reason.DRAIN, predicted_kv_s=2.5, predicted_tokens_s=1.5)
    begun = pair.a.moves.start(order, B)
    record = await pair.settled()
    for each in (begun, record):
        assert (each.predicted_kv_s, each.predicted_tokens_s) == (2.5, 1.5)
    assert record.predicted_s == 1.5


async def test_predictions_are_optional() -> None:
    record = await moved(make_pair())
    assert (record.predicted_kv_s, record.predicted_tokens_s, record.predicted_s) == (None, None, None)


# --- the target's side -----------------------------------------------------------------------------------


async def test_only_adopted_migrations_resume() -> None:
    pair = make_pair()
    assert await pair.b.moves.resumed("unknown") is None
    await moved(pair)
    record = pair.a.moves.records()[0]
    assert await pair.b.moves.resumed(record.id) is not None


@pytest.mark.parametrize(("request_id", "hop"), [("r", 1), ("unknown", 0)])
async def test_an_unknown_run_has_no_first_token(request_id: str, hop: int) -> None:
    pair = make_pair()
    await pair.until(pair.submit(spec()), 1)
    assert await pair.a.host.first_token(RequestId(request_id), hop) is None
    assert await pair.a.host.first_token(R, 0) is not None


async def test_a_muted_run_has_its_first_token_when_it_is_published() -> None:
    pair = make_pair(step_s=0.02)
    pair.submit(spec(tokens=50))
    pair.a.host.mute(R, 0)
    waiting = asyncio.ensure_future(pair.a.host.first_token(R, 0))
    async with asyncio.timeout(5):
        while not pair.a.host._runs[R].outputs:
            await asyncio.sleep(0.001)
    assert not waiting.done()
    pair.a.host.unmute(R, 0)
    assert await waiting is not None


def test_the_oldest_entry_is_evicted_first() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"] = 1
    recent["b"] = 2
    recent["a"] = 3
    recent["c"] = 4
    assert dict(recent) == {"b": 2, "c": 4}
