"""The runs of a plan: every case with every workload, then the oracle's candidates."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from policies.rules.registry import policy
from simulator.autoscaling.fleet import SimulatedFleet
from simulator.autoscaling.rule import ScalingRule
from simulator.command.order import SimulationOrder
from simulator.command.runs import Tick, perform_all
from simulator.costs.costs import Costs
from simulator.outcome.metrics import Window
from simulator.outcome.service import Counts, ServiceOutcome, ServiceRecorder, parts, served
from simulator.planning.cases import PlanCase, plan_cases
from simulator.planning.oracle import CUTS_S, at_once, provisioned, without_peaks
from simulator.workload.workload import Job, Workload
from simulator.world.setup import Setup
from simulator.world.world import simulate

ROUGH_RUNS = 66
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
            SimulatedFleet(self.rule, setup, self.costs, recorder, tick, self.seed).run(self.jobs)
        return PlanResult(
            served(recorder, self.jobs, self.window, self.seconds),
            tuple(served(recorder, self.jobs, part, self.seconds) for part in parts(self.window)),
            tuple(recorder.gpus),
        )


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


def perform_plan(
    cases: Sequence[PlanCase],
    workloads: Sequence[Workload],
    base: tuple[Setup, Costs],
    window: Window,
    processes: int,
    show: Tick,
) -> tuple[list[list[PlanResult]], list[list[OraclePlan]]]:
    """The results by case and workload, and the oracle's candidates by workload.

    `base` are the set-up with the level and the costs; `show` gets the simulated seconds of all runs.
    """
    setup, costs = base
    without = at_once(setup, costs)
    runs = [
        PlanRun(case.rule, workload.seed, workload.jobs, case.setup, window, case.costs)
        for case in cases
        for workload in workloads
    ]
    ideal = [PlanRun("pack", w.seed, w.jobs, without[0], window, without[1]) for w in workloads]
    results = perform_all([*ideal, *runs], processes, show)
    done_s = sum(run.seconds for run in [*ideal, *runs])
    first, results = results[: len(ideal)], results[len(ideal) :]
    capped = [
        replace(run, setup=at_once(setup, costs, without_peaks(result.gpus, cut_s))[0])
        for run, result in zip(ideal, first, strict=True)
        for cut_s in CUTS_S
    ]
    others = perform_all(capped, processes, _after(show, done_s))
    candidates = [
        [
            OraclePlan(_name(cut_s), provisioned(each.gpus, costs.startup_s, window), each)
            for cut_s, each in zip(
                (0.0, *CUTS_S), [result, *others[n * len(CUTS_S) : (n + 1) * len(CUTS_S)]], strict=True
            )
        ]
        for n, result in enumerate(first)
    ]
    count = len(workloads)
    return [list(results[n * count : (n + 1) * count]) for n in range(len(cases))], candidates


def sample_runs(jobs: tuple[Job, ...], order: SimulationOrder) -> list[tuple[int, PlanRun]]:
    """A run of every contender, and of the oracle, with the numbers of runs that these have."""
    cases = plan_cases(order.setup, order.costs, jobs)
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


def simulated_seconds(cases: Sequence[PlanCase], workloads: Sequence[Workload], setup: Setup) -> float:
    """The simulated time of all runs of a plan."""
    return (len(cases) + 1 + len(CUTS_S)) * len(workloads) * (setup.horizon_s + TAIL_S)


def _after(show: Tick, done_s: float) -> Callable[[float], None]:
    return lambda now: show(done_s + now)
