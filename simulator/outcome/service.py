"""The level of service of a run, and its GPU-seconds: over the whole window, and over parts of five minutes.

First tokens count by the arrival of their requests; a request without one by the end of the run counts with the time
that it has waited. Times between tokens are all those that a client sees, pauses by moves and preemptions included.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from policies.cluster.cluster import Cluster
from policies.cost.service import TAIL, ServiceLevel, strictest
from policies.model import RequestId, Tokens
from policies.plan import Plan, Reason
from policies.precedence import DEFAULT_CLASS
from simulator.outcome.metrics import Window
from simulator.outcome.recorder import STEP_GRID_S, STEP_SPAN_S
from simulator.outcome.statistics import quantile
from simulator.workload.workload import Job
from simulator.world.observer import Life, Transfer

PART_S = 300.0
"""The length of a part of the window, for which the level is judged by itself, in seconds."""

Counts = Sequence[tuple[float, int]]
"""Numbers of GPUs, or of machines, each from its time on, in seconds of virtual time."""


@dataclass(slots=True)
class ServiceRecorder:
    """Keeps what the level of service and the GPU-seconds need. Observes worlds and fleets.

    `steps` are tokens by span of `STEP_SPAN_S` and by the time since the token before, in units of `STEP_GRID_S`.
    """

    tick: Callable[[float], None]
    gpus: list[tuple[float, int]] = field(default_factory=list)
    machines: list[tuple[float, int]] = field(default_factory=list)
    firsts: dict[RequestId, float] = field(default_factory=dict)
    steps: dict[tuple[int, int], float] = field(default_factory=dict)
    preemptions: list[float] = field(default_factory=list)
    moves: list[tuple[float, Reason]] = field(default_factory=list)

    def decided(
        self, now: float, cluster: Cluster, plans: Sequence[Plan], closing: int = 0, machines: int | None = None
    ) -> None:
        """See `Observer`."""
        self.counted(now, len(cluster.replicas) + closing, machines)
        self.tick(now)

    def counted(self, now: float, gpus: int, machines: int | None = None) -> None:
        """See `FleetObserver`."""
        self.gpus.append((now, gpus))
        if machines is not None:
            self.machines.append((now, machines))

    def stepped(self, now: float, step_s: float, tokens: float) -> None:
        """See `Observer`."""
        key = int(now / STEP_SPAN_S), round(step_s / STEP_GRID_S)
        self.steps[key] = self.steps.get(key, 0.0) + tokens

    def transferred(self, now: float, transfer: Transfer) -> None:
        """See `Observer`."""
        if transfer.completed:
            self.moves.append((now, transfer.reason))

    def preempted(self, now: float, tokens: Tokens) -> None:
        """See `Observer`."""
        self.preemptions.append(now)

    def finished(self, now: float, life: Life) -> None:
        """See `Observer`."""
        self.firsts[life.job.id] = life.first_token_s


@dataclass(frozen=True, slots=True)
class PlannedLevels:
    """The service level of a plan, and the levels of the service classes that have one of their own."""

    whole: ServiceLevel
    classes: Mapping[str, ServiceLevel] = field(default_factory=dict)

    def of(self, name: str) -> ServiceLevel:
        """The level of a class."""
        return self.classes.get(name, self.whole)


@dataclass(frozen=True, slots=True)
class ServiceOutcome:
    """The service in a window, and its cost. Times are in seconds; None without a request or a second token.

    `unfinished` counts the requests of the window without an end by the end of the run. `ttft_p99_by_class_s` are the
    times of each service class that has requests in the window; there are none if all have the default class. Tokens
    of all classes come in the same steps, so they have one time between two tokens. `machine_seconds` are None if
    machines are not counted.
    """

    gpu_seconds: float
    gpus_mean: float
    gpus_peak: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p99_s: float | None
    preemptions: int
    moves: int
    unfinished: int
    ttft_p99_by_class_s: Mapping[str, float] = field(default_factory=dict)
    machine_seconds: float | None = None
    moves_by_reason: Mapping[Reason, int] = field(default_factory=dict)

    def keeps(self, levels: PlannedLevels) -> bool:
        """True if the first tokens of every class are within its level, and the times between tokens within all."""
        strict = strictest([levels.whole, *levels.classes.values()])
        return all(self.kept_by_class(levels).values()) and _within(self.itl_p99_s, strict.itl_p99_s)

    def kept_by_class(self, levels: PlannedLevels) -> dict[str, bool]:
        """By class, true if its first tokens are within its level."""
        found: Mapping[str, float | None] = self.ttft_p99_by_class_s or {DEFAULT_CLASS: self.ttft_p99_s}
        return {name: _within(ttft_s, levels.of(name).ttft_p99_s) for name, ttft_s in found.items()}

    @property
    def levels(self) -> PlannedLevels:
        """The strictest levels that this service keeps: its own p99."""
        classes = {name: ServiceLevel(ttft_s) for name, ttft_s in self.ttft_p99_by_class_s.items()}
        return PlannedLevels(ServiceLevel(self.ttft_p99_s, self.itl_p99_s), classes)

    def is_as_good_as(self, other: "ServiceOutcome") -> bool:
        """True if neither p99 is longer than the other's."""
        return _within(self.ttft_p99_s, other.ttft_p99_s) and _within(self.itl_p99_s, other.itl_p99_s)


def served(recorder: ServiceRecorder, jobs: Iterable[Job], window: Window, until_s: float) -> ServiceOutcome:
    """The service in a window of a run that ended at `until_s`."""
    inside = [job for job in jobs if window.warmup_s <= job.arrival_s < window.horizon_s]
    by_class: dict[str, list[float]] = {}
    for job in inside:
        by_class.setdefault(job.service_class, []).append(recorder.firsts.get(job.id, until_s) - job.arrival_s)
    waits = sorted(wait_s for waits_s in by_class.values() for wait_s in waits_s)
    counts = list(within(recorder.gpus, window.warmup_s, window.horizon_s))
    used = _seconds(recorder.gpus, window)
    moves = Counter(reason for at, reason in recorder.moves if window.has(at))
    return ServiceOutcome(
        gpu_seconds=used,
        gpus_mean=used / window.seconds,
        gpus_peak=max(gpus for _, _, gpus in counts),
        ttft_p50_s=quantile(waits, 0.5) if waits else None,
        ttft_p99_s=quantile(waits, 1 - TAIL) if waits else None,
        itl_p99_s=inter_token_p99(recorder.steps, window),
        preemptions=sum(map(window.has, recorder.preemptions)),
        moves=moves.total(),
        unfinished=sum(job.id not in recorder.firsts for job in inside),
        ttft_p99_by_class_s={}
        if by_class.keys() <= {DEFAULT_CLASS}
        else {name: quantile(sorted(by_class[name]), 1 - TAIL) for name in sorted(by_class)},
        machine_seconds=_seconds(recorder.machines, window) if recorder.machines else None,
        moves_by_reason=moves,
    )


def parts(window: Window) -> list[Window]:
    """The parts of a window, `PART_S` long each; the rest belongs to the last one."""
    count = max(1, int(window.seconds // PART_S))
    starts = [window.warmup_s + PART_S * number for number in range(count)]
    return [Window(start, end) for start, end in pairwise([*starts, window.horizon_s])]


def within(counts: Counts, begin_s: float, end_s: float) -> Iterable[tuple[float, float, int]]:
    """(start, end, GPUs) of every stretch of the counts between two times; no GPUs before the first count."""
    ends = [at for at, _ in counts[1:]] + [max(end_s, counts[-1][0])] if counts else []
    for (at, gpus), end in zip(counts, ends, strict=True):
        start, stop = max(at, begin_s), min(end, end_s)
        if start < stop:
            yield start, stop, gpus


def _seconds(counts: Counts, window: Window) -> float:
    """The sum over the window of the counts times their durations."""
    return sum(number * (end - start) for start, end, number in within(counts, window.warmup_s, window.horizon_s))


def inter_token_p99(steps: Mapping[tuple[int, int], float], window: Window) -> float | None:
    """The p99 of the times between two tokens."""
    tokens: dict[int, float] = {}
    for (span, step), count in steps.items():
        if window.warmup_s <= span * STEP_SPAN_S < window.horizon_s:
            tokens[step] = tokens.get(step, 0.0) + count
    if not tokens:
        return None
    ordered = sorted(tokens.items())
    reached = list(accumulate(count for _, count in ordered))
    index = bisect_left(reached, (1 - TAIL) * reached[-1])
    return ordered[min(index, len(ordered) - 1)][0] * STEP_GRID_S


def _within(found: float | None, most: float | None) -> bool:
    return most is None or (found is not None and found <= most)
