"""The oracle: the GPU-seconds of a provider that knows all arrivals, sizes and the start-up time in advance.

Two numbers bracket the optimum.

    plan    a constructive plan, so an upper bound on the optimum. Mell serves the trace with replicas that start at
            once, with no reserve; that gives a number of replicas over time. Every replica is then charged with its
            start-up: it begins to start `startup_s` before its first use, and stays open between two uses if that takes
            no longer than another start. Whoever knows the trace can carry this out, and the service is that of the
            simulated run. Further candidates cut the peaks of that number that last less than a time in `CUTS_S`: the
            requests wait, within the level. The cases of all contenders are candidates, too, since hindsight could
            have chosen their numbers of replicas. The plan is the cheapest of the candidates that keep the level in
            the most parts of the window. So no run of a contender is cheaper and keeps the level wherever the plan does
    work    a relaxation, so a lower bound. Requests are divisible work: every token takes its share of a step on a
            replica that is always full, by KV or by the level's step time, in whatever fraction of a replica, at any
            time. Start-ups, arrival times, the level's first tokens and whole replicas are left out, and with prefix
            caches the prefills and the memory of prompts. Requests count by their arrival in the window; those that
            cross its edges are assumed to even out

The plan decides placements and moves as Mell does, second by second. So it is an oracle of the number of replicas, not
of the placement.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from policies.cost.service import TAIL, ServiceLevel
from policies.cost.steps import Knots, PrefillChunk, interpolate
from policies.decision.limits import Limits
from simulator.costs.costs import ComputeCosts, Costs
from simulator.outcome.metrics import Window
from simulator.outcome.service import Counts, PlannedLevels, ServiceOutcome
from simulator.workload.workload import Job
from simulator.world.setup import Setup

CUTS_S = (3.0, 8.0, 20.0, 60.0)
"""Peaks in the number of replicas that last less are cut, in seconds; one candidate for each."""

AT_ONCE_S = 1e-6
"""A foresight and a linger of next to nothing: zero would mean measured values."""


def at_once(setup: Setup, costs: Costs, caps: Counts = ()) -> tuple[Setup, Costs]:
    """A world in which replicas start at once, without a reserve, and with these maximum numbers of replicas."""
    limits = Limits(cooldown_s=setup.limits.cooldown_s, foresight_s=AT_ONCE_S, linger_s=AT_ONCE_S)
    return replace(setup, limits=limits, caps=tuple(caps)), replace(costs, startup_s=0.0)


def without_peaks(counts: Counts, shortest_s: float, grid_s: float = 1.0) -> list[tuple[float, int]]:
    """The counts without peaks that last less than `shortest_s` (the morphological opening), on a grid of times."""
    size = max(1, round(shortest_s / grid_s))
    sampled = list(_sampled(counts, grid_s))
    floors = [min(sampled[max(0, i - size + 1) : i + 1]) for i in range(len(sampled))]
    # A floor holds for every grid point of its stretch: those before the end of `sampled` have all of theirs.
    opened = [max(floors[i : i + size]) for i in range(len(floors))]
    return [(index * grid_s, gpus) for index, gpus in enumerate(opened)]


def provisioned(counts: Counts, startup_s: float, window: Window) -> float:
    """GPU-seconds within the window of the cheapest provision of these numbers of replicas (see the module).

    The replicas of the first count are there from the start.
    """
    ends = [at for at, _ in counts[1:]] + [max(window.horizon_s, counts[-1][0])]
    stretches = [(start, end, gpus) for (start, _), end, (_, gpus) in zip(counts, ends, counts, strict=True)]
    return sum(
        sum(max(0.0, min(end, window.horizon_s) - max(start, window.warmup_s)) for start, end in uses)
        for level in range(1, max(gpus for _, gpus in counts) + 1)
        for uses in [list(_with_starts(stretches, level, startup_s))]
    )


def least_work(jobs: Iterable[Job], window: Window, setup: Setup, costs: ComputeCosts, level: ServiceLevel) -> float:
    """GPU-seconds of the jobs that arrive in the window as divisible work (see the module)."""
    inside = [job for job in jobs if window.has(job.arrival_s)]
    formula = costs.steps
    computed = [] if setup.block_tokens else inside
    # A prompt is held in the step that ends its prefill, too, but its KV is only read in the steps of decoding.
    generated = sum(job.output * (job.output - 1) / 2 for job in inside)
    read = generated + sum(job.prompt * max(0, job.output - 1) for job in inside)
    held = generated + sum(job.prompt * job.output for job in computed)
    decoded = sum(max(0, job.output - 1) for job in inside)
    prefilled = sum(job.prompt for job in computed)
    attended = sum(PrefillChunk(job.prompt, 0).attended for job in computed)
    always_s = formula.context_s * read + formula.attention_s * attended + formula.sequence_s * decoded
    best = 0.0
    for base_s, token_s in minorants(formula.linear):
        fixed_s = formula.overhead_s + base_s
        shares = held / setup.capacity
        if level.itl_p99_s is not None and (step_s := level.itl_p99_s - fixed_s) > 0 and token_s > 0:
            # All but 1 % of the tokens come in steps with at most this number of requests.
            largest = max(1.0, step_s / (token_s + formula.sequence_s))
            shares = max(shares, (1 - TAIL) * decoded / largest)
        best = max(best, fixed_s * shares + token_s * (decoded + prefilled) + always_s)
    return best


def minorants(knots: Knots) -> Iterator[tuple[float, float]]:
    """(value at 0, slope) of lines that are nowhere above the interpolated knots, for one token or more.

    They are the edges of the lower convex hull.
    """
    last = knots[-1][0]
    hull: list[tuple[float, float]] = []
    for x, y in [*knots, (1000 * last, interpolate(knots, 1000 * last))]:
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    yield hull[0][1], 0.0
    for (x0, y0), (x1, y1) in pairwise(hull):
        slope = (y1 - y0) / (x1 - x0)
        yield y0 - slope * x0, slope


def cheapest(candidates: Sequence[tuple[float, Sequence[ServiceOutcome]]], levels: PlannedLevels) -> int | None:
    """The index of the candidate with the fewest GPU-seconds of those that keep the level in the most parts.

    A candidate is its GPU-seconds and its service in every part. So none is cheaper than the chosen one and keeps the
    level in all of its parts. None if no candidate keeps the level in any part.
    """
    kept = [sum(part.keeps(levels) for part in parts) for _, parts in candidates]
    most = max(kept)
    return min((used, i) for i, (used, _) in enumerate(candidates) if kept[i] == most)[1] if most else None


def reachable(candidates: Sequence[Sequence[ServiceOutcome]], levels: PlannedLevels) -> list[bool]:
    """For every part of the window, True if any candidate keeps the level there."""
    return [any(part.keeps(levels) for part in column) for column in zip(*candidates, strict=True)]


def _is_above(left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]) -> bool:
    """True if the middle point is on or above the line through the others."""
    return (middle[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (middle[0] - left[0])


def _sampled(counts: Counts, grid_s: float) -> Iterator[int]:
    """The largest count within each step of the grid."""
    index, now, most = 0, 0.0, 0
    while index < len(counts):
        while index < len(counts) and counts[index][0] < now + grid_s:
            most = max(most, counts[index][1])
            index += 1
        yield most
        most = counts[index - 1][1] if index else 0
        now += grid_s


def _with_starts(
    stretches: Sequence[tuple[float, float, int]], level: int, startup_s: float
) -> Iterator[tuple[float, float]]:
    """The times in which the replica of this number exists: its uses, each after a start or an idle time."""
    begun: float | None = None
    ended = 0.0
    for start, end, gpus in stretches:
        if gpus < level or start >= end:
            continue
        if begun is None:
            begun = start if start == stretches[0][0] else max(stretches[0][0], start - startup_s)
        elif start - startup_s > ended:
            yield begun, ended
            begun = start - startup_s
        ended = end
    if begun is not None:
        yield begun, ended
