"""The rendezvous of the two ranks of a group, in Ray's internal key-value store."""

import time
from collections.abc import Callable

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

_NAMESPACE = b"mell"
_POLL_S = 0.005


def put(key: str, value: bytes) -> None:
    """Set the value of a key; an earlier value is overwritten."""
    _internal_kv_put(key.encode(), value, overwrite=True, namespace=_NAMESPACE)


def wait_for(key: str, deadline: float, closed: Callable[[], bool] = lambda: False) -> bytes:
    """Wait until the peer has set a key; return its value.

    Raises:
        TimeoutError: the key is not set by `deadline` (of `time.monotonic`).
        RuntimeError: `closed` returned True.
    """
    while (value := _internal_kv_get(key.encode(), namespace=_NAMESPACE)) is None:
        if closed():
            raise RuntimeError(f"{key}: closed while waiting for the peer")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{key}: timed out, the peer did not appear")
        time.sleep(_POLL_S)
    found: bytes = value
    return found


def delete(key: str) -> None:
    """Delete a key, if it exists."""
    _internal_kv_del(key.encode(), namespace=_NAMESPACE)
