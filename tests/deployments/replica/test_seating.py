"""A starting replica waits for memory, whatever the scheduler does meanwhile."""

from typing import Any

import pytest

from deployments.api.calls import MeasuredEngine, SeatAnswer, SeatCall, SeatGiven, SeatLater, SeatRefused
from deployments.replica.seating import RETRY_S, Seating
from migration.protocol.errors import PeerLost
from policies.memory.ledger import OrderNumber
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import SOLE_POOL, Blocks, Bytes, ReplicaId
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time
GIVEN = SeatGiven(MemoryPlan(Blocks(7)), OrderNumber(3, 1))


class SchedulerOfSeats:
    """Implements `SeatClient`: gives one answer after the other; an exception is raised."""

    def __init__(self, *answers: SeatAnswer | Exception) -> None:
        self._answers = iter(answers)
        self.calls: list[SeatCall] = []

    def within(self, timeout_s: float) -> "SchedulerOfSeats":
        return self

    async def seat(self, call: SeatCall) -> Any:
        self.calls.append(call)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def seating(scheduler: SchedulerOfSeats) -> Seating:
    return Seating(scheduler, SOLE_POOL, ReplicaId("a"), "n")


async def test_a_replica_asks_until_there_is_a_scheduler_and_room() -> None:
    scheduler = SchedulerOfSeats(PeerLost("there is none"), TimeoutError(), SeatLater("no room"), GIVEN)
    began, model = now(), ModelMemory(Bytes(1), Bytes(2), Bytes(0), Bytes(3), Blocks(4))
    measured = MeasuredEngine(model, Blocks(90), Blocks(30))
    assert await seating(scheduler).wait(measured) == GIVEN
    assert now() - began == pytest.approx(3 * RETRY_S)
    assert scheduler.calls == [SeatCall(SOLE_POOL, ReplicaId("a"), "n", measured)] * 4


async def test_a_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = SchedulerOfSeats(*[SeatLater("no room")] * 3, SeatLater("less room"), GIVEN)
    with caplog.at_level("INFO", "ray.serve"):
        await seating(scheduler).wait()
    assert [record.args for record in caplog.records] == [("no room",), ("less room",)]


async def test_a_replica_that_will_never_have_room_does_not_start() -> None:
    with pytest.raises(ValueError, match="raise budget_mib"):
        await seating(SchedulerOfSeats(SeatRefused("raise budget_mib"))).wait()
