"""GPUs over the bound against requests moved, for every policy and several tunings."""

from collections.abc import Sequence

from benchmarks.evaluation.plots import cloud, logarithmic
from benchmarks.evaluation.points import Point, front
from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.eight import A100, AZURE, HIGH, LOW, RTX4090, Workload, name
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.style import Pictures, drawing, legend
from benchmarks.evaluation.style import name as name_of
from benchmarks.evaluation.words import table

CORE = (
    "best_fit",
    "worst_fit",
    "load_balance",
    "load_balance:drain=true",
    "mell",
    "mell:headroom_s=4",
    "mell_repaired:headroom_s=0",
    "mell_repaired",
    "mell_repaired:headroom_s=8",
    "pack:headroom_s=0",
    "pack",
    "pack:headroom_s=4",
    "pack:headroom_s=8",
)
MORE = (
    "best_fit:headroom_s=20",
    "best_fit:headroom_s=60",
    "worst_fit:headroom_s=20",
    "load_balance:threshold=0.1",
    "load_balance:threshold=0.4",
    "load_balance:drain=true,spare=0.05",
    "load_balance:drain=true,spare=0.2",
    "mell:headroom_s=8",
    "mell_repaired:headroom_s=16",
    "pack:headroom_s=1",
    "pack:headroom_s=16",
    "pack:comfort=0.8",
    "pack:comfort=0.95",
    "pack:drain_moves=0",
    "pack:drain_moves=4",
    "pack:drain_moves=16",
    "pack:headroom_s=4,comfort=0.95",
    "pack:headroom_s=4,drain_moves=4",
)
WORKLOADS: tuple[tuple[Workload, Sequence[str]], ...] = (
    ((A100, HIGH), (*CORE, *MORE)),
    ((RTX4090, LOW), (*CORE, *MORE)),
    ((A100, AZURE), CORE),
)


def _case(workload: Workload, policy: str, scale: Scale) -> Case:
    hardware, load = workload
    span = scale.tuned_azure if load == AZURE else scale.tuned
    return Case(policy, load.arrivals, span, hardware.capacity)


def _cases(scale: Scale) -> list[Case]:
    return [_case(workload, policy, scale) for workload, policies in WORKLOADS for policy in policies]


def _tunings(results: Results, workload: Workload, policies: Sequence[str], scale: Scale) -> list[Point]:
    def tuning(policy: str) -> Point:
        case = _case(workload, policy, scale)
        moved = sum(results.value(case, metric) for metric in ("migrations_per_s", "evictions_per_s"))
        return Point(policy, moved, 100 * (results.value(case, "ratio_to_bound") - 1))

    return [tuning(policy) for policy in policies]


def _parts(results: Results, scale: Scale, pictures: Pictures) -> dict[str, str]:
    tuned = [(workload, _tunings(results, workload, policies, scale)) for workload, policies in WORKLOADS]
    return {
        "frontier": _figure(tuned, pictures),
        **{f"frontier-{number}": _table(tunings) for number, (_, tunings) in enumerate(tuned, 1)},
    }


def _figure(tuned: Sequence[tuple[Workload, list[Point]]], pictures: Pictures) -> str:
    with drawing(3, width=10, height=3.6) as (figure, axes):
        for each, (workload, tunings) in zip(axes, tuned, strict=True):
            cloud(each, tunings, front(tunings))
            logarithmic(each)
            each.set(title=name(workload), xlabel="moved per second", ylim=(0, None))
        axes[0].set_ylabel("GPUs over the L2 bound (%)")
        legend(figure, axes[0], 7)
        return pictures.save(figure, "frontier", "GPUs over the bound against requests moved; lower left is better")


def _table(tunings: Sequence[Point]) -> str:
    best = front(tunings)
    owners = {name_of(each.policy) for each in best}
    others = dict.fromkeys(name_of(each.policy) for each in tunings if name_of(each.policy) not in owners)
    nearest = [_nearest([each for each in tunings if name_of(each.policy) == other], best) for other in others]
    rows = [(each, "yes") for each in best] + [(each, "no") for each in nearest]
    return table(
        ("policy", "moved/s", "GPUs over L2", "on the line"),
        [[f"`{each.policy}`", f"{each.x:.2f}", f"{each.y:+.1f} %", on] for each, on in rows],
    )


def _nearest(own: Sequence[Point], best: Sequence[Point]) -> Point:
    """The point with the smallest distance, in GPUs, to the best point that moves at most as much."""

    def behind(each: Point) -> float:
        return each.y - min(other.y for other in best if other.x <= each.x)

    return min(own, key=behind)


SECTION = PageSection(_cases, _parts)
