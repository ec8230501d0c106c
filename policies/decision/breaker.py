"""Pairs of replicas between which moves keep failing are left alone for a while."""

from dataclasses import dataclass

from policies.model import ReplicaId

Pair = tuple[ReplicaId, ReplicaId]


@dataclass(slots=True)
class _Record:
    failures: int = 0
    blocked_until: float = 0.0


class Breaker:
    """Opens after `failures` in a row, for `rest_s` seconds; then one attempt decides. Times of any monotonic clock."""

    def __init__(self, failures: int = 3, rest_s: float = 30.0) -> None:
        self._limit = failures
        self._rest_s = rest_s
        self._records: dict[Pair, _Record] = {}

    def failed(self, pair: Pair, now: float) -> bool:
        """A move failed; returns whether the pair rests because of it."""
        record = self._records.setdefault(pair, _Record())
        record.failures += 1
        if record.failures < self._limit:
            return False
        record.blocked_until = now + self._rest_s
        return True

    def succeeded(self, pair: Pair) -> None:
        """A move went through."""
        self._records.pop(pair, None)

    def blocks(self, pair: Pair, now: float) -> bool:
        """Whether the pair is to be left alone."""
        record = self._records.get(pair)
        return record is not None and now < record.blocked_until

    def resting(self, now: float) -> tuple[Pair, ...]:
        """All pairs that are left alone."""
        return tuple(pair for pair in self._records if self.blocks(pair, now))

    def forget(self, replica: ReplicaId) -> None:
        """The replica is gone."""
        self._records = {pair: record for pair, record in self._records.items() if replica not in pair}
