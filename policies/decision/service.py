"""The service level in the decision: the limits of replicas' speed in an epoch, and their report for operators."""

from collections.abc import Iterable
from math import isfinite
from typing import Any

from policies.cluster.replica import Replica
from policies.cost.service import TAIL, ReplicaSpeed, ServiceLevel, SpeedLimit, limit
from policies.decision.memory import PoolMemory

FORESEEN = 1.0 - TAIL
"""The share of recent epochs whose rise in demand is kept free: a level holds for the same share of requests."""


def replica_speed(memory: PoolMemory) -> ReplicaSpeed | None:
    """The step times of the pool's replicas: the given ones, else fitted ones; None before there is a fit."""
    if memory.terms.speed is not None:
        return memory.terms.speed
    fitted = memory.experience.steps.fitted
    if fitted is None:
        return None
    return ReplicaSpeed(fitted.costs, fitted.error, memory.experience.step_tokens or None)


def speed_limit(memory: PoolMemory, now: float) -> SpeedLimit | None:
    """The limits of replicas' speed in this epoch; None without a service level, and while step times are unknown."""
    level = memory.terms.service
    speed = replica_speed(memory) if level is not None else None
    if level is None or speed is None:
        return None
    prompts = memory.experience.prompts
    running = memory.cluster.running()
    passed_s = now - prompts[0][0] if prompts else 0.0
    return limit(level, speed, [tokens for _, tokens in prompts], _steps(speed, running, passed_s))


def _steps(speed: ReplicaSpeed, replicas: Iterable[Replica], seconds: float) -> float:
    """The steps that these replicas take in that time with their present batches."""
    return sum(seconds / max(1e-6, speed.costs.step_s(max(1, len(r.requests)), r.load)) for r in replicas)


def service_json(memory: PoolMemory) -> dict[str, Any] | None:
    """The service level, the limits that follow from it, and the slowest replica's steps; None without a level.

    `state` is `measuring` before step times are known, `unreachable` if no number of replicas meets the level,
    `slow` if a replica exceeds a limit, else `held`. Another replica opens while `free_replicas` is less than
    `reserve_replicas`; one closes if a whole one more is free.
    """
    level, cluster = memory.terms.service, memory.cluster
    if level is None:
        return None
    found = cluster.speed
    if found is None:
        return {"target": _target(level), "state": "measuring"}
    costs, busy = found.speed.costs, [replica for replica in cluster.running() if replica.requests]
    step_s = max((costs.step_s(len(replica.requests), replica.load) for replica in busy), default=0.0)
    late = sum(not found.is_in_time(len(r.requests), r.load, r.backlog) for r in cluster.running())
    state = "unreachable" if found.unreachable else "slow" if step_s > found.step_s or late else "held"
    return {
        "target": _target(level),
        "state": state,
        "why": list(found.unreachable),
        "step_limit_s": _finite(found.step_s),
        "wait_limit_s": _finite(found.wait_s),
        "interruption_s": found.interruption_s,
        "slowest_step_s": step_s,
        "late_replicas": late,
        "free_replicas": cluster.spare() / cluster.capacity,
        "reserve_replicas": cluster.slack / cluster.capacity,
        "error": found.speed.error,
    }


def _target(level: ServiceLevel) -> dict[str, float | None]:
    itl_ms = None if level.itl_p99_s is None else 1e3 * level.itl_p99_s
    return {"ttft_p99_s": level.ttft_p99_s, "itl_p99_ms": itl_ms}


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
