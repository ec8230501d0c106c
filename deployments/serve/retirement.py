"""Asks Serve's controller to stop one particular replica; Serve's API only takes a number."""

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
    """Serve's controller. Raises ValueError while there is none."""
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def generation() -> str:
    """Names this start of Serve: it changes with `serve shutdown`, not when the controller is restarted."""
    return str(controller()._actor_id.hex())


async def retire(app: str, deployment: str, replica: ReplicaId, count: int) -> bool:
    """Stop that very replica and keep `count` others.

    False if the controller does not run it, or does not know how: then nothing has changed, and the caller has to
    lower the number and evacuate whichever replica Serve stops.
    """
    try:
        return bool(await controller().__ray_call__.remote(scaling.stop_exactly, app, deployment, replica, count))
    except Exception as error:
        log.warning("Serve would not stop replica %s by name: %r", replica, error)
        return False
