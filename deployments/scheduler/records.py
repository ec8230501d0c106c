"""The newest records of migrations: for `/mell/migrations`, for metrics, and for the decision."""

from deployments.metrics.telemetry import Telemetry
from migration.protocol.record import MigrationRecord, Recent

KEPT = 1000
_ENDED = 1 << 16
"""Ended migrations that are known by their ids: replicas repeat records after lost answers."""


class Records:
    """Keeps the newest records, and drops repeated ones. Each migration is counted once, at its end."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._kept: Recent[str, MigrationRecord] = Recent(KEPT)
        self._resumed: Recent[str, bool] = Recent(_ENDED)
        """Ended migrations, by whether the time of the first token at the target is known: that comes last."""

    def __contains__(self, id: object) -> bool:
        return id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def newest_first(self) -> list[MigrationRecord]:
        """All kept records, by descending start of the migration."""
        return sorted(self._kept.values(), key=lambda record: -record.started_at)

    def keep(self, record: MigrationRecord) -> bool:
        """Keep a record. False if one as new or newer of the ended migration has been kept before.

        A record of a migration under way is new each time, since it shows that the migration goes on.
        """
        whole_s, resumed = record.whole_s, self._resumed.get(record.id)
        if resumed is not None and (resumed or whole_s is None):
            return False
        self._kept[record.id] = record
        if record.outcome is not None:
            if resumed is None:
                self._telemetry.migrated(record)
            if whole_s is not None:
                self._telemetry.resumed(record.path, whole_s)
            self._resumed[record.id] = whole_s is not None
        return True
