"""What runs inside Serve's controller: it mirrors the scheduler's number of replicas, and stops just the emptied one.

The scheduler's number lives in Ray's internal key-value store, under a key of this
application and this start of Serve: it survives restarts of the scheduler and of the controller, and a configuration
that is applied again.

Serve ships this module by value to its controller, which may not have the project: it imports nothing of it.
"""

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy

STALE_S = 15.0
"""A scheduler that has not stood by its number for so long has no say; Serve keeps what it has."""

REQUESTS = "requests"
"""The name under which replicas tell Serve how many requests they have."""

_NAMESPACE = b"mell"


@dataclass(frozen=True, slots=True)
class Wanted:
    """`count` replicas are wanted, as of `at` (seconds since the epoch)."""

    count: int
    at: float


def read_wanted(app: str, generation: str) -> Wanted | None:
    """The number that was written last; None if none was, or it cannot be read."""
    try:
        found = _internal_kv_get(_key(app, generation), namespace=_NAMESPACE)
        return None if found is None else Wanted(**json.loads(found))
    except Exception:
        # A policy that raises stops the scaling of every application.
        return None


def write_wanted(app: str, generation: str, wanted: Wanted) -> None:
    """Replace it."""
    value = json.dumps({"count": wanted.count, "at": wanted.at}).encode()
    _internal_kv_put(_key(app, generation), value, overwrite=True, namespace=_NAMESPACE)


def _key(app: str, generation: str) -> bytes:
    return f"wanted/{app}/{generation}".encode()


def _generation() -> str:
    """This start of Serve, in the controller's own words: its actor id, which a restart of the controller keeps."""
    return ray.get_runtime_context().get_actor_id() or ""


class MirrorWanted:
    """An autoscaling policy, called about ten times a second: never blocks or raises."""

    def __init__(self, app: str, wall_clock: Callable[[], float] = time.time) -> None:
        self._app = app
        self._wall_clock = wall_clock

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The scheduler's number, else the current target; Serve applies min_replicas and max_replicas to it."""
        wanted = read_wanted(self._app, _generation())
        if wanted is None or self._wall_clock() - wanted.at > STALE_S:
            return context.target_num_replicas, {}
        return wanted.count, {}


class CountRequests:
    """Serve's own rule, so many ongoing requests per replica, with the requests that replicas say they have.

    Serve would count calls, and an ingress has one per replica however many requests there are.
    """

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """As Serve's default policy."""
        counts = (context.aggregated_metrics or {}).get(REQUESTS, {})
        seen = copy.copy(context)
        seen.__dict__["total_num_requests"] = sum(counts.values())
        decided: tuple[float, dict[str, Any]] = replica_queue_length_autoscaling_policy(seen)
        return decided


def stop_exactly(serve_controller: Any, app: str, deployment: str, replica: str, count: int) -> bool:
    """Stop that very replica and want `count` others; the two change between two steps of the controller.

    False, and nothing has changed, if it does not run. The calls are internal to Ray (tested with 2.60).
    """
    manager = serve_controller.deployment_state_manager
    deployment_id = DeploymentID(deployment, app)
    state = manager._deployment_states[deployment_id]
    states = [ReplicaState.RUNNING, ReplicaState.PENDING_MIGRATION]
    found = {r.replica_id for r in state._replicas.get(states) if r.replica_id.unique_id == replica}
    if not found:
        return False
    write_wanted(app, _generation(), Wanted(count, time.time()))
    state.stop_replicas(found)
    manager.set_target_num_replicas(deployment_id, count)
    return True
