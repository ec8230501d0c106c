"""The metrics of a simulation by name, as in the JSON document.

Only events after the warm-up count. An epoch's state holds until the next epoch, so means are weighted with the time
between epochs; rates are per second of virtual time.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from policies.plan import Path, Reason
from policies.precedence import DEFAULT_CLASS
from simulator.outcome.recorder import STEP_GRID_S, STEP_SPAN_S, EpochSample, EventRecorder
from simulator.outcome.statistics import mean, quantile, weighted_mean
from simulator.workload.workload import Job
from simulator.world.observer import Life, Transfer, TransferOutcome

Metrics = dict[str, Any]

_IDEAL = "ideal"
"""The key for moves of the idealised model, which have no path."""

SERIES_POINTS = 600
"""The number of points of a series, about as many as a plot can show."""


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a simulation that counts, in seconds of virtual time."""

    warmup_s: float
    horizon_s: float

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return self.horizon_s - self.warmup_s

    def has(self, at_s: float) -> bool:
        """True if a time is in the window. The horizon belongs to it, since its events are simulated."""
        return self.warmup_s <= at_s <= self.horizon_s


@dataclass(frozen=True, slots=True)
class _Span:
    """An epoch, and the seconds of the window in which its state held."""

    epoch: EpochSample
    seconds: float


def measure(recorder: EventRecorder, jobs: Sequence[Job], window: Window) -> Metrics:
    """Every metric of one run."""
    spans, seconds = _spans(recorder.epochs, window), window.seconds
    transfers = [transfer for transfer in recorder.transfers if window.has(transfer.ended_s)]
    lives = [life for life in recorder.lives if window.has(life.finished_s)]
    preempted = [tokens for at_s, tokens in recorder.preemptions if window.has(at_s)]
    return {
        **_gpus(spans),
        **_machines(spans),
        **_bounds(spans),
        **_decisions([epoch for epoch in recorder.epochs if window.has(epoch.now_s)], seconds),
        **_transfers(transfers, seconds),
        "preemptions_per_s": len(preempted) / seconds,
        "tokens_preempted_per_s": sum(preempted) / seconds,
        **_requests(spans),
        "requests_arrived": sum(window.has(job.arrival_s) for job in jobs),
        "requests_finished": len(lives),
        "requests_finished_per_s": len(lives) / seconds,
        **_delays(lives),
        "itl_s": inter_token(recorder, window),
        **_caches(lives),
        **_classes(jobs, lives, window),
    }


def bounds(recorder: EventRecorder, window: Window) -> Metrics:
    """Only the lower bound and the full repack of a run."""
    spans = _spans(recorder.epochs, window)
    return {
        "peak": max(span.epoch.bound for span in spans),
        "mean": _mean(spans, lambda epoch: epoch.bound),
        "repack_mean": _mean(spans, lambda epoch: epoch.repack),
    }


def series(recorder: EventRecorder) -> list[dict[str, Any]]:
    """The course of a run, warm-up included, as evenly spaced epochs."""
    every = -(-len(recorder.epochs) // SERIES_POINTS)
    return [
        {
            "at_s": epoch.now_s,
            "gpus": epoch.gpus,
            "bound": epoch.bound,
            "requests_held": epoch.held,
            "requests_waiting": epoch.waiting,
            "migrations": epoch.moves,
        }
        for epoch in recorder.epochs[::every]
    ]


def _spans(epochs: Sequence[EpochSample], window: Window) -> list[_Span]:
    """The epochs whose state held within the window; the last epoch's state holds to the end."""
    starts = [*(epoch.now_s for epoch in epochs), window.horizon_s]
    inside = (max(0.0, end - max(start, window.warmup_s)) for start, end in pairwise(starts))
    return [_Span(epoch, seconds) for epoch, seconds in zip(epochs, inside, strict=True) if seconds > 0]


def _mean(spans: Iterable[_Span], value: Callable[[EpochSample], float | None]) -> float | None:
    """The mean over time of a value, over the epochs that have it; None if no epoch has it."""
    found = [(value(span.epoch), span.seconds) for span in spans]
    return weighted_mean([(number, seconds) for number, seconds in found if number is not None])


def _gpus(spans: Sequence[_Span]) -> Metrics:
    return {
        "gpus_peak": max(span.epoch.gpus for span in spans),
        "gpus_mean": _mean(spans, lambda epoch: epoch.gpus),
        "gpu_seconds": sum(span.epoch.gpus * span.seconds for span in spans),
        "gpus_starting_mean": _mean(spans, lambda epoch: epoch.starting),
        "utilisation": _mean(spans, lambda epoch: _ratio(epoch.used, epoch.capacity)),
    }


def _machines(spans: Sequence[_Span]) -> Metrics:
    """The machines that the GPUs are on; nothing if they are not counted."""
    counts = [(span.epoch.machines, span.seconds) for span in spans if span.epoch.machines is not None]
    if not counts:
        return {}
    return {
        "machines_mean": _mean(spans, lambda epoch: epoch.machines),
        "machine_seconds": sum(machines * seconds for machines, seconds in counts),
    }


def _bounds(spans: Sequence[_Span]) -> Metrics:
    """The bounds, and the ratios of each epoch's GPUs to its bounds; an epoch without requests has no ratio."""
    return {
        "bound_peak": max(span.epoch.bound for span in spans),
        "bound_mean": _mean(spans, lambda epoch: epoch.bound),
        "ratio_to_bound": _mean(spans, lambda epoch: _ratio(epoch.gpus, epoch.bound)),
        "ratio_to_repack": _mean(spans, lambda epoch: _ratio(epoch.gpus, epoch.repack)),
    }


def _decisions(epochs: Sequence[EpochSample], seconds: float) -> Metrics:
    def rate(count: Callable[[EpochSample], int]) -> float:
        return sum(map(count, epochs)) / seconds

    reasons: Counter[Reason] = Counter()
    for epoch in epochs:
        reasons.update(epoch.reasons)
    return {
        "migrations_per_s": rate(lambda epoch: epoch.moves),
        "units_moved_per_s": rate(lambda epoch: epoch.units),
        "tokens_moved_per_s": rate(lambda epoch: epoch.tokens_moved),
        "moves_by_reason": {reason.value: reasons[reason] for reason in Reason if reasons[reason]},
        "evictions_per_s": rate(lambda epoch: epoch.evictions),
        "tokens_evicted_per_s": rate(lambda epoch: epoch.tokens_evicted),
        "activations_per_s": rate(lambda epoch: epoch.opened),
        "deactivations_per_s": rate(lambda epoch: epoch.closed),
    }


def _transfers(transfers: Sequence[Transfer], seconds: float) -> Metrics:
    outcomes = Counter(transfer.outcome for transfer in transfers)
    by_path = {path: [transfer for transfer in transfers if transfer.path is path] for path in (*Path, None)}
    return {
        "bytes_moved_per_s": sum(transfer.sent for transfer in transfers) / seconds,
        "moves_by_outcome": {outcome.value: outcomes[outcome] for outcome in TransferOutcome if outcomes[outcome]},
        "moves_by_path": {path or _IDEAL: _path(members) for path, members in by_path.items() if members},
    }


def _path(transfers: Sequence[Transfer]) -> Metrics:
    """Metrics of the migrations of one path, failed ones included; `actual_to_predicted` is a ratio of durations."""
    planned = [transfer for transfer in transfers if transfer.completed and transfer.predicted_s > 0]
    return {
        "moves": len(transfers),
        "completed": sum(transfer.completed for transfer in transfers),
        "same_node": sum(transfer.same_node for transfer in transfers),
        "tokens": sum(transfer.tokens for transfer in transfers),
        "bytes": sum(transfer.sent for transfer in transfers),
        "duration_s": _spread([_duration_s(transfer) for transfer in transfers]),
        "stall_s": _spread([transfer.stall_s for transfer in transfers]),
        "actual_to_predicted": _spread([_duration_s(transfer) / transfer.predicted_s for transfer in planned]),
    }


def _requests(spans: Sequence[_Span]) -> Metrics:
    """`serving_ratio` is the paper's: the share of requests whose KV cache is in GPU memory (section III, Fig. 6)."""
    return {
        "requests_held_mean": _mean(spans, lambda epoch: epoch.held),
        "requests_waiting_mean": _mean(spans, lambda epoch: epoch.waiting),
        "serving_ratio": _mean(spans, lambda epoch: _ratio(epoch.held, epoch.held + epoch.waiting)),
    }


def _classes(jobs: Sequence[Job], lives: Sequence[Life], window: Window) -> Metrics:
    """`classes`: the requests and delays of each service class; nothing if all have the default class."""
    names = sorted({job.service_class for job in jobs})
    if names in ([], [DEFAULT_CLASS]):
        return {}
    return {"classes": {name: _class(name, jobs, lives, window) for name in names}}


def _class(name: str, jobs: Sequence[Job], lives: Sequence[Life], window: Window) -> Metrics:
    own = [life for life in lives if life.job.service_class == name]
    return {
        "requests_arrived": sum(window.has(job.arrival_s) for job in jobs if job.service_class == name),
        "requests_finished": len(own),
        "moves": sum(life.moves for life in own),
        "preemptions": sum(life.preemptions for life in own),
        **_delays(own),
    }


def _delays(lives: Sequence[Life]) -> Metrics:
    """Delays in seconds of the requests that ended within the window, relative to running alone on an idle replica."""
    first = [life.first_token_s - life.job.arrival_s - life.ideal_first_token_s for life in lives]
    whole = [life.finished_s - life.job.arrival_s - life.ideal_s for life in lives]
    return {
        "ttft_s": _spread([life.first_token_s - life.job.arrival_s for life in lives]),
        "completion_s": _spread([life.finished_s - life.job.arrival_s for life in lives]),
        "stall_s": _spread([life.stalled_s for life in lives]),
        "added_ttft_s": _spread(first),
        "added_completion_s": _spread(whole),
        "longest_gap_s": _spread([life.longest_gap_s for life in lives]),
    }


def _caches(lives: Sequence[Life]) -> Metrics:
    """The prompt tokens in prefix caches, as shares of all: those of the best replica, those of the chosen one by the
    decision, and those that its prefill found; and the share of predicted ones that it missed. Nothing without caches.
    """
    prompts = sum(life.job.prompt for life in lives)
    if not any(life.job.names for life in lives):
        return {}
    predicted = sum(life.matched.predicted for life in lives)
    missing = sum(max(0, life.matched.predicted - life.cached) for life in lives)
    return {
        "cache_available": sum(life.matched.available for life in lives) / prompts,
        "cache_predicted": predicted / prompts,
        "cache_delivered": sum(life.cached for life in lives) / prompts,
        "cache_not_delivered": missing / predicted if predicted else 0.0,
    }


def inter_token(recorder: EventRecorder, window: Window) -> dict[str, float] | None:
    """The times between two tokens of a request, in seconds, pauses by moves and preemptions included."""
    tokens: dict[int, float] = {}
    for (span, step), count in recorder.steps.items():
        if window.has(span * STEP_SPAN_S):
            tokens[step] = tokens.get(step, 0.0) + count
    if not tokens:
        return None
    ordered, total = sorted(tokens.items()), sum(tokens.values())
    reached = list(accumulate(count for _, count in ordered))

    def at(share: float) -> float:
        return ordered[min(bisect_left(reached, share * total), len(ordered) - 1)][0] * STEP_GRID_S

    mean_s = sum(step * count for step, count in ordered) * STEP_GRID_S / total
    return {"mean": mean_s, "p50": at(0.5), "p99": at(0.99), "max": ordered[-1][0] * STEP_GRID_S}


def _duration_s(transfer: Transfer) -> float:
    return transfer.ended_s - transfer.began_s


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": mean(ordered),
        "p50": quantile(ordered, 0.5),
        "p99": quantile(ordered, 0.99),
        "max": ordered[-1],
    }
