"""The report of a replay as printed text, from the JSON document alone; pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simulator.replay.report import Document
from simulator.traces.account import account_lines, percent


def render(report: Document) -> str:
    """The text: trace and endpoint, latencies, replicas and migrations, faults."""
    return "\n".join((*_head(report), *_numbers(report["summary"]), *_cluster(report), *_faults(report)))


def _head(report: Document) -> Iterator[str]:
    trace, options, summary = report["trace"], report["options"], report["summary"]
    until = trace["start_minute"] + trace["minutes"]
    if summary["interrupted"]:
        yield f"Interrupted after {summary['requests']} of {trace['requests']} requests."
    yield f"{trace['file']}, minutes {trace['start_minute']:g} to {until:g}"
    yield from account_lines(trace["account"])
    yield f"on {options['model']} at {options['url']}"
    context = "which the endpoint does not list" if options["context"] is None else f"of {options['context']:,} tokens"
    whole = trace["cut_tokens"] + trace["prompt_tokens"] + trace["output_tokens"]
    share = percent(trace["cut_tokens"] / max(1, whole))
    cut = f", {share} of the tokens left out" if trace["clipped"] else ""
    yield f"{trace['clipped']} of {trace['requests']} requests clipped to the context {context}{cut}"


def _numbers(summary: Mapping[str, Any]) -> Iterator[str]:
    per_chunk = summary["tokens_per_chunk"]
    counts = ", ".join(f"{summary[name]} {name}" for name in ("ok", "broken", "failed", "cancelled"))
    yield ""
    yield f"Requests  {counts}; {summary['requests_per_s']:.2f}/s over {summary['duration_s']:.1f} s"
    yield (
        f"Output    {summary['output_tokens']:,} tokens, {summary['output_tokens_per_s']:,.1f}/s"
        + (f", {per_chunk:.2f} per chunk" if per_chunk is not None else "")
    )
    yield ""
    yield f"{'milliseconds':<22}{'p50':>12}{'p99':>12}{'max':>12}{'samples':>12}"
    yield _row("time to first token", summary["ttft_s"])
    yield _row("between chunks", summary["gap_s"])
    yield _row("end to end", summary["total_s"])
    yield _row("send delay", summary["send_lag_s"])


def _row(name: str, values: Mapping[str, float] | None) -> str:
    if values is None:
        return f"{name:<22}{'-':>12}{'-':>12}{'-':>12}{0:>12}"
    times = "".join(f"{1000 * values[column]:>12,.1f}" for column in ("p50", "p99", "max"))
    return f"{name:<22}{times}{values['count']:>12,}"


def _cluster(report: Document) -> Iterator[str]:
    summary, migrations = report["summary"], report["migrations"]
    replicas, used = summary["running_replicas"], summary["kv_used_percent"]
    yield ""
    if replicas is not None:
        yield f"Replicas  {replicas['mean']:.2f} running on average, {replicas['max']} at most"
    if used is not None:
        yield f"KV use    {used['mean']:.1f} % on average, {used['p99']:.1f} % at p99"
    for path, reason in migrations["not_offered"].items():
        yield f"{path} is not offered ({reason})"
    if "/mell/migrations" not in migrations["not_offered"]:
        yield f"Migrations  {len(migrations['items'])}"
        yield from map(_group, migrations["groups"])
    if report["options"]["move_every_s"]:
        yield f"Moves  {migrations['moves']['asked']} ordered, {migrations['moves']['accepted']} accepted"
        yield from _tally("rejected", migrations["moves"]["rejected"])


def _group(group: Mapping[str, Any]) -> str:
    pause = group["pause_s"]
    times = f", pause p50 {1000 * pause['p50']:.1f} ms, p99 {1000 * pause['p99']:.1f} ms" if pause else ""
    return f"  {group['count']} by {group['path']} {group['outcome']}{times}"


def _faults(report: Document) -> Iterator[str]:
    yield from _tally("error", report["errors"])
    yield from _tally("poll missed", report["migrations"]["missed"])


def _tally(name: str, entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for entry in entries:
        yield f"  {entry['count']} x {name}: {entry['kind']}: {entry['first_message']}"
