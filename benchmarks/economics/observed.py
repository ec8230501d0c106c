"""Observations of a run, and the file of runs: one run per line, as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.economics.case import LiveCase
from simulator.replay.measurements import ReplayMeasurements
from simulator.replay.stream import Record, StreamOutcome
from simulator.replay.summary import Distribution, quantiles


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request: its due time, its lengths in tokens, and the times of its first and last token.

    Times are seconds since the replay began; `first_s` is None if the request failed before its first token.
    """

    at_s: float
    prompt: int
    output: int
    first_s: float | None
    ended_s: float
    whole: bool


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the cluster: the state of each replica, and the preemptions of all replicas seen so far.

    `states` is None if the cluster did not answer.
    """

    at_s: float
    states: Mapping[str, str] | None
    preemptions: int


@dataclass(frozen=True, slots=True)
class ObservedMigration:
    """One ordered migration; `outcome` is None if it had not ended by the end of the run."""

    at_s: float
    path: str
    outcome: str | None
    rounds: int
    pause_s: float | None
    duration_s: float


@dataclass(frozen=True, slots=True)
class RunObservation:
    """The observations of one run.

    `gap_s` are the times between two chunks of a stream, `send_lag_s` the delays of sending, both of the counted
    requests. `cpu` is the busy share of all processors of the machine during the run.
    """

    requests: tuple[ServedRequest, ...]
    looks: tuple[Look, ...]
    migrations: tuple[ObservedMigration, ...]
    gap_s: Distribution | None
    send_lag_s: Distribution | None
    cpu: float


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that was made: its case and its observations."""

    case: LiveCase
    observed: RunObservation


def observe(case: LiveCase, measured: ReplayMeasurements, began: float, cpu: float) -> RunObservation:
    """The observations of a replay that began at the Unix time `began`."""
    counted = [record for record in measured.records if record.request.at_s >= case.conditions.warmup_s]
    return RunObservation(
        requests=tuple(_served(record) for record in measured.records),
        looks=tuple(_looks(measured)),
        migrations=tuple(_migration(item, began) for item in reversed(measured.migrations)),
        gap_s=quantiles(gap for record in counted for gap in record.gaps_s),
        send_lag_s=quantiles(record.sent_s - record.request.at_s for record in counted),
        cpu=cpu,
    )


def _served(record: Record) -> ServedRequest:
    arrival = record.request
    return ServedRequest(
        at_s=arrival.at_s,
        prompt=arrival.prompt_tokens,
        output=arrival.output_tokens,
        first_s=record.chunks_s[0] if record.chunks_s else None,
        ended_s=record.ended_s,
        whole=record.outcome is StreamOutcome.OK,
    )


def _looks(measured: ReplayMeasurements) -> Iterable[Look]:
    """The looks of a replay. Preemptions of a replica that has gone stay in the sum with their last value."""
    counts: dict[str, int] = {}
    for sample in measured.samples:
        counts |= {replica.id: replica.preemptions for replica in sample.replicas or () if replica.preemptions}
        states = None if sample.replicas is None else {replica.id: replica.state for replica in sample.replicas}
        yield Look(sample.at_s, states, sum(counts.values()))


def _migration(item: Mapping[str, Any], began: float) -> ObservedMigration:
    return ObservedMigration(
        at_s=item["started_at"] - began,
        path=item["path"],
        outcome=item["outcome"],
        rounds=item["rounds"],
        pause_s=item["pause_s"],
        duration_s=item["duration_s"],
    )


def missing(cases: Sequence[LiveCase], runs: Sequence[LiveRun]) -> list[LiveCase]:
    """The cases that have no run."""
    done = {run.case for run in runs}
    return [case for case in cases if case not in done]
