"""A vLLM engine's side of a pair, over the utility calls of its core (`migration.kv.pair`)."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from deployments.engine.resizing import VllmMemory
from migration.memory.pair_run import HOP_S, PairLook
from migration.memory.run import EngineEnded

_RETRY_S = 0.05


class PausingCore(Protocol):
    """The part of vLLM's client of a core with which steps are paused."""

    def pause_scheduler_async(self, mode: str, clear_cache: bool) -> Coroutine[Any, Any, None]:
        """Have the core make no step."""
        ...

    def resume_scheduler_async(self) -> Coroutine[Any, Any, None]:
        """Have the core make steps again."""
        ...

    def reset_prefix_cache_async(self, reset_running_requests: bool) -> Coroutine[Any, Any, bool]:
        """Empty the prefix cache, and have running requests computed anew. Raises if blocks are in use elsewhere."""
        ...


class VllmHalf:
    """Implements `EngineHalf`. `lost` has loads under way fail, `forgotten` comes once the prefix cache is empty."""

    def __init__(
        self,
        core: PausingCore,
        memory: VllmMemory,
        layers: int,
        unable: str | None,
        lost: Callable[[], None],
        forgotten: Callable[[], None],
        hop_s: float = HOP_S,
    ) -> None:
        self._core = core
        self._memory = memory
        self._lost = lost
        self._forgotten = forgotten
        self._hop_s = hop_s
        self.layers = layers
        self.unable = unable

    async def listen(self, epoch: int) -> str:
        """See `EngineHalf.listen`."""
        address: str = await self._worker("listen", epoch)
        return address

    async def link(self, address: str, epoch: int) -> str | None:
        """See `EngineHalf.link`."""
        return await self._reason("link", address, epoch, self._hop_s)

    async def copy(self, layer: int, back: bool) -> None:
        """See `EngineHalf.copy`."""
        await self._worker("copy", layer, back)

    async def give(self, layer: int) -> str | None:
        """See `EngineHalf.give`."""
        return await self._reason("give", layer)

    async def take_back(self, layer: int) -> str | None:
        """See `EngineHalf.take_back`."""
        return await self._reason("take_back", layer)

    async def forget(self, layer: int, back: bool) -> None:
        """See `EngineHalf.forget`."""
        await self._worker("forget", layer, back)

    async def load(self) -> str | None:
        """See `EngineHalf.load`."""
        return await self._reason("load")

    async def look(self) -> PairLook:
        """See `EngineHalf.look`."""
        return PairLook(**await self._worker("look"))

    async def abandon(self) -> None:
        """See `EngineHalf.abandon`."""
        await self._worker("abandon")

    async def forget_kv(self, within_s: float) -> str | None:
        """See `EngineHalf.forget_kv`. Requests that wait for KV of other replicas are in the way until they fail."""
        deadline = time.monotonic() + within_s
        await self._memory.unless_ended(self._core.pause_scheduler_async("keep", False))
        while True:
            self._lost()
            try:
                if await self._memory.unless_ended(self._core.reset_prefix_cache_async(reset_running_requests=True)):
                    self._forgotten()
                    return None
                failure = "the prefix cache is in use"
            except EngineEnded:
                raise
            except Exception as error:
                failure = str(error)
            if time.monotonic() >= deadline:
                return failure
            await asyncio.sleep(_RETRY_S)

    async def be_whole(self) -> None:
        """See `EngineHalf.be_whole`."""
        await self._worker("be_whole")
        await self._memory.unless_ended(self._core.resume_scheduler_async())

    async def close(self) -> None:
        """See `EngineHalf.close`."""
        await self._worker("close")

    async def _worker(self, method: str, *args: Any) -> Any:
        """Call the only worker."""
        (answer,) = await self._memory.call_workers(f"mell_pair_{method}", *args)
        return answer

    async def _reason(self, method: str, *args: Any) -> str | None:
        answer: str | None = await self._worker(method, *args)
        return answer
