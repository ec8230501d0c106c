"""The newest records of migrations: for `/mell/migrations`, for metrics, and for the decision."""

from deployments.metrics.telemetry import Telemetry
from migration.protocol.record import MigrationRecord, Recent

KEPT = 1000
_ENDED = 1 << 16
"""Ended migrations whose records are compared with later reports: replicas repeat records after lost answers."""


class Records:
    """Keeps the newest records, and drops repeated ones. Each migration is counted once, at its end."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._kept: Recent[str, MigrationRecord] = Recent(KEPT)
        self._ended: Recent[str, MigrationRecord] = Recent(_ENDED)

    def __contains__(self, id: object) -> bool:
        return id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def newest_first(self) -> list[MigrationRecord]:
        """All kept records, by descending start of the migration."""
        return sorted(self._kept.values(), key=lambda record: -record.started_at)

    def keep(self, record: MigrationRecord) -> bool:
        """Keep a record. False if a record as new or newer of the ended migration has been kept before.

        A record of a migration under way is new each time, since it shows that the migration goes on.
        """
        ended = self._ended.get(record.id)
        if ended is not None and not _follows(record, ended):
            return False
        self._kept[record.id] = record
        if record.outcome is not None:
            if ended is None:
                self._telemetry.migrated(record)
            if record.whole_s is not None and (ended is None or ended.whole_s is None):
                self._telemetry.resumed(record.path, record.whole_s)
            self._ended[record.id] = record
        return True


def _follows(record: MigrationRecord, ended: MigrationRecord) -> bool:
    """True if `record` is newer than `ended`, the kept record of an ended migration.

    The last change of a record is the time of the first token at the target.
    """
    if record.outcome is None or record == ended:
        return False
    return ended.whole_s is None or record.whole_s is not None
