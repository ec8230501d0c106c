"""One run of a case, and the figures of several: what the paper and its released code measure."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from benchmarks.instruments.runs import simulate_all
from benchmarks.kunserve.case import TAIL_S, PairCase, PairContender
from benchmarks.kunserve.windows import WINDOW_S
from policies.cluster.cluster import Cluster
from policies.model import RequestId, Tokens
from policies.plan import Plan
from policies.rules.registry import policy
from simulator.command.runs import Tick
from simulator.outcome.statistics import mean, quantile
from simulator.world.observer import Life, Transfer
from simulator.world.pairs import GroupRecord
from simulator.world.world import one_pool

SHARES = (0.5, 0.9, 0.99, 0.999)
"""The percentiles of all figures."""
SLO = 5.0
"""The service level of the paper: this many times the median, of the contender without moves."""


@dataclass(slots=True)
class PairRecorder:
    """Keeps the lives of requests, steps (end, seconds, tokens), and counts of preemptions and moves."""

    tick: Tick
    lives: list[Life] = field(default_factory=list)
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    preemptions: int = 0
    moves: int = 0

    def decided(
        self, now: float, cluster: Cluster, plans: Sequence[Plan], closing: int = 0, machines: int | None = None
    ) -> None:
        """See `Observer`."""
        self.tick(now)

    def stepped(self, now: float, step_s: float, tokens: float) -> None:
        """See `Observer`."""
        self.steps.append((now, step_s, tokens))

    def transferred(self, now: float, transfer: Transfer) -> None:
        """See `Observer`."""
        self.moves += transfer.completed

    def preempted(self, now: float, tokens: Tokens) -> None:
        """See `Observer`."""
        self.preemptions += 1

    def finished(self, now: float, life: Life) -> None:
        """See `Observer`."""
        self.lives.append(life)


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """A run. `arrivals` and `firsts` are times by request; one without a first token has none.

    `tpot` are the times per output token of requests that ended, `steps` (end, seconds, tokens) of steps in exchanges,
    `refused` the requests that no replica or group can hold. `last_s` is the end of the last request.
    """

    arrivals: Mapping[RequestId, float]
    firsts: Mapping[RequestId, float]
    tpot: Sequence[float]
    gaps: tuple[float, ...]
    steps: Sequence[tuple[float, float, float]]
    groups: Sequence[GroupRecord]
    preemptions: int
    moves: int
    last_s: float
    tokens: int
    refused: int

    @property
    def ttft(self) -> list[float]:
        """The times to the first token in seconds, sorted; until the end of the run for requests without one."""
        end = WINDOW_S + TAIL_S
        return sorted(self.firsts.get(request, end) - at_s for request, at_s in self.arrivals.items())

    def waited_s(self, at_s: float) -> float:
        """The seconds from a time until all requests that then had no first token have one; 0 without such requests."""
        end = WINDOW_S + TAIL_S
        waiting = (self.firsts.get(each, end) for each, came_s in self.arrivals.items() if came_s <= at_s)
        return max((first - at_s for first in waiting if first > at_s), default=0.0)


@dataclass(frozen=True, slots=True)
class PairPlay:
    """A case to perform."""

    case: PairCase

    @property
    def seconds(self) -> float:
        """See `Performable`."""
        return WINDOW_S + TAIL_S

    def perform(self, tick: Tick) -> PairOutcome:
        """See `Performable`."""
        case = self.case
        setup = case.setup(self.seconds)
        jobs = case.window.jobs(case.seed, setup.capacity, case.count, case.long)
        most = setup.capacity if setup.pairs is None else case.size * setup.capacity + setup.pairs.gain
        kept = [job for job in jobs if job.prompt + job.output <= most]
        recorder = PairRecorder(tick)
        world = one_pool(policy(case.policy), setup, case.costs(), recorder)
        world.run(kept)
        groups = world.pools[0].groups
        records = groups.records if groups is not None else []
        lives = recorder.lives
        return PairOutcome(
            {job.id: job.arrival_s for job in kept},
            {life.job.id: life.first_token_s for life in lives},
            [(life.finished_s - life.first_token_s) / (life.job.output - 1) for life in lives if life.job.output > 1],
            _gaps(recorder.steps),
            [each for each in recorder.steps if any(_is_exchanging(record, each[0]) for record in records)],
            records,
            recorder.preemptions,
            recorder.moves,
            max((life.finished_s for life in lives), default=self.seconds),
            sum(life.job.output for life in lives),
            len(jobs) - len(kept),
        )


Outcomes = Mapping[PairCase, Sequence[PairOutcome]]
"""The runs of each case, by the case with seed 0."""


def simulated(cases: Iterable[PairCase], seeds: int, processes: int) -> dict[PairCase, list[PairOutcome]]:
    """Simulate every case with the seeds from 0 to `seeds` - 1, with a bar of their virtual time."""
    seeded = [replace(case, seed=seed) for case in dict.fromkeys(cases) for seed in range(seeds)]
    found = simulate_all([PairPlay(case) for case in seeded], processes)
    by_case = defaultdict(list)
    for case, outcome in zip(seeded, found, strict=True):
        by_case[replace(case, seed=0)].append(outcome)
    return dict(by_case)


@dataclass(frozen=True, slots=True)
class PairFigures:
    """Percentiles in seconds at `SHARES` over the requests of all seeds: first tokens, times per token, and gaps.

    The gaps are means over seeds. `late` is the share of requests that miss the level, of first tokens or of times per
    token, whichever is larger; None without a run of the contender that it is about.
    """

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    gaps: tuple[float, ...]
    late: float | None
    throughput: float


def figures(found: Outcomes, case: PairCase) -> PairFigures:
    """The figures of a case."""
    runs = found[case]
    ttft, tpot = _ttft(runs), _tpot(runs)
    plain = PairCase(PairContender.VLLM, case.window, case.model, count=case.count, chunk=case.chunk)
    late = None
    if reference := found.get(plain):
        level, slow = (SLO * quantile(each, 0.5) for each in (_ttft(reference), _tpot(reference)))
        late = max(
            sum(each > level for each in ttft) / len(ttft), sum(each > slow for each in tpot) / max(1, len(tpot))
        )
    return PairFigures(
        tuple(quantile(ttft, share) for share in SHARES),
        tuple(quantile(tpot, share) for share in SHARES),
        tuple(mean(each) for each in zip(*(run.gaps for run in runs), strict=True)),
        late,
        mean([run.tokens / run.last_s for run in runs]),
    )


def _ttft(runs: Sequence[PairOutcome]) -> list[float]:
    return sorted(each for run in runs for each in run.ttft)


def _tpot(runs: Sequence[PairOutcome]) -> list[float]:
    return sorted(each for run in runs for each in run.tpot)


def _gaps(steps: Sequence[tuple[float, float, float]]) -> tuple[float, ...]:
    """The percentiles of the times between two tokens."""
    ordered = sorted((seconds, tokens) for _, seconds, tokens in steps)
    reached = list(accumulate(tokens for _, tokens in ordered))
    return tuple(ordered[min(bisect_right(reached, share * reached[-1]), len(ordered) - 1)][0] for share in SHARES)


def _is_exchanging(record: GroupRecord, at_s: float) -> bool:
    """True while a group forms, and for the step that ends behind that."""
    if record.formed_s is None or record.formed_s == record.began_s:
        return False
    return record.began_s <= at_s <= record.formed_s + 0.5
