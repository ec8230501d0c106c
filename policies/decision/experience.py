"""What the cluster's own past shows: how fast requests grow, how long moves take, how long a replica takes to start."""

from collections import deque
from collections.abc import Iterable
from math import ceil
from statistics import median

from policies.decision.observation import Status
from policies.model import ReplicaId, ReplicaState

FIRST_GUESS_TOKENS_PER_S = 30.0
FIRST_GUESS_STARTUP_S = 30.0
"""Before anything was measured: a busy decode, and a model of some gigabytes from a local disk."""

WEIGHT = 0.2
"""Weight of the newest measurement in the decode rate."""

PATIENCE = 3.0
"""A start that lasts so many times as long as usual is not waited for: it may want a GPU that is not free."""

STARTS = 8
"""How many starts are remembered."""

REMEMBERED = 200
"""How many moves are remembered. Links get busy and quiet again within minutes."""

SHARE = 0.9
"""The share of the remembered moves that took no longer than the lead allows for."""


class Experience:
    """Learns from observations; times in seconds of the observations' clock. `rate` is the decode rate where it is
    known beforehand.
    """

    def __init__(self, epoch_s: float, rate: float | None = None) -> None:
        self._lead = Lead(epoch_s)
        self._given = rate
        self._rate: float | None = None
        self._seen_s: float | None = None
        self._starting: dict[ReplicaId, float] = {}
        self._starts: deque[float] = deque(maxlen=STARTS)

    def moved(self, took_s: float) -> None:
        """A move took so many seconds."""
        self._lead.observe(took_s)

    def grew(self, tokens: int, requests: int, now: float) -> None:
        """So many requests that have been decoding since the last call have gained `tokens` in all."""
        passed_s = 0.0 if self._seen_s is None else now - self._seen_s
        self._seen_s = now
        if requests > 0 and passed_s > 0:
            rate = tokens / requests / passed_s
            self._rate = rate if self._rate is None else (1 - WEIGHT) * self._rate + WEIGHT * rate

    def saw(self, replicas: Iterable[Status], lost: Iterable[ReplicaId], now: float) -> None:
        """Replicas are in these states now, or gone."""
        for replica in lost:
            self._starting.pop(replica, None)
        for status in replicas:
            if status.state is ReplicaState.STARTING:
                self._starting.setdefault(status.id, now)
            elif (since := self._starting.pop(status.id, None)) is not None and status.state is ReplicaState.RUNNING:
                self._starts.append(now - since)

    @property
    def lead_s(self) -> float:
        """How long a decision takes to have its effect."""
        return self._lead.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second by which a request grows that decodes."""
        if self._given is not None:
            return self._given
        return FIRST_GUESS_TOKENS_PER_S if self._rate is None else self._rate

    @property
    def startup_s(self) -> float:
        """From STARTING to RUNNING, the median of the last starts."""
        return median(self._starts) if self._starts else FIRST_GUESS_STARTUP_S

    def awaits_start(self, now: float) -> bool:
        """Whether a replica is starting, and has not been for so long that it may never run."""
        return any(now - since < PATIENCE * self.startup_s for since in self._starting.values())


class Lead:
    """Measures the lead from the moves that have been made: two epochs, and as long as nine in ten of them took.

    One epoch, since what is known is up to an epoch old; another, since the next chance to decide is an epoch away.
    """

    def __init__(self, epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    def observe(self, took_s: float) -> None:
        """A move took so many seconds from its beginning to its end."""
        self._took.append(took_s)

    @property
    def seconds(self) -> float:
        """The lead in seconds; as long as nothing has moved, moves are taken to be instantaneous."""
        if not self._took:
            return 2 * self._epoch_s
        return 2 * self._epoch_s + sorted(self._took)[ceil(SHARE * len(self._took)) - 1]
