"""The result at a glance: GPUs over the lower bound, and the moves needed for it."""

from app.simulator.outcome.statistics import Interval
from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.eight import POLICIES, WORKLOADS, averaged, every, name, over_bound, runs
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection, blocks
from benchmarks.evaluation.style import Pictures
from benchmarks.evaluation.words import change, counted, prose, share, spread, table

NEAR = 0.03
"""The project's target for the excess over the bound."""


def _cases(scale: Scale) -> list[Case]:
    return every(POLICIES, scale)


def _write(results: Results, scale: Scale, pictures: Pictures) -> str:
    return blocks(
        prose(*_sentences(results, scale)),
        "Mean GPUs over the L2 bound, in per cent:",
        table(("policy", *map(name, WORKLOADS), "average"), _excess(results, scale)),
        prose(
            "Running requests that change their GPU, per second: migrations, and for `best_fit` and `worst_fit`, which",
            "do not migrate, evictions, after which the whole context is prefilled again:",
        ),
        table(("policy", *map(name, WORKLOADS)), _moved(results, scale)),
    )


def _sentences(results: Results, scale: Scale) -> list[str]:
    ranked = sorted(POLICIES, key=lambda policy: averaged(results, scale, policy))
    near = sum(over_bound(results, scale, workload, "pack") <= NEAR for workload in WORKLOADS)
    fewer = sum(
        results.mean(runs(workload, "pack", scale), "migrations_per_s")
        < results.mean(runs(workload, "mell", scale), "migrations_per_s")
        for workload in WORKLOADS
    )
    return [
        f"In the idealised model `{ranked[0]}` is nearest to the bound, on average over the eight workloads"
        f" {change(averaged(results, scale, ranked[0]))}, then `{ranked[1]}` with"
        f" {change(averaged(results, scale, ranked[1]))}; the farthest is `{ranked[-1]}` with"
        f" {change(averaged(results, scale, ranked[-1]))}.",
        f"`pack` is at most {share(NEAR, 0)} above the bound on {counted(near, len(WORKLOADS))} workloads, and moves",
        f"fewer requests than `mell` on {counted(fewer, len(WORKLOADS))}.",
    ]


def _excess(results: Results, scale: Scale) -> list[list[str]]:
    return [
        [f"`{policy}`"]
        + [_over(results, runs(workload, policy, scale)) for workload in WORKLOADS]
        + [f"{averaged(results, scale, policy) * 100:.1f}"]
        for policy in POLICIES
    ]


def _over(results: Results, cases: list[Case]) -> str:
    found = results.over(cases, "ratio_to_bound")
    return spread(Interval(found.mean - 1, found.ci95), 1, 100)


def _moved(results: Results, scale: Scale) -> list[list[str]]:
    return [
        [f"`{policy}`"] + [_uprooted(results, runs(workload, policy, scale)) for workload in WORKLOADS]
        for policy in POLICIES
    ]


def _uprooted(results: Results, cases: list[Case]) -> str:
    return f"{results.mean(cases, 'migrations_per_s') + results.mean(cases, 'evictions_per_s'):.2f}"


SECTION = PageSection("Result at a glance", _cases, _write)
