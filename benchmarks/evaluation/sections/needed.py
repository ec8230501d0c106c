"""Figures 11, 12, 14 and 15 of the paper: GPUs, migrations, utilisation, and GPUs over time."""

from collections.abc import Callable, Sequence

from benchmarks.evaluation.plots import Bars, PlottedCurve, bars, curves, grouped, steps_at
from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.eight import (
    HARDWARE,
    HIGH,
    LOADS,
    POLICIES,
    WORKLOADS,
    Hardware,
    every,
    name,
    runs,
    saving,
)
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.style import BOUND, Pictures, colour, drawing, legend
from benchmarks.evaluation.words import change, share, table
from simulator.outcome.statistics import Interval

MIGRATING = ("load_balance", "mell", "mell_repaired", "pack")
Read = Callable[[str, Sequence[Case]], Interval]
"""The drawn value of a policy's runs of one workload."""


def _cases(scale: Scale) -> list[Case]:
    return every(POLICIES, scale)


def _parts(results: Results, scale: Scale, pictures: Pictures) -> dict[str, str]:
    header = ("policy", *map(name, WORKLOADS))
    return {
        "fig11": _needed(results, scale, pictures),
        "gpus-mean": table(header, _means(results, scale)),
        "gpus-peak": table(header, _peaks(results, scale)),
        "fig12": _moves(results, scale, pictures),
        "fig14": _utilisation(results, scale, pictures),
        "utilisation": table(header, _used(results, scale)),
        "fig15": _course(results, scale, pictures),
    }


# --- Fig. 11 --------------------------------------------------------------------------------------------------------


def _needed(results: Results, scale: Scale, pictures: Pictures) -> str:
    def read(policy: str, cases: Sequence[Case]) -> Interval:
        # Seeds shift the bound and all policies alike, so a policy's uncertainty is that of its ratio to the bound.
        ratio, bound = results.over(cases, "ratio_to_bound"), results.mean(cases, "bound.mean")
        return Interval(results.mean(cases, "gpus_mean"), ratio.ci95 and ratio.ci95 * bound)

    bound = [results.mean(runs(workload, "pack", scale), "bound.mean") for workload in WORKLOADS]
    sentence = "Mean GPUs of every policy on the eight workloads, and the lower bound"
    return _eight(scale, pictures, "fig11", sentence, POLICIES, read, "mean GPUs", bound)


def _means(results: Results, scale: Scale) -> list[list[str]]:
    rows = []
    for policy in POLICIES:
        row = [f"`{policy}`"]
        for workload in WORKLOADS:
            mean = results.mean(runs(workload, policy, scale), "gpus_mean")
            more = -saving(results, scale, workload, policy, "mell")
            row.append(f"{mean:.1f}" if policy == "mell" else f"{mean:.1f} ({change(more, 0)})")
        rows.append(row)
    return rows


def _peaks(results: Results, scale: Scale) -> list[list[str]]:
    return [
        [f"`{policy}`"] + [f"{results.mean(runs(workload, policy, scale), 'gpus_peak'):.1f}" for workload in WORKLOADS]
        for policy in POLICIES
    ]


# --- Fig. 12 --------------------------------------------------------------------------------------------------------


def _moves(results: Results, scale: Scale, pictures: Pictures) -> str:
    def read(policy: str, cases: Sequence[Case]) -> Interval:
        return results.over(cases, "migrations_per_s")

    sentence = "Migrations per second of every policy that migrates"
    return _eight(scale, pictures, "fig12", sentence, MIGRATING, read, "migrations per second")


# --- Fig. 14 --------------------------------------------------------------------------------------------------------


def _utilisation(results: Results, scale: Scale, pictures: Pictures) -> str:
    def read(policy: str, cases: Sequence[Case]) -> Interval:
        found = results.over(cases, "utilisation")
        return Interval(found.mean * 100, None if found.ci95 is None else found.ci95 * 100)

    sentence = "KV memory in use, as a share of that of all open GPUs"
    return _eight(scale, pictures, "fig14", sentence, POLICIES, read, "utilisation (%)", floor=50, ceiling=100)


def _used(results: Results, scale: Scale) -> list[list[str]]:
    return [
        [f"`{policy}`"] + [share(results.mean(runs(workload, policy, scale), "utilisation")) for workload in WORKLOADS]
        for policy in POLICIES
    ]


# --- Fig. 15 --------------------------------------------------------------------------------------------------------


def _course(results: Results, scale: Scale, pictures: Pictures) -> str:
    sentence = f"GPUs over time with {HIGH.name}, the first seed; the differences stay through all ups and downs"
    with drawing(1, 2, height=2.8) as (figure, axes):
        for each, hardware in zip(axes, HARDWARE, strict=True):
            curves(each, [*(_line(results, scale, hardware, policy) for policy in POLICIES)])
            curves(each, [_bound_line(results, scale, hardware)])
            each.axvspan(0, scale.poisson.warmup_s, color="#F2F2F2", zorder=0)
            each.set(title=hardware.name, ylabel="GPUs", ylim=(0, None), xlim=(0, scale.poisson.horizon_s))
        axes[-1].set_xlabel("seconds (grey: not counted in means)")
        legend(figure, axes[0], 7)
        return pictures.save(figure, "fig15", sentence)


def _line(results: Results, scale: Scale, hardware: Hardware, policy: str) -> PlottedCurve:
    series = results.metrics[runs((hardware, HIGH), policy, scale)[0]]["series"]
    return PlottedCurve(policy, colour(policy), [at["at_s"] for at in series], [at["gpus"] for at in series])


def _bound_line(results: Results, scale: Scale, hardware: Hardware) -> PlottedCurve:
    series = results.metrics[runs((hardware, HIGH), "pack", scale)[0]]["series"]
    return PlottedCurve("L2 bound", BOUND, [at["at_s"] for at in series], [at["bound"] for at in series], dashed=True)


# --- all of them ----------------------------------------------------------------------------------------------------


def _eight(
    scale: Scale,
    pictures: Pictures,
    file: str,
    sentence: str,
    policies: Sequence[str],
    read: Read,
    ylabel: str,
    bound: Sequence[float] = (),
    floor: float = 0.0,
    ceiling: float | None = None,
) -> str:
    """Bars of the eight workloads: for each kind of GPU the Poisson loads, and beside them Azure's, which is larger."""
    with drawing(4, width=10, height=3.4, ratios=(3, 1.2, 3, 1.2)) as (figure, axes):
        for number, each in enumerate(axes):
            hardware, loads = HARDWARE[number // 2], LOADS[:3] if number % 2 == 0 else LOADS[3:]
            workloads = [(hardware, load) for load in loads]
            grouped(
                each,
                [load.name.replace("Poisson ", "") for load in loads],
                [
                    _bars(policy, [read(policy, runs(workload, policy, scale)) for workload in workloads])
                    for policy in policies
                ],
            )
            if bound:
                steps_at(each, [bound[WORKLOADS.index(workload)] for workload in workloads], "L2 bound")
            each.set_ylim(floor, ceiling)
            if number % 2 == 0:
                each.set(title=hardware.name, ylabel=ylabel)
        legend(figure, axes[0], 7)
        return pictures.save(figure, file, sentence)


def _bars(policy: str, found: Sequence[Interval]) -> Bars:
    return bars(policy, [each.mean for each in found], [each.ci95 or 0.0 for each in found])


SECTION = PageSection(_cases, _parts)
