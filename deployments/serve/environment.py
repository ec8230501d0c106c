"""The environment of Mell's deployments, which an entry under `deployments` in Serve's configuration replaces.

The build refuses such entries, but Serve applies one that is added later without another build.
"""

import os

MARK = {"MELL_DEPLOYMENT": "1"}
"""Part of the environment of all deployments."""


def check_environment() -> None:
    """Raise RuntimeError in a replica without the environment of its deployment."""
    if not MARK.keys() <= os.environ.keys():
        raise RuntimeError(
            "Serve's configuration has ray_actor_options for this deployment, which replace Mell's environment and "
            "GPUs: remove them under deployments; docs/configuration.md has the settings in their place"
        )
