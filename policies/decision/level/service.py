"""The service level in the decision: the limits of replicas' speed in an epoch, and their report for operators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from policies.cluster.capacity import queued_tokens, spare_capacity, total_demand
from policies.cost.latencies import NO_TIMES, WINDOW_S, ServiceQuantiles
from policies.cost.limit import Traffic, limit
from policies.cost.service import TAIL, ReplicaSpeed, ServiceLevel, SpeedLimit, strictest
from policies.decision.memory import PoolMemory
from policies.precedence import DEFAULT_CLASS


def replica_speed(memory: PoolMemory) -> ReplicaSpeed | None:
    """The step times of the pool's replicas: the given ones, else fitted ones; None before there is a fit."""
    if memory.terms.speed is not None:
        return memory.terms.speed
    fitted = memory.learned.experience.steps.fitted
    if fitted is None:
        return None
    return ReplicaSpeed(fitted.costs, fitted.error, memory.learned.experience.step_tokens or None)


def speed_limit(memory: PoolMemory, now: float) -> SpeedLimit | None:
    """The limits of replicas' speed in this epoch; None without a service level, and while step times are unknown.

    Requests of all classes share every replica, so the strictest level counts of the pool and of the active classes.
    """
    speed = replica_speed(memory) if memory.terms.has_level else None
    if speed is None:
        return None
    cluster = memory.cluster
    most = cluster.up() + cluster.supply.left
    return limit(level_of(memory, now), speed, _traffic(memory, now), len(cluster.running()), most)


def level_of(memory: PoolMemory, now: float) -> ServiceLevel:
    """The strictest level of the pool and of the active classes."""
    terms = memory.terms
    levels = [terms.service or ServiceLevel()]
    if terms.classes.levels:
        active = memory.active_classes(now)
        levels += [level for name, level in terms.classes.levels.items() if name in active]
    return strictest(levels)


def _traffic(memory: PoolMemory, now: float) -> Traffic:
    """The traffic of the pool, with requests in proportion for the capacity that is kept free."""
    cluster, experience = memory.cluster, memory.learned.experience
    demand = total_demand(cluster)
    share = 1 + cluster.conditions.slack / demand if demand else 1.0
    tokens = sum(replica.load for replica in cluster.replicas.values()) + queued_tokens(cluster)
    return Traffic(experience.prompts, experience.arrival_rate(now), share * len(cluster.requests), share * tokens)


STATES = ("measuring", "held", "slow", "unreachable")
"""The states of a service level."""


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """The state of a service level, for operators. Times are in seconds.

    `limits` are those of the last epoch, None before step times are known. `slowest_step_s` is the longest decoding
    step of all replicas by prediction, and `late_replicas` counts those on which an arrival would wait for too long.
    The level takes `limits.least_replicas`, and `missing_replicas` of them are not running. Another replica opens while
    `free_replicas` is less than `reserve_replicas`; one closes if a whole one more is free. Demand exceeds the reserve
    with the probability `risk`, and repeats after `period_s`, None if it does not. `predicted` and `reached` are the
    times of the last `WINDOW_S` seconds, by step times and, by service class, as clients got them. `levels` are the
    levels of the other service classes.
    """

    level: ServiceLevel
    limits: SpeedLimit | None = None
    slowest_step_s: float = 0.0
    late_replicas: int = 0
    free_replicas: float = 0.0
    reserve_replicas: float = 0.0
    predicted: ServiceQuantiles = NO_TIMES
    reached: Mapping[str, ServiceQuantiles] = field(default_factory=dict)
    levels: Mapping[str, ServiceLevel] = field(default_factory=dict)
    missing_replicas: int = 0
    risk: float = TAIL
    period_s: float | None = None

    @property
    def state(self) -> str:
        """`measuring` before step times are known, `unreachable` if no number of replicas meets the level, `slow` if a
        replica exceeds a limit or replicas are missing, else `held`.
        """
        if self.limits is None:
            return "measuring"
        if self.limits.unreachable:
            return "unreachable"
        is_slow = self.slowest_step_s > self.limits.step_s or self.late_replicas or self.missing_replicas
        return "slow" if is_slow else "held"

    @property
    def reasons(self) -> Sequence[str]:
        """The reasons why the level is unreachable, or takes more replicas than are running."""
        if self.limits is None or not self.missing_replicas:
            return () if self.limits is None else self.limits.unreachable
        least = self.limits.least_replicas
        missing = (
            f"on fewer than {least:,} replicas, prefills lengthen too many steps; {least - self.missing_replicas:,}"
        )
        return (*self.limits.unreachable, f"{missing} are running")

    def _reached(self, name: str, level: ServiceLevel) -> dict[str, Any]:
        return {"target": _target(level), "reached": _times(self.reached.get(name, NO_TIMES))}

    def to_json(self) -> dict[str, Any]:
        """The member `service` of `/mell/state`."""
        head = {
            **self._reached(DEFAULT_CLASS, self.level),
            "window_s": WINDOW_S,
            "state": self.state,
        }
        if self.levels:
            head["classes"] = {name: self._reached(name, level) for name, level in self.levels.items()}
        if self.limits is None:
            return head
        return head | {
            "predicted": _times(self.predicted),
            "why": list(self.reasons),
            "step_limit_s": _finite(self.limits.step_s),
            "wait_limit_s": _finite(self.limits.wait_s),
            "interruption_s": self.limits.interruption_s,
            "slowest_step_s": self.slowest_step_s,
            "late_replicas": self.late_replicas,
            "least_replicas": self.limits.least_replicas,
            "free_replicas": self.free_replicas,
            "reserve_replicas": self.reserve_replicas,
            "risk": self.risk,
            "period_s": self.period_s,
            "error": self.limits.speed.error,
        }


def service_report(memory: PoolMemory, now: float, reached: Mapping[str, ServiceQuantiles]) -> ServiceReport | None:
    """The state of the pool's service level, with the times that clients `reached`, by class; None without a level."""
    terms, cluster, predicted = memory.terms, memory.cluster, memory.learned.predicted
    if not terms.has_level:
        return None
    level, levels = terms.service or ServiceLevel(), terms.classes.levels
    if cluster.conditions.speed is None:
        return ServiceReport(level, reached=reached, levels=levels)
    return ServiceReport(
        level,
        cluster.conditions.speed,
        predicted.slowest_step_s,
        predicted.late_replicas,
        spare_capacity(cluster) / cluster.capacity,
        cluster.conditions.slack / cluster.capacity,
        predicted.window.quantiles(now),
        reached,
        levels,
        max(0, cluster.conditions.speed.least_replicas - len(cluster.running())),
        memory.learned.risk.value,
        memory.learned.demand.forecast.period_s,
    )


def _target(level: ServiceLevel) -> dict[str, Any]:
    return {"ttft_p99_s": level.ttft_p99_s, "itl_p99_ms": _ms(level.itl_p99_s)}


def _times(times: ServiceQuantiles) -> dict[str, Any]:
    return {
        "ttft_p99_s": times.ttft_p99_s,
        "itl_p99_ms": _ms(times.itl_p99_s),
        "first_tokens": times.first_tokens,
        "gaps": times.gaps,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
