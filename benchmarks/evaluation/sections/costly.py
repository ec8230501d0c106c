"""Every policy under real costs: GPU-seconds against delay."""

from collections.abc import Iterator, Sequence

from benchmarks.evaluation.plots import cloud
from benchmarks.evaluation.points import Point, beats, front, height
from benchmarks.evaluation.runs.case import Case, Physics, seeds
from benchmarks.evaluation.runs.eight import A100, BASELINES, HIGH, MIDDLE, OURS, PAPERS, RTX4090, STALL, Workload, name
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection, blocks
from benchmarks.evaluation.style import Pictures, drawing, legend
from benchmarks.evaluation.words import change, listing, prose, seeds_in_words, spread, table

STALLING = (f"best_fit{STALL}", f"worst_fit{STALL}")
"""Variants in which requests wait on full GPUs while others are empty: they serve less, and are not comparable."""
SERVING = (*BASELINES, "load_balance:drain=true", *PAPERS, OURS)
WORKLOADS: tuple[Workload, ...] = ((A100, MIDDLE), (RTX4090, HIGH))
SLACKS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Free room, in GPUs, for requests that would otherwise wait for a GPU to start."""
TABLED = (1.0, 4.0)
"""The slacks in the tables."""
DELAY = "added_completion_s.p99"
HEADER = (
    "policy",
    "slack",
    "GPU-seconds / 1,000",
    "served/s",
    "waiting",
    "moves/s",
    "evicted/s",
    "preempted/s",
    "stall p99 s",
    "TTFT+ p99 s",
    "done+ p99 s",
)


def runs(workload: Workload, policy: str, scale: Scale, slack: float) -> list[Case]:
    """The runs of a workload under real costs, one per seed, with the free room of `slack` GPUs."""
    hardware, load = workload
    case = Case(policy, load.arrivals, scale.costly, hardware.capacity, Physics(hardware.costs), slack=slack)
    return seeds(case, scale.costly_seeds)


def _cases(scale: Scale) -> list[Case]:
    compared = _compared(SLACKS)
    return [
        case for workload in WORKLOADS for policy, slack in compared for case in runs(workload, policy, scale, slack)
    ]


def _compared(slacks: Sequence[float]) -> list[tuple[str, float]]:
    return [(policy, slack) for policy in SERVING for slack in slacks] + [(policy, slacks[0]) for policy in STALLING]


def _write(results: Results, scale: Scale, pictures: Pictures) -> str:
    found = {workload: _outcomes(results, workload, scale) for workload in WORKLOADS}
    return blocks(
        prose(
            f"Real costs, {scale.costly.horizon_s:,.0f} s of which {scale.costly.warmup_s:,.0f} s are not counted,",
            f"{seeds_in_words(scale.costly_seeds)}. Delays are what a request takes longer than alone on an idle GPU:",
            "*done+* until its last token, *TTFT+* until its first; *stall* is time without tokens after the first one",
            "because of moves, preemptions and evictions. *Slack* is how many GPUs' worth of room stays free; an empty",
            "GPU is kept for as long as one takes to start. Both are the same for all policies. Starting GPUs count as",
            "GPUs. The figure has every slack, tables two; what stalls (`overload=stall`) is in the tables only: its",
            "requests wait on full GPUs, so it serves less.",
        ),
        *(prose(*_sentences(workload, outcomes)) for workload, outcomes in found.items()),
        _figure(found, pictures),
        *(part for workload in WORKLOADS for part in (f"{name(workload)}:", _table(results, workload, scale))),
    )


def _outcomes(results: Results, workload: Workload, scale: Scale) -> list[Point]:
    def outcome(policy: str, slack: float) -> Point:
        cases = runs(workload, policy, scale, slack)
        label = f"{'drains, ' if 'drain=true' in policy else ''}{slack:g}"
        return Point(policy, results.mean(cases, DELAY), results.mean(cases, "gpu_seconds") / 1000, label)

    return [outcome(policy, slack) for policy in SERVING for slack in SLACKS]


def _sentences(workload: Workload, outcomes: Sequence[Point]) -> Iterator[str]:
    mine = [each for each in outcomes if each.policy == OURS]
    others = [each for each in outcomes if each.policy != OURS]
    beaten = [_named(each) for each in others if any(beats(one, each) for one in mine)]
    better = [_named(each) for each in others if any(beats(each, one) for one in mine)]
    yield f"{name(workload)}: `{OURS}` with some slack needs fewer GPU-seconds and adds no more delay at p99 than"
    yield f"{listing(beaten or ['no other'])}; with some slack it is beaten in this way by {listing(better)}."
    yield f"GPU-seconds at the same delay, beside a line through the points of `{OURS}`:"
    yield f"{listing(list(_beside(mine, others)))}."


def _beside(line: Sequence[Point], others: Sequence[Point]) -> Iterator[str]:
    """For each policy by how much its points are above the line, least and most; those beside its ends left out."""
    for policy in dict.fromkeys(each.policy for each in others):
        points = [each for each in others if each.policy == policy]
        over = [each.y / at - 1 for each in points if (at := height(line, each.x)) is not None]
        yield f"`{policy}` {change(min(over))} to {change(max(over))}" if over else f"`{policy}` has no such delay"


def _named(point: Point) -> str:
    return f"`{point.policy}` ({point.label})"


def _figure(found: dict[Workload, list[Point]], pictures: Pictures) -> str:
    with drawing(2, height=3.6) as (figure, axes):
        for each, (workload, outcomes) in zip(axes, found.items(), strict=True):
            cloud(each, outcomes, front(outcomes))
            each.set(title=name(workload), xlabel="added to completion, p99 (s)", xlim=(0, None))
        axes[0].set_ylabel("GPU-seconds / 1,000")
        legend(figure, axes[0], 7)
        return pictures.save(figure, "costs", "GPU-seconds against delay under real costs; lower left is better")


def _table(results: Results, workload: Workload, scale: Scale) -> str:
    rows = [_row(results, policy, slack, runs(workload, policy, scale, slack)) for policy, slack in _compared(TABLED)]
    return table(HEADER, rows)


def _row(results: Results, policy: str, slack: float, cases: Sequence[Case]) -> list[str]:
    def number(metric: str, digits: int, factor: float = 1.0) -> str:
        return spread(results.over(cases, metric), digits, factor)

    def middle(metric: str) -> str:
        return f"{results.mean(cases, metric):.2f}"

    return [
        f"`{policy}`",
        f"{slack:g}",
        number("gpu_seconds", 1, 1 / 1000),
        middle("requests_finished_per_s"),
        middle("requests_waiting_mean"),
        middle("migrations_per_s"),
        middle("evictions_per_s"),
        middle("preemptions_per_s"),
        number("stall_s.p99", 1),
        number("added_ttft_s.p99", 1),
        number(DELAY, 1),
    ]


SECTION = PageSection("GPU-seconds and delay under real costs", _cases, _write)
