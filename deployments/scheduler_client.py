"""The scheduler as ingresses and replicas see it: it may be slow, restarting or dead, and serving goes on."""

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.cancellation import callee_cancelled

log = logging.getLogger("ray.serve")


class SchedulerClient:
    """Calls to the `Scheduler` deployment."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._cached: DeploymentHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def _handle(self) -> DeploymentHandle:
        if self._cached is None:
            self._cached = serve.get_deployment_handle("Scheduler", self._app).options(_by_reference=False)
        return self._cached

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method; what it raises is raised here.

        Raises:
            TimeoutError: there was no answer in time.
            CalleeCancelled: the scheduler broke the call off.
        """
        with callee_cancelled():
            async with asyncio.timeout(timeout_s):
                return await getattr(self._handle, method).remote(*args)

    def tell(self, method: str, *args: Any) -> None:
        """Call a method without waiting. If it does not arrive, the next report says the same."""
        task = asyncio.create_task(self._tell(method, *args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, method: str, *args: Any) -> None:
        try:
            await self.call(method, *args, timeout_s=5.0)
        except Exception as error:
            log.debug("the scheduler did not hear %s: %r", method, error)
