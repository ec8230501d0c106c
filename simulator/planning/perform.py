"""The runs of a plan: every case with every workload, in the stages of the sweep, and the oracle's candidates."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from policies.rules.registry import policy
from simulator.autoscaling.fleet import SimulatedFleet
from simulator.autoscaling.rule import ScalingRule
from simulator.command.order import SimulationOrder
from simulator.command.runs import Tick, perform_all
from simulator.costs.costs import Costs
from simulator.outcome.metrics import Window
from simulator.outcome.service import Counts, PlannedLevels, ServiceOutcome, ServiceRecorder, parts, served
from simulator.planning.cases import PlanCase, plan_cases
from simulator.planning.frontier import CaseOutcome, averaged
from simulator.planning.oracle import CUTS_S, at_once, least_work, provisioned, without_peaks
from simulator.planning.sweep import representative_cases, second_stage, third_stage
from simulator.workload.workload import Job, Workload
from simulator.world.setup import Setup
from simulator.world.world import simulate

ROUGH_RUNS = 130
"""About the number of runs of a plan with one seed."""

TAIL_S = 300.0
"""Seconds after the window in which its requests may end."""


@dataclass(frozen=True, slots=True)
class PlanRun:
    """One workload under one rule. The set-up's horizon is the end of the window."""

    rule: str | ScalingRule
    seed: int
    jobs: tuple[Job, ...]
    setup: Setup
    window: Window
    costs: Costs
    tail_s: float = TAIL_S

    @property
    def seconds(self) -> float:
        """The simulated time."""
        return self.setup.horizon_s + self.tail_s

    def perform(self, tick: Tick) -> "PlanResult":
        """Perform the run."""
        recorder, setup = ServiceRecorder(tick), replace(self.setup, horizon_s=self.seconds)
        if isinstance(self.rule, str):
            simulate(self.jobs, policy(self.rule), setup, self.costs, recorder)
        else:
            foreseen = self._loads_at_once(self.rule, tick) if self.rule.looks_ahead else ()
            SimulatedFleet(self.rule, setup, self.costs, recorder, tick, self.seed, foreseen).run(self.jobs)
        return PlanResult(
            served(recorder, self.jobs, self.window, self.seconds),
            tuple(served(recorder, self.jobs, part, self.seconds) for part in parts(self.window)),
            tuple(recorder.gpus),
        )

    def _loads_at_once(self, rule: ScalingRule, tick: Tick) -> list[float]:
        """The loads of a fleet whose replicas start at once. `tick` may end the run, and gets no time of it."""
        setup, costs = replace(self.setup, horizon_s=self.seconds), replace(self.costs, startup_s=0.0)
        recorder = ServiceRecorder(lambda now: tick(0.0))
        fleet = SimulatedFleet(rule, setup, costs, recorder, recorder.tick, self.seed)
        fleet.run(self.jobs)
        return fleet.loads


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The service of a run in its window and in the parts of the window, and the numbers of replicas over time."""

    whole: ServiceOutcome
    parts: tuple[ServiceOutcome, ...]
    gpus: Counts


@dataclass(frozen=True, slots=True)
class OraclePlan:
    """A candidate of the oracle for one workload. `gpu_seconds` include the start-ups."""

    name: str
    gpu_seconds: float
    result: PlanResult


@dataclass(slots=True)
class PlanRuns:
    """The runs of a plan so far: cases, and their results by case and workload."""

    workloads: Sequence[Workload]
    window: Window
    processes: int
    show: Tick
    cases: list[PlanCase] = field(default_factory=list)
    results: list[list[PlanResult]] = field(default_factory=list)
    _done_s: float = 0.0

    @property
    def outcomes(self) -> list[CaseOutcome]:
        """The cases with the means of their results."""
        return [
            CaseOutcome(case, averaged([result.whole for result in row]))
            for case, row in zip(self.cases, self.results, strict=True)
        ]

    def perform(self, cases: Sequence[PlanCase], others: Sequence[PlanRun] = ()) -> list[PlanResult]:
        """Perform and keep more cases, at the same time as other runs, whose results are returned."""
        runs = [
            PlanRun(case.rule, workload.seed, workload.jobs, case.setup, self.window, case.costs)
            for case in cases
            for workload in self.workloads
        ]
        every, before_s, count = [*others, *runs], self._done_s, len(self.workloads)
        if not every:
            return []
        results = perform_all(every, self.processes, lambda now: self.show(before_s + now))
        self._done_s += sum(run.seconds for run in every)
        own = results[len(others) :]
        self.cases += cases
        self.results += [own[index : index + count] for index in range(0, len(own), count)]
        return results[: len(others)]


def perform_plan(base: tuple[Setup, Costs], levels: PlannedLevels, runs: PlanRuns) -> list[list[OraclePlan]]:
    """Perform all cases. Returns the oracle's candidates by workload: its own plans, and every real case.

    With hindsight, the numbers of replicas of a case can be had. `base` are the set-up with the level and the costs.
    """
    setup, costs = base
    jobs, window = runs.workloads[0].jobs, runs.window
    without = at_once(setup, costs)
    ideal = [PlanRun("pack", w.seed, w.jobs, without[0], window, without[1]) for w in runs.workloads]
    first = runs.perform(plan_cases(setup, costs, jobs), ideal)
    capped = [
        replace(run, setup=at_once(setup, costs, without_peaks(result.gpus, cut_s))[0])
        for run, result in zip(ideal, first, strict=True)
        for cut_s in CUTS_S
    ]
    assert costs.compute is not None, "a level needs step times"
    least_gpus = least_work(jobs, window, setup, costs.compute, levels.whole) / window.seconds
    others = runs.perform(second_stage(runs.outcomes, setup, costs, jobs, levels, least_gpus), capped)
    runs.perform(third_stage(runs.outcomes, setup, costs, levels))
    real = [(case, row) for case, row in zip(runs.cases, runs.results, strict=True) if not case.hypothetical]
    return [
        [
            *(
                OraclePlan(_name(cut_s), provisioned(each.gpus, costs.startup_s, window), each)
                for cut_s, each in zip(
                    (0.0, *CUTS_S), [result, *others[n * len(CUTS_S) : (n + 1) * len(CUTS_S)]], strict=True
                )
            ),
            *(OraclePlan(case.name, row[n].whole.gpu_seconds, row[n]) for case, row in real),
        ]
        for n, result in enumerate(first)
    ]


def sample_runs(jobs: tuple[Job, ...], order: SimulationOrder) -> list[tuple[int, PlanRun]]:
    """A run of every contender, and of the oracle, with the numbers of runs that these have."""
    cases = representative_cases(order.setup, order.costs, jobs)
    first = {case.contender: case for case in reversed(cases)}
    counts = Counter(case.contender for case in cases)
    window, seeds = order.window, len(order.seeds)
    runs = [
        (counts[contender] * seeds, PlanRun(case.rule, 0, jobs, case.setup, window, case.costs, 0.0))
        for contender, case in first.items()
    ]
    setup, costs = at_once(order.setup, order.costs)
    return [*runs, ((1 + len(CUTS_S)) * seeds, PlanRun("pack", 0, jobs, setup, window, costs, 0.0))]


def _name(cut_s: float) -> str:
    return f"peaks under {cut_s:g} s cut" if cut_s else "no peak cut"


def simulated_seconds(order: SimulationOrder, jobs: tuple[Job, ...]) -> float:
    """About the simulated time of all runs of a plan."""
    runs = len(representative_cases(order.setup, order.costs, jobs)) + 1 + len(CUTS_S)
    return runs * len(order.seeds) * (order.setup.horizon_s + TAIL_S)
