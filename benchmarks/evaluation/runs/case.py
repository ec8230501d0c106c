"""One run of the simulator as a value: exactly the parameters that determine its outcome."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from policies.decision.limits import Limits
from policies.model import Tokens
from simulator.costs.costs import IDEAL, ComputeCosts, Costs, MigrationCosts, PathChoice, read_costs
from simulator.outcome.metrics import Window
from simulator.workload.lengths import read_lengths
from simulator.workload.workload import ArrivalTrace, Poisson, Recipe, read_trace
from simulator.world.setup import Setup

LENGTHS = "lmsys_conv_quantiles.csv"


@dataclass(frozen=True, slots=True)
class Recording:
    """Arrivals of a trace; with a `mean_rate`, their times are scaled to this mean number per second."""

    file: str
    mean_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """The length of a run, and of its warm-up, which does not count, in seconds."""

    horizon_s: float
    warmup_s: float


@dataclass(frozen=True, slots=True)
class Physics:
    """Costs by name, and an experiment's changes of them; None keeps the value of the file.

    `slowness` is a factor on the time of every engine step.
    """

    costs: str = "ideal"
    path: PathChoice | None = None
    consensus: bool | None = None
    inter_bytes_per_s: float | None = None
    startup_s: float | None = None
    slowness: float = 1.0

    def read(self) -> Costs:
        """The costs, with the changes applied."""
        costs = read_costs(self.costs)
        if costs is IDEAL:
            return costs
        return replace(
            costs,
            startup_s=_either(self.startup_s, costs.startup_s),
            compute=costs.compute and _slower(costs.compute, self.slowness),
            migration=costs.migration and self._migration(costs.migration),
        )

    def _migration(self, costs: MigrationCosts) -> MigrationCosts:
        inter = replace(costs.inter, bytes_per_s=_either(self.inter_bytes_per_s, costs.inter.bytes_per_s))
        path, consensus = _either(self.path, costs.path), _either(self.consensus, costs.consensus)
        return replace(costs, inter=inter, path=path, consensus=consensus)


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, a policy, a cluster and its physics. Files are names in the folder of traces."""

    policy: str
    arrivals: Poisson | Recording
    span: Span
    capacity: int
    physics: Physics = Physics()
    seed: int = 0
    lengths: str | None = LENGTHS
    length_scale: float = 10.0
    max_gpus: int | None = None
    batched: bool = True
    epoch_s: float = 1.0
    decode_rate: float = 25.0
    slack: float = 2.0
    with_series: bool = False

    @property
    def files(self) -> tuple[str, ...]:
        """The files read by the run."""
        trace = (self.arrivals.file,) if isinstance(self.arrivals, Recording) else ()
        return (*trace, *([self.lengths] if self.lengths else []))

    @property
    def window(self) -> Window:
        """The counted part of the run."""
        return Window(self.span.warmup_s, self.span.horizon_s)

    @property
    def setup(self) -> Setup:
        """The cluster and its epochs. If GPUs take time to start, some room stays free and empty GPUs linger."""
        startup_s = self.physics.read().startup_s
        return Setup(
            Tokens(self.capacity),
            self.decode_rate,
            self.epoch_s,
            horizon_s=self.span.horizon_s,
            max_gpus=self.max_gpus,
            batched=self.batched,
            limits=Limits(slack=self.slack, linger_s=startup_s) if startup_s else Limits(),
        )

    def recipe(self, traces: Path) -> Recipe:
        """The recipe of the workload."""
        arrivals, time_scale = _arrivals(self.arrivals, traces)
        return Recipe(
            arrivals,
            read_lengths(str(traces / self.lengths)) if self.lengths else None,
            self.span.horizon_s,
            Tokens(self.capacity),
            time_scale,
            self.length_scale,
        )


def seeds(case: Case, count: int) -> list[Case]:
    """The case with the seeds from 0 to `count` - 1."""
    return [replace(case, seed=seed) for seed in range(count)]


def expected_requests(case: Case, traces: Path) -> float:
    """The approximate number of arrivals, which determines the time of a run."""
    arrivals, time_scale = _arrivals(case.arrivals, traces)
    if isinstance(arrivals, Poisson):
        return arrivals.rate * case.span.horizon_s
    return sum(row.at_s * time_scale < case.span.horizon_s for row in arrivals.rows)


def _arrivals(arrivals: Poisson | Recording, traces: Path) -> tuple[Poisson | ArrivalTrace, float]:
    """The source of arrivals, and the factor on their times."""
    if isinstance(arrivals, Poisson):
        return arrivals, 1.0
    trace = _trace(traces / arrivals.file)
    if arrivals.mean_rate is None:
        return trace, 1.0
    return trace, len(trace.rows) / trace.rows[-1].at_s / arrivals.mean_rate


@cache
def _trace(path: Path) -> ArrivalTrace:
    return read_trace(path)


def _slower(costs: ComputeCosts, factor: float) -> ComputeCosts:
    return replace(
        costs,
        linear=tuple((tokens, seconds * factor) for tokens, seconds in costs.linear),
        overhead_s=costs.overhead_s * factor,
        context_s=costs.context_s * factor,
        attention_s=costs.attention_s * factor,
    )


def _either(changed: Any, kept: Any) -> Any:
    return kept if changed is None else changed
