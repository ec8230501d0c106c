"""An event loop whose clock leaps to the next timer when nothing is left to do: sleeps and time-outs take no time.

Tests marked `virtual_time` run in it; `now` is the clock to inject. Nothing may wait for threads, processes or sockets
meanwhile: time would run away.
"""

import asyncio
import selectors
from typing import Any, cast


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while something happens. It wakes `late_s` after it should; `timers` counts timers set."""

    def __init__(self) -> None:
        super().__init__(LeapingSelector(self))
        self.now_s = 0.0
        self.late_s = 0.0
        self.timers = 0

    def time(self) -> float:
        return self.now_s

    def call_at(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self.timers += 1
        return super().call_at(*args, **kwargs)


class LeapingSelector(selectors.SelectSelector):
    """Never waits; the loop's time passes instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("every task waits, and no timer is set")
        if not ready and timeout is not None and timeout > 0:
            self._loop.now_s += timeout + self._loop.late_s
        return ready


def virtual_loop() -> VirtualLoop:
    """The loop that the test runs in."""
    return cast(VirtualLoop, asyncio.get_running_loop())


def now() -> float:
    """Seconds of virtual time since the loop was made."""
    return asyncio.get_running_loop().time()
