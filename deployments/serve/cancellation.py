"""Calls that their callee cancels.

Where the callee's task is cancelled, Ray Serve raises `CancelledError` in the caller's (tested with Ray 2.60). Nobody
cancelled the caller, and nothing that handles errors catches it: unless it is told apart, it ends the caller's task.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class CalleeCancelled(ConnectionError):
    """The callee broke the call off."""


@contextmanager
def callee_cancelled() -> Iterator[None]:
    """Raises CalleeCancelled for a `CancelledError` that is not meant for the task that runs this."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CalleeCancelled("the callee broke the call off") from error
