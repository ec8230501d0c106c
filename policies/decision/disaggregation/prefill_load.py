"""The load of a pool as far as it decides where prompts are prefilled, and the decision on the number of replicas.

Only the decision updates it: with every placement, and in every epoch.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from math import ceil
from statistics import fmean, pvariance
from typing import NamedTuple

from policies.cost.job_times import MOST_BUSY, JobLoad
from policies.cost.service import TAIL

LOAD_WINDOW_S = 60.0
"""The time for which a placement counts, in seconds."""
LEAST_S = 10.0
"""The least time, in seconds, over which a rate is a mean."""
HALF_LIFE_S = 15.0
"""The age at which a number of decoding requests has lost half of its weight, in seconds."""
PROMPTS = 200
"""The number of newest placements in the mean job."""
FORGOTTEN_S = 300.0
"""The time in which half of what is known of the other mode's spread is forgotten, in seconds."""


class PrefillReason(StrEnum):
    """The reason for the number of replicas for prefills.

    MEASURING: too little is known. ROOM: with more of them, the others would lack room. OVERLOAD: no number of them
    keeps up with the arrivals. TIMES: jobs take the least time in this way, by prediction, or not enough less in
    another.
    """

    MEASURING = "measuring"
    ROOM = "room"
    OVERLOAD = "overload"
    TIMES = "times"


class _PlacedPrompt(NamedTuple):
    at: float
    computed: int
    cached: int
    prefill_s: float
    apart: bool


@dataclass(slots=True)
class PrefillLoad:
    """The placements of the last LOAD_WINDOW_S seconds, and the decoding of the epochs. Times are in seconds.

    `decoded` is the mean number of tokens decoded per second, and `context` that of the tokens of a request. `spreads`
    are the evenness of the requests on the replicas that decode, without and with replicas for prefills: 1 if all have
    as many. `count` replicas are for prefills since `since`, for that `reason`; `times` are the predictions for this
    and other numbers that keep up with the arrivals.
    """

    decoded: float = 0.0
    context: float = 1.0
    spreads: dict[bool, float] = field(default_factory=lambda: {False: 1.0, True: 1.0})
    count: int = 0
    since: float | None = None
    reason: PrefillReason = PrefillReason.MEASURING
    times: Mapping[int, float] = field(default_factory=dict)
    _placed: deque[_PlacedPrompt] = field(default_factory=deque)
    _first: float | None = None
    _counted_at: float | None = None
    _busy: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})

    def copy(self) -> "PrefillLoad":
        """The same load, to be changed without a change here."""
        return replace(self, spreads=dict(self.spreads), _placed=deque(self._placed), _busy=dict(self._busy))

    def add_placement(self, computed: int, cached: int, prefill_s: float, apart: bool, now: float) -> None:
        """Add the placement of a prompt, of which `computed` tokens take an idle replica `prefill_s` seconds."""
        self._first = now if self._first is None else self._first
        self._placed.append(_PlacedPrompt(now, computed, cached, prefill_s, apart))
        self._busy[apart] += prefill_s
        self._expire(now)

    def add_epoch(self, decoded: float, context: float, batches: Sequence[int], now: float) -> None:
        """Add the numbers of an epoch: tokens decoded per second, tokens of a request, and requests of replicas.

        The latter are the `batches` of the replicas that decode.
        """
        if self._first is None:
            return
        passed_s = 0.0 if self._counted_at is None else now - self._counted_at
        self._counted_at = now
        # Until much has been seen, the mean of all.
        new = max(1 - 0.5 ** (passed_s / HALF_LIFE_S), passed_s / max(1e-6, now - self._first))
        self.decoded += new * (decoded - self.decoded)
        self.context += new * (max(1.0, context) - self.context)
        apart = self.count > 0
        if squares := sum(batch * batch for batch in batches):
            spread = sum(batches) ** 2 / squares / min(sum(batches), len(batches))
            self.spreads[apart] += new * (spread - self.spreads[apart])
        forgotten = 1 - 0.5 ** (passed_s / FORGOTTEN_S)
        self.spreads[not apart] += forgotten * (1 - self.spreads[not apart])

    def busy(self, apart: bool, replicas: int, now: float) -> float:
        """The share of their time in which the replicas for prefills, or the others, prefill; MOST_BUSY at most."""
        self._expire(now)
        return min(MOST_BUSY, max(0.0, self._busy[apart]) / self._span_s(now) / max(1, replicas))

    def answer(self, now: float) -> float:
        """The mean number of tokens of an answer: those decoded for each arrival."""
        self._expire(now)
        return self.decoded / self._rate(now) if self._placed else 0.0

    def job_load(self, now: float) -> JobLoad | None:
        """The mean job, without the pause of a hand-over; None without placements."""
        self._expire(now)
        if not self._placed:
            return None
        newest = list(islice(reversed(self._placed), PROMPTS))
        count = len(newest)
        mean_s = fmean(each.prefill_s for each in newest)
        variation = pvariance((each.prefill_s for each in newest), mean_s) / mean_s**2 if mean_s else 0.0
        longest = sorted(each.computed for each in newest)[ceil((1 - TAIL) * count) - 1]
        prompt, cached = fmean(each.computed for each in newest), fmean(each.cached for each in newest)
        answer, rate = self.answer(now), self._rate(now)
        return JobLoad(rate, round(prompt), round(cached), variation, longest, answer, self.context)

    @property
    def share_apart(self) -> float:
        """The share of the prompts that are prefilled apart."""
        return fmean(each.apart for each in self._placed) if self._placed else 0.0

    def _rate(self, now: float) -> float:
        return len(self._placed) / self._span_s(now)

    def _span_s(self, now: float) -> float:
        return min(LOAD_WINDOW_S, max(LEAST_S, now - (now if self._first is None else self._first)))

    def _expire(self, now: float) -> None:
        while self._placed and self._placed[0].at <= now - LOAD_WINDOW_S:
            gone = self._placed.popleft()
            self._busy[gone.apart] -= gone.prefill_s
