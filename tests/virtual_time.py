"""An event loop whose clock leaps to the next timer when nothing is left to do: sleeps and time-outs take no time.

Tests marked `virtual_time` run in it; `now` is the clock to inject. Nothing may wait for threads, processes or sockets
meanwhile: time would run away.
"""

import asyncio
import selectors
from typing import Any


class LeapingSelector(selectors.SelectSelector):
    """Never waits; counts how long it would have waited."""

    waited_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits, and no timer is set")
        self.waited_s += 0.0 if ready or timeout is None else max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._leaping = LeapingSelector()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.waited_s


def now() -> float:
    """Seconds of virtual time since the loop was made."""
    return asyncio.get_running_loop().time()
