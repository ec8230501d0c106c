"""A number that rises with every scheduler that starts.

Serve may run two schedulers for a moment (redeploy, restart after a failed health check). Replicas obey only
the highest fence they have seen, so the older one can decide nothing any more.
"""

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

_NAMESPACE = b"mell"


def next_fence(app: str) -> int:
    """A fence higher than all before it in this cluster; no two callers get the same."""
    newest = f"fence/{app}".encode()
    fence = int(_internal_kv_get(newest, namespace=_NAMESPACE) or 0) + 1
    while _internal_kv_put(f"fence/{app}/{fence}".encode(), b"taken", overwrite=False, namespace=_NAMESPACE):
        fence += 1
    _internal_kv_put(newest, str(fence).encode(), overwrite=True, namespace=_NAMESPACE)
    return fence
