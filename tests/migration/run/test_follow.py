"""A move by KV that is ordered while the request is prefilled: blocks are copied as the prefill fills them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from deployments.engine.tokens import expected
from migration.kv.staging import HEADER
from migration.protocol.cursor import Cursor
from migration.protocol.errors import PeerLost, Refused, TransferFailed
from migration.protocol.messages import CopyRound, PathRequest, Shard
from migration.protocol.ports import Slot
from migration.protocol.record import Outcome
from migration.protocol.request import Delta, Moved, Moving, RequestSpec
from migration.run.world import MigrationLimits
from policies.causes import Cause
from policies.model import Blocks, Phase, Tokens
from policies.plan import Path, Reason
from tests.deployments.engine.quick_engine import preempt, prompt_of, set_pace
from tests.migration.run.test_moves import linked
from tests.migration.world import LIMITS, Pair, make_pair, spec

pytestmark = pytest.mark.virtual_time
CHUNK, STEP_S = 16, 0.01


def prefilling(prompt: int = 100, tokens: int = 60, *, direct: bool = False) -> tuple[Pair, RequestSpec, Cursor]:
    """A pair, and a request on a that takes seven steps to its first token."""
    pair = linked(step_s=STEP_S)[0] if direct else make_pair(step_s=STEP_S)
    set_pace(pair.a.engine, max_num_batched_tokens=CHUNK)
    set_pace(pair.b.engine, decode_s=STEP_S / 10)
    request = spec(prompt=prompt, tokens=tokens)
    return pair, request, pair.submit(request)


def noted_gathers(pair: Pair) -> list[tuple[int, int, Tokens | None]]:
    """The ranges that are gathered on a, each with the number of tokens that are computed then."""
    found: list[tuple[int, int, Tokens | None]] = []
    gather = pair.a.engine.gather

    async def noted(key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        found.append((first, last, await pair.a.engine.computed(key)))
        return await gather(key, first, last, slots)

    pair.a.engine.gather = noted  # type: ignore[method-assign]
    return found


async def steps(count: float) -> None:
    """Let the engine make that many steps."""
    await asyncio.sleep(count * STEP_S)


def state(pair: Pair) -> str:
    """The state of a's only migration."""
    return pair.a.moves.records()[0].state


@pytest.mark.parametrize("direct", [False, True], ids=["by messages", "between the workers"])
@pytest.mark.parametrize("prompt", [3, 4, 17, 64, 100, 101])
@pytest.mark.parametrize("begun", [0.5, 1.5, 3.5, 6.5])
async def test_output_is_that_of_an_unmoved_request(begun: float, prompt: int, direct: bool) -> None:
    pair, request, cursor = prefilling(prompt, direct=direct)
    await steps(begun)
    early = not cursor.tokens
    pair.move(request.id)
    record = await pair.settled()
    assert (record.outcome, record.path, record.cause) == (Outcome.COMMITTED, "kv", None)
    assert (record.waited_s > 0) is early
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


@pytest.mark.parametrize("direct", [False, True], ids=["by messages", "between the workers"])
async def test_blocks_are_copied_as_they_fill_and_the_last_ones_in_the_pause(direct: bool) -> None:
    pair, request, cursor = prefilling(direct=direct)
    gathered = noted_gathers(pair)
    await steps(1.5)
    pair.move(request.id)
    await steps(1)
    assert (state(pair), pair.a.host._runs[request.id].muted) == ("follow", False)
    assert next(pair.a.host.loads()).phase is Phase.PREFILL
    record = await pair.settled()
    assert all(last * 4 <= (computed or 0) for _, last, computed in gathered)
    ranges = [(first, last) for first, last, _ in gathered]
    assert ranges[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(ranges))
    early = [last for _, last, computed in gathered if computed is not None and computed < 100]
    assert early == [4, 8, 12, 16, 20, 24], "a round for each step"
    assert record.rounds == 6 and record.blocks == 24 == pair.b.engine.blocks_loaded
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


async def test_first_token_comes_from_the_source_and_the_rest_from_the_target() -> None:
    pair, request, cursor = prefilling()
    await steps(1.5)
    pair.move(request.id)
    await pair.settled()
    await pair.finished(cursor)
    of_source = [e for e in pair.events if e.hop == 0]
    assert [type(event) for event in of_source] == [Delta, Moving, Moved]
    first = of_source[0]
    assert isinstance(first, Delta) and (first.index, len(first.tokens)) == (0, 1)


async def test_request_that_has_a_token_once_the_target_agrees_is_copied_while_it_decodes() -> None:
    """Not in one piece behind a freeze: nothing of it was copied during the prefill."""
    pair, request, cursor = prefilling()
    computed = pair.a.engine.computed

    async def late(key: str) -> Tokens | None:
        await steps(2)
        return await computed(key)

    pair.a.engine.computed = late  # type: ignore[method-assign]
    await steps(6.5)
    pair.move(request.id)
    record = await pair.settled()
    await pair.finished(cursor)
    assert (record.path, record.blocks) == ("kv", 26) and record.waited_s == 0
    of_source = [type(event) for event in pair.events if event.hop == 0]
    assert of_source.index(Moving) < of_source.index(Moved) - 1, "it has decoded on"


async def test_target_that_has_all_blocks_is_sent_none() -> None:
    pair, request, cursor = prefilling()
    await steps(1.5)
    pair.move(request.id)
    await pair.settled()
    await pair.finished(cursor)
    await pair.a.engine.reset_prefix_cache()
    again = replace(request, id=spec("again").id)
    cursor, gathered = pair.submit(again), noted_gathers(pair)
    await steps(1.5)
    pair.move(again.id)
    await steps(2)
    assert gathered == [] and state(pair) == "follow"
    record = await pair.settled()
    assert (record.outcome, record.path, record.present) == (Outcome.COMMITTED, "kv", 24)
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


async def test_corrupted_block_of_a_prefill_changes_the_output() -> None:
    pair, request, cursor = prefilling()
    gather = pair.a.engine.gather

    async def corrupt(key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        shards = await gather(key, first, last, slots)
        slots[0].memory[HEADER : HEADER + 4] = b"\1\0\0\0"
        return shards

    pair.a.engine.gather = corrupt  # type: ignore[method-assign]
    await steps(1.5)
    pair.move(request.id)
    assert (await pair.settled()).outcome is Outcome.COMMITTED
    assert await pair.finished(cursor) != expected(prompt_of(request), 60)


async def test_request_that_waits_goes_by_tokens_at_once() -> None:
    pair, request, cursor = prefilling()
    await steps(1.5)
    preempt(pair.a.engine)
    pair.move(request.id)
    record = await pair.settled()
    assert (record.path, record.cause, record.waited_s) == ("tokens", Cause.BLOCKS_GONE, 0.0)
    assert not record.fell_back and record.tokens == 100, "there was no token yet"
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


async def test_request_that_waits_on_a_replica_for_prefills_is_followed() -> None:
    pair, request, cursor = prefilling()
    await steps(1.5)
    preempt(pair.a.engine)
    pair.move(request.id, reason=Reason.DISAGGREGATE)
    await steps(1)
    assert state(pair) == "follow"
    pair.a.engine.resize(Blocks(100))
    record = await pair.settled()
    assert (record.path, record.blocks, record.tokens) == ("kv", 24, 101)
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


async def test_request_that_is_preempted_meanwhile_is_followed_on() -> None:
    pair, request, cursor = prefilling()
    gather, engine = pair.a.engine.gather, pair.a.engine
    fails = [2]

    async def preempted(key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        fails[0] -= 1
        if fails[0] == 0:
            preempt(engine)
            asyncio.get_running_loop().call_later(STEP_S, engine.resize, Blocks(100))
        return await gather(key, first, last, slots)

    engine.gather = preempted  # type: ignore[method-assign]
    await steps(1.5)
    pair.move(request.id)
    record = await pair.settled()
    assert (record.outcome, record.path, record.cause, record.blocks) == (Outcome.COMMITTED, "kv", None, 24)
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


@pytest.mark.parametrize("call", ["load", "receive"])
async def test_failed_copy_has_the_first_token_awaited_and_goes_by_tokens(call: str) -> None:
    pair, request, cursor = prefilling()
    pair.b.faults[call] = TransferFailed("broken")
    await steps(1.5)
    pair.move(request.id)
    await steps(1)
    assert state(pair) == "await"
    record = await pair.settled()
    assert (record.outcome, record.path, record.cause) == (Outcome.COMMITTED, "tokens", Cause.TRANSFER_FAILED)
    assert "kv failed: broken" in record.reason and record.tokens == 101
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


async def test_late_confirmation_of_the_last_round_turns_the_move_into_one_by_tokens() -> None:
    """Between the workers, the source learns of it only in the pause."""
    pair, request, cursor = prefilling(direct=True)
    load = pair.b.moves.load

    async def late(message: CopyRound) -> None:
        await load(message)
        if message.last == 24:
            await steps(2)
            raise TransferFailed("late")

    pair.b.moves.load = late  # type: ignore[method-assign]
    await steps(1.5)
    pair.move(request.id)
    record = await pair.settled()
    assert (record.path, record.cause) == ("tokens", Cause.TRANSFER_FAILED)
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


@pytest.mark.parametrize("by", ["stopping", "lost"])
@pytest.mark.parametrize("failed", [False, True], ids=["following", "awaiting the token"])
async def test_request_stays_if_its_target_is_lost(by: str, failed: bool) -> None:
    pair, request, cursor = prefilling()
    if failed:
        pair.b.faults["load"] = TransferFailed("broken")
    await steps(1.5)
    pair.move(request.id)
    await steps(1)
    if by == "stopping":
        pair.b.moves.stop()
    else:
        pair.a.moves.outgoing.follow([pair.a.id])
    record = await pair.settled()
    assert record.outcome is Outcome.ABORTED
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    assert by == "stopping" or not any(isinstance(event, Moving) for event in pair.events)
    await pair.both_idle()


@pytest.mark.parametrize("failed", [False, True], ids=["following", "awaiting the token"])
async def test_client_that_leaves_ends_the_move(failed: bool) -> None:
    pair, request, _ = prefilling()
    if failed:
        pair.b.faults["load"] = TransferFailed("broken")
    await steps(1.5)
    pair.move(request.id)
    await steps(2)
    pair.a.moves.release(request.id, None)
    record = await pair.settled()
    assert (record.outcome, record.cause) == (Outcome.ABORTED, Cause.CLIENT_GONE)
    await pair.both_idle()


@pytest.mark.parametrize("failed", [False, True], ids=["following", "awaiting the token"])
async def test_request_that_ends_with_its_first_token_is_not_moved(failed: bool) -> None:
    pair, request, cursor = prefilling(tokens=1)
    if failed:
        pair.b.faults["load"] = TransferFailed("broken")
    await steps(1.5)
    pair.move(request.id)
    record = await pair.settled()
    assert (record.outcome, record.cause) == (Outcome.ABORTED, Cause.REQUEST_ENDED)
    assert await pair.finished(cursor) == expected(prompt_of(request), 1)
    await pair.both_idle()


@pytest.mark.parametrize("failed", [False, True], ids=["following", "awaiting the token"])
async def test_source_that_stops_follows_on(failed: bool) -> None:
    pair, request, cursor = prefilling()
    if failed:
        pair.b.faults["load"] = TransferFailed("broken")
    await steps(1.5)
    pair.move(request.id)
    await steps(1)
    pair.a.moves.stop()
    assert (await pair.settled()).outcome is Outcome.COMMITTED
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)


async def test_second_order_is_refused() -> None:
    pair, request, cursor = prefilling()
    await steps(1.5)
    pair.move(request.id)
    await steps(1)
    with pytest.raises(Refused, match="already moving"):
        pair.move(request.id)
    assert (await pair.settled()).path == "kv"
    await pair.finished(cursor)


@pytest.mark.parametrize("adoption", [Refused("no room", Cause.NO_ROOM), PeerLost("dead")])
async def test_hand_over_that_fails_costs_the_request_nothing(adoption: Exception) -> None:
    """It goes on where it is: at once if the target refused, and once its reader has decided if it was lost."""
    pair, request, cursor = prefilling()
    pair.b.faults["adopt"] = adoption
    await steps(1.5)
    pair.move(request.id)
    record = await pair.settled()
    assert (record.outcome, record.path) == (Outcome.ABORTED, "kv")
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


# --- the target's lease -------------------------------------------------------------------------------


def slow(
    lease_s: float, limits: MigrationLimits = LIMITS, step_s: float = 1.0, prompt: int = 100
) -> tuple[Pair, RequestSpec, Cursor]:
    """A request on a whose prefill takes seven steps of `step_s` seconds."""
    pair = make_pair(step_s=step_s, lease_s=lease_s, limits=limits)
    set_pace(pair.a.engine, max_num_batched_tokens=CHUNK)
    set_pace(pair.b.engine, decode_s=0.001)
    request = spec(prompt=prompt, tokens=2)
    return pair, request, pair.submit(request)


@pytest.mark.parametrize("failed", [False, True], ids=["following", "awaiting the token"])
async def test_target_keeps_all_that_it_holds_during_the_longest_prefill(failed: bool) -> None:
    pair, request, cursor = slow(lease_s=0.4)
    if failed:
        pair.b.faults["load"] = TransferFailed("broken")
    await asyncio.sleep(1.5)
    pair.move(request.id)
    record = await pair.settled()
    assert (record.outcome, record.path) == (Outcome.COMMITTED, "tokens" if failed else "kv")
    assert record.waited_s == pytest.approx(5.5, abs=0.1)
    assert await pair.finished(cursor) == expected(prompt_of(request), 2)
    await pair.both_idle()


@pytest.mark.parametrize("failed", [False, True], ids=["following", "awaiting the token"])
async def test_target_that_has_given_up_ends_the_move(failed: bool) -> None:
    pair, request, cursor = slow(lease_s=0.4)
    if failed:
        pair.b.faults["load"] = TransferFailed("broken")
    pair.b.faults["renew"] = "silent"
    await asyncio.sleep(1.5)
    pair.move(request.id)
    await asyncio.sleep(0.6)
    assert pair.b.idle, "its lease has run out"
    assert await pair.finished(cursor) == expected(prompt_of(request), 2)
    assert (await pair.settled()).outcome is Outcome.ABORTED
    await pair.both_idle()


async def test_renewal_that_the_target_refuses_ends_the_move_during_the_prefill() -> None:
    pair, request, cursor = slow(lease_s=0.4)
    await asyncio.sleep(1.5)
    record = pair.move(request.id)
    await asyncio.sleep(0.05)
    pair.b.moves.cancel(record.id)
    record = await pair.settled()
    assert (record.outcome, record.cause) == (Outcome.ABORTED, Cause.MIGRATION_GONE)
    assert len(cursor.tokens) == 0
    assert await pair.finished(cursor) == expected(prompt_of(request), 2)


# --- time limits --------------------------------------------------------------------------------------


def test_time_limit_follows_the_rest_of_the_prompt() -> None:
    limits = MigrationLimits()
    assert limits.prefilling_s(0) == 10.0
    assert limits.prefilling_s(100_000) == limits.prefilling_s(0) + 1000.0
    assert MigrationLimits(prefill_s=0.5).prefilling_s(100_000) == 0.5


async def test_prefill_whose_turn_does_not_come_in_time_stays() -> None:
    """Behind a long wait it would be prefilled twice, at the source and at the target."""
    pair, request = make_pair(limits=replace(LIMITS, prefill_s=0.75)), spec()
    pair.a.moves.submit(request, 0, (), fetching=True)
    cursor = pair.cursors[request.id] = Cursor()
    pair.move(request.id, reason=Reason.DISAGGREGATE)
    await asyncio.sleep(1.0)
    pair.a.host.begin(request.id, 0)
    record = await pair.settled()
    assert (record.outcome, record.cause, record.pause_s) == (Outcome.ABORTED, Cause.PREFILL_TIMEOUT, None)
    assert await pair.finished(cursor) == expected(prompt_of(request), 60)
    await pair.both_idle()


@pytest.mark.parametrize(("step_s", "outcome"), [(1.0, Outcome.COMMITTED), (5.0, Outcome.ABORTED)])
async def test_prefill_that_does_not_go_on_costs_the_blocks_and_then_the_move(step_s: float, outcome: Outcome) -> None:
    """The request loses nothing."""
    pair, request, cursor = slow(0.4, replace(LIMITS, prefill_s=0.75), step_s=0.5, prompt=40)
    await asyncio.sleep(0.6)
    set_pace(pair.a.engine, decode_s=step_s)
    pair.move(request.id)
    await asyncio.sleep(0.5)
    assert state(pair) == "follow"
    await asyncio.sleep(0.8)
    assert state(pair) == "await"
    record = await pair.settled()
    assert (record.outcome, record.cause) == (outcome, Cause.PREFILL_TIMEOUT)
    assert outcome is Outcome.ABORTED or record.path == "tokens"
    set_pace(pair.a.engine, decode_s=0.001)
    assert await pair.finished(cursor) == expected(prompt_of(request), 2)
    await pair.both_idle()


@pytest.mark.parametrize("path", [PathRequest.KV, PathRequest.AUTO])
async def test_wait_for_the_prefill_is_no_time_of_the_move(path: PathRequest) -> None:
    pair, request, cursor = slow(lease_s=2.0)
    await asyncio.sleep(1.5)
    pair.move(request.id, path=path)
    record = await pair.settled()
    assert record.path is Path.KV and record.duration_s is not None and record.duration_s > 5.0
    async with asyncio.timeout(10):
        while (whole_s := pair.a.moves.records()[0].whole_s) is None:
            await asyncio.sleep(0.01)
    assert whole_s < 0.5
    await pair.finished(cursor)
