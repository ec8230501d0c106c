"""Carries out one run: starts the application, replays the window's requests, samples its replicas, and stops it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.economics.case import LiveCase, rule_of, settings
from benchmarks.economics.external import follow, number_of_replicas
from benchmarks.economics.observed import LiveRun, observe
from benchmarks.servers import mell
from simulator.autoscaling.rule import Autoscaler
from simulator.replay.client import connect, find_model
from simulator.replay.measurements import ReplayMeasurements, ReplaySample
from simulator.replay.probe import TIMEOUT_S, MellProbe
from simulator.replay.run import TraceReplay
from simulator.replay.trace import LengthScaling, TraceRequest, TraceWindow, cut, fit, read_trace

PORT = 8100
SEED = 1

Show = Callable[[ReplaySample], None]


def arrivals(case: LiveCase, traces: Path) -> tuple[TraceRequest, ...]:
    """The requests of a run, including its warm-up. Raises `BadInput` if the trace does not have the window."""
    window, conditions = case.window, case.conditions
    minutes = conditions.until_s / 60 / window.time_scale
    rows = read_trace(traces / f"{window.trace}.csv.gz").requests
    due = cut(rows, TraceWindow(minutes, window.start_minute, window.time_scale))
    return fit(due, LengthScaling(window.token_scale, conditions.pace.max_model_len))


def perform(case: LiveCase, traces: Path, show: Show, record: Path | None = None) -> LiveRun:
    """Carry out a run; `show` is called once a second with its progress.

    With `record`, a folder, the scheduler's observations and plans are recorded there.

    Raises:
        BadInput: the trace does not have the window.
        RuntimeError: the application does not start.
    """
    due = arrivals(case, traces)
    changed = settings(case)
    if record is not None:
        changed["scheduler"]["record"] = str(record.absolute())
    with mell(PORT, 1, **changed):
        psutil.cpu_percent()  # The next call returns the mean since this one.
        began = time.time()
        measured = asyncio.run(_replay(case, due, show))
        cpu = psutil.cpu_percent() / 100
    return LiveRun(case, observe(case, measured, began, cpu))


async def _replay(case: LiveCase, due: Sequence[TraceRequest], show: Show) -> ReplayMeasurements:
    url, rule = f"http://127.0.0.1:{PORT}", rule_of(case)
    async with connect(url) as api, connect(url, timeout_s=TIMEOUT_S) as mell:
        watch = MellProbe(mell, SEED)
        await watch.begin()
        replay = TraceReplay(api, await find_model(api), SEED, watch, show)
        run = replay.run(due, 0.0, asyncio.Event())
        if rule is None:
            return await run
        autoscaler = Autoscaler(rule, 1, case.conditions.max_replicas)
        with number_of_replicas() as write:
            async with asyncio.TaskGroup() as together:  # Ends the run if the autoscaler fails.
                scaling = together.create_task(follow(autoscaler.observe, watch, write))
                measured = await run
                scaling.cancel()
        return measured
