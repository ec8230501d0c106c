"""What the cluster's own past says: how fast requests grow, how long moves take, how long a replica takes to start."""

from collections import deque
from math import ceil
from statistics import median

from policies.decision.observation import Observation
from policies.model import Phase, ReplicaId, ReplicaState, RequestId, RequestLoad

FIRST_GUESS_TOKENS_PER_S = 30.0
FIRST_GUESS_STARTUP_S = 30.0
"""Before anything was measured: a busy decode, and a model of some gigabytes from a local disk."""

WEIGHT = 0.2
"""How much the newest observation counts in the decode rate."""

PATIENCE = 3.0
"""A start that lasts so many times as long as usual is not waited for: it may want a GPU that is not free."""

STARTS = 8
"""How many starts are remembered."""

REMEMBERED = 200
"""How many moves are remembered. Links get busy and quiet again within minutes."""

SHARE = 0.9
"""The share of the remembered moves that did not take longer than what is reckoned with."""


class Experience:
    """Learns from observations; times in seconds of the observations' clock."""

    def __init__(self, epoch_s: float) -> None:
        self._lead = Lead(epoch_s)
        self._rate: float | None = None
        self._decoding: dict[RequestId, RequestLoad] = {}
        self._seen_s: float | None = None
        self._starting: dict[ReplicaId, float] = {}
        self._starts: deque[float] = deque(maxlen=STARTS)

    def observe(self, seen: Observation) -> None:
        """Take the next observation."""
        for took_s in seen.took_s:
            self._lead.observe(took_s)
        self._measure_growth(seen)
        self._measure_starts(seen)

    @property
    def lead_s(self) -> float:
        """How long a decision takes to have its effect."""
        return self._lead.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second by which a request grows that decodes."""
        return FIRST_GUESS_TOKENS_PER_S if self._rate is None else self._rate

    @property
    def startup_s(self) -> float:
        """From STARTING to RUNNING, the median of the last starts."""
        return median(self._starts) if self._starts else FIRST_GUESS_STARTUP_S

    def awaits_start(self, now: float) -> bool:
        """Whether a replica is starting, and has not been for so long that it may never run."""
        return any(now - since < PATIENCE * self.startup_s for since in self._starting.values())

    def _measure_growth(self, seen: Observation) -> None:
        decoding = {q.id: q for _, q in seen.state.requests() if q.phase is Phase.DECODE}
        earlier = ((q, self._decoding.get(q.id)) for q in decoding.values())
        grown = [q.tokens - was.tokens for q, was in earlier if was is not None and was.hop == q.hop]
        passed_s = 0.0 if self._seen_s is None else seen.now - self._seen_s
        if grown and passed_s > 0:
            rate = sum(grown) / len(grown) / passed_s
            self._rate = rate if self._rate is None else (1 - WEIGHT) * self._rate + WEIGHT * rate
        self._decoding, self._seen_s = decoding, seen.now

    def _measure_starts(self, seen: Observation) -> None:
        states = {r.id: r.state for r in seen.state.replicas}
        for replica, since in list(self._starting.items()):
            if states.get(replica) is not ReplicaState.STARTING:
                del self._starting[replica]
                if states.get(replica) is ReplicaState.RUNNING:
                    self._starts.append(seen.now - since)
        for replica, state in states.items():
            if state is ReplicaState.STARTING:
                self._starting.setdefault(replica, seen.now)


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
