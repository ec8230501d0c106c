"""Figure 6 of the paper: requests held and served by a fixed number of GPUs, with migration and without."""

from dataclasses import replace

from benchmarks.evaluation.plots import bars, grouped
from benchmarks.evaluation.runs.case import Case, Physics
from benchmarks.evaluation.runs.eight import A100, HIGH, STALL
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.style import Pictures, drawing, legend, name
from benchmarks.evaluation.words import change, table

GPUS = (20, 30, 40)
COSTLY_GPUS = 30
FIXED = tuple(f"{policy}{STALL}" for policy in ("best_fit", "worst_fit"))
"""Without migration: requests stay where they were placed, and the engine preempts when memory runs out."""
EVICTING = ("best_fit", "worst_fit")
MIGRATING = ("load_balance", "mell", "mell_repaired", "pack")
SERVED = "requests_finished_per_s"
EVERYONE = (*FIXED, *EVICTING, *MIGRATING)
HEADER = ("policy", "requests held", "served/s", "waiting", "serving ratio", "stall p99 s", "more held", "more served")


def ideal(policy: str, gpus: int, scale: Scale) -> Case:
    """A run with at most `gpus` GPUs in the idealised model."""
    return Case(policy, HIGH.arrivals, scale.held, A100.capacity, max_gpus=gpus)


def costly(policy: str, scale: Scale) -> Case:
    """A run with `COSTLY_GPUS` GPUs under real costs."""
    return replace(ideal(policy, COSTLY_GPUS, scale), physics=Physics(A100.costs))


def gain(results: Results, case: Case, metric: str = "requests_held_mean") -> float:
    """The relative gain of a policy over the better policy that neither migrates nor evicts."""
    best = max(results.value(replace(case, policy=fixed), metric) for fixed in FIXED)
    return results.value(case, metric) / best - 1


def gains(results: Results, scale: Scale, policy: str) -> list[float]:
    """`gain` for every number of GPUs in the idealised model."""
    return [gain(results, ideal(policy, gpus, scale)) for gpus in GPUS]


def _cases(scale: Scale) -> list[Case]:
    return [ideal(policy, gpus, scale) for policy in EVERYONE for gpus in GPUS] + [
        costly(policy, scale) for policy in EVERYONE
    ]


def _parts(results: Results, scale: Scale, pictures: Pictures) -> dict[str, str]:
    return {
        "fig06": _figure(results, scale, pictures),
        **{f"held-{gpus}": _table(results, [ideal(p, gpus, scale) for p in EVERYONE]) for gpus in GPUS},
        "held-costly": _table(results, [costly(policy, scale) for policy in EVERYONE]),
    }


def _figure(results: Results, scale: Scale, pictures: Pictures) -> str:
    sentence = "Serving ratio with a fixed number of GPUs; hatched: without migration"
    with drawing(1, height=3.4) as (figure, [axes]):
        drawn = [
            bars(
                name(policy),
                [results.value(ideal(policy, gpus, scale), "serving_ratio") for gpus in GPUS],
                label=f"{name(policy)}, stalls" if policy in FIXED else policy,
                hatch="///" if policy in FIXED else "",
            )
            for policy in (*FIXED, *MIGRATING)
        ]
        grouped(axes, [f"{gpus} GPUs" for gpus in GPUS], drawn)
        axes.set(ylabel="serving ratio", ylim=(0, 1))
        legend(figure, axes, 6)
        return pictures.save(figure, "fig06", sentence)


def _table(results: Results, cases: list[Case]) -> str:
    return table(HEADER, [_row(results, case) for case in cases])


def _row(results: Results, case: Case) -> list[str]:
    return [
        f"`{case.policy}`",
        f"{results.value(case, 'requests_held_mean'):.1f}",
        f"{results.value(case, SERVED):.3f}",
        f"{results.value(case, 'requests_waiting_mean'):.1f}",
        f"{results.value(case, 'serving_ratio'):.2f}",
        f"{results.value(case, 'stall_s.p99'):.0f}",
        change(gain(results, case), 0),
        change(gain(results, case, SERVED), 0),
    ]


SECTION = PageSection(_cases, _parts)
