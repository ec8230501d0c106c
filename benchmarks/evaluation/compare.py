"""What one policy saves against another."""

from benchmarks.evaluation.eight import WORKLOADS, Workload, runs
from benchmarks.evaluation.results import Results
from benchmarks.evaluation.scale import Scale


def saving(
    results: Results, scale: Scale, workload: Workload, policy: str, other: str, metric: str = "gpus_mean"
) -> float:
    """The share by which a metric is less with a policy than with another one; negative if it is more."""
    ours, theirs = (results.mean(runs(workload, each, scale), metric) for each in (policy, other))
    return 1 - ours / theirs


def savings(results: Results, scale: Scale, policy: str, other: str, metric: str = "gpus_mean") -> list[float]:
    """The same for all eight workloads."""
    return [saving(results, scale, workload, policy, other, metric) for workload in WORKLOADS]


def over_bound(results: Results, scale: Scale, workload: Workload, policy: str) -> float:
    """The share by which a policy's GPUs exceed the lower bound, on average over time and seeds."""
    return results.mean(runs(workload, policy, scale), "ratio_to_bound") - 1


def averaged(results: Results, scale: Scale, policy: str) -> float:
    """The same on average over the eight workloads."""
    return sum(over_bound(results, scale, workload, policy) for workload in WORKLOADS) / len(WORKLOADS)
