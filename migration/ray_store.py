"""Ray's internal key-value store, under Mell's own namespace: values that outlive the processes of an application.

The only module that knows Ray's calls. Each blocks for a round trip to Ray's control service. Serve ships this module
by value to its controller (`deployments.serve.scaling`), so it imports nothing of the project.
"""

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

_NAMESPACE = b"mell"


def read(key: str) -> bytes | None:
    """The value of a key, None without one."""
    value: bytes | None = _internal_kv_get(key.encode(), namespace=_NAMESPACE)
    return value


def write(key: str, value: bytes, replace: bool = True) -> bool:
    """Set the value of a key. Returns True if there was one, which stays unless `replace`."""
    existed: bool = _internal_kv_put(key.encode(), value, overwrite=replace, namespace=_NAMESPACE)
    return existed


def remove(key: str) -> bool:
    """Remove a key. Returns False if there is none."""
    removed: int = _internal_kv_del(key.encode(), namespace=_NAMESPACE)
    return removed > 0


def keys(prefix: str) -> list[str]:
    """The keys that begin with `prefix`, sorted."""
    found: list[bytes] = _internal_kv_list(prefix.encode(), namespace=_NAMESPACE)
    return sorted(key.decode() for key in found)
