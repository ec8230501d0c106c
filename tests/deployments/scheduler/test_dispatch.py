"""What is ordered, and what is reported of it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deployments.metrics.telemetry import Telemetry
from deployments.scheduler.dispatch import Dispatch
from deployments.scheduler.records import Records
from migration.protocol.errors import PeerLost, Refused
from migration.protocol.messages import PathRequest
from migration.protocol.record import CopyOutcome, CopyRecord, MigrationRecord, Outcome
from migration.run.source import Order
from policies.causes import PAIR_FAILURES, Cause
from policies.model import SOLE_POOL, ReplicaId, RequestId, Tokens
from policies.plan import Move, MoveReport, Path, Reason
from policies.prefix.copies import CopyReason, CopyReport

A, B, P = ReplicaId("a"), ReplicaId("b"), RequestId("p")


class Sources:
    """Replicas that obey, or raise."""

    def __init__(self) -> None:
        self.orders: list[tuple[ReplicaId, Order, ReplicaId]] = []
        self.fault: Exception | None = None

    async def move(self, source: ReplicaId, order: Order, target: ReplicaId) -> MigrationRecord:
        self.orders.append((source, order, target))
        if self.fault is not None:
            raise self.fault
        return record(order.id, order.reason)


def record(id: str = "m", trigger: Reason = Reason.DRAIN) -> MigrationRecord:
    return MigrationRecord(id, P, "", A, B, Path.KV, "drain", "copying", trigger)


def make_dispatch(sources: Sources | None = None) -> Dispatch:
    return Dispatch(sources or Sources(), Records(Telemetry(SOLE_POOL)))


MOVE = Move(P, A, B, Tokens(10), Reason.DRAIN, 0, Path.TOKENS, 2.0, 1.0)
UNDER_WAY = MoveReport(P, A, B, path=Path.KV, reason=Reason.DRAIN)


async def begun(dispatch: Dispatch, move: Move = MOVE) -> tuple[MoveReport, ...]:
    """What is reported once the source has answered."""
    dispatch.begin([move])
    for _ in range(5):
        await asyncio.sleep(0)
    return dispatch.take_reports()


async def test_a_move_is_ordered_as_it_was_decided_and_reported_under_way() -> None:
    sources = Sources()
    dispatch = make_dispatch(sources)
    assert await begun(dispatch) == (UNDER_WAY,)
    ((source, order, target),) = sources.orders
    assert (source, order.request, order.path, order.reason, target) == ("a", "p", PathRequest.TOKENS, "drain", "b")
    assert (order.predicted_kv_s, order.predicted_tokens_s) == (2.0, 1.0)
    assert dispatch.take_reports() == ()


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (PeerLost("dead"), Cause.NOT_BEGUN),
        (Refused("bound here", Cause.IMMOVABLE), Cause.IMMOVABLE),
        (ValueError("ours"), Cause.NOT_BEGUN),
    ],
    ids=["lost", "refused", "broken"],
)
async def test_a_move_that_does_not_begin_has_ended(fault: Exception, cause: Cause) -> None:
    sources = Sources()
    sources.fault = fault
    report = MoveReport(P, A, B, moved=False, path=Path.TOKENS, cause=cause)
    assert cause not in PAIR_FAILURES, "the target was not asked"
    assert await begun(make_dispatch(sources)) == (report,)


async def test_an_operators_move_is_reported_as_such() -> None:
    sources = Sources()
    dispatch = make_dispatch(sources)
    by_hand = replace(MOVE, reason=Reason.MANUAL)
    assert await begun(dispatch, by_hand) == (replace(UNDER_WAY, by_hand=True, reason=Reason.MANUAL),)
    sources.fault = PeerLost("dead")
    with pytest.raises(PeerLost):
        await dispatch.order(Order("m", P, PathRequest.AUTO, Reason.MANUAL), by_hand)
    (report,) = dispatch.take_reports()
    assert (report.moved, report.by_hand, report.cause) == (False, True, Cause.NOT_BEGUN)


def test_what_runs_is_reported_again_and_again_and_what_ended_only_when_something_is_new() -> None:
    dispatch, running = make_dispatch(), record()
    ended = replace(running, outcome=Outcome.COMMITTED, duration_s=2.0, pause_s=0.5, tokens=Tokens(10))
    resumed = replace(ended, resume_s=1.0)
    reports = []
    for told in (running, running, ended, ended, resumed, ended, running):
        dispatch.take(told)
        reports.append([(report.moved, report.took_s, report.whole_s) for report in dispatch.take_reports()])
    assert reports[:5] == [[(None, None, None)], [(None, None, None)], [(True, 2.0, None)], [], [(True, 2.0, 2.5)]]
    assert reports[5:] == [[], []]


def test_the_wait_for_a_prefill_is_no_time_of_its_move() -> None:
    dispatch = make_dispatch()
    ended = replace(record(), outcome=Outcome.COMMITTED, duration_s=9.0, waited_s=7.5, pause_s=0.5, resume_s=1.0)
    dispatch.take(ended)
    (report,) = dispatch.take_reports()
    assert (report.took_s, report.whole_s) == (1.5, 2.0)


@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.REFUSED])
def test_a_move_without_effect_is_reported_with_its_cause(outcome: Outcome) -> None:
    dispatch = make_dispatch()
    dispatch.take(replace(record(), outcome=outcome, cause=Cause.NO_ROOM))
    (report,) = dispatch.take_reports()
    assert (report.moved, report.cause) == (False, Cause.NO_ROOM)


def test_a_request_that_was_submitted_anew_was_not_moved() -> None:
    dispatch = make_dispatch()
    dispatch.take(replace(record(trigger=Reason.LOST), outcome=Outcome.COMMITTED))
    assert dispatch.take_reports() == ()


COPIED = CopyRecord(
    "c", ReplicaId("a"), ReplicaId("b"), CopyReason.FETCH, "done", CopyOutcome.DONE, tokens=Tokens(320), duration_s=0.05
)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({}, True),
        ({"tokens": Tokens(0)}, None),
        ({"outcome": CopyOutcome.ABORTED, "cause": Cause.TRANSFER_TIMEOUT}, False),
        ({"outcome": CopyOutcome.ABORTED, "cause": Cause.NO_ROOM}, None),
        ({"outcome": CopyOutcome.ABORTED, "cause": Cause.CLIENT_GONE}, None),
    ],
)
def test_copies_are_reported_once_if_they_show_something_of_their_link(
    change: dict[str, Any], reported: bool | None
) -> None:
    dispatch = make_dispatch()
    dispatch.take_copy(replace(COPIED, **change))
    report = CopyReport(ReplicaId("a"), ReplicaId("b"), Tokens(320), 0.05, bool(reported))
    assert dispatch.take_copies() == (() if reported is None else (report,))
    assert dispatch.take_copies() == ()
