"""The simulated setting, and the commands to repeat it."""

import hashlib
from collections.abc import Iterator

from app.simulator.costs.costs import Costs, read_costs
from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.eight import A100, HARDWARE, LOADS, POLICIES, WORKLOADS, Workload, name, runs
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.runs.sources import fingerprint
from benchmarks.evaluation.section import PageSection, blocks
from benchmarks.evaluation.style import Pictures
from benchmarks.evaluation.words import bullets, listing, prose, share, spread, table

HEADER = ("workload", "seeds", "requests", "cut", "prompt", "output", "L2 mean", "L2 peak", "repack over L2")
REFERENCE = "worst_fit"
"""The policy whose runs are in the table of workloads; requests and bounds are the same for all policies."""


def _cases(scale: Scale) -> list[Case]:
    return [case for workload in WORKLOADS for case in runs(workload, REFERENCE, scale)]


def _write(results: Results, scale: Scale, pictures: Pictures) -> str:
    return blocks(
        prose(
            "The simulator (`app/simulator`) plays a workload through a policy in virtual time. Policies, limits and",
            "the function that decides an epoch are those of the live scheduler, so what is simulated is what is",
            "served. There are two worlds:",
        ),
        bullets([_ideal(), _costly(read_costs(A100.costs))]),
        prose(*_workloads(scale)),
        table(HEADER, _rows(results, scale)),
        prose(
            "*Cut* are the requests that were shortened to fit. Prompt and output are mean tokens. *L2* is the lower",
            "bound of Martello and Toth on the GPUs for the requests that are there at that moment, found anew in",
            "every epoch; a *repack* is best-fit-decreasing from nothing, with every move for free. Means are over",
            "time. `±` is half of the 95 % confidence interval over seeds (Student's t); where it is missing, there is",
            "one run. All policies get the same requests, so their differences are surer than the number of GPUs",
            "itself.",
        ),
        prose(
            f"The policies: {listing([f'`{policy}`' for policy in POLICIES])}; `mell` is the paper's algorithm read to",
            "the letter, `mell_repaired` the same with its gaps closed in the spirit of the text, `pack` this",
            "project's own. `python -m app.simulator --list-policies` says what each does and can be set to.",
        ),
        _how_to_repeat(results),
    )


def _ideal() -> str:
    return (
        "**Idealised**, as in section VI-A of the paper: time is in slots of one second, every request decodes 25 "
        "tokens per second, and moves, evictions, prefills and new GPUs take no time."
    )


def _costly(costs: Costs) -> str:
    if costs.compute is None or costs.migration is None:
        raise ValueError(f"the costs {costs.name} are not those of a real system")
    intra, inter = (link.bytes_per_s / 1e9 for link in (costs.migration.intra, costs.migration.inter))
    return (
        f"**Real costs**, from the files in `app/simulator/cost_files`: decode speed falls with batch and context, "
        f"prefills run in chunks of {costs.compute.chunk_tokens:,} tokens and slow the decoding beside them, "
        f"overloaded GPUs preempt, a new GPU takes {costs.startup_s:g} s to start, and KV moves over shared links of "
        f"{intra:g} GB/s in a machine of 8 GPUs and {inter:g} GB/s between machines, like the paper's testbed. Each "
        "file says what in it was measured and what is assumed."
    )


def _workloads(scale: Scale) -> Iterator[str]:
    gpus = listing([f"{hardware.name} with room for {hardware.capacity:,} tokens" for hardware in HARDWARE])
    yield f"The paper's eight workloads (section VIII-B) are two kinds of GPU, {gpus}, times four arrival patterns:"
    yield f"{listing([load.name for load in LOADS])} (`azure2023_conv`). Lengths are those of whole LMSYS-Chat-1M"
    yield "conversations, drawn by inverse CDF from a table of quantiles and multiplied by ten; prompts are cut at half"
    yield f"of a GPU, prompt and output together at a whole one. Poisson runs last {scale.poisson.horizon_s:,.0f} s"
    yield f"with {scale.seeds} seeds, Azure's {scale.azure.horizon_s:,.0f} s; the first {scale.poisson.warmup_s:,.0f}"
    yield f"and {scale.azure.warmup_s:,.0f} s are not counted."


def _rows(results: Results, scale: Scale) -> Iterator[list[str]]:
    for workload in WORKLOADS:
        yield _row(results, workload, runs(workload, REFERENCE, scale))


def _row(results: Results, workload: Workload, cases: list[Case]) -> list[str]:
    def mean(metric: str) -> float:
        return results.mean(cases, metric)

    return [
        name(workload),
        str(len(cases)),
        f"{mean('workload.requests'):,.0f}",
        share(mean("workload.capped") / mean("workload.requests")),
        f"{mean('workload.prompt_mean'):,.0f}",
        f"{mean('workload.output_mean'):,.0f}",
        spread(results.over(cases, "bound.mean")),
        f"{results.most(cases, 'bound.peak'):,.0f}",
        share(mean("bound.repack_mean") / mean("bound.mean") - 1),
    ]


def _how_to_repeat(results: Results) -> str:
    files = sorted({file for case in results.metrics for file in case.files})
    return blocks(
        prose(
            f"This page and its figures are made by one command from {len(results.metrics)} runs. Raw runs are kept in",
            "`.figures/`, and only what changed is run again. `FAST=1` takes fewer seeds and shorter runs, and writes",
            f"to `.figures/fast/`. `DIR` must hold {listing([f'`{file}`' for file in files])}.",
        ),
        "```sh\nmake figures TRACES=DIR\n"
        ".venv/bin/python -m app.simulator --poisson 1.1 --lengths DIR/lmsys_conv_quantiles.csv --length-scale 10 \\\n"
        "  --policy mell --policy pack --seeds 3   # a part of it by hand\n```",
        prose(f"The code that made it has the fingerprint `{_fingerprint()}`; the same code makes the same page."),
    )


def _fingerprint() -> str:
    return hashlib.sha256("".join(map(fingerprint, POLICIES)).encode()).hexdigest()[:12]


SECTION = PageSection("What was simulated", _cases, _write)
