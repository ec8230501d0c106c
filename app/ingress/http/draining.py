"""The drain of one ingress process, before it ends: it is unready, and its connections close after their answers.

It still takes calls, since balancers send some until they have seen that it is unready.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOOK_S = 0.1


class Draining:
    """The state of the drain. `running` gives the number of calls that run."""

    def __init__(self, running: Callable[[], int]) -> None:
        self._running = running
        self.active = False

    @property
    def reason(self) -> str | None:
        """The reason why the ingress is unready; None without a drain."""
        return f"draining: {self._running()} calls run" if self.active else None

    async def drain(self, wait_s: float) -> int:
        """Begin to drain, or go on with it. Returns the number of calls that run: 0, or more after `wait_s` seconds.

        Returns early if the drain is undone.
        """
        self.active = True
        for _ in range(math.ceil(wait_s / _LOOK_S)):
            if not (self.active and self._running()):
                break
            await asyncio.sleep(_LOOK_S)
        return self._running()

    def undo(self) -> int:
        """Be ready again. Returns the number of calls that run."""
        self.active = False
        return self._running()


class CloseConnections:
    """Middleware: while the ingress drains, each answer is the last one of its connection."""

    def __init__(self, app: ASGIApp, draining: Draining) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the wrapped application."""

        def closing(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and self._draining.active:
                MutableHeaders(scope=message)["Connection"] = "close"
            return send(message)

        await self._app(scope, receive, closing)
