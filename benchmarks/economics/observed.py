"""What a run showed, and the file that keeps it: one run per line, as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from app.replay.measurements import ReplayMeasurements
from app.replay.stream import Record, StreamOutcome
from app.replay.summary import Distribution, quantiles
from app.replay.trace import ReplayInputError
from benchmarks.economics.case import Case


@dataclass(frozen=True, slots=True)
class Served:
    """One request: when it was due, its lengths in tokens, when its first and last token came (None: it failed before).

    Times are seconds since the replay began.
    """

    at_s: float
    prompt: int
    output: int
    first_s: float | None
    ended_s: float
    whole: bool


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the cluster: the state of each replica, and the preemptions of all that have ever been seen.

    `states` is None when the cluster did not answer.
    """

    at_s: float
    states: Mapping[str, str] | None
    preemptions: int


@dataclass(frozen=True, slots=True)
class Migration:
    """One migration that was ordered; `outcome` is None if it was still under way at the end."""

    at_s: float
    path: str
    outcome: str | None
    rounds: int
    pause_s: float | None
    duration_s: float


@dataclass(frozen=True, slots=True)
class Observed:
    """One run. `gap_s` is the time between two chunks of a stream, `send_lag_s` how late requests were sent, both of
    the requests that count; `cpu` is the share of all processors that was busy meanwhile, whatever with.
    """

    requests: tuple[Served, ...]
    looks: tuple[Look, ...]
    migrations: tuple[Migration, ...]
    gap_s: Distribution | None
    send_lag_s: Distribution | None
    cpu: float


@dataclass(frozen=True, slots=True)
class Run:
    """A case and what it showed."""

    case: Case
    observed: Observed


def observe(case: Case, measured: ReplayMeasurements, began: float, cpu: float) -> Observed:
    """What of a replay is kept. `began` is its beginning in Unix time."""
    counted = [record for record in measured.records if record.request.at_s >= case.conditions.warmup_s]
    return Observed(
        requests=tuple(_served(record) for record in measured.records),
        looks=tuple(_looks(measured)),
        migrations=tuple(_migration(item, began) for item in reversed(measured.migrations)),
        gap_s=quantiles(gap for record in counted for gap in record.gaps_s),
        send_lag_s=quantiles(record.sent_s - record.request.at_s for record in counted),
        cpu=cpu,
    )


def _served(record: Record) -> Served:
    arrival = record.request
    return Served(
        at_s=arrival.at_s,
        prompt=arrival.prompt_tokens,
        output=arrival.output_tokens,
        first_s=record.chunks_s[0] if record.chunks_s else None,
        ended_s=record.ended_s,
        whole=record.outcome is StreamOutcome.OK,
    )


def _looks(measured: ReplayMeasurements) -> Iterable[Look]:
    """Preemptions of replicas that are gone stay in the sum, as they were when last seen."""
    counts: dict[str, int] = {}
    for sample in measured.samples:
        counts |= {replica.id: replica.preemptions for replica in sample.replicas or () if replica.preemptions}
        states = None if sample.replicas is None else {replica.id: replica.state for replica in sample.replicas}
        yield Look(sample.at_s, states, sum(counts.values()))


def _migration(item: Mapping[str, Any], began: float) -> Migration:
    return Migration(
        at_s=item["started_at"] - began,
        path=item["path"],
        outcome=item["outcome"],
        rounds=item["rounds"],
        pause_s=item["pause_s"],
        duration_s=item["duration_s"],
    )


# --- the file ---------------------------------------------------------------------------------------------

_RUN = TypeAdapter(Run)


def keep(path: Path, run: Run) -> None:
    """Add a run to a file."""
    with path.open("ab") as file:
        file.write(_RUN.dump_json(run) + b"\n")


def read_runs(path: Path) -> list[Run]:
    """The runs in a file, none if there is no such file. Raises `ReplayInputError` if it holds something else."""
    if not path.exists():
        return []
    try:
        return [_RUN.validate_json(line) for line in path.read_bytes().splitlines()]
    except (OSError, ValidationError) as error:
        raise ReplayInputError(f"{path} is not a file of runs: {str(error).splitlines()[0]}.") from None


def missing(cases: Sequence[Case], runs: Sequence[Run]) -> list[Case]:
    """The cases that have not been run."""
    done = {run.case for run in runs}
    return [case for case in cases if case not in done]
