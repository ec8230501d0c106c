"""Has replicas carry out moves, and reports what becomes of them to the next decision."""

import asyncio
import logging
import uuid
from collections.abc import Iterable
from typing import Protocol

from migration.protocol.errors import MigrationError
from migration.protocol.messages import ONLY, PathRequest
from migration.protocol.record import MigrationRecord, Outcome, Recent
from migration.run.source import Order
from policies.causes import Cause
from policies.model import ReplicaId
from policies.plan import Move, MoveReport, Path, Reason

log = logging.getLogger("ray.serve")

_ENDED = 1 << 16
"""Migrations whose end has been reported: replicas repeat their records for as long as they live."""


class Sources(Protocol):
    """How replicas are reached."""

    async def move(self, source: ReplicaId, order: Order, target: ReplicaId) -> MigrationRecord:
        """Have `source` begin to move a request. Raises MigrationError."""
        ...


class Dispatch:
    """Collects a report for every move that is under way or has ended; one that did not begin has ended, too."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._reports: dict[str, MoveReport] = {}
        self._ended: Recent[str, MigrationRecord] = Recent(_ENDED)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, moves: Iterable[Move]) -> None:
        """Order moves, without waiting for the answers."""
        for move in moves:
            path = ONLY[move.path] if move.path is not None else PathRequest.AUTO
            order = Order(new_id(), move.request, path, move.reason, move.kv_s, move.tokens_s)
            task = asyncio.create_task(self._begin(order, move))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _begin(self, order: Order, move: Move) -> None:
        try:
            await self.order(order, move)
        except Exception as error:
            log.info("move of %s from %s to %s did not begin: %s", move.request, move.source, move.target, error)

    async def order(self, order: Order, move: Move) -> MigrationRecord:
        """Order one move, and wait until it has begun. Raises MigrationError if it does not."""
        try:
            record = await self._sources.move(move.source, order, move.target)
        except BaseException as error:
            cause = error.cause if isinstance(error, MigrationError) else Cause.UNEXPECTED
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
        self.heard(record)
        return record

    def heard(self, record: MigrationRecord) -> None:
        """The newest state of a migration, whichever scheduler or operator ordered it."""
        if record.trigger is Reason.LOST:
            return  # The request was submitted anew; nothing was moved.
        ended = self._ended.get(record.id)
        if ended is not None and (record.outcome is None or record == ended):
            return
        if record.outcome is not None:
            self._ended[record.id] = record
        self._reports.pop(record.id, None)
        self._reports[record.id] = reported(record)

    def take_reports(self) -> tuple[MoveReport, ...]:
        """What is new of moves since the last call. One that is under way is reported as often as its source does."""
        reports, self._reports = tuple(self._reports.values()), {}
        return reports


def reported(record: MigrationRecord) -> MoveReport:
    """What a record says of its move."""
    return MoveReport(
        record.request_id,
        record.source,
        record.target,
        moved=None if record.outcome is None else record.outcome is Outcome.COMMITTED,
        path=record.path,
        cause=record.cause,
        by_hand=record.trigger is Reason.MANUAL,
        took_s=record.duration_s,
        whole_s=record.whole_s,
        tokens=record.tokens,
        sent=record.bytes,
        copy_s=record.copy_s,
        fell_back=record.fell_back,
        predicted_s=record.predicted_s,
    )


def new_id() -> str:
    """A migration's id."""
    return uuid.uuid4().hex[:16]
