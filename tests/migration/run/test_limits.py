"""The time limits of a migration's copies follow its bytes and the scheduler's prediction."""

import asyncio

import pytest

from migration.protocol import sizing
from migration.protocol.messages import PathRequest
from migration.protocol.ports import Slot
from migration.protocol.record import Outcome
from migration.protocol.rounds import CopyLimits
from migration.protocol.sizing import LATE, SLOWEST
from migration.run.source import Order
from migration.run.world import FINAL_FLOOR_S, ROUND_FLOOR_S, MigrationLimits
from migration.transport.shared import SharedSlots
from policies.causes import Cause
from policies.model import Bytes
from policies.plan import Path, Reason
from tests.migration.world import make_pair, spec

SIZE = Bytes(10**9)


class Stalled(SharedSlots):
    """A transport whose sends never end."""

    async def send(self, channel: str, slot: Slot, size: Bytes) -> None:
        """See `SharedSlots`."""
        await asyncio.Event().wait()


def test_limits_of_copies_follow_the_bytes() -> None:
    limits = MigrationLimits()
    assert limits.round_s(SIZE, 5e8) == ROUND_FLOOR_S + LATE * 2.0
    assert limits.last_s(SIZE, 5e8) == FINAL_FLOOR_S + LATE * 2.0
    assert limits.round_s(SIZE, None) == ROUND_FLOOR_S + LATE * SIZE / SLOWEST


def test_a_number_replaces_the_limit() -> None:
    limits = MigrationLimits(copy_s=3.0, final_s=4.0)
    assert (limits.round_s(SIZE, 1.0), limits.last_s(SIZE, None)) == (3.0, 4.0)


@pytest.mark.virtual_time
@pytest.mark.parametrize(("rounds", "floor_s"), [(4, ROUND_FLOOR_S), (0, FINAL_FLOOR_S)], ids=["pre-copy", "pause"])
@pytest.mark.parametrize("predicted_s", [3.0, 30.0])
async def test_a_copy_has_failed_a_multiple_of_its_predicted_time_after_its_floor(
    rounds: int, floor_s: float, predicted_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "SLOWEST", 1.0)  # the fake engine's blocks have 16 bytes
    limits = MigrationLimits(copy=CopyLimits(max_rounds=rounds, final_blocks=0))
    pair = make_pair(step_s=1.0, limits=limits, transport=Stalled(), lease_s=1000.0)
    request = spec(prompt=400, tokens=300)
    cursor = pair.submit(request)
    await pair.until(cursor, 1)
    pair.a.moves.start(Order("m", request.id, PathRequest.AUTO, Reason.DRAIN, predicted_s), pair.b.id)
    async with asyncio.timeout(300):
        while not (records := pair.a.moves.records()) or records[0].outcome is None:
            await asyncio.sleep(0.1)
    [record] = records
    assert (record.outcome, record.path, record.cause) == (Outcome.COMMITTED, Path.TOKENS, Cause.TRANSFER_TIMEOUT)
    assert record.duration_s == pytest.approx(floor_s + LATE * predicted_s, rel=0.02, abs=0.5)
    pair.a.moves.release(request.id, None)
    pair.b.moves.release(request.id, None)
