"""deploy/kuberay/mell.yaml: its objects by their schemas, its Serve configuration by Mell's settings, and its hooks."""

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._common.utils import resources_from_ray_options
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.serve.schema import ServeDeploySchema

from app.configuration.documents import IMPORT_PATH
from app.ingress.access.keys import parse_keys
from app.ingress.access.operators import parse_admin_key
from app.ingress.http.control import ROUTES
from app.ingress.http.orders import DrainOrder, parse_order
from app.main import _engine_deployment, _ingress_deployment, _scheduler_deployment, read_settings
from app.settings import Settings
from app.versions import VERSION
from policies.model import SOLE_POOL
from tests.app.cli.shown import takes
from tests.deploy.manifests import MANIFEST, Object, errors, objects, of_kind

OBJECTS = objects()
SERVICE = of_kind(OBJECTS, "RayService")
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
GROUPS = {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}


def container(group: str) -> Object:
    (only,) = GROUPS[group]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def hook(group: str) -> str:
    *shell, line = container(group)["lifecycle"]["preStop"]["exec"]["command"]
    assert shell == ["bash", "-c"] and isinstance(line, str)
    return line


def settings(tmp_path: Path) -> Settings:
    """Mell's settings of the manifest, with the files of its Secret."""
    (application,) = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])["applications"]
    ingress = application["args"]["ingress"]
    for name in ("api_keys_file", "admin_key_file"):
        mounted = Path(ingress[name])
        assert mounted.parent == Path("/etc/mell")
        (tmp_path / mounted.name).write_text(of_kind(OBJECTS, "Secret")["stringData"][mounted.name])
        ingress[name] = str(tmp_path / mounted.name)
    return read_settings(application["args"])


# --- schemas ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", OBJECTS, ids=lambda found: f"{found['kind']}/{found['metadata']['name']}")
def test_an_object_is_valid(found: Object) -> None:
    assert errors(found) == []


@pytest.mark.parametrize(
    ("kind", "path", "wrong"),
    [
        ("RayService", ("spec",), {"serveConfigV3": ""}),
        ("RayService", ("spec", "rayClusterConfig", "autoscalerOptions"), {"idleTimeoutSecond": 60}),
        ("RayService", ("spec", "rayClusterConfig", "workerGroupSpecs", 1), {"maxReplica": 8}),
        ("RayService", ("spec", "rayClusterConfig", "workerGroupSpecs", 0, "template", "spec"), {"volume": []}),
        ("RayService", ("spec", "rayClusterConfig", "workerGroupSpecs", 0), {"replicas": "two"}),
        ("NetworkPolicy", ("spec",), {"podSelectors": {}}),
        ("PodDisruptionBudget", ("spec",), {"maxUnavailables": 1}),
    ],
)
def test_a_misspelt_field_is_found(kind: str, path: tuple[str | int, ...], wrong: Object) -> None:
    broken = copy.deepcopy(of_kind(OBJECTS, kind))
    part: Any = broken
    for step in path:
        part = part[step]
    part |= wrong
    assert any(next(iter(wrong)) in error for error in errors(broken))


# --- Serve's configuration ----------------------------------------------------------------------------


def test_the_configuration_is_valid_for_serve_and_mell(tmp_path: Path) -> None:
    ServeDeploySchema.model_validate(yaml.safe_load(SERVICE["spec"]["serveConfigV2"]))
    made = settings(tmp_path)
    assert made.gpus == 1 and made.ingress.host == "0.0.0.0"


def test_the_keys_are_such(tmp_path: Path) -> None:
    secret = of_kind(OBJECTS, "Secret")["stringData"]
    assert parse_keys(secret["api-keys.yaml"], "it") and parse_admin_key(secret["admin-key"], "it")


def test_ingress_and_scheduler_are_on_fronts_alone(tmp_path: Path) -> None:
    made = settings(tmp_path)
    offered = {
        name: yaml.safe_load(yaml.safe_load(group["rayStartParams"].get("resources", "'{}'")))
        for name, group in GROUPS.items()
    }
    assert offered == {"front": {"front": 1}, "gpu": {}}
    ingress, scheduler = made.ingress.placement.resources, made.scheduler.placement.resources
    assert not made.deployment_config.placement.resources and ingress.keys() == scheduler.keys() == {"front"}
    assert 2 * ingress["front"] + 2 * scheduler["front"] <= 1, "two of each while they are replaced"
    assert 3 * ingress["front"] > 1 and made.ingress.num_replicas == GROUPS["front"]["replicas"]


def test_the_gpu_group_may_be_empty_and_has_room_for_all_replicas(tmp_path: Path) -> None:
    group = GROUPS["gpu"]
    assert group["minReplicas"] == 0
    assert group["maxReplicas"] >= settings(tmp_path).deployment_config.autoscaling_config.max_replicas
    assert CLUSTER["autoscalerOptions"]["version"] == "v2" and CLUSTER["enableInTreeAutoscaling"]


def test_the_autoscaler_has_a_group_for_every_deployment(tmp_path: Path) -> None:
    """It knows the resources of pods that do not run yet from the manifest alone."""
    made = settings(tmp_path)
    metadata = {"name": "mell", "namespace": "mell"}
    config = AutoscalingConfig(_derive_autoscaling_config_from_ray_cr({"metadata": metadata, "spec": CLUSTER}))
    deployments = _engine_deployment(made.models[0], SOLE_POOL), _ingress_deployment(made), _scheduler_deployment(made)
    demands = [
        ResourceRequestUtil.make(resources_from_ray_options(deployment.ray_actor_options)) for deployment in deployments
    ]
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_worker_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count(demands),
        )
    )
    assert reply.infeasible_resource_requests == []
    assert {launch.instance_type: launch.count for launch in reply.to_launch} == {"front": 2, "gpu": 1}


# --- probes, hooks and monitors -----------------------------------------------------------------------


def test_the_probe_is_a_route() -> None:
    assert container("front")["readinessProbe"]["httpGet"]["path"] in {route.path for route in ROUTES}
    assert "readinessProbe" not in container("gpu"), "KubeRay's own probe keeps it unready"


def test_a_front_drains_its_ingress_before_it_ends(tmp_path: Path) -> None:
    words = shlex.split(hook("front").split(";")[0])
    order = parse_order(DrainOrder, words[words.index("--post-data") + 1].encode())
    (route,) = [route for route in ROUTES if words[-1].endswith(route.path) and "POST" in route.methods]
    assert route.path == "/mell/ingress/drain" and words[0] == "wget"
    assert order.wait_s < int(words[words.index("-T") + 1]), "wget waits longer than Mell"
    grace = settings(tmp_path).deployment_config.graceful_shutdown_timeout_s
    assert order.wait_s + grace < GROUPS["front"]["template"]["spec"]["terminationGracePeriodSeconds"]


def test_a_gpu_pod_drains_its_node_before_it_ends() -> None:
    found = re.search(r"mell (node drain .*) \|\| true", hook("gpu"))
    assert found is not None
    words = shlex.split(found[1])
    takes(words)
    waits_s = float(words[words.index("--wait") + 1])
    assert waits_s < GROUPS["gpu"]["template"]["spec"]["terminationGracePeriodSeconds"]


def test_each_process_is_in_one_scrape() -> None:
    (monitor,) = [each for each in OBJECTS if each["kind"] == "PodMonitor" and each["metadata"]["name"] == "mell"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["params"] == {"scope": ["share"]} and endpoint["path"] == "/metrics"
    assert monitor["spec"]["selector"]["matchLabels"]["mell/part"] == "front"


def test_pods_have_no_more_rights_than_they_need() -> None:
    templates = [CLUSTER["headGroupSpec"]["template"], *(group["template"] for group in GROUPS.values())]
    for spec in (template["spec"] for template in templates):
        assert spec["securityContext"]["runAsNonRoot"]
        for each in spec["containers"]:
            assert (
                each["securityContext"]["readOnlyRootFilesystem"]
                and not each["securityContext"]["allowPrivilegeEscalation"]
            )
    assert CLUSTER["authOptions"]["mode"] == "token"


def test_the_image_is_of_this_version_and_has_the_import_path() -> None:
    assert {container(group)["image"] for group in GROUPS} == {f"mell:{VERSION}"}
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"])["applications"][0]["import_path"] == IMPORT_PATH


def test_the_manifest_is_of_the_tested_ray() -> None:
    lock = (MANIFEST.parents[2] / "requirements" / "cpu.lock").read_text()
    assert re.search(r"^ray(\[.*\])?==(\S+)", lock, re.MULTILINE)[2] == CLUSTER["rayVersion"]  # type: ignore[index]
