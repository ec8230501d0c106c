"""Performs runs, in this process or in several, with one progress count for all.

Processes are spawned, not forked, so that no state of this process affects a result. Each one writes the virtual time
of its run to its own cell in shared memory, and reads a flag there that ends it.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from ctypes import Array, c_bool, c_double
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from app.simulator.costs.costs import IDEAL, Costs
from app.simulator.outcome.demand import Alone, unlimited
from app.simulator.outcome.metrics import Metrics, Window, bounds, measure, series
from app.simulator.outcome.recorder import EventRecorder
from app.simulator.workload.workload import Job
from app.simulator.world.setup import Setup
from app.simulator.world.world import simulate
from policies.rules.registry import policy

Tick = Callable[[float], None]
"""Called with seconds of virtual time."""

POLL_S = 0.2


class Stopped(Exception):
    """The run was stopped before its horizon."""


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """One workload played through one policy; without a policy, the run only computes the lower bounds."""

    policy: str | None
    seed: int
    jobs: tuple[Job, ...]
    setup: Setup
    window: Window
    costs: Costs = IDEAL
    with_series: bool = False


def perform(run: SimulationRun, tick: Tick) -> Metrics:
    """Perform one run. `tick` may raise an exception to end it."""
    recorder = EventRecorder(tick)
    if run.policy is None:
        simulate(run.jobs, Alone(), unlimited(run.setup), IDEAL, recorder)
        return {"seed": run.seed, **bounds(recorder, run.window)}
    simulate(run.jobs, policy(run.policy), run.setup, run.costs, recorder)
    metrics = {"policy": run.policy, "seed": run.seed, **measure(recorder, run.jobs, run.window)}
    return {**metrics, "series": series(recorder)} if run.with_series else metrics


def perform_all(runs: Sequence[SimulationRun], processes: int, show: Tick) -> list[Metrics]:
    """Perform all runs. Returns their metrics in the same order. `show` gets the sum of their virtual times."""
    if processes == 1:
        return _in_turn(runs, show)
    context = get_context("spawn")
    times = context.RawArray(c_double, len(runs))
    stop = context.RawValue(c_bool, False)
    with ProcessPoolExecutor(min(processes, len(runs)), context, _join, (times, stop)) as pool:
        try:
            with _interrupts_ignored_by_children():
                futures = [pool.submit(_perform_here, index, run) for index, run in enumerate(runs)]
            _watch(futures, times, show)
            return [future.result() for future in futures]
        except BaseException:
            stop.value = True
            pool.shutdown(cancel_futures=True)
            raise


def available_processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_turn(runs: Sequence[SimulationRun], show: Tick) -> list[Metrics]:
    done_s, results = 0.0, []
    for run in runs:
        results.append(perform(run, partial(_show_after, show, done_s)))
        done_s += run.setup.horizon_s
        show(done_s)
    return results


def _show_after(show: Tick, done_s: float, now: float) -> None:
    show(done_s + now)


@contextmanager
def _interrupts_ignored_by_children() -> Iterator[None]:
    """Have processes started in this context ignore Ctrl-C, which a terminal sends to all: only this one reacts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(futures: Sequence[Future[Metrics]], times: "Array[c_double]", show: Tick) -> None:
    """Return when all runs are done. Raises the exception of the first run that fails."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, POLL_S, FIRST_EXCEPTION)
        for future in done:
            future.result()
        show(sum(times))


# --- in a process of the pool ---------------------------------------------------------------------------------------


def _join(times: "Array[c_double]", stop: c_bool) -> None:
    global _times, _stop
    _times, _stop = times, stop


def _perform_here(index: int, run: SimulationRun) -> Metrics:
    def tick(now: float) -> None:
        if _stop.value:
            raise Stopped
        _times[index] = now

    metrics = perform(run, tick)
    _times[index] = run.setup.horizon_s
    return metrics


_times: "Array[c_double]"
_stop: c_bool
