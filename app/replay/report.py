"""The report of a replay as a JSON document; pure.

The document's shape is stable: fields may be added, none changes its meaning. Times are seconds, and those
called `at_s` are counted from the start of the replay. A distribution is `{"count", "mean", "p50", "p99",
"max"}`, or null where nothing was measured.

    trace       file, start_minute, minutes, requests, clipped, prompt_tokens, output_tokens
                (`clipped` requests were shortened to fit the context; tokens are totals after scaling)
    options     url, model, context, time_scale, token_scale, max_output, seed, move_every_s
    summary     interrupted, and the fields of `app.replay.summary.Summary`
    errors      [{kind, count, first_message}], the most frequent kind first
    migrations  not_offered: {path: reason} of `/mell/state` and `/mell/migrations`, {} on a Mell endpoint
                missed: [{kind, count, first_message}], polls that failed all the same
                moves: {asked, accepted, rejected: [{kind, count, first_message}]}, those the replay asked for
                groups: [{path, outcome, count, bytes, pause_s}]
                pause_s: of all committed migrations
                items: what `/mell/migrations` said of each, newest first
    distributions   {ttft_s, gap_s, total_s}: each the values below which 0, 1, ... 100 % lie, or null; `gap_s` and
                `total_s` as in the summary
    timeline    [{at_s, running, finished, errors, moved, replicas}], one entry a second
                moved: requests that changed replica since the entry before
                replicas: null, or [{id, state, used_tokens, capacity_tokens, requests, preemptions}]
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.replay.measured import Measured
from app.replay.summary import group_migrations, percentiles, quantiles, summarize, tally
from app.replay.trace import Arrival, Lengths, Window

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """What was replayed against what."""

    trace: str
    url: str
    model: str
    window: Window
    lengths: Lengths
    seed: int = 0
    move_every_s: float = 0.0


def document(setup: Setup, arrivals: Sequence[Arrival], measured: Measured) -> Document:
    """The report of one replay."""
    records = measured.records
    return {
        "trace": _trace(setup, arrivals),
        "options": _options(setup),
        "summary": {"interrupted": measured.interrupted, **asdict(summarize(records, measured.samples))},
        "errors": [asdict(one) for one in tally(r.fault for r in records if r.fault is not None)],
        "migrations": _migrations(measured),
        "distributions": percentiles(records),
        "timeline": [asdict(sample) for sample in measured.samples],
    }


def _trace(setup: Setup, arrivals: Sequence[Arrival]) -> Document:
    return {
        "file": setup.trace,
        "start_minute": setup.window.start_minute,
        "minutes": setup.window.minutes,
        "requests": len(arrivals),
        "clipped": sum(arrival.clipped for arrival in arrivals),
        "prompt_tokens": sum(arrival.prompt_tokens for arrival in arrivals),
        "output_tokens": sum(arrival.output_tokens for arrival in arrivals),
    }


def _options(setup: Setup) -> Document:
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


def _migrations(measured: Measured) -> Document:
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
