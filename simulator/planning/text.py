"""A plan as text to print, from the JSON document alone: the answer, and the best cases of every contender."""

from collections.abc import Iterator, Mapping
from typing import Any

from simulator.command.document import Document
from simulator.command.text import cut_lines
from simulator.costs.costs import SHIPPED_SYSTEMS
from simulator.planning.cases import LEVEL
from simulator.traces.account import account_lines

HEADING = f"{'GPUs mean':>9}  {'peak':>4}  {'TTFT p99 s':>10}  {'ITL p99 ms':>10}  level"


def render_plan(plan: Document) -> str:
    """The plan as a table, and the answer in sentences."""
    return "\n".join((*_head(plan), "", *_table(plan), *_classes(plan), "", *_answer(plan)))


def _head(plan: Document) -> Iterator[str]:
    workload, setup = plan["workload"], plan["setup"]
    requests = sum(drawn["requests"] for drawn in workload["by_seed"]) / len(workload["by_seed"])
    source = workload["trace"] or f"Poisson {workload['rate_per_s']:g}/s"
    yield (
        f"{source}: {requests:,.0f} requests in {workload['horizon_s']:,.0f} s, the first {workload['warmup_s']:,.0f} "
        "not counted"
    )
    yield from account_lines(workload["account"])
    yield from cut_lines(workload["by_seed"], setup["capacity_tokens"])
    system = SHIPPED_SYSTEMS.get(setup["costs"])
    yield (
        f"GPU assumed: {f'{system} ' if system else ''}(--costs {setup['costs']}), {setup['capacity_tokens']:,} tokens "
        f"of KV cache (--capacity-tokens), {setup['startup_s']:g} s to start (--startup)"
    )
    if _counts_machines(plan):
        yield f"machines of {setup['gpus_per_machine']} GPUs (--gpus-per-machine)"
    yield f"level: {_level(setup)}"


def _counts_machines(plan: Document) -> bool:
    return "gpus_per_machine" in plan["setup"]


def _level(setup: Mapping[str, Any]) -> str:
    parts = []
    if setup["ttft_p99_s"] is not None:
        parts.append(f"TTFT p99 {setup['ttft_p99_s']:g} s")
    if setup["itl_p99_s"] is not None:
        parts.append(f"ITL p99 {1e3 * setup['itl_p99_s']:g} ms")
    return ", ".join(parts)


def _table(plan: Document) -> Iterator[str]:
    """Mell at the level, the same with faster starts or links, the best case of every other contender, the oracle."""
    rows = list(_rows(plan))
    width = max(len(name) for name, _ in rows)
    machines = _counts_machines(plan)
    yield f"{'':<{width}}  {'GPU-seconds':>11}  {'machine-seconds  ' if machines else ''}{HEADING}"
    for name, case in rows:
        yield f"{name:<{width}}  {_cells(case, machines)}"


def _classes(plan: Document) -> Iterator[str]:
    """The first tokens of every service class, if there are several, with Mell at the level."""
    mell = next(case for case in plan["cases"] if case["name"] == LEVEL)
    found, classes = mell["ttft_p99_by_class_s"], plan["setup"]["classes"]
    if not found:
        return
    yield ""
    width = max(map(len, found))
    yield f"{'Mell, by class':<{max(width, 14)}}  {'TTFT p99 s':>10}  {'target s':>8}  level"
    for name, ttft_s in found.items():
        level = classes.get(name, {}).get("level")
        target_s = plan["setup"]["ttft_p99_s"] if level is None else level["ttft_p99_s"]
        target = "-" if target_s is None else f"{target_s:g}"
        kept = "kept" if mell["kept_by_class"][name] else "missed"
        yield f"{name:<{max(width, 14)}}  {ttft_s:>10,.2f}  {target:>8}  {kept}"


def _rows(plan: Document) -> Iterator[tuple[str, Mapping[str, Any]]]:
    cases = {case["name"]: case for case in plan["cases"]}
    yield "Mell at the level", cases[LEVEL]
    for case in plan["cases"]:
        if case["hypothetical"]:
            yield f"  {case['name'].partition(', ')[2]}", case
    for compared in plan["comparisons"]:
        shown = list(dict.fromkeys(_best(plan, compared)))
        for name in shown:
            yield f"{compared['title']}: {name.partition(', ')[2]}", cases[name]
    oracle = plan["oracle"]
    if oracle["gpu_seconds"] is not None:
        seconds = plan["workload"]["horizon_s"] - plan["workload"]["warmup_s"]
        kept = oracle["parts_planned"] == oracle["parts"]
        yield "oracle", {**oracle, "gpus_mean": oracle["gpu_seconds"] / seconds, "gpus_peak": None, "keeps_level": kept}


def _best(plan: Document, compared: Mapping[str, Any]) -> Iterator[str]:
    """The contender's best case at the level, and at service equal to Mell's; else that with the shortest TTFT."""
    found = [compared[where]["case"] for where in ("at_level", "at_equal_service") if compared[where]]
    if found:
        yield from found
        return
    members = [case for case in plan["cases"] if case["contender"] == compared["contender"]]
    yield min(members, key=lambda case: (case["ttft_p99_s"] or 0.0, case["gpu_seconds"]))["name"]


def _cells(case: Mapping[str, Any], machines: bool) -> str:
    ttft, itl = (
        "-" if case[name] is None else f"{case[name] * factor:,.{digits}f}"
        for name, factor, digits in (("ttft_p99_s", 1.0, 2), ("itl_p99_s", 1e3, 1))
    )
    peak = "" if case["gpus_peak"] is None else case["gpus_peak"]
    kept = "kept" if case["keeps_level"] else "missed"
    seconds = f"{case['gpu_seconds']:>11,.0f}"
    if machines:
        seconds += f"  {case['machine_seconds']:>15,.0f}" if "machine_seconds" in case else f"  {'':>15}"
    return f"{seconds}  {case['gpus_mean']:>9.2f}  {peak:>4}  {ttft:>10}  {itl:>10}  {kept}"


def _answer(plan: Document) -> Iterator[str]:
    cases = {case["name"]: case for case in plan["cases"]}
    level, fewest = cases[LEVEL], plan["fewest"]
    keeps = "keeps the level" if level["keeps_level"] else "misses the level"
    yield (
        f"Mell with this level {keeps} on {level['gpus_mean']:.2f} GPUs on average, {level['gpus_peak']} at peak: "
        f"{level['gpu_seconds']:,.0f} GPU-seconds."
    )
    for compared in plan["comparisons"]:
        yield f"{compared['title']}: {_verdict(compared, level['keeps_level'])}."
    if fewest is None:
        yield "No case keeps the level."
    elif fewest != LEVEL:
        saved = 1 - cases[fewest]["gpu_seconds"] / level["gpu_seconds"]
        yield f"With hindsight, {fewest} keeps it with {_compared(saved)}."
    oracle = plan["oracle"]
    if oracle["gpu_seconds"] is not None:
        yield (
            f"An oracle that knows the trace takes {oracle['gpu_seconds']:,.0f} GPU-seconds (no less than "
            f"{oracle['least_work_gpu_seconds']:,.0f} are possible) and keeps the level in {oracle['parts_planned']} "
            f"of {oracle['parts']} parts of five minutes. Mell takes {oracle['mell_to_oracle']:.2f} times as many, and "
            f"keeps the level in {oracle['parts_kept']} of the {oracle['parts_possible']} in which any run does. "
            f"It takes {level['gpu_seconds'] / level['oracle_gpu_seconds']:.2f} times as many as the cheapest run of "
            "any contender, or of the oracle, whose p99 are no longer than Mell's."
        )


def _verdict(compared: Mapping[str, Any], mell_keeps: bool) -> str:
    """Mell's GPU-seconds beside the contender's: where both keep the level, and at equal service."""
    level, equal = compared["at_level"], compared["at_equal_service"]
    parts = []
    if level is None:
        parts.append("no setting keeps the level")
    elif mell_keeps:
        parts.append(f"Mell takes {_compared(level['saved_by_mell'])} at the level")
    else:
        parts.append(f"one setting or more keeps the level, with {level['gpu_seconds']:,.0f} GPU-seconds at least")
    if equal is None:
        parts.append("no setting has both p99 of Mell")
    else:
        parts.append(f"Mell takes {_compared(equal['saved_by_mell'])} at equal or better p99")
    return "; ".join(parts)


def _compared(saved: float) -> str:
    if round(saved, 2) == 0:
        return "about as many GPU-seconds"
    return f"{abs(saved):.0%} {'fewer' if saved > 0 else 'more'} GPU-seconds"
