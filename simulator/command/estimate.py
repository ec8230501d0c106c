"""Estimates the time of long simulations of a trace from a short sample of it, and refuses those of many hours."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from time import perf_counter
from typing import Any

from simulator.command.order import SimulationOrder
from simulator.command.runs import Performable
from simulator.errors import BadInput
from simulator.outcome.metrics import Window
from simulator.workload.workload import ArrivalTrace, Job, draw

_REQUEST_S, _EPOCH_S = 3e-3, 1e-4
"""Rough times of a run per request and per epoch, which decide if a sample is worth its time."""

_SHORT_S = 60.0
"""Simulations that take less by these are begun at once."""

_MOST_S = 4 * 3600.0
"""The longest estimate with which a whole trace is simulated without an explicit horizon."""

_SAMPLE_REQUESTS, _SAMPLE_S = 200, 600.0
"""The most requests and seconds of the sample, from the middle of the trace."""

_PROPOSED_S = 600.0
"""The estimate of the part of a trace that is proposed instead of it, if that is no more than an hour of the trace."""

SampleRuns = Callable[[tuple[Job, ...], SimulationOrder], Sequence[tuple[int, Performable[Any]]]]
"""Representative runs of jobs under an order, each with the number of runs that it stands for."""


def require_affordable(order: SimulationOrder, rough_runs: int, sample_runs: SampleRuns) -> None:
    """Print the estimated time of a long simulation of a trace, which has about `rough_runs` runs.

    Raises `BadInput` if it is very long and the command line has no horizon.
    """
    arrivals = order.recipe.arrivals
    if not isinstance(arrivals, ArrivalTrace):
        return
    requests, seconds = len(arrivals.rows), order.setup.horizon_s
    rough_s = rough_runs * (requests * _REQUEST_S + seconds / order.setup.epoch_s * _EPOCH_S)
    if rough_s < _SHORT_S:
        return
    runs, took_s = _sampled(order, arrivals, sample_runs)
    estimated_s = took_s / min(order.processes, runs)
    size = f"{runs:,} runs of {requests:,} requests in {in_words(seconds)}"
    processors = f"{order.processes} processor{'s' if order.processes > 1 else ''}"
    text = f"{size} take about {in_words(estimated_s)} on {processors}"
    if order.is_whole and estimated_s > _MOST_S:
        raise BadInput(
            f"{order.names.trace}: {text}. Give a part: {_busiest(order, arrivals, estimated_s)}. "
            f"With --horizon {math.ceil(seconds)} all of it is simulated."
        )
    if estimated_s >= _SHORT_S:
        print(f"{text}.", file=sys.stderr)


def _sampled(order: SimulationOrder, arrivals: ArrivalTrace, sample_runs: SampleRuns) -> tuple[int, float]:
    """The number of runs, and their processor time by that of a sample."""
    scale = order.recipe.time_scale
    begin = max(0, len(arrivals.rows) // 2 - _SAMPLE_REQUESTS // 2)
    rows = arrivals.rows[begin : begin + _SAMPLE_REQUESTS]
    begins_s = rows[0].at_s
    sample = [
        replace(row, at_s=row.at_s - begins_s, session="")
        for row in takewhile(lambda row: (row.at_s - begins_s) * scale < _SAMPLE_S, rows)
    ]
    horizon_s = max(sample[-1].at_s * scale + order.setup.epoch_s, 2 * order.setup.epoch_s)
    recipe = replace(order.recipe, arrivals=ArrivalTrace(sample), horizon_s=horizon_s)
    short = replace(
        order, recipe=recipe, setup=replace(order.setup, horizon_s=horizon_s), window=Window(0.0, horizon_s)
    )
    runs, took_s = 0, 0.0
    for count, run in sample_runs(draw(recipe, order.seeds[0]).jobs, short):
        began = perf_counter()
        run.perform(lambda now: None)
        took_s += count * (perf_counter() - began)
        runs += count
    return runs, took_s * max(len(arrivals.rows) / len(sample), order.setup.horizon_s / horizon_s)


def _busiest(order: SimulationOrder, arrivals: ArrivalTrace, estimated_s: float) -> str:
    """The options for the part of the trace with most requests, so short that it is simulated within minutes."""
    minutes = order.setup.horizon_s * _PROPOSED_S / estimated_s // 60
    part_s = min(3600.0, max(1.0, minutes) * 60)
    counts = Counter(int(row.at_s * order.recipe.time_scale // part_s) for row in arrivals.rows)
    begins_s = order.start_s + max(counts, key=counts.__getitem__) * part_s / order.recipe.time_scale
    return f"its busiest {in_words(part_s)} are --start {begins_s:.0f} --horizon {part_s:.0f}"


def in_words(seconds: float) -> str:
    """A time in the largest fitting unit."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:,.0f} seconds"
