"""The elastic KV pool of a vLLM engine, over the utility calls of its core (`migration.kv.executor`)."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

import psutil

from deployments.engine.vllm_messages import EngineDeadError
from migration.memory.run import EngineEnded, Fitted
from policies.memory.plan import ModelMemory
from policies.model import Blocks, Bytes


class CoreCalls(Protocol):
    """The part of vLLM's client of a core that this room uses."""

    def collective_rpc_async(self, method: str, args: tuple[Any, ...] = ()) -> Coroutine[Any, Any, Sequence[Any]]:
        """Call a method of the core's executor, and so of all workers."""
        ...


class VllmMemory:
    """Implements `EngineMemory`. `on_size` gets every new number of blocks that the engine hands out."""

    def __init__(
        self,
        core: CoreCalls,
        model: ModelMemory,
        size: Blocks,
        declared: Blocks,
        use: Callable[[], float],
        running: Callable[[], int],
        on_size: Callable[[Blocks], None],
        ended: Callable[[], Coroutine[Any, Any, str]],
    ) -> None:
        """`use` is the used share of the blocks that are handed out, `running` the number of running requests.

        `ended` waits for the end of the core, and returns the reason.
        """
        self._core = core
        self._ended = ended
        self._size = self.capacity = self.start = size
        self._use = use
        self._running = running
        self._on_size = on_size
        self.model = model
        self.declared = declared

    @property
    def size(self) -> Blocks:
        """See `EngineMemory.size`."""
        return self._size

    @property
    def used(self) -> Blocks:
        """See `EngineMemory.used`."""
        return Blocks(round(self._size * self._use()))

    def announce(self, blocks: Blocks) -> None:
        """See `EngineMemory.announce`."""
        self.capacity = blocks

    async def fit(self, blocks: Blocks) -> Fitted:
        """See `EngineMemory.fit`. Each running request may need a block more in its next step."""
        return await self._call("mell_fit", blocks, self._running())

    async def release(self, blocks: Blocks) -> str | None:
        """See `EngineMemory.release`."""
        failed = [reason for reason in await self._all("mell_release", blocks + 1) if reason is not None]
        return f"the memory of KV blocks was not given back: {failed[0]}" if failed else None

    async def grow(self, blocks: Blocks) -> None:
        """See `EngineMemory.grow`."""
        await self._call("mell_grow", blocks)

    async def _call(self, method: str, *args: int) -> Fitted:
        """The pool's answer to a call, after which it has another size."""
        (answer,) = await self._all(method, *args)
        fitted = Fitted(*map(Blocks, answer))
        self._size = fitted.size
        self._on_size(fitted.size)
        return fitted

    async def _all(self, method: str, *args: int) -> Sequence[Any]:
        call = asyncio.create_task(self._core.collective_rpc_async(method, args=args))
        # vLLM's client leaves calls unanswered if the core ends.
        end = asyncio.create_task(self._ended())
        try:
            await asyncio.wait((call, end), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise EngineEnded(end.result())
            return call.result()
        except EngineDeadError as error:
            raise EngineEnded(str(error)) from error
        finally:
            call.cancel()
            end.cancel()
            await asyncio.wait((call, end))


def measured(
    workers: Sequence[Mapping[str, int]], processes: Iterable[int], context: int, block_size: int
) -> ModelMemory:
    """The memory of an engine before its first request. `workers` are their own descriptions (`MellWorker`).

    `processes` are those of the replica; what they hold beside parameters is `fixed`. The floor holds one request of
    the model's whole `context` of tokens.
    """
    parameters = sum(worker["parameter_bytes"] for worker in workers)
    fixed = max(0, resident(processes) - parameters)
    block = sum(worker["block_bytes"] for worker in workers)
    floor = Blocks(-(-context // block_size))
    return ModelMemory(Bytes(parameters), Bytes(fixed), Bytes(fixed), Bytes(block), floor)


def resident(processes: Iterable[int]) -> Bytes:
    """The resident memory of processes; those that have ended have none."""
    found = 0
    for pid in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += psutil.Process(pid).memory_info().rss
    return Bytes(found)
