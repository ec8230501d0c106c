"""Made-up runs, with keyword defaults."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.economics.case import Conditions, LiveCase, RunWindow
from benchmarks.economics.observed import LiveRun, Look, ObservedMigration, RunObservation, ServedRequest
from simulator.replay.summary import Distribution

WINDOW = RunWindow("trace", 1.0)
CONDITIONS = Conditions(warmup_s=10.0, seconds=100.0)


def case(
    variant: str = "mell", window: RunWindow = WINDOW, repeat: int = 0, conditions: Conditions = CONDITIONS
) -> LiveCase:
    return LiveCase(variant, window, repeat, conditions)


def served(at_s: float, **changes: Any) -> ServedRequest:
    """A request due at `at_s`, with a first token 0.5 s later, and 10 more in a second."""
    return replace(ServedRequest(at_s, 100, 11, at_s + 0.5, at_s + 1.5, whole=True), **changes)


def migration(
    at_s: float,
    outcome: str | None = "committed",
    pause_s: float | None = 0.02,
    path: str = "kv",
    duration_s: float = 0.2,
) -> ObservedMigration:
    return ObservedMigration(at_s, path, outcome, rounds=2, pause_s=pause_s, duration_s=duration_s)


def looks(*states: dict[str, str] | None, every_s: float = 10.0) -> tuple[Look, ...]:
    return tuple(Look(i * every_s, seen, 0) for i, seen in enumerate(states))


def observed(
    requests: Sequence[ServedRequest] = (served(20.0),),
    seen: Sequence[Look] = (Look(0.0, {"a": "RUNNING"}, 0),),
    migrations: Sequence[ObservedMigration] = (),
) -> RunObservation:
    gap_s = Distribution(10, 0.1, 0.1, 0.2, 0.3)
    return RunObservation(tuple(requests), tuple(seen), tuple(migrations), gap_s, gap_s, cpu=0.5)


def run(of: LiveCase | None = None, **what: Any) -> LiveRun:
    return LiveRun(of or case(), observed(**what))
