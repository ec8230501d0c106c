"""Performs runs, in this process or in several, with one progress count for all.

A run is a value that can be sent to another process and performed there.

Processes are spawned, not forked, so that no state of this process affects a result. Each one writes the virtual time
of its run to its own cell in shared memory, and reads a flag there that ends it. It ends with this process, even if
that is killed.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from ctypes import Array, c_bool, c_double
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_context, parent_process
from threading import Thread
from typing import Any, Protocol, TypeVar

from policies.rules.registry import policy
from simulator.costs.costs import IDEAL, Costs
from simulator.outcome.demand import Alone, unlimited
from simulator.outcome.metrics import Metrics, Window, bounds, measure, series
from simulator.outcome.recorder import EventRecorder
from simulator.workload.workload import Job
from simulator.world.setup import Setup
from simulator.world.world import simulate

Tick = Callable[[float], None]
"""Called with seconds of virtual time."""

Result = TypeVar("Result", covariant=True)
"""The result of a run."""

POLL_S = 0.2


class Stopped(Exception):
    """The run was stopped before its horizon."""


class Performable(Protocol[Result]):
    """One simulation to perform."""

    @property
    def seconds(self) -> float:
        """The virtual time that it takes."""
        ...

    def perform(self, tick: Tick) -> Result:
        """Perform it. `tick` may raise an exception to end it."""
        ...


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

    @property
    def seconds(self) -> float:
        """See `Performable`."""
        return self.setup.horizon_s

    def perform(self, tick: Tick) -> Metrics:
        """See `Performable`."""
        recorder = EventRecorder(tick, {job.id: job.names for job in self.jobs}, self.setup.block_tokens)
        if self.policy is None:
            simulate(self.jobs, Alone(), unlimited(self.setup), IDEAL, recorder)
            return {"seed": self.seed, **bounds(recorder, self.window)}
        simulate(self.jobs, policy(self.policy), self.setup, self.costs, recorder)
        metrics = {"policy": self.policy, "seed": self.seed, **measure(recorder, self.jobs, self.window)}
        return {**metrics, "series": series(recorder)} if self.with_series else metrics


def perform_all(runs: Sequence[Performable[Result]], processes: int, show: Tick) -> list[Result]:
    """Perform all runs. Returns their results in the same order. `show` gets the sum of their virtual times."""
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


def _in_turn(runs: Sequence[Performable[Result]], show: Tick) -> list[Result]:
    done_s, results = 0.0, []
    for run in runs:
        results.append(run.perform(partial(_show_after, show, done_s)))
        done_s += run.seconds
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


def _watch(futures: Sequence[Future[Any]], times: "Array[c_double]", show: Tick) -> None:
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
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process as soon as its parent is gone, which may have been killed."""
    parent = parent_process()
    assert parent is not None, "a process of the pool has a parent"
    connection.wait([parent.sentinel])
    os._exit(1)


def _perform_here(index: int, run: Performable[Result]) -> Result:
    def tick(now: float) -> None:
        if _stop.value:
            raise Stopped
        _times[index] = now

    result = run.perform(tick)
    _times[index] = run.seconds
    return result


_times: "Array[c_double]"
_stop: c_bool
