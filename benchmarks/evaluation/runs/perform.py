"""Carries out a case: the simulator's own metrics, and a few that only this report needs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.evaluation.runs.case import Case
from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.model import Tokens
from policies.plan import Plan
from policies.rules.policy import NONE, Barred, Policy
from policies.rules.registry import policy
from simulator.outcome.metrics import Metrics, Window, bounds, measure, series
from simulator.outcome.recorder import EventRecorder
from simulator.outcome.statistics import mean, quantile
from simulator.workload.workload import Job, Workload, draw
from simulator.world.observer import Life, Transfer
from simulator.world.world import simulate

COMPETITIVE_RATIO = 4 / 3
"""The competitive ratio of the paper's Theorem 2."""
MIN_SLOWDOWN_TOKENS = 250
"""The least output for which slowdown is measured: a single prefill beside a request of few tokens dominates its time.
"""
PROMISED_MOVES = 10
"""The largest number of moved units per operation by the paper's Theorem 3."""


@dataclass(frozen=True, slots=True)
class Raw:
    """The metrics of one run, and its processor time in seconds."""

    metrics: Metrics
    cpu_s: float


@dataclass(slots=True)
class OperationCounter:
    """A policy and an observer that forward every call, and count the units that each operation moved.

    An operation is one departure, one change of class or one arrival (the paper's Fig. 10). They can be distinguished
    only if operations are not batched: then each has its own plan, in the order of the calls to the policy. The first
    operation of an epoch does not count, since its plan also relieves GPUs that growth has overloaded.
    """

    policy: Policy
    recorder: EventRecorder
    units_moved: list[int] = field(default_factory=list)
    _operations: list[bool] = field(default_factory=list)

    @property
    def headroom_s(self) -> float:
        """See `Policy`."""
        return self.policy.headroom_s

    @property
    def knows_sharing(self) -> bool:
        """See `Policy`."""
        return self.policy.knows_sharing

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """See `Policy`."""
        return self.policy.place(cluster, request)

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """See `Policy`."""
        self._operations.append(len(changes.departed) + len(changes.crossed) + len(changes.waiting) == 1)
        self.policy.rebalance(cluster, changes)

    def decided(
        self, now: float, cluster: Cluster, plans: Sequence[Plan], closing: int = 0, machines: int | None = None
    ) -> None:
        """See `Observer`."""
        # The last plan is not the policy's.
        for plan, is_operation in list(zip(plans, self._operations, strict=False))[1:]:
            if is_operation:
                self.units_moved.append(len({move.unit for move in plan.moves}))
        self._operations.clear()
        self.recorder.decided(now, cluster, plans, closing, machines)

    def stepped(self, now: float, step_s: float, tokens: float) -> None:
        """See `Observer`."""
        self.recorder.stepped(now, step_s, tokens)

    def transferred(self, now: float, transfer: Transfer) -> None:
        """See `Observer`."""
        self.recorder.transferred(now, transfer)

    def preempted(self, now: float, tokens: Tokens) -> None:
        """See `Observer`."""
        self.recorder.preempted(now, tokens)

    def finished(self, now: float, life: Life) -> None:
        """See `Observer`."""
        self.recorder.finished(now, life)


def perform(case: Case, traces: Path) -> Raw:
    """Carry out a case."""
    began_s = time.process_time()
    workload = draw(case.recipe(traces), case.seed)
    counter = OperationCounter(policy(case.policy), EventRecorder(lambda now: None))
    simulate(workload.jobs, counter, case.setup, case.physics.read(), counter)
    metrics = _metrics(counter.recorder, workload, case.window)
    if not case.batched:
        metrics["operations"] = _operations(counter.units_moved)
    if case.with_series:
        metrics["series"] = series(counter.recorder)
    return Raw(metrics, time.process_time() - began_s)


def _metrics(recorder: EventRecorder, workload: Workload, window: Window) -> Metrics:
    return {
        **measure(recorder, workload.jobs, window),
        "bound": bounds(recorder, window),
        "workload": _workload(workload.jobs, workload.capped),
        "most_above_ratio": max(epoch.gpus - COMPETITIVE_RATIO * epoch.bound for epoch in recorder.epochs),
        "pause_s": _spread([t.stall_s for t in recorder.transfers if _interrupts(t) and window.has(t.ended_s)]),
        "slowdown": _spread([_slowdown(life) for life in recorder.lives if _is_neighbour(life, window)]),
    }


def _operations(units_moved: Sequence[int]) -> dict[str, int]:
    return {
        "count": len(units_moved),
        "most_units": max(units_moved, default=0),
        "beyond_promise": sum(units > PROMISED_MOVES for units in units_moved),
    }


def _workload(jobs: Sequence[Job], capped: int) -> dict[str, Any]:
    return {
        "requests": len(jobs),
        "capped": capped,
        "prompt_mean": mean([job.prompt for job in jobs]),
        "output_mean": mean([job.output for job in jobs]),
    }


def _interrupts(transfer: Transfer) -> bool:
    """True if the move paused a stream; moves of waiting requests do not."""
    return transfer.completed and transfer.stall_s > 0


def _is_neighbour(life: Life, window: Window) -> bool:
    """True if the request was never moved or preempted, and decoded long enough to measure its speed."""
    stayed = not life.moves and not life.preemptions
    return window.has(life.finished_s) and stayed and life.job.output >= MIN_SLOWDOWN_TOKENS


def _slowdown(life: Life) -> float:
    """The request's decoding time over its decoding time alone on an idle replica."""
    decoding_s = life.finished_s - life.first_token_s - life.stalled_s
    return decoding_s / (life.ideal_s - life.ideal_first_token_s)


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {"mean": mean(ordered), "p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99)}
