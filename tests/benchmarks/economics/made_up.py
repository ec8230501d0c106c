"""Runs that nobody made, with keyword defaults."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from app.replay.summary import Distribution
from benchmarks.economics.case import Case, Conditions, Window
from benchmarks.economics.observed import Look, Migration, Observed, Run, Served

WINDOW = Window("trace", 1.0)
CONDITIONS = Conditions(warmup_s=10.0, seconds=100.0)


def case(variant: str = "mell", window: Window = WINDOW, repeat: int = 0, conditions: Conditions = CONDITIONS) -> Case:
    return Case(variant, window, repeat, conditions)


def served(at_s: float, **changes: Any) -> Served:
    """Due at `at_s`, a first token 0.5 s later, and 10 more in a second."""
    return replace(Served(at_s, 100, 11, at_s + 0.5, at_s + 1.5, whole=True), **changes)


def migration(
    at_s: float, outcome: str | None = "committed", pause_s: float | None = 0.02, path: str = "kv"
) -> Migration:
    return Migration(at_s, path, outcome, rounds=2, pause_s=pause_s, duration_s=0.11)


def looks(*states: dict[str, str] | None, every_s: float = 10.0) -> tuple[Look, ...]:
    return tuple(Look(i * every_s, seen, 0) for i, seen in enumerate(states))


def observed(
    requests: Sequence[Served] = (served(20.0),),
    seen: Sequence[Look] = (Look(0.0, {"a": "RUNNING"}, 0),),
    migrations: Sequence[Migration] = (),
) -> Observed:
    gap_s = Distribution(10, 0.1, 0.1, 0.2, 0.3)
    return Observed(tuple(requests), tuple(seen), tuple(migrations), gap_s, gap_s, cpu=0.5)


def run(of: Case | None = None, **what: Any) -> Run:
    return Run(of or case(), observed(**what))
