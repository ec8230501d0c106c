"""A plan of several models as text to print, from its JSON document alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from simulator.command.document import Document
from simulator.traces.account import account_lines

SHOWN = 20
"""The models with the most requests, which are shown one by one."""


def render_sharing(plan: Document) -> str:
    """The plan as tables: the contenders, and the models with the most requests."""
    return "\n".join((*_head(plan), "", *_contenders(plan), "", *_models(plan), *_answer(plan)))


def _head(plan: Document) -> Iterator[str]:
    workload = plan["workload"]
    yield (
        f"{workload['trace']}: {workload['requests']:,} requests for {len(plan['models'])} models in "
        f"{workload['horizon_s']:,.0f} s, the first {workload['warmup_s']:,.0f} not counted"
    )
    yield from account_lines(workload["account"])
    if workload["cut"]:
        yield f"{workload['cut']:,} requests were cut to max_model_len"
    yield f"devices of {plan['budget_mib']:,.0f} MiB, {plan['max_gpus']} at most; level: 99 % of first tokens in time"


def _contenders(plan: Document) -> Iterator[str]:
    rows = plan["contenders"]
    width = max(len(row["name"]) for row in rows)
    yield (
        f"{'':<{width}}  {'GPU-seconds':>11}  {'GPUs mean':>9}  {'TTFT p50 s':>10}  {'p99 s':>7}  {'ITL p99 ms':>10}  "
        f"{'late':>7}  {'lost':>6}  level"
    )
    for row in rows:
        whole = row["whole"]
        yield (
            f"{row['name']:<{width}}  {row['gpu_seconds']:>11,.0f}  {row['gpus_mean']:>9.2f}  "
            f"{_cell(whole['ttft_p50_s'], 10, 2)}  {_cell(whole['ttft_p99_s'], 7, 2)}  "
            f"{_cell(row['itl_p99_s'], 10, 1, 1e3)}  {whole['late']:>7,}  {whole['lost']:>6,}  "
            f"{'kept' if row['kept'] else 'missed'}"
        )
    for name in plan["impossible"]:
        yield f"{name:<{width}}  the models do not fit into {plan['max_gpus']} devices"


def _models(plan: Document) -> Iterator[str]:
    """TTFT p50 and p99 of the models with the most requests, by contender."""
    contenders = plan["contenders"]
    counted = contenders[0]["models"]
    shown = sorted(counted, key=lambda name: (-counted[name]["requests"], name))
    width = max(len("TTFT p50/p99 s"), *map(len, shown[:SHOWN]))
    titles = [row["contender"] for row in contenders]
    yield f"{'TTFT p50/p99 s':<{width}}  {'requests':>8}  " + "  ".join(f"{title:>13}" for title in titles)
    for name in shown[:SHOWN]:
        cells = (row["models"][name] for row in contenders)
        pairs = (f"{_cell(own['ttft_p50_s'], 1, 2)}/{_cell(own['ttft_p99_s'], 1, 2)}" for own in cells)
        row = "  ".join(f"{pair:>{max(13, len(title))}}" for pair, title in zip(pairs, titles, strict=True))
        yield f"{name:<{width}}  {counted[name]['requests']:>8,}  {row}"
    if len(shown) > SHOWN:
        yield f"and {len(shown) - SHOWN} models with fewer requests: --json has all"


def _answer(plan: Document) -> Iterator[str]:
    """The fewest GPU-seconds at the level, and Mell's beside the others'."""
    kept = [row for row in plan["contenders"] if row["kept"]]
    yield ""
    if not kept:
        yield "No contender keeps the level."
        return
    best = min(kept, key=lambda row: row["gpu_seconds"])
    yield f"The fewest GPU-seconds at the level: {best['name']}, {best['gpu_seconds']:,.0f}."
    mell = next((row for row in kept if row["contender"] == "Mell"), None)
    if mell is None:
        yield "Mell misses the level."
        return
    for row in kept:
        if row is not mell:
            yield f"{_ratio(mell, row)} {row['name']}."


def _ratio(mell: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    ratio = other["gpu_seconds"] / mell["gpu_seconds"]
    if ratio >= 1:
        return f"Mell takes {ratio:.2f} times fewer GPU-seconds than"
    return f"Mell takes {1 / ratio:.2f} times more GPU-seconds than"


def _cell(value: float | None, width: int, digits: int, factor: float = 1.0) -> str:
    return f"{'-':>{width}}" if value is None else f"{value * factor:>{width},.{digits}f}"
