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


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `queries` are pairs of an expression and its legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    told: str = ""
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
    """The mean of what a histogram observed."""
    return f"{per_s(f'{histogram}_sum', by)} / {per_s(f'{histogram}_count', by)}"


ROWS: dict[str, tuple[Panel, ...]] = {
    "GPUs": (
        Panel(
            "Replicas",
            "short",
            (("sum by (state) (mell_replicas)", "{{state}}"), ("sum(mell_replicas_wanted)", "wanted")),
            "Engine replicas by state, and how many there are to be by the scheduler's word.",
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            (("vllm:kv_cache_usage_perc", "{{replica}}"), ("avg(vllm:kv_cache_usage_perc)", "mean")),
            "Share of each replica's KV blocks that is in use, as vLLM counts.",
        ),
        Panel(
            "Time to free a replica",
            "s",
            quantiles("mell_time_to_free_replica_seconds"),
            "From the decision to empty it until Serve lists it no more.",
        ),
        Panel(
            "GPU-hours",
            "h",
            ((f"sum(increase(mell_gpu_seconds_total[{RANGE}])) / 3600", "in the time shown"),),
            "Time times replicas. With several GPUs per replica multiply by them.",
            "stat",
        ),
    ),
    "Requests": (
        Panel("Time to first token", "s", quantiles("mell_request_ttft_seconds")),
        Panel("Between tokens", "s", quantiles("mell_request_itl_seconds"), "Pauses of migrations are in it."),
        Panel("Ended, by outcome", "reqps", ((per_s("mell_requests_total", "outcome"), "{{outcome}}"),), stacked=True),
        Panel(
            "Lost requests",
            "short",
            ((f"sum(increase(mell_requests_lost_total[{RANGE}]))", "in the time shown"),),
            "Requests under way that could not be continued elsewhere. The target is 0.",
            "stat",
        ),
    ),
    "Load": (
        Panel(
            "Requests under way",
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
    "Migrations": (
        Panel(
            "Migrations",
            "ops",
            ((per_s("mell_migrations_total", "path, reason, outcome"), "{{path}} {{reason}} {{outcome}}"),),
            "Migrations that ended, and resubmissions after a death (replica lost).",
            stacked=True,
        ),
        Panel(
            "Pause",
            "s",
            quantiles("mell_migration_pause_seconds", "path"),
            "Of committed migrations, from the freeze to the target's confirmation.",
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
            (("sum(mell_replicas)", "exist"), ("sum(mell_dry_run_replicas_needed)", "would be needed")),
        ),
        Panel(
            "GPUs saved",
            "short",
            ((f"{per_s('mell_gpu_seconds_total')} - {per_s('mell_dry_run_gpu_seconds_total')}", "would be saved"),),
            "The mean number of replicas that acting would save. Below zero it would take more.",
        ),
        Panel(
            "Moves",
            "ops",
            ((per_s("mell_dry_run_moves_total"), "there would be"),),
        ),
        Panel(
            "KV and tokens of moves",
            "short",
            (
                (per_s("mell_dry_run_moved_bytes_total"), "bytes per s"),
                (per_s("mell_dry_run_moved_tokens_total"), "tokens per s"),
            ),
            "As if every move sent all of its KV.",
        ),
        Panel("Would wait for a place", "short", (("sum(mell_dry_run_requests_waiting)", "requests"),)),
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
        "description": panel.told,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }
