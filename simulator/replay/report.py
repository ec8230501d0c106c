"""The report of a replay as a JSON document; pure.

The document's schema is stable: members may be added, none changes its meaning. Times are in seconds; those
called `at_s` are counted from the start of the replay. A distribution is `{"count", "mean", "p50", "p99",
"max"}`, or null without measurements.

    trace       file, start_minute, minutes, requests, clipped, cut_tokens, prompt_tokens, output_tokens
                (`clipped` requests were shortened to fit the context, by `cut_tokens` in all; tokens are totals after
                scaling)
                account: null, or {format, columns, time_unit, rows, begins, read_to_line, unit_is_guess,
                changes: [{what, requests, request_share, token_share}]}: how the file was read (`simulator.traces`)
    options     url, model, context, time_scale, token_scale, max_output, seed, move_every_s
    summary     interrupted, and the fields of `simulator.replay.summary.Summary`
    errors      [{kind, count, first_message}], the most frequent kind first
    migrations  not_offered: {path: reason} of `/mell/state` and `/mell/migrations`, {} on a Mell endpoint
                missed: [{kind, count, first_message}], failed polls of offered paths
                moves: {asked, accepted, rejected: [{kind, count, first_message}]}, those ordered by the replay
                groups: [{path, outcome, count, bytes, pause_s}]
                pause_s: of all committed migrations
                items: the records of `/mell/migrations`, newest first
    distributions   {ttft_s, gap_s, total_s}: each the values below which 0, 1, ... 100 % lie, or null; `gap_s` and
                `total_s` as in the summary
    timeline    [{at_s, running, finished, errors, moved, replicas}], one entry a second
                moved: requests that changed replica since the entry before
                replicas: null, or [{id, state, used_tokens, capacity_tokens, requests, preemptions}]
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from simulator.replay.measurements import ReplayMeasurements
from simulator.replay.summary import group_migrations, percentiles, quantiles, summarize, tally
from simulator.replay.trace import LengthScaling, TraceRequest, TraceWindow
from simulator.traces.trace import TraceAccount

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplaySetup:
    """The options of a replay, and its endpoint."""

    trace: str
    url: str
    model: str
    window: TraceWindow
    lengths: LengthScaling
    seed: int = 0
    move_every_s: float = 0.0
    account: TraceAccount | None = None


def document(setup: ReplaySetup, requests: Sequence[TraceRequest], measured: ReplayMeasurements) -> Document:
    """The report of one replay."""
    records = measured.records
    return {
        "trace": _trace(setup, requests),
        "options": _options(setup),
        "summary": {"interrupted": measured.interrupted, **asdict(summarize(records, measured.samples))},
        "errors": [asdict(one) for one in tally(r.fault for r in records if r.fault is not None)],
        "migrations": _migrations(measured),
        "distributions": percentiles(records),
        "timeline": [asdict(sample) for sample in measured.samples],
    }


def _trace(setup: ReplaySetup, requests: Sequence[TraceRequest]) -> Document:
    return {
        "file": setup.trace,
        "start_minute": setup.window.start_minute,
        "minutes": setup.window.minutes,
        "requests": len(requests),
        "clipped": sum(request.cut_tokens > 0 for request in requests),
        "cut_tokens": sum(request.cut_tokens for request in requests),
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
        "account": None if setup.account is None else asdict(setup.account),
    }


def _options(setup: ReplaySetup) -> Document:
    return {
        "url": setup.url,
        "model": setup.model,
        "context": setup.lengths.context,
        "time_scale": setup.window.time_scale,
        "token_scale": setup.lengths.token_scale,
        "max_output": setup.lengths.max_output,
        "seed": setup.seed,
        "move_every_s": setup.move_every_s,
    }


def _migrations(measured: ReplayMeasurements) -> Document:
    pauses = quantiles(item["pause_s"] for item in measured.migrations if _has_pause(item))
    return {
        "not_offered": dict(measured.missing),
        "missed": [asdict(one) for one in tally(measured.missed)],
        "moves": {
            "asked": measured.moves.asked,
            "accepted": measured.moves.accepted,
            "rejected": [asdict(one) for one in tally(measured.moves.rejected)],
        },
        "groups": [asdict(group) for group in group_migrations(measured.migrations)],
        "pause_s": asdict(pauses) if pauses else None,
        "items": [dict(item) for item in measured.migrations],
    }


def _has_pause(item: Mapping[str, Any]) -> bool:
    return item.get("outcome") == "committed" and item.get("pause_s") is not None
