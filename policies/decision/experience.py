"""Measurements of the cluster's own past: growth of requests, durations of moves, replica starts and engine steps."""

from collections import deque
from collections.abc import Iterable
from math import ceil
from statistics import median

from policies.cost.fit import NO_STEPS, StepFit, StepTotals
from policies.cost.lines import Line
from policies.cost.steps import prompt_chunks
from policies.decision.observation import Status
from policies.model import ReplicaId, ReplicaState
from policies.paths.beliefs import LONG, SHORT

FIRST_GUESS_TOKENS_PER_S = 30.0
FIRST_GUESS_STARTUP_S = 30.0
"""Assumptions before the first measurement: a busy decode, and a model of some gigabytes from a local disk."""

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
        self.steps = StepFit()
        """The fit of the engines' step times."""
        self.step_tokens = 0
        """The most tokens that a step computes; 0: unknown."""
        self.prompts: deque[tuple[float, int]] = deque(maxlen=PROMPTS)
        """The times and the tokens of the newest arrivals."""

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

    def observe_replicas(self, replicas: Iterable[Status], lost: Iterable[ReplicaId], now: float) -> None:
        """Follow the starts of replicas: `replicas` have these states now, and `lost` no longer exist."""
        for replica in lost:
            self._starting.pop(replica, None)
        for status in replicas:
            if status.state is ReplicaState.STARTING:
                self._starting.setdefault(status.id, now)
            elif (since := self._starting.pop(status.id, None)) is not None and status.state is ReplicaState.RUNNING:
                self._starts.append(now - since)

    def observe_steps(self, totals: StepTotals, step_tokens: int, now: float) -> None:
        """Add the steps of one replica since the last observation, and the most tokens that one of them computes."""
        self.steps.add(totals, now)
        self.step_tokens = max(self.step_tokens, step_tokens)

    def observe_profile(self, prefill: Line, now: float) -> None:
        """Add the prefills of a new replica's profile, since its first steps may have none."""
        for size in SHORT, LONG:
            chunks = tuple(prompt_chunks(size, self.step_tokens or None))
            totals = NO_STEPS
            for chunk in chunks:
                totals = totals.add(prefill.seconds(size) / len(chunks), 0, 0.0, (chunk,))
            self.steps.add(totals, now)

    def observe_arrival(self, tokens: int, now: float) -> None:
        """Add the prompt of an arrival."""
        self.prompts.append((now, tokens))

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
        """The median time from STARTING to RUNNING over the newest starts, in seconds."""
        return median(self._starts) if self._starts else FIRST_GUESS_STARTUP_S

    def awaits_start(self, now: float) -> bool:
        """True while a replica is starting, unless its start has exceeded the usual time by the factor `PATIENCE`."""
        return any(now - since < PATIENCE * self.startup_s for since in self._starting.values())


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
