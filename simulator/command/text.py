"""The results of a simulation as text to print, from the JSON document alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from simulator.command.document import Document, summary
from simulator.outcome.statistics import mean
from simulator.traces.account import account_lines, percent

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class _Column:
    """A metric of the summary, with its heading and its format."""

    heading: str
    metric: str
    form: str
    width: int
    factor: float = 1.0


COLUMNS = (
    _Column("GPUs mean", "gpus_mean", ",.2f", 9),
    _Column("peak", "gpus_peak", ",.0f", 6),
    _Column("x bound", "ratio_to_bound", ".3f", 7),
    _Column("used %", "utilisation", ".1f", 6, factor=100),
    _Column("moves/s", "migrations_per_s", ",.2f", 7),
    _Column("evict/s", "evictions_per_s", ",.3f", 7),
    _Column("preempt/s", "preemptions_per_s", ",.3f", 9),
    _Column("waiting", "requests_waiting_mean", ",.1f", 7),
    _Column("stall p99", "stall_s.p99", ",.2f", 9),
    _Column("TTFT+ p99", "added_ttft_s.p99", ",.2f", 9),
    _Column("done+ p99", "added_completion_s.p99", ",.2f", 9),
)
"""Delays are in seconds. The last two are relative to the same request alone on an idle replica."""
MACHINES = (_Column("machines", "machines_mean", ",.2f", 8), _Column("machine-s", "machine_seconds", ",.0f", 9))
"""Further columns where machines are counted: their mean number, and the seconds of all of them together."""
CACHES = (_Column("hit %", "cache_delivered", ".2f", 6, factor=100), _Column("TTFT mean", "ttft_s.mean", ",.3f", 9))
"""Further columns with prefix caches: the share of prompt tokens that prefills find there, and the time in seconds."""


def render(outcome: Document) -> str:
    """A page with the input, the lower bound on the GPUs, one line per policy, and one per class of each run."""
    return "\n".join((*_head(outcome), "", *_table(summary(outcome["runs"])), *_classes(outcome["runs"])))


def _classes(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The p99 of first tokens of every service class, in seconds."""
    for run in runs:
        for name, found in run.get("classes", {}).items():
            ttft = NOTHING if found["ttft_s"] is None else f"{found['ttft_s']['p99']:,.2f} s"
            moved = f"{found['moves']:,} moves, {found['preemptions']:,} preemptions"
            requests = f"{found['requests_finished']:,} requests"
            yield f"{run['policy']}, seed {run['seed']}, class {name}: {requests}, TTFT p99 {ttft}, {moved}"


def _head(outcome: Document) -> Iterator[str]:
    workload, setup, bound = outcome["workload"], outcome["setup"], outcome["bound"]
    made_up = f", sessions {workload['sessions']}" if workload.get("sessions") else ""
    source = workload["trace"] or f"Poisson {workload['rate_per_s']:g}/s{made_up}"
    lengths = f", lengths from {workload['lengths']}" if workload["lengths"] else ""
    scales = "".join(
        f", {scaled} x {workload[name]:g}"
        for scaled, name in (("times", "time_scale"), ("lengths", "length_scale"))
        if workload[name] != 1
    )
    yield f"{source}{lengths}{scales}; {workload['horizon_s']:g} s, the first {workload['warmup_s']:g} s not counted"
    yield from account_lines(workload["account"])
    yield from cut_lines(workload["by_seed"], setup["capacity_tokens"])
    rate = "" if setup["decode_rate"] is None else f"{setup['decode_rate']:g} tokens/s per request, "
    most = "" if setup["max_gpus"] is None else f"at most {setup['max_gpus']} "
    gpus = f"{most}GPUs of {setup['capacity_tokens']:,} tokens"
    yield f"{gpus}, {rate}epochs of {setup['epoch_s']:g} s, costs {setup['costs']}"
    ideally = "" if setup["costs"] == "ideal" else f"in the idealised model, at {bound['decode_rate']:g} tokens/s, "
    for drawn, needs in zip(workload["by_seed"], bound["by_seed"], strict=True):
        yield (
            f"seed {drawn['seed']}: {drawn['requests']:,} requests; "
            f"{ideally}they need {needs['mean']:.2f} GPUs on average at least, {needs['peak']} at peak"
        )
        if rates := drawn.get("hit_rates"):
            pooled = "" if rates["pooled"] is None else f", one of the GPUs' total size {100 * rates['pooled']:.2f} %"
            yield f"one cache for all, without limit, has {100 * rates['unlimited']:.2f} % of the prompt tokens{pooled}"


def cut_lines(drawn: Sequence[Mapping[str, Any]], capacity: int) -> Iterator[str]:
    """The requests that do not fit into a GPU, in means over the seeds: none if all fit."""
    capped, requests, cut = (mean([each[name] for each in drawn]) for name in ("capped", "requests", "cut_tokens"))
    tokens = mean(
        [
            each["requests"] * (each["prompt_tokens_mean"] + each["output_tokens_mean"]) + each["cut_tokens"]
            for each in drawn
        ]
    )
    if capped:
        yield (
            f"longer than the {capacity:,} tokens of a GPU: cut, {capped:,.0f} of {requests:,.0f} requests "
            f"({percent(capped / requests)}), by {percent(cut / tokens)} of the tokens"
        )


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line per policy; with several seeds a second line has the half-widths of the 95 % intervals."""
    width = max(len(row["policy"]) for row in rows)
    further = (columns for columns in (MACHINES, CACHES) if any(columns[0].metric in row for row in rows))
    columns = COLUMNS + tuple(chain.from_iterable(further))
    yield " " * width + "".join(f"  {column.heading:>{column.width}}" for column in columns)
    for row in rows:
        yield f"{row['policy']:<{width}}" + _cells(columns, row, "mean")
        if row["seeds"] > 1:
            yield " " * width + _cells(columns, row, "ci95", "±")


def _cells(columns: Sequence[_Column], row: Mapping[str, Any], part: str, sign: str = "") -> str:
    cells = (
        f"{sign}{row[column.metric][part] * column.factor:{column.form}}" if column.metric in row else NOTHING
        for column in columns
    )
    return "".join(f"  {cell:>{column.width}}" for column, cell in zip(columns, cells, strict=True))
