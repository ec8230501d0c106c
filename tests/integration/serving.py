"""Actions of tests on the application's Serve from inside its Ray cluster.

Each function runs in a process of its own: Ray ends whoever has joined a cluster when that cluster ends, and the tests
outlive it.
"""

import asyncio
import multiprocessing
from collections.abc import Callable
from typing import Any

import ray
import yaml
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from deployments.serve.internals import controller
from tests.integration.application import Application


async def stop_replica(replica: str) -> None:
    """Have Serve's controller stop a replica, as it does of its own accord."""
    await _joined(_stop_replica, replica)


async def deploy(application: Application, **scheduler: Any) -> None:
    """Apply the configuration again, with other settings of the scheduler: `serve deploy`."""
    config = yaml.safe_load((application.folder / "serve_config.yaml").read_text())
    config["applications"][0]["args"]["scheduler"] |= scheduler
    await _joined(_deploy, config)


async def _joined(done: Callable[[Any], None], argument: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_connected, args=(done, argument))
    process.start()
    await asyncio.to_thread(process.join)
    assert process.exitcode == 0


def _connected(done: Callable[[Any], None], argument: Any) -> None:
    ray.init("auto")
    done(argument)


def _stop_replica(replica: str) -> None:
    ray.get(controller().__ray_call__.remote(_stop, replica))


def _stop(serve_controller: Any, replica: str) -> None:
    from ray.serve._private.common import DeploymentID, ReplicaState

    state = serve_controller.deployment_state_manager._deployment_states[DeploymentID("Engine", "mell")]
    state.stop_replicas(
        {r.replica_id for r in state._replicas.get([ReplicaState.RUNNING]) if r.replica_id.unique_id == replica}
    )


def _deploy(config: dict[str, Any]) -> None:
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
