"""Calls that their callee cancels.

If the callee's task is cancelled, Ray Serve raises `CancelledError` in the caller's task (tested with Ray 2.60). Error
handlers do not catch this class, so it would end the caller's task, which nobody has cancelled.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class CalleeCancelled(ConnectionError):
    """The callee has cancelled the call."""


@contextmanager
def callee_cancelled() -> Iterator[None]:
    """Raise CalleeCancelled in place of a `CancelledError`, unless the current task itself is being cancelled."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CalleeCancelled("the callee cancelled the call") from error
