"""Stops one particular replica through Serve's controller; Serve's API only takes a number of replicas."""

import asyncio
import logging

from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError

from deployments.serve import scaling
from deployments.serve.internals import controller
from migration.protocol.errors import PeerLost, Refused
from policies.causes import Cause
from policies.model import ReplicaId

log = logging.getLogger("ray.serve")

_PATIENCE_S = 5.0
"""The longest wait for Serve's controller, in seconds. Less than the scheduler's number needs to expire."""

cloudpickle.register_pickle_by_value(scaling)


def generation() -> str:
    """An id of this start of Serve. It changes with `serve shutdown`, not with a restart of the controller."""
    return str(controller()._actor_id.hex())


async def retire(app: str, deployment: str, replica: ReplicaId, count: int) -> bool:
    """Stop exactly this replica and keep `count` others.

    Returns False, and changes nothing, if the installed version of Serve offers no such call. The caller then has to
    lower the number, and to evacuate the replica that Serve stops.

    Raises:
        PeerLost: the controller does not answer. It may still stop the replica.
        Refused: the controller does not run the replica. Nothing changes.
    """
    try:
        async with asyncio.timeout(_PATIENCE_S):
            stops: bool = await controller().__ray_call__.remote(scaling.stop_exactly, app, deployment, replica, count)
    except RayTaskError as error:
        log.warning("Serve cannot stop replica %s by name: %r", replica, error)
        return False
    except (RayError, TimeoutError, ValueError) as error:
        raise PeerLost(f"Serve's controller does not answer: {error!r}") from error
    if not stops:
        raise Refused(f"Serve does not run replica {replica}", Cause.NOT_RUNNING)
    return True
