"""The bounds on the number of a pool's replicas that an operator has set, in Ray's internal key-value store.

They outlive the scheduler, and count until Serve ends, or a configuration with other bounds is applied.
"""

import json

from migration import ray_store
from policies.model import PoolId

Bounds = tuple[int, int]
"""The least and the greatest number of replicas."""


def read_bounds(app: str, pool: PoolId, generation: str, configured: Bounds) -> Bounds:
    """The bounds that count for a pool of an application with these `configured` ones."""
    found = json.loads(ray_store.read(_key(app, pool, generation)) or b"{}")
    if found.get("configured") != list(configured):
        return configured
    least, most = found["ordered"]
    return least, most


def write_bounds(app: str, pool: PoolId, generation: str, configured: Bounds, ordered: Bounds) -> None:
    """Write an operator's bounds. Blocks for a round trip to Ray's control service."""
    value = json.dumps({"configured": configured, "ordered": ordered}).encode()
    ray_store.write(_key(app, pool, generation), value)


def _key(app: str, pool: PoolId, generation: str) -> str:
    return f"bounds/{app}/{pool}/{generation}"
