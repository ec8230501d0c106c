"""What is known of migrations: what `/mell/migrations` shows, and what is counted of them."""

from deployments.metrics.telemetry import Telemetry
from migration.protocol.record import MigrationRecord, Recent

KEPT = 1000
_ENDED = 1 << 16
"""Migrations that are known to have ended: replicas tell of the same ones again and again, for as long as they live."""


class Records:
    """The newest word on each of the newest migrations. Each is counted once, when it has ended."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._kept: Recent[str, MigrationRecord] = Recent(KEPT)
        self._ended: Recent[str, bool] = Recent(_ENDED)
        """Whether it has been counted how long it took."""

    def __contains__(self, id: object) -> bool:
        return id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def newest_first(self) -> list[MigrationRecord]:
        """All that are kept."""
        return sorted(self._kept.values(), key=lambda record: -record.started_at)

    def keep(self, record: MigrationRecord) -> bool:
        """Take a word on a migration; False if it is old: without an outcome, of one that has ended."""
        if record.outcome is None and record.id in self._ended:
            return False
        self._kept[record.id] = record
        if record.outcome is not None:
            self._count(record)
        return True

    def _count(self, record: MigrationRecord) -> None:
        """Count an ended migration once, and once what it took: its target tells that later."""
        timed = self._ended.get(record.id)
        if timed is None:
            self._telemetry.migrated(record)
        if not timed and record.whole_s is not None:
            self._telemetry.resumed(record.path, record.whole_s)
        self._ended[record.id] = bool(timed) or record.whole_s is not None
