"""Mell's code inside Serve's controller: mirrors the scheduler's number of replicas, and stops exactly the emptied one.

The scheduler's number lives in Ray's internal key-value store, under a key of the pool and this start of Serve. So it
survives restarts of the scheduler and of the controller, and a repeated deployment of the configuration.

Serve ships this module by value to its controller, where the project may not be installed: of the project, it uses only
what is shipped in the same way, and names that are Ray's.
"""

import asyncio
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray._common import utils
from ray.serve._private.common import ReplicaState
from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy

from deployments.serve.internals import DeploymentID
from migration import ray_store
from migration.ray_store import read, write

cloudpickle.register_pickle_by_value(ray_store)

STALE_S = 15.0
"""The age, in seconds, at which the scheduler's number expires. Serve then keeps its current number."""

REQUESTS = "requests"
"""The name of the metric by which replicas report their numbers of requests to Serve."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted number of replicas, as of `at` (seconds since 1970)."""

    count: int
    at: float


def read_wanted(app: str, pool: str, generation: str) -> Wanted | None:
    """The number written last for a pool of an application; None if there is none, or reading fails."""
    try:
        found = read(_key(app, pool, generation))
        return None if found is None else Wanted(**json.loads(found))
    except Exception:
        # An exception in one autoscaling policy would stop the scaling of every application.
        return None


def write_wanted(app: str, pool: str, generation: str, wanted: Wanted) -> None:
    """Write the wanted number of a pool's replicas."""
    value = json.dumps({"count": wanted.count, "at": wanted.at}).encode()
    write(_key(app, pool, generation), value)


def _key(app: str, pool: str, generation: str) -> str:
    return f"wanted/{app}/{pool}/{generation}"


def _generation() -> str:
    """The id of this start of Serve: the controller's actor id, which a restart of the controller keeps."""
    return ray.get_runtime_context().get_actor_id() or ""


class MirrorWanted:
    """An autoscaling policy that returns the scheduler's number. Serve calls it about ten times a second, so it never
    blocks, and it never raises.
    """

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The scheduler's number, or the current target without one; Serve applies min_replicas and max_replicas."""
        wanted = read_wanted(context.app_name, context.deployment_name, _generation())
        if wanted is None or self._wall_clock() - wanted.at > STALE_S:
            return context.target_num_replicas, {}
        return wanted.count, {}


class CountRequests:
    """Serve's default policy, a number of ongoing requests per replica, with the requests that replicas report.

    Serve itself would count calls, but an ingress makes one call per replica for any number of requests.
    """

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """As Serve's default policy, on the reported numbers of requests."""
        counts = (context.aggregated_metrics or {}).get(REQUESTS, {})
        seen = copy.copy(context)
        seen.__dict__["total_num_requests"] = sum(counts.values())
        decided: tuple[float, dict[str, Any]] = replica_queue_length_autoscaling_policy(seen)
        return decided


def stop_exactly(serve_controller: Any, app: str, deployment: str, replica: str, count: int) -> bool:
    """Stop exactly this replica and set the wanted number to `count`, atomically between two steps of the controller.

    Returns False, and changes nothing, if the replica does not run. The calls are internal to Ray (tested with 2.60).
    """

    async def stop() -> bool:
        return _stop(serve_controller, DeploymentID(deployment, app), replica, count)

    # Ray makes this call in a thread beside the controller's event loop.
    loop = _controller_loop()
    return asyncio.run_coroutine_threadsafe(stop(), loop).result() if loop else asyncio.run(stop())


def _stop(serve_controller: Any, deployment: DeploymentID, replica: str, count: int) -> bool:
    manager = serve_controller.deployment_state_manager
    state = manager._deployment_states[deployment]
    states = [ReplicaState.RUNNING, ReplicaState.PENDING_MIGRATION]
    found = {r.replica_id for r in state._replicas.get(states) if r.replica_id.unique_id == replica}
    if not found:
        return False
    write_wanted(deployment.app_name, deployment.name, _generation(), Wanted(count, time.time()))
    state.stop_replicas(found)
    manager.set_target_num_replicas(deployment, count)
    return True


def _controller_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of the controller in this process: that of the task which runs its steps; None without one."""
    loops = (task.get_loop() for task in tuple(utils._BACKGROUND_TASKS) if "run_control_loop" in repr(task.get_coro()))
    return next(loops, None)
