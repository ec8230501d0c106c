"""The shipped manifest's groups of pods under Ray's KubeRay autoscaler: GPU pods come with load, and go without it.

Kubernetes is played by `tests.integration.kubernetes`, KubeRay's autoscaler is Ray's own, engines are paced.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.cluster_utils import Cluster

from tests.counts import LONG_ONLY
from tests.deploy.manifests import objects, of_kind
from tests.integration.application import eventually
from tests.integration.conftest import ROOT, Stage
from tests.integration.kubernetes import Kubernetes, autoscaling, head_environment
from tests.integration.namespaces import needs_namespaces
from tests.integration.test_4_closed_loop import Streams, scene, until

HEAD, NETWORK = "127.0.3.1", "127.0.4"
IDLE_S = 15
"""The idle time-out of GPU pods: the manifest's is a minute. The first pod waits nearly as long for its replica."""

WITHIN_S = IDLE_S + 20


def cluster() -> dict[str, Any]:
    """The manifest's, with one front, and a short idle time."""
    found: dict[str, Any] = of_kind(objects(), "RayService")["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in found["workerGroupSpecs"]}
    groups["front"] |= {"replicas": 1, "minReplicas": 1, "maxReplicas": 1}
    groups["gpu"]["idleTimeoutSeconds"] = IDLE_S
    return found


def config() -> dict[str, Any]:
    """The manifest's, with paced engines that fill a pod's CPUs in the place of its GPU, and small caches."""
    found: dict[str, Any] = yaml.safe_load(of_kind(objects(), "RayService")["spec"]["serveConfigV2"])
    args = found["applications"][0]["args"]
    ingress, scheduler = args["ingress"], args["scheduler"]
    found["applications"][0]["args"] = {
        "model_loading_config": {"model_id": "mell-tiny"},
        "engine": "paced",
        "engine_kwargs": {
            "num_gpu_blocks_override": 256,
            "block_size": 16,
            "max_model_len": 4000,
            "decode_s": 0.03,
            "startup_s": 0.5,
        },
        "deployment_config": {
            "num_cpus": 8.0,
            "graceful_shutdown_timeout_s": 30.0,
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 2},
        },
        "migration": {"transport": "collective", "slot_mib": 1},
        "scheduler": scheduler | {"epoch_s": 0.5, "linger_s": 2.0, "foresight_s": 0.0, "cooldown_s": 1.0},
        "ingress": {"placement": ingress["placement"], "host": "127.0.0.1"},
    }
    return found


@pytest.fixture
def kubernetes(stage: Stage, tmp_path: Path) -> Iterator[Kubernetes]:
    """A front, and applications that are shown from now on are shown on the pods."""
    stage.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_enable_autoscaler_v2", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        head = {"num_cpus": 0, "no_monitor": True, "include_dashboard": False, "node_ip_address": HEAD}
        ray = Cluster(initialize_head=True, head_node_args=head | {"env_vars": head_environment()})
        pods = Kubernetes(cluster(), ray.address, NETWORK, tmp_path)
        try:
            patch.setenv("RAY_ADDRESS", ray.address)
            with autoscaling(pods, ray.address, tmp_path):
                yield pods
        finally:
            stage.clear()
            pods.close()
            ray.shutdown()


@LONG_ONLY
@needs_namespaces
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_gpu_pods_come_with_load_and_go_without_it(kubernetes: Kubernetes, stage: Stage) -> None:
    application = await asyncio.to_thread(stage.show, "kubernetes", config())
    fronts = kubernetes.pods("front")
    async with scene(application) as (client, load):
        kept = Streams(client)
        try:
            await kept.start(1, 3800, 100, "kept")
            await load.start(4, 3000, 700, "load")
            await until(client, lambda now: len(now) == 2 and all(now.values()), 120)
            assert len(kubernetes.pods("gpu")) == 2
            await load.check()
            await load.leave()

            async def one_is_left() -> bool:
                return len((await client.state())["replicas"]) == 1

            await eventually(one_is_left, 60)

            async def given_back() -> bool:
                return len(kubernetes.pods("gpu")) == 1

            await eventually(given_back, WITHIN_S)
            assert kubernetes.pods("front") == fronts
            await kept.go_on(20)
            await kept.check()
        finally:
            await kept.leave()
