"""Stops one particular replica through Serve's controller; Serve's API only takes a number of replicas."""

import logging
from typing import Any

import ray
from ray import cloudpickle
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from deployments.serve import scaling
from policies.model import ReplicaId

log = logging.getLogger("ray.serve")

cloudpickle.register_pickle_by_value(scaling)


def controller() -> Any:
    """The actor of Serve's controller. Raises ValueError while there is none."""
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def generation() -> str:
    """An id of this start of Serve. It changes with `serve shutdown`, not with a restart of the controller."""
    return str(controller()._actor_id.hex())


async def retire(app: str, deployment: str, replica: ReplicaId, count: int) -> bool:
    """Stop exactly this replica and keep `count` others.

    Returns False, and changes nothing, if the controller does not run the replica or the call fails. The caller then
    has to lower the number, and to evacuate the replica that Serve stops.
    """
    try:
        return bool(await controller().__ray_call__.remote(scaling.stop_exactly, app, deployment, replica, count))
    except Exception as error:
        log.warning("Serve cannot stop replica %s by name: %r", replica, error)
        return False
