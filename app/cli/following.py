"""Which migrations are news, look by look; pure."""

from app.client.documents import Records
from migration.recent import Recent
from migration.record import MigrationRecord, Outcome

_REMEMBERED = 1 << 14


class Follower:
    """Tells each migration once, when it has ended.

    Of a committed one, the target tells a little later how long it took; it is waited for until the next look.
    """

    def __init__(self) -> None:
        self._ended: Recent[str, None] = Recent(_REMEMBERED)
        self._told: Recent[str, None] = Recent(_REMEMBERED)

    def feed(self, records: Records) -> Records:
        """The news among records that come newest first, oldest first."""
        news = tuple(record for record in reversed(records) if self._is_news(record))
        for record in news:
            self._told[record.id] = None
        for record in records:
            if record.outcome is not None:
                self._ended[record.id] = None
        return news

    def _is_news(self, record: MigrationRecord) -> bool:
        if record.id in self._told or record.outcome is None:
            return False
        complete = record.outcome is not Outcome.COMMITTED or record.whole_s is not None
        return complete or record.id in self._ended

    def skip(self, records: Records) -> None:
        """Take these for told, as far as they have ended."""
        for record in records:
            if record.outcome is not None:
                self._told[record.id] = None
