"""The breaker: no moves for a while between two replicas whose moves keep failing."""

from dataclasses import dataclass

from policies.model import ReplicaId

Pair = tuple[ReplicaId, ReplicaId]
"""Source and target of moves."""


@dataclass(slots=True)
class _Record:
    failures: int = 0
    blocked_until: float = 0.0


class Breaker:
    """Blocks a pair for `rest_s` seconds after `failures` failed moves in a row.

    Afterwards moves are allowed again, and a single failure blocks the pair anew. Times are of one monotonic clock.
    """

    def __init__(self, failures: int = 3, rest_s: float = 30.0) -> None:
        self._limit = failures
        self._rest_s = rest_s
        self._records: dict[Pair, _Record] = {}

    def failed(self, pair: Pair, now: float) -> bool:
        """Count a failed move. True if the pair is blocked from now on."""
        record = self._records.setdefault(pair, _Record())
        record.failures += 1
        if record.failures < self._limit:
            return False
        record.blocked_until = now + self._rest_s
        return True

    def succeeded(self, pair: Pair) -> None:
        """Note a successful move: the pair's failures no longer count."""
        self._records.pop(pair, None)

    def blocks(self, pair: Pair, now: float) -> bool:
        """True while the pair is blocked."""
        record = self._records.get(pair)
        return record is not None and now < record.blocked_until

    def resting(self, now: float) -> tuple[Pair, ...]:
        """All blocked pairs."""
        return tuple(pair for pair in self._records if self.blocks(pair, now))

    def forget(self, replica: ReplicaId) -> None:
        """Drop all pairs of a lost replica."""
        self._records = {pair: record for pair, record in self._records.items() if replica not in pair}
