"""Where the two ends of a group leave each other word: Ray's internal key-value store."""

import time
from collections.abc import Callable

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

_NAMESPACE = b"mell"
_POLL_S = 0.005


def leave(key: str, value: bytes) -> None:
    """Leave word under a key, in place of what may be there."""
    _internal_kv_put(key.encode(), value, overwrite=True, namespace=_NAMESPACE)


def find(key: str, deadline: float, closed: Callable[[], bool] = lambda: False) -> bytes:
    """Wait until the other end has left word under a key.

    Raises:
        TimeoutError: it did not by `deadline`, of `time.monotonic`.
        RuntimeError: this end was closed.
    """
    while (value := _internal_kv_get(key.encode(), namespace=_NAMESPACE)) is None:
        if closed():
            raise RuntimeError(f"{key}: closed while waiting for the peer")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{key}: timed out, the peer did not appear")
        time.sleep(_POLL_S)
    found: bytes = value
    return found


def erase(key: str) -> None:
    """Take the word back, if there is any."""
    _internal_kv_del(key.encode(), namespace=_NAMESPACE)
