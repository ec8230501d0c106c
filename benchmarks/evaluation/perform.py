"""From a case to its raw outcome: the simulator's own metrics, and a few that only this report needs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.simulator.job import Job
from app.simulator.metrics import Metrics, Window, bounds, measure, series
from app.simulator.observer import Life, Transfer
from app.simulator.recorder import Recorder
from app.simulator.statistics import mean, quantile
from app.simulator.workload import Workload, draw
from app.simulator.world import simulate
from benchmarks.evaluation.case import Case
from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.model import Tokens
from policies.plan import Plan
from policies.rules.policy import NONE, Barred, Policy
from policies.rules.registry import policy

COMPETITIVE_RATIO = 4 / 3
"""What the paper's Theorem 2 promises."""
TELLING_TOKENS = 250
"""A request of a few tokens says of a single prefill beside it that everything was slow."""
PROMISED_MOVES = 10
"""At most, per operation: what its Theorem 3 promises."""


@dataclass(frozen=True, slots=True)
class Raw:
    """What one run gave, and the seconds of processor time that it took."""

    metrics: Metrics
    cpu_s: float


@dataclass(slots=True)
class Notes:
    """A policy and an observer that pass everything on, and note how many units each operation moved.

    An operation is one departure, one change of class or one arrival (the paper's Fig. 10). They can only be told apart
    where they are decided one by one: then each has a plan of its own, in the order in which the policy was called. The
    first of an epoch is left out: a policy takes it as the occasion to cure what everyone's growth has overloaded.
    """

    policy: Policy
    recorder: Recorder
    units_moved: list[int] = field(default_factory=list)
    _operations: list[bool] = field(default_factory=list)

    @property
    def headroom_s(self) -> float:
        """See `Policy`."""
        return self.policy.headroom_s

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """See `Policy`."""
        return self.policy.place(cluster, request)

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """See `Policy`."""
        self._operations.append(len(changes.departed) + len(changes.crossed) + len(changes.waiting) == 1)
        self.policy.rebalance(cluster, changes)

    def decided(self, now: float, cluster: Cluster, plans: Sequence[Plan]) -> None:
        """See `Observer`."""
        # There is one more plan, of what nobody asked the policy for.
        for plan, is_operation in list(zip(plans, self._operations, strict=False))[1:]:
            if is_operation:
                self.units_moved.append(len({move.unit for move in plan.moves}))
        self._operations.clear()
        self.recorder.decided(now, cluster, plans)

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
    notes = Notes(policy(case.policy), Recorder(lambda now: None))
    simulate(workload.jobs, notes, case.setup, case.physics.read(), notes)
    metrics = _metrics(notes.recorder, workload, case.window)
    if not case.batched:
        metrics["operations"] = _operations(notes.units_moved)
    if case.with_series:
        metrics["series"] = series(notes.recorder)
    return Raw(metrics, time.process_time() - began_s)


def _metrics(recorder: Recorder, workload: Workload, window: Window) -> Metrics:
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
    """Moves of requests that were still waiting interrupt nothing."""
    return transfer.completed and transfer.stall_s > 0


def _is_neighbour(life: Life, window: Window) -> bool:
    """Whether a request stayed where it was and kept its KV, and decoded long enough to tell its speed."""
    stayed = not life.moves and not life.preemptions
    return window.has(life.finished_s) and stayed and life.job.output >= TELLING_TOKENS


def _slowdown(life: Life) -> float:
    """How many times longer its decoding took than alone on an idle replica."""
    decoding_s = life.finished_s - life.first_token_s - life.stalled_s
    return decoding_s / (life.ideal_s - life.ideal_first_token_s)


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {"mean": mean(ordered), "p50": quantile(ordered, 0.5), "p99": quantile(ordered, 0.99)}
