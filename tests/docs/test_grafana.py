"""The Grafana dashboard asks for what there is: metrics that Mell and vLLM export, and their labels."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.ingress.telemetry.requests import RequestTelemetry
from app.ingress.telemetry.scrape import scrape
from deployments.api.report import ElasticMemory
from deployments.cache.mirror import Mirror
from deployments.cache.occupancy import cache_report
from deployments.metrics.cache import expose_cache
from deployments.metrics.exposition import expose, merge
from deployments.metrics.instruments import LabelledRegistry
from deployments.metrics.telemetry import Telemetry, expose_budgets
from deployments.replica.elastic import expose_memory
from deployments.replica.pairing import PairCounts
from deployments.scheduler.pairs import count_pairs
from docs.make.dashboard import PAGE, page
from migration.kv.cache_events import PoolContents
from migration.memory.run import ResizeCounts, WakeCounts
from migration.protocol.core_messages import Prefilled
from migration.protocol.record import CopyCounts
from policies.cost.service import ServiceLevel
from policies.decision.level.service import ServiceReport
from policies.memory.ledger import MemoryReport, OrderNumber
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import SOLE_POOL, Blocks, Bytes, ReplicaId

DASHBOARD: dict[str, Any] = json.loads(PAGE.read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
TARGETS = [target for panel in PANELS for target in panel.get("targets", [])]
EXPRESSIONS = [target["expr"] for target in TARGETS]

VLLM = {
    "vllm:kv_cache_usage_perc": {"model_name", "engine"},
    "vllm:num_preemptions_total": {"model_name", "engine"},
    "vllm:num_requests_running": {"model_name", "engine"},
    "vllm:num_requests_waiting": {"model_name", "engine"},
}
"""vLLM 0.32's, of vllm/v1/metrics/loggers.py."""


def exported() -> dict[str, set[str]]:
    """Every sample name there may be, with its labels."""
    scheduler, requests = Telemetry(SOLE_POOL), RequestTelemetry("model")
    scheduler.service(ServiceReport(ServiceLevel(ttft_p99_s=1.0)))
    scheduler.dry_run(1, 0)
    scheduler.pairs(count_pairs(()))
    names = {name: labels | {"replica"} for name, labels in VLLM.items()}
    names["mell_metrics_unreachable"] = {"deployment", "replica"}
    for registry in (scheduler._registry, requests._registry):
        names |= dict(_samples(registry))
    mirror = Mirror()
    mirror.take(0, [PoolContents(b"")])
    cache = merge(
        [expose_cache(cache_report(mirror, Blocks(1), Blocks(1), 0, Prefilled(1, 1)), CopyCounts(), {}, SOLE_POOL, "a")]
    ).decode()
    plan, model = MemoryPlan(Blocks(9)), ModelMemory(Bytes(90), Bytes(10), Bytes(5), Bytes(1), Blocks(2))
    reported = MemoryReport(ReplicaId("a"), OrderNumber(0), plan, plan)
    pool = ElasticMemory(reported, model, Blocks(20), Blocks(9), Blocks(9), Blocks(0), "settled")
    memory = merge(
        [
            expose_memory(pool, ResizeCounts(), WakeCounts(), SOLE_POOL, "a"),
            expose_budgets(["node"], Bytes(1000), "s"),
            expose(PairCounts(), {"pool": SOLE_POOL, "replica": "a"}),
        ]
    ).decode()
    for family in text_string_to_metric_families(cache + memory):
        names |= {sample.name: set(sample.labels) for sample in family.samples}
    return names


def _samples(registry: LabelledRegistry) -> Iterable[tuple[str, set[str]]]:
    endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    for collector, (name, *_) in registry._collector_to_names.items():
        (metric,) = collector.describe()  # type: ignore[attr-defined]
        named = [*getattr(collector, "_labelnames", ()), *getattr(metric, "_labelnames", ())]
        labels = {*named, "replica", *registry.labels}
        for ending in endings[metric.type]:
            yield name + ending, labels | ({"le"} if ending == "_bucket" else set())


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:mell_|vllm:)\w+", expression))


def labels_of(target: dict[str, str]) -> set[str]:
    """Labels that an expression groups or filters by, and those that its legend shows."""
    groups = re.findall(r"\b(?:by|without) \(([^)]*)\)", target["expr"])
    filters = re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", target["expr"])
    shown = re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"])
    return {label.strip() for group in groups for label in group.split(",")} | {*filters, *shown}


def test_it_equals_the_output_of_its_generator() -> None:
    assert PAGE.read_text() == page(), "run: python -m docs.make"


def test_panels_have_ids_of_their_own() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids) > 10


def test_no_panel_covers_another() -> None:
    def covers(one: dict[str, int], other: dict[str, int]) -> bool:
        return all(one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in ("xw", "yh"))

    places = {panel["id"]: panel["gridPos"] for panel in PANELS}
    assert not [(a, b) for a, b in combinations(places, 2) if covers(places[a], places[b])]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places.values())


def test_every_metric_is_exported() -> None:
    names = exported()
    assert not {name for expression in EXPRESSIONS for name in metrics_of(expression)} - names.keys()
    assert all(metrics_of(expression) for expression in EXPRESSIONS)


def test_every_label_is_one_of_each_metric_beside_it() -> None:
    names = exported()
    wrong = [
        (metric, labels_of(target) - names[metric])
        for target in TARGETS
        for metric in metrics_of(target["expr"])
        if labels_of(target) - names[metric] - {"le"}
    ]
    assert not wrong
    assert {label for target in TARGETS for label in labels_of(target)} >= {"le", "path", "outcome", "state"}


async def test_missing_metrics_are_reported_by_name_and_label() -> None:
    assert b'mell_metrics_unreachable{deployment="' not in await scrape([], "i")
    assert b"# TYPE mell_metrics_unreachable gauge" in await scrape([], "i")


def test_all_that_mell_exports_of_a_dry_run_and_of_migrations_is_shown() -> None:
    shown = {name for expression in EXPRESSIONS for name in metrics_of(expression)}
    wanted = {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in exported() if "dry_run" in name or "migration" in name
    }
    assert wanted <= {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed")
def test_prometheus_can_read_every_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$__\w+", "5m", expression)}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(EXPRESSIONS)} rules found" in checked.stdout
