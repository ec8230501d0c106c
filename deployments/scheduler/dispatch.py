"""Orders moves from their sources, and reports the progress of all moves, and ended copies, to the next decision."""

import logging
from collections.abc import Iterable
from typing import Protocol

from deployments.scheduler.records import Records
from migration.concurrency import Tasks
from migration.protocol.errors import MigrationError
from migration.protocol.record import CopyOutcome, CopyRecord, MigrationRecord, Outcome
from migration.run.source import Order
from policies.causes import PAIR_FAILURES, Cause
from policies.model import ReplicaId
from policies.plan import Move, MoveReport, Path, Reason
from policies.prefix.copies import CopyReport

log = logging.getLogger("ray.serve")


class Sources(Protocol):
    """The replicas that moves start from."""

    async def move(self, source: ReplicaId, order: Order, target: ReplicaId) -> MigrationRecord:
        """Begin to move a request from `source`. Raises MigrationError."""
        ...


class Dispatch:
    """Collects a report of every move that is under way or has ended. A move that did not begin has ended, too.

    `records` keeps the records of moves. Repeated records become no reports.
    """

    def __init__(self, sources: Sources, records: Records) -> None:
        self._sources = sources
        self._records = records
        self._reports: dict[str, MoveReport] = {}
        self._copies: list[CopyReport] = []
        self._tasks = Tasks()

    def begin(self, moves: Iterable[Move]) -> None:
        """Order moves, without waiting for the answers."""
        for move in moves:
            self._tasks.start(self._begin(Order.of(move), move))

    async def _begin(self, order: Order, move: Move) -> None:
        try:
            await self.order(order, move)
        except Exception as error:
            log.info("move of %s from %s to %s did not begin: %s", move.request, move.source, move.target, error)

    async def order(self, order: Order, move: Move) -> MigrationRecord:
        """Order one move, and wait until it begins. Raises MigrationError if it does not begin.

        Such a failure is no failure of the pair, since the source has not contacted the target yet.
        """
        try:
            record = await self._sources.move(move.source, order, move.target)
        except BaseException as error:
            cause = error.cause if isinstance(error, MigrationError) else Cause.NOT_BEGUN
            if cause is Cause.PEER_LOST:  # the source is unreachable for the scheduler
                cause = Cause.NOT_BEGUN
            self._reports[order.id] = MoveReport(
                move.request,
                move.source,
                move.target,
                moved=False,
                path=move.path or Path.KV,
                cause=cause,
                by_hand=move.reason is Reason.MANUAL,
            )
            raise
        self.take(record)
        return record

    def take(self, record: MigrationRecord) -> None:
        """Take the record of a migration, ordered by any scheduler or operator."""
        if not self._records.keep(record) or record.trigger in (Reason.LOST, Reason.HAND_OVER):
            return  # The request was resubmitted, not moved.
        self._reports.pop(record.id, None)
        self._reports[record.id] = report_of(record)

    def take_copy(self, record: CopyRecord) -> None:
        """Take the record of a copy that has ended."""
        if (report := report_of_copy(record)) is not None:
            self._copies.append(report)

    def take_copies(self) -> tuple[CopyReport, ...]:
        """The reports of copies since the last call."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def take_reports(self) -> tuple[MoveReport, ...]:
        """The newest report of every move with a record since the last call."""
        reports, self._reports = tuple(self._reports.values()), {}
        return reports


def report_of(record: MigrationRecord) -> MoveReport:
    """The report of a move from its record."""
    return MoveReport(
        record.request_id,
        record.source,
        record.target,
        moved=None if record.outcome is None else record.outcome is Outcome.COMMITTED,
        path=record.path,
        cause=record.cause,
        by_hand=record.trigger is Reason.MANUAL,
        took_s=None if record.duration_s is None else record.duration_s - record.waited_s,
        whole_s=record.whole_s,
        tokens=record.tokens,
        sent=record.bytes,
        copy_s=record.copy_s,
        fell_back=record.fell_back,
        predicted_s=record.predicted_s,
        reason=record.trigger,
    )


def report_of_copy(record: CopyRecord) -> CopyReport | None:
    """The report of a copy from its record; None if it shows nothing of the link between the two replicas."""
    done = record.outcome is CopyOutcome.DONE
    if not record.tokens or (not done and record.cause not in PAIR_FAILURES):
        return None
    return CopyReport(record.source, record.target, record.tokens, record.duration_s, done)
