"""Measurements of the cluster's own past: growth of requests, durations of moves, replica starts and engine steps."""

from collections import deque
from collections.abc import Collection, Iterable
from math import ceil, isfinite
from statistics import median

from policies.cost.fit import StepFit, StepTotals
from policies.cost.latencies import WINDOW_S
from policies.decision.observation import Status
from policies.model import ReplicaId, ReplicaState

FIRST_GUESS_TOKENS_PER_S = 30.0
FIRST_GUESS_STARTUP_S = 30.0
FIRST_GUESS_WAKE_S = 3.0
"""Assumptions before the first measurement: a busy decode, and a model of some gigabytes from a local disk, or from the
page cache.
"""

WEIGHT = 0.2
"""The weight of the newest measurement in the decode rate."""

PATIENCE = 3.0
"""A start is expected to succeed for this multiple of the median start-up time. A longer one may lack a free GPU."""

STARTS = 8
"""The number of newest starts in the start-up time."""

REMEMBERED = 200
"""The number of newest moves in the lead. Links become busy and idle within minutes."""

PROMPTS = 500
"""The number of newest arrivals whose prompts are remembered."""

LEAST_WINDOW_S = 60.0
"""The least time, in seconds, over which the rate of arrivals is a mean."""

SHARE = 0.9
"""The percentile of past move durations that the lead allows for."""


class Experience:
    """Decode rate, lead and start-up time, measured from observations; times are in seconds of the observations' clock.

    `rate` is a decode rate in tokens per second that replaces the measured one.
    """

    def __init__(self, epoch_s: float, rate: float | None = None) -> None:
        self._lead = Lead(epoch_s)
        self._fixed_rate = rate
        self._rate: float | None = None
        self._measured_at: float | None = None
        self._starting: dict[ReplicaId, float] = {}
        self._starts: deque[float] = deque(maxlen=STARTS)
        self._waking: dict[ReplicaId, float] = {}
        self._wakes: deque[float] = deque(maxlen=STARTS)
        self._waited = WaitedTimes()
        self.steps = StepFit()
        """The fit of the engines' step times."""
        self.step_tokens = 0
        """The most tokens that a step computes; 0: unknown."""
        self.prompts: deque[int] = deque(maxlen=PROMPTS)
        """The tokens of the newest arrivals."""
        self._arrivals: deque[tuple[float, int]] = deque()
        self._first_arrival: float | None = None
        self._stays: deque[tuple[float, float]] = deque()
        self._stays_s = 0.0
        self._counted_at: float | None = None

    def observe_move(self, took_s: float) -> None:
        """Add the duration of a successful move, in seconds."""
        self._lead.observe(took_s)

    def observe_growth(self, tokens: int, requests: int, now: float) -> None:
        """Add the total growth, in tokens, of the `requests` requests that have decoded since the last call."""
        passed_s = 0.0 if self._measured_at is None else now - self._measured_at
        self._measured_at = now
        if requests > 0 and passed_s > 0:
            rate = tokens / requests / passed_s
            self._rate = rate if self._rate is None else (1 - WEIGHT) * self._rate + WEIGHT * rate

    def observe_replicas(self, replicas: Collection[Status], lost: Collection[ReplicaId], now: float) -> None:
        """Follow the starts and wakes of replicas: `replicas` have these states now, and `lost` no longer exist."""
        for begun, durations, state in (
            (self._starting, self._starts, ReplicaState.STARTING),
            (self._waking, self._wakes, ReplicaState.WAKING),
        ):
            for replica in lost:
                begun.pop(replica, None)
                self._waited.take(replica)
            for status in replicas:
                if status.state is state:
                    begun.setdefault(status.id, now)
                elif (since := begun.pop(status.id, None)) is not None:
                    took_s = now - since - self._waited.take(status.id)
                    if status.state is ReplicaState.RUNNING:
                        durations.append(took_s)

    def observe_waits(self, waiting: Iterable[ReplicaId], now: float) -> None:
        """Add the time since the last call to the waits of the starting replicas that wait for memory now."""
        self._waited.add((replica for replica in waiting if replica in self._starting), now)

    def observe_steps(self, totals: StepTotals, step_tokens: int, now: float) -> None:
        """Add the steps of one replica since the last observation, and the most tokens that one of them computes."""
        self.steps.add(totals, now)
        self.step_tokens = max(self.step_tokens, step_tokens)

    def observe_arrival(self, tokens: int, now: float) -> None:
        """Add the prompt of an arrival."""
        self.prompts.append(tokens)
        self._arrivals.append((now, tokens))
        if self._first_arrival is None:
            self._first_arrival = now

    def arrival_rate(self, now: float) -> float:
        """Arrivals per second in the last WINDOW_S seconds, or since the first arrival, but in LEAST_WINDOW_S or more.

        The times for which a level is judged are as long: a rate of fewer seconds would take bursts for lasting.
        """
        if self._first_arrival is None:
            return 0.0
        return self._arrived(now) / min(WINDOW_S, max(LEAST_WINDOW_S, now - self._first_arrival))

    def observe_running(self, requests: int, now: float) -> None:
        """Add the number of requests on replicas, which has been the same since the last call."""
        if self._counted_at is not None:
            spent_s = requests * (now - self._counted_at)
            self._stays.append((now, spent_s))
            self._stays_s += spent_s
            while self._stays[0][0] <= now - WINDOW_S:
                self._stays_s -= self._stays.popleft()[1]
        self._counted_at = now

    def queue_share(self, tokens: int, wait_s: float, now: float) -> float:
        """The share of a queue of `tokens` tokens for which there has to be room at a time.

        Requests stay on a replica for r seconds in the mean. If they may wait `wait_s` seconds for it, a
        replica serves (r + wait_s) / r times its room of them in time. Those that came more than r + wait_s seconds ago
        would be over if there had been room, so they are no demand: only a past shortage makes a queue so long.
        """
        stay_s = self.stay_s(now)
        if not (tokens and stay_s and isfinite(wait_s)):
            return 1.0
        began, recent = now - stay_s - wait_s, 0
        for at, size in reversed(self._arrivals):
            if at < began or recent >= tokens:
                break
            recent += size
        return stay_s / (stay_s + wait_s) * min(1.0, recent / tokens)

    def stay_s(self, now: float) -> float:
        """The seconds that a request stays on a replica, in the mean (Little's law); 0 before any has arrived."""
        arrived = self._arrived(now)
        return self._stays_s / arrived if arrived else 0.0

    def _arrived(self, now: float) -> int:
        """The number of arrivals in the last WINDOW_S seconds."""
        while self._arrivals and self._arrivals[0][0] <= now - WINDOW_S:
            self._arrivals.popleft()
        return len(self._arrivals)

    @property
    def lead_s(self) -> float:
        """The seconds from an observation until a decision on it takes effect."""
        return self._lead.seconds

    @property
    def decode_rate(self) -> float:
        """The growth of a decoding request, in tokens per second."""
        if self._fixed_rate is not None:
            return self._fixed_rate
        return FIRST_GUESS_TOKENS_PER_S if self._rate is None else self._rate

    @property
    def startup_s(self) -> float:
        """The median time from STARTING to RUNNING over the newest starts, without waits for memory, in seconds."""
        return median(self._starts) if self._starts else FIRST_GUESS_STARTUP_S

    @property
    def wake_s(self) -> float:
        """The median time from WAKING to RUNNING over the newest wakes, in seconds."""
        return median(self._wakes) if self._wakes else FIRST_GUESS_WAKE_S

    def awaits_start(self, now: float) -> bool:
        """True while a replica starts or wakes, unless it has exceeded the usual time by the factor `PATIENCE`."""
        coming = ((self._starting, self.startup_s), (self._waking, self.wake_s))
        return any(now - since < PATIENCE * usual_s for begun, usual_s in coming for since in begun.values())

    def lacks_gpu(self, now: float) -> bool:
        """True if a start has exceeded the usual time by the factor `PATIENCE`: another one would wait behind it."""
        return any(now - since >= PATIENCE * self.startup_s for since in self._starting.values())


class WaitedTimes:
    """The seconds for which starting replicas have waited for memory: how long depends on others, not on the start."""

    def __init__(self) -> None:
        self._waited: dict[ReplicaId, float] = {}
        self._observed_at: float | None = None

    def add(self, waiting: Iterable[ReplicaId], now: float) -> None:
        """Those `waiting` now have waited since the last call."""
        passed_s = 0.0 if self._observed_at is None else now - self._observed_at
        self._observed_at = now
        for replica in waiting:
            self._waited[replica] = self._waited.get(replica, 0.0) + passed_s

    def take(self, replica: ReplicaId) -> float:
        """Remove and return the wait of a replica."""
        return self._waited.pop(replica, 0.0)


class Lead:
    """The lead: two epochs plus the percentile `SHARE` of the newest moves' durations.

    One epoch is the greatest age of an observation, the other the wait for the next decision.
    """

    def __init__(self, epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    def observe(self, took_s: float) -> None:
        """Add the duration of a move from its order to its end, in seconds."""
        self._took.append(took_s)

    @property
    def seconds(self) -> float:
        """The lead in seconds. Before the first move, moves count as instantaneous."""
        if not self._took:
            return 2 * self._epoch_s
        return 2 * self._epoch_s + sorted(self._took)[ceil(SHARE * len(self._took)) - 1]
