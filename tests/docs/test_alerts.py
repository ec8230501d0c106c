"""The alerts for Prometheus: their metrics and labels exist, and each fires when it should, and not before."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs import markdown
from tests.docs.test_grafana import exported, labels_of, metrics_of

FILE = markdown.ROOT / "docs/prometheus/alerts.yml"
(GROUP,) = yaml.safe_load(FILE.read_text())["groups"]
RULES: list[dict[str, Any]] = GROUP["rules"]
NAMES = [rule["alert"] for rule in RULES]

FIRING: dict[str, dict[str, str]] = {
    "MellUnreachable": {'up{job="mell"}': "0x60"},
    "MellNoReplica": {
        'mell_replicas{pool="a", state="RUNNING"}': "0x60",
        'mell_replicas{pool="a", state="STARTING"}': "1x60",
        'mell_replicas{pool="b", state="RUNNING"}': "2x60",
    },
    "MellRequestsLost": {"mell_requests_lost_total": "0+1x60"},
    "MellInternalErrors": {'mell_requests_total{outcome="internal_error"}': "0+1x60"},
    "MellWrongCache": {'mell_cache_recomputations_total{outcome="different"}': "0+1x60"},
    "MellRefusesRequests": {
        'mell_requests_total{outcome="saturated"}': "0+10x60",
        'mell_requests_total{outcome="stop"}': "0+90x60",
    },
    "MellNeedsReplicas": {'mell_replicas_reason{decision="open", reason="requests"}': "1x60"},
    "MellReplicaDoesNotStart": {
        'mell_replicas_wanted{pool="a"}': "2x60",
        'mell_replicas_wanted{pool="b"}': "2x60",
        'mell_replicas{pool="a", state="RUNNING"}': "1x60",
        'mell_replicas{pool="b", state="RUNNING"}': "2x60",
    },
    "MellServiceLevelMissed": {
        'mell_service_p99_seconds{pool="a", time="ttft", of="reached"}': "3x60",
        'mell_service_p99_seconds{pool="a", time="ttft", of="target"}': "2x60",
        'mell_service_p99_seconds{pool="b", time="ttft", of="target"}': "9x60",
    },
    "MellMovesFail": {
        'mell_migrations_total{outcome="aborted"}': "0+3x60",
        'mell_migrations_total{outcome="committed"}': "0+7x60",
    },
    "MellMovesPauseLong": {
        'mell_migration_pause_seconds_bucket{le="1"}': "0+1x60",
        'mell_migration_pause_seconds_bucket{le="5"}': "0+9x60",
        'mell_migration_pause_seconds_bucket{le="+Inf"}': "0+9x60",
    },
    "MellProcessSilent": {'mell_metrics_unreachable{deployment="Engine"}': "1x60"},
}
"""Series, a sample a minute, on which each alert fires."""

HEALTHY = {
    'up{job="mell"}': "1x60",
    'mell_replicas{state="RUNNING"}': "2x60",
    "mell_replicas_wanted": "2x60",
    "mell_requests_lost_total": "0x60",
    'mell_requests_total{outcome="internal_error"}': "0x60",
    'mell_requests_total{outcome="saturated"}': "0+1x60",
    'mell_requests_total{outcome="stop"}': "0+90x60",
    'mell_cache_recomputations_total{outcome="different"}': "0x60",
    'mell_replicas_reason{decision="open", reason="requests"}': "0x60",
    'mell_service_p99_seconds{time="ttft", of="reached"}': "1x60",
    'mell_service_p99_seconds{time="ttft", of="target"}': "2x60",
    'mell_migrations_total{outcome="aborted"}': "0+1x60",
    'mell_migrations_total{outcome="committed"}': "0+9x60",
    'mell_migration_pause_seconds_bucket{le="1"}': "0+9x60",
    'mell_migration_pause_seconds_bucket{le="+Inf"}': "0+9x60",
    'mell_metrics_unreachable{deployment="Engine"}': "0x60",
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed"
)


def test_every_metric_and_label_is_exported() -> None:
    names = exported() | {"up": {"job", "instance"}}
    for rule in RULES:
        metrics = metrics_of(rule["expr"]) or {"up"}
        assert metrics <= names.keys(), rule["alert"]
        shown = re.sub(r"\$labels\.", "", " ".join(rule["annotations"].values()))
        labels = labels_of({"expr": rule["expr"], "legendFormat": shown}) - {"le"}
        assert labels <= set().union(*(names[metric] for metric in metrics)), rule["alert"]


def test_every_alert_is_in_the_documentation_and_says_what_to_do() -> None:
    page = (markdown.ROOT / "docs/metrics.md").read_text()
    assert len(set(NAMES)) == len(NAMES) and FIRING.keys() == set(NAMES)
    assert not [name for name in NAMES if f"`{name}`" not in page]
    assert all(set(rule["annotations"]) == {"summary", "action"} for rule in RULES)


@needs_promtool
def test_each_fires_on_its_fault_and_none_on_a_healthy_mell(tmp_path: Path) -> None:
    def case(series: dict[str, str], alerts: Iterable[str]) -> dict[str, Any]:
        expected = [{"eval_time": "59m", "alertname": name, "exp_alerts": []} for name in alerts]
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": expected,
        }

    tests = [case(HEALTHY, NAMES)]
    (tmp_path / "healthy.yml").write_text(json.dumps({"rule_files": [str(FILE)], "tests": tests}))
    assert promtool("test", "rules", str(tmp_path / "healthy.yml")) == ""
    # promtool compares whole alerts. That each is missing from a test without any shows that it fires.
    for name, series in FIRING.items():
        path = tmp_path / f"{name}.yml"
        path.write_text(json.dumps({"rule_files": [str(FILE)], "tests": [case(series, [name])]}))
        assert f"alertname: {name}" in promtool("test", "rules", str(path)), name


def promtool(*words: str) -> str:
    """The failures that promtool reports."""
    done = subprocess.run(["promtool", *words], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@needs_promtool
def test_prometheus_reads_the_rules() -> None:
    assert promtool("check", "rules", str(FILE)) == ""
