"""deploy/helm: the chart renders the manifest's objects with values of one's own. Skipped without Helm's library."""

import json
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, MANIFEST, Object, errors, objects, of_kind

CHART = DEPLOY / "helm"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.fixture(scope="module")
def helm() -> Any:
    return pytest.importorskip("helm_python", reason="the package helm-python-sdk (250 MB) is not installed")


def rendered(helm: Any, values: Object) -> list[Object]:
    chart = helm.Chart.load(str(CHART))
    rendered = chart.render(values=values, name="chat", namespace="chats")
    return [found for each in rendered.values() for found in yaml.safe_load_all(each) if found]


def text(found: Object) -> str:
    return json.dumps(found, sort_keys=True)


def test_the_chart_has_the_manifest_itself() -> None:
    assert (CHART / "mell.yaml").resolve() == MANIFEST
    assert MANIFEST.read_text().count(f"image: &image {VALUES['image']}\n") == 1


def test_the_chart_has_no_lint(helm: Any) -> None:
    messages = helm.lint(str(CHART))["messages"]
    assert [each for each in messages if each["severity"] > 1] == []


def test_the_objects_are_the_manifests(helm: Any) -> None:
    wanted = [each for each in objects() if each["kind"] not in VALUES["without"]]
    for each in wanted:
        each["metadata"]["namespace"] = "chats"
    found = rendered(helm, {})
    assert sorted(map(text, found)) == sorted(map(text, wanted))


def test_values_change_the_objects(helm: Any) -> None:
    values = {
        "image": "registry.example/mell:1",
        "serveConfig": "applications: []\n",
        "groups": {"gpu": {"maxReplicas": 3}},
        "objects": {"PersistentVolumeClaim": {"spec": {"storageClassName": "fast"}}},
        "without": ["PodMonitor"],
    }
    found = rendered(helm, values)
    assert [error for each in found for error in errors(each)] == []
    service = of_kind(found, "RayService")["spec"]
    groups = {group["groupName"]: group for group in service["rayClusterConfig"]["workerGroupSpecs"]}
    assert (service["serveConfigV2"], groups["gpu"]["maxReplicas"]) == (values["serveConfig"], 3)
    images = {c["image"] for group in groups.values() for c in group["template"]["spec"]["containers"]}
    assert images == {values["image"]}
    assert of_kind(found, "PersistentVolumeClaim")["spec"]["storageClassName"] == "fast"
    assert not [each for each in found if each["kind"] == "PodMonitor"] and of_kind(found, "Secret")
