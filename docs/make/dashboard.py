"""docs/grafana/mell.json, the Grafana dashboard, from the list of its panels."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "grafana" / "mell.json"

RATE, RANGE = "$__rate_interval", "$__range"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 24, 8
PROMPTED, DELIVERED = (f'mell_cache_tokens_total{{stage="{stage}"}}' for stage in ("prompt", "delivered"))


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `queries` are pairs of an expression and its legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""
    kind: str = "timeseries"
    stacked: bool = False


def per_s(counter: str, by: str = "") -> str:
    """A counter's rate, over all processes."""
    return f"sum{f' by ({by})' if by else ''} (rate({counter}[{RATE}]))"


def quantiles(histogram: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """The median and the tails of a histogram."""
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    inner = per_s(f"{histogram}_bucket", labels)
    return tuple((f"histogram_quantile({q / 100}, {inner})", f"p{q}{legend}") for q in (50, 95, 99))


def mean(histogram: str, by: str) -> str:
    """The mean of a histogram's observations."""
    return f"{per_s(f'{histogram}_sum', by)} / {per_s(f'{histogram}_count', by)}"


ROWS: dict[str, tuple[Panel, ...]] = {
    "GPUs": (
        Panel(
            "Replicas",
            "short",
            (("sum by (state) (mell_replicas)", "{{state}}"), ("sum(mell_replicas_wanted)", "wanted")),
            "Engine replicas by state, and the number wanted by the scheduler.",
        ),
        Panel(
            "Roles",
            "short",
            (("sum by (role) (mell_replica_roles)", "{{role}}"),),
            "Running replicas by their part in prefill and decoding.",
            stacked=True,
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            (("vllm:kv_cache_usage_perc", "{{replica}}"), ("avg(vllm:kv_cache_usage_perc)", "mean")),
            "Share of each replica's KV blocks in use, by vLLM's count.",
        ),
        Panel(
            "Time to free a replica",
            "s",
            quantiles("mell_time_to_free_replica_seconds"),
            "From the decision to close a replica until it has left Serve's list.",
        ),
        Panel(
            "GPU-hours",
            "h",
            ((f"sum(increase(mell_gpu_seconds_total[{RANGE}])) / 3600", "in the shown period"),),
            "Hours of replicas that are not asleep; multiply by the number of GPUs per replica.",
            "stat",
        ),
    ),
    "Requests": (
        Panel("Time to first token", "s", quantiles("mell_request_ttft_seconds")),
        Panel("Between tokens", "s", quantiles("mell_request_itl_seconds"), "Includes pauses of migrations."),
        Panel(
            "Second token after the first",
            "s",
            quantiles("mell_request_second_token_seconds"),
            "With prefill and decoding on different replicas it includes the hand-over.",
        ),
        Panel("Ended, by outcome", "reqps", ((per_s("mell_requests_total", "outcome"), "{{outcome}}"),), stacked=True),
        Panel(
            "Lost requests",
            "short",
            ((f"sum(increase(mell_requests_lost_total[{RANGE}]))", "in the shown period"),),
            "Running requests that could not continue on another replica. The target is 0.",
            "stat",
        ),
    ),
    "Load": (
        Panel(
            "Running requests",
            "short",
            (
                ("sum(mell_requests_running)", "at the ingresses"),
                ("sum(vllm:num_requests_running)", "running in engines"),
                ("sum(vllm:num_requests_waiting)", "waiting in engines"),
            ),
        ),
        Panel(
            "Tokens of ended requests",
            "short",
            (
                (per_s("mell_request_prompt_tokens_total"), "prompts, per s"),
                (per_s("mell_request_completion_tokens_total"), "output, per s"),
            ),
        ),
        Panel("Preemptions", "ops", ((per_s("vllm:num_preemptions_total", "replica"), "{{replica}}"),)),
    ),
    "Prefix caches": (
        Panel(
            "Prompt tokens from the cache",
            "percentunit",
            ((f"{per_s(DELIVERED)} / {per_s(PROMPTED)}", "share"),),
            "Of requests when they began, on their first replica.",
        ),
        Panel(
            "KV blocks by use",
            "short",
            (("sum by (state) (mell_cache_blocks)", "{{state}}"),),
            "Historical blocks are free, and requests can still use their content.",
            stacked=True,
        ),
        Panel(
            "Copies between replicas",
            "ops",
            ((per_s("mell_cache_copies_total", "reason, outcome"), "{{reason}} {{outcome}}"),),
            "Cached prefixes. An aborted copy costs nothing but the attempt.",
            stacked=True,
        ),
        Panel(
            "Repairs of mirrors",
            "short",
            ((f"sum by (reason) (increase(mell_cache_resyncs_total[{RANGE}]))", "{{reason}}"),),
            "In the shown period. One start per replica; audits should find nothing.",
            "stat",
        ),
    ),
    "Memory (memory.budget_mib)": (
        Panel(
            "Memory of models",
            "bytes",
            (
                ("sum by (pool) (mell_memory_bytes)", "{{pool}}"),
                ("sum(mell_memory_budget_bytes)", "budget of all nodes"),
            ),
            "What the replicas of each model may have. Replicas that start are not in it before their first report.",
        ),
        Panel(
            "Memory by use",
            "bytes",
            (("sum by (kind) (mell_memory_bytes)", "{{kind}}"),),
            "Parameters, KV pools, and the rest of the processes.",
            stacked=True,
        ),
        Panel(
            "KV blocks used",
            "percentunit",
            (
                (
                    'sum by (replica) (mell_kv_blocks{state="used"}) '
                    '/ sum by (replica) (mell_kv_blocks{state=~"used|free"})',
                    "{{replica}}",
                ),
            ),
            "Of the blocks that the engine hands out at present.",
        ),
        Panel(
            "Resizes",
            "ops",
            ((per_s("mell_resizes_total", "direction, outcome"), "{{direction}} {{outcome}}"),),
            "Ended resizes of KV pools.",
            stacked=True,
        ),
        Panel(
            "Asleep and woken",
            "short",
            (
                ('sum by (pool) (mell_replicas{state="ASLEEP"})', "{{pool}} asleep"),
                (f"sum by (pool, outcome) (increase(mell_wakes_total[{RATE}]))", "{{pool}} wakes {{outcome}}"),
            ),
            "Replicas that sleep, and the wakes that ended.",
        ),
        Panel(
            "Pairs of replicas",
            "short",
            (("sum by (pool, phase) (mell_pairs)", "{{pool}} {{phase}}"),),
            "Pairs that form, that share their layers, and that end.",
        ),
        Panel(
            "Waits in pairs",
            "s",
            (
                (
                    f"sum by (replica) (rate(mell_hop_seconds_sum[{RATE}])) "
                    f"/ sum by (replica) (rate(mell_hop_seconds_count[{RATE}]))",
                    "{{replica}}",
                ),
            ),
            "Mean wait of a step for the layers at the other replica.",
        ),
    ),
    "Migrations": (
        Panel(
            "Migrations",
            "ops",
            ((per_s("mell_migrations_total", "path, reason, outcome"), "{{path}} {{reason}} {{outcome}}"),),
            "Ended migrations, and resubmissions after the death of a replica (replica lost).",
            stacked=True,
        ),
        Panel(
            "Pause",
            "s",
            quantiles("mell_migration_pause_seconds", "path"),
            "Pauses of committed migrations, from the freeze to the target's confirmation.",
        ),
        Panel(
            "Predicted and actual",
            "s",
            (
                (mean("mell_migration_predicted_seconds", "path"), "predicted, {{path}}"),
                (mean("mell_migration_seconds", "path"), "actual, {{path}}"),
            ),
            "Means, from the order to the first token at the target.",
        ),
        Panel("KV sent", "Bps", ((per_s("mell_migration_bytes_total"), "KV"),)),
    ),
    "Dry run (scheduler.mode: observe)": (
        Panel(
            "Replicas",
            "short",
            (("sum(mell_replicas)", "now"), ("sum(mell_dry_run_replicas_needed)", "needed in mode act")),
        ),
        Panel(
            "Moves",
            "ops",
            ((per_s("mell_dry_run_moves_total"), "in mode act"),),
            "Each request counts once until it leaves its replica.",
        ),
    ),
    "Processes": (
        Panel(
            "Missing from the scrape",
            "short",
            (("sum by (deployment) (mell_metrics_unreachable)", "{{deployment}}"),),
            "Processes whose metrics did not arrive in time.",
        ),
    ),
}


def page() -> str:
    """The whole file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def dashboard() -> dict[str, Any]:
    """The dashboard, for Grafana 10 and later."""
    return {
        "uid": "mell",
        "title": "Mell",
        "tags": ["mell"],
        "schemaVersion": 38,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [panel | {"id": number} for number, panel in enumerate(_panels(), 1)],
    }


def _panels() -> Iterator[dict[str, Any]]:
    y = 0
    for title, panels in ROWS.items():
        row = {"type": "row", "title": title, "collapsed": False, "panels": []}
        yield row | {"gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        width = WIDTH // len(panels)
        for index, panel in enumerate(panels):
            yield _drawn(panel) | {"gridPos": {"x": index * width, "y": y + 1, "w": width, "h": HEIGHT}}
        y += 1 + HEIGHT


def _drawn(panel: Panel) -> dict[str, Any]:
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stacked else {}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }
