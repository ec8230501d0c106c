"""Comparisons of policies with each other and with the lower bound."""

from benchmarks.evaluation.eight import WORKLOADS, Workload, runs
from benchmarks.evaluation.results import Results
from benchmarks.evaluation.scale import Scale


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
