"""Names of Ray Serve's own modules that several of Mell's need, and Serve's controller."""

from typing import Any

import ray
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

__all__ = ["SERVE_NAMESPACE", "DeploymentID", "controller"]


def controller() -> Any:
    """The actor of Serve's controller. Raises ValueError while there is none."""
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
