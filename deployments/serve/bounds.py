"""The bounds on the number of a pool's replicas that an operator has set, in Ray's internal key-value store.

They outlive the scheduler, and count until Serve ends, or a configuration with other bounds is applied.
"""

from pydantic import TypeAdapter

from deployments.serve.ordered import read_ordered, write_ordered
from policies.model import PoolId

Bounds = tuple[int, int]
"""The least and the greatest number of replicas."""

_BOUNDS: TypeAdapter[Bounds] = TypeAdapter(Bounds)


def read_bounds(app: str, pool: PoolId, generation: str, configured: Bounds) -> Bounds:
    """The bounds that count for a pool of an application with these `configured` ones."""
    return read_ordered(_key(app, pool, generation), configured, _BOUNDS)


def write_bounds(app: str, pool: PoolId, generation: str, configured: Bounds, ordered: Bounds) -> None:
    """Write an operator's bounds. Blocks for a round trip to Ray's control service."""
    write_ordered(_key(app, pool, generation), configured, ordered, _BOUNDS)


def _key(app: str, pool: PoolId, generation: str) -> str:
    return f"bounds/{app}/{pool}/{generation}"
