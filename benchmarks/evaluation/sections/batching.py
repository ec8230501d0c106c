"""Figure 13 of the paper: migrations saved by operation batching."""

from dataclasses import replace

from benchmarks.evaluation.plots import bars, grouped
from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.eight import AZURE, HARDWARE, LOADS, PAPERS, WORKLOADS, Workload, name, runs
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.style import Pictures, drawing, legend
from benchmarks.evaluation.words import change, table

HEADER = (
    "workload",
    *(f"`{policy}` {what}" for policy in PAPERS for what in ("one by one", "batched", "fewer moves", "more GPUs")),
)


def pair(workload: Workload, policy: str, scale: Scale) -> tuple[Case, Case]:
    """A run that decides operation by operation, and the same run with batched operations."""
    batched = runs(workload, policy, scale)[0]
    if workload[1] == AZURE:
        batched = replace(batched, span=scale.unbatched_azure)
    return replace(batched, batched=False, with_series=False), batched


def fewer(results: Results, workload: Workload, policy: str, scale: Scale, metric: str = "migrations_per_s") -> float:
    """The share of migrations that batching saves."""
    one_by_one, batched = pair(workload, policy, scale)
    return 1 - results.value(batched, metric) / results.value(one_by_one, metric)


def _cases(scale: Scale) -> list[Case]:
    return [case for workload in WORKLOADS for policy in PAPERS for case in pair(workload, policy, scale)]


def _parts(results: Results, scale: Scale, pictures: Pictures) -> dict[str, str]:
    return {
        "fig13": _figure(results, scale, pictures),
        "batching": table(HEADER, [_row(results, workload, scale) for workload in WORKLOADS]),
    }


def _figure(results: Results, scale: Scale, pictures: Pictures) -> str:
    with drawing(2, height=2.8) as (figure, axes):
        for each, hardware in zip(axes, HARDWARE, strict=True):
            drawn = [
                bars(policy, [100 * fewer(results, (hardware, load), policy, scale) for load in LOADS])
                for policy in PAPERS
            ]
            grouped(each, [load.name for load in LOADS], drawn)
            each.axhline(0, color="black", linewidth=0.8)
            each.set(title=hardware.name, ylabel="migrations saved (%)")
        legend(figure, axes[0], 2)
        return pictures.save(
            figure, "fig13", "Share of migrations that operation batching saves; below zero, it adds some"
        )


def _row(results: Results, workload: Workload, scale: Scale) -> list[str]:
    row = [name(workload)]
    for policy in PAPERS:
        one_by_one, batched = pair(workload, policy, scale)
        row += [f"{results.value(case, 'migrations_per_s'):.2f}" for case in (one_by_one, batched)]
        row.append(change(fewer(results, workload, policy, scale)))
        row.append(change(-fewer(results, workload, policy, scale, "gpus_mean")))
    return row


SECTION = PageSection(_cases, _parts)
