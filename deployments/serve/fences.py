"""Fences of schedulers, in Ray's internal key-value store: each scheduler of an application has a higher one.

Serve may run two for a moment: in a redeploy, or after a failed health check. Replicas obey only the highest fence that
they have seen, so the older scheduler's orders are refused.
"""

from migration import ray_store
from migration.protocol.errors import Refused
from policies.causes import Cause


def next_fence(app: str) -> int:
    """A fence above all earlier ones of the application in this cluster. No two callers get the same."""
    newest = f"fence/{app}"
    fence = int(ray_store.read(newest) or 0) + 1
    while ray_store.write(_key(app, fence), b"taken", replace=False):
        fence += 1
    ray_store.write(newest, str(fence).encode())
    return fence


def check_newest(app: str, fence: int) -> None:
    """Raise `Refused` if a scheduler with a higher fence has begun."""
    if ray_store.read(_key(app, fence + 1)) is not None:
        raise Refused(f"a newer scheduler than that with fence {fence} has begun", Cause.SUPERSEDED)


def _key(app: str, fence: int) -> str:
    return f"fence/{app}/{fence}"
