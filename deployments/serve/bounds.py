"""The bounds on the number of a pool's replicas that an operator has set, in Ray's internal key-value store.

They outlive the scheduler, and count until Serve ends, or a configuration with other bounds is applied.
"""

import json

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from policies.model import PoolId

Bounds = tuple[int, int]
"""The least and the greatest number of replicas."""

_NAMESPACE = b"mell"


def read_bounds(app: str, pool: PoolId, generation: str, configured: Bounds) -> Bounds:
    """The bounds that count for a pool of an application with these `configured` ones."""
    found = json.loads(_internal_kv_get(_key(app, pool, generation), namespace=_NAMESPACE) or b"{}")
    if found.get("configured") != list(configured):
        return configured
    least, most = found["ordered"]
    return least, most


def write_bounds(app: str, pool: PoolId, generation: str, configured: Bounds, ordered: Bounds) -> None:
    """Write an operator's bounds. Blocks for a round trip to Ray's control service."""
    value = json.dumps({"configured": configured, "ordered": ordered}).encode()
    _internal_kv_put(_key(app, pool, generation), value, overwrite=True, namespace=_NAMESPACE)


def _key(app: str, pool: PoolId, generation: str) -> bytes:
    return f"bounds/{app}/{pool}/{generation}".encode()
