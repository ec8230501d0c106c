"""The rendezvous of the two ranks of a group, in Ray's internal key-value store."""

import time
from collections.abc import Callable

from migration import ray_store

_POLL_S = 0.005


def put(key: str, value: bytes) -> None:
    """Set the value of a key; an earlier value is overwritten."""
    ray_store.write(key, value)


def wait_for(key: str, deadline: float, closed: Callable[[], bool] = lambda: False) -> bytes:
    """Wait until the peer has set a key; return its value.

    Raises:
        TimeoutError: the key is not set by `deadline` (of `time.monotonic`).
        RuntimeError: `closed` returned True.
    """
    while (value := ray_store.read(key)) is None:
        if closed():
            raise RuntimeError(f"{key}: closed while waiting for the peer")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{key}: timed out, the peer did not appear")
        time.sleep(_POLL_S)
    return value


def delete(key: str) -> None:
    """Delete a key, if it exists."""
    ray_store.remove(key)
