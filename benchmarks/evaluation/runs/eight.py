"""The paper's eight workloads (section VIII-B), two kinds of GPU times four arrival patterns, the policies,
and their comparison on these workloads, with each other and with the lower bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.evaluation.runs.case import Case, Recording, seeds
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from simulator.workload.workload import Poisson


@dataclass(frozen=True, slots=True)
class Hardware:
    """A model on a kind of GPU: a KV cache of `capacity` tokens, and the name of its cost file."""

    name: str
    short: str
    capacity: int
    costs: str


@dataclass(frozen=True, slots=True)
class ArrivalPattern:
    """An arrival pattern."""

    name: str
    arrivals: Poisson | Recording


A100 = Hardware("LLaMA-13B on A100-40GB", "13B", 13_698, "a100-40g-13b-pcie")
RTX4090 = Hardware("LLaMA-7B on RTX 4090", "7B", 16_846, "rtx4090-7b-pcie")
HARDWARE = (A100, RTX4090)

LOW, MIDDLE, HIGH = (ArrivalPattern(f"Poisson {rate:g}/s", Poisson(rate)) for rate in (0.5, 0.8, 1.1))
AZURE = ArrivalPattern("Azure", Recording("azure2023_conv.csv.gz"))
LOADS = (LOW, MIDDLE, HIGH, AZURE)

BASELINES = ("best_fit", "worst_fit", "load_balance")
PAPERS = ("mell", "mell_repaired")
OURS = "pack"
POLICIES = (*BASELINES, *PAPERS, OURS)

STALL = ":overload=stall"
"""The option of best fit and worst fit that leaves overload to the engine's preemption; by default, they evict."""

Workload = tuple[Hardware, ArrivalPattern]
WORKLOADS: tuple[Workload, ...] = tuple((hardware, load) for hardware in HARDWARE for load in LOADS)


def runs(workload: Workload, policy: str, scale: Scale) -> list[Case]:
    """The runs of a workload under a policy in the idealised model, one per seed.

    Azure's arrivals are a recording, so they have a single run. The runs of the paper's figure over time keep their
    series.
    """
    hardware, load = workload
    if load == AZURE:
        return [Case(policy, load.arrivals, scale.azure, hardware.capacity)]
    first, *others = seeds(Case(policy, load.arrivals, scale.poisson, hardware.capacity), scale.seeds)
    return [replace(first, with_series=load == HIGH), *others]


def name(workload: Workload) -> str:
    """The workload's name, with hardware and arrivals."""
    hardware, load = workload
    return f"{hardware.short}, {load.name}"


def every(policies: Sequence[str], scale: Scale) -> list[Case]:
    """The runs of all eight workloads under these policies."""
    return [case for workload in WORKLOADS for policy in policies for case in runs(workload, policy, scale)]


def saving(
    results: Results, scale: Scale, workload: Workload, policy: str, other: str, metric: str = "gpus_mean"
) -> float:
    """The share by which a metric is lower with `policy` than with `other`; negative if it is higher."""
    ours, theirs = (results.mean(runs(workload, each, scale), metric) for each in (policy, other))
    return 1 - ours / theirs


def savings(results: Results, scale: Scale, policy: str, other: str, metric: str = "gpus_mean") -> list[float]:
    """`saving` for each of the eight workloads."""
    return [saving(results, scale, workload, policy, other, metric) for workload in WORKLOADS]


def over_bound(results: Results, scale: Scale, workload: Workload, policy: str) -> float:
    """The share by which a policy's GPUs exceed the lower bound, on average over time and seeds."""
    return results.mean(runs(workload, policy, scale), "ratio_to_bound") - 1


def averaged(results: Results, scale: Scale, policy: str) -> float:
    """`over_bound`, averaged over the eight workloads."""
    return sum(over_bound(results, scale, workload, policy) for workload in WORKLOADS) / len(WORKLOADS)
