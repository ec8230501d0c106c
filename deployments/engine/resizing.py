"""The memory of a vLLM engine, over the utility calls of its core (`migration.kv.executor`, `migration.kv.worker`)."""

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from deployments.engine.vllm_messages import EngineDeadError
from migration.memory.run import EngineEnded, Fitted
from migration.protocol.errors import TransferFailed
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes

T = TypeVar("T")


class CoreCalls(Protocol):
    """The part of vLLM's client of a core that this room uses."""

    def collective_rpc_async(self, method: str, args: tuple[Any, ...] = ()) -> Coroutine[Any, Any, Sequence[Any]]:
        """Call a method of the core's executor, and so of all workers."""
        ...


class Steps(Protocol):
    """The engine's steps, as far as its memory depends on them."""

    @property
    def use(self) -> float:
        """The used share of the blocks that are handed out."""
        ...

    @property
    def running(self) -> int:
        """The number of running requests."""
        ...

    def resized(self, blocks: Blocks) -> None:
        """The engine hands out another number of blocks."""
        ...

    async def end(self) -> str:
        """Wait for the end of the core; the reason."""
        ...

    async def pause(self) -> None:
        """Have the core compute nothing from now on, with no block in its prefix cache.

        Raises TransferFailed if requests hold blocks.
        """
        ...

    def resume(self) -> None:
        """Have the core compute again."""
        ...


class VllmMemory:
    """Implements `EngineMemory`. `processes` hold the memory, those of the engine and of its replica."""

    def __init__(
        self,
        core: CoreCalls,
        steps: Steps,
        model: ModelMemory,
        size: Blocks,
        declared: Blocks,
        processes: Collection[int] = (),
        sleepless: str | None = None,
    ) -> None:
        self._core = core
        self._steps = steps
        self._size = self.capacity = self.start = size
        self._processes = processes
        self._excess = Bytes(0)
        self.model = model
        self.declared = declared
        self.sleepless = sleepless

    @property
    def size(self) -> Blocks:
        """See `EngineMemory.size`."""
        return self._size

    @property
    def used(self) -> Blocks:
        """See `EngineMemory.used`."""
        return Blocks(round(self._size * self._steps.use))

    def measure(self, held: MemoryPlan) -> None:
        """See `EngineMemory.measure`. KV pages that no request has used yet hide some of it until one uses them."""
        excess, before = max(0, resident(self._processes) - self.model.need(held)), self._excess
        grown = min(excess, before)
        self._excess = Bytes(excess - grown)
        if grown:
            model = self.model
            self.model = replace(model, fixed=Bytes(model.fixed + grown), asleep=Bytes(model.asleep + grown))

    def announce(self, blocks: Blocks) -> None:
        """See `EngineMemory.announce`."""
        self.capacity = blocks

    async def fit(self, blocks: Blocks) -> Fitted:
        """See `EngineMemory.fit`. Each running request may need a block more in its next step."""
        return await self._call("mell_fit", blocks, self._steps.running)

    async def release(self, blocks: Blocks) -> str | None:
        """See `EngineMemory.release`."""
        failed = _first(await self.call_workers("mell_release", blocks + 1))
        return f"the memory of KV blocks was not given back: {failed}" if failed else None

    async def grow(self, blocks: Blocks) -> None:
        """See `EngineMemory.grow`."""
        await self._call("mell_grow", blocks)

    async def drop(self) -> str | None:
        """See `EngineMemory.drop`."""
        try:
            await self.unless_ended(self._steps.pause())
            # Also once it is empty: pages may be there of an earlier size.
            while (await self._call("mell_fit", Blocks(0), 0)).size:
                pass
        except TransferFailed as error:
            return str(error)
        failed = await self.release(Blocks(0)) or _first(await self.call_workers("mell_drop"))
        self.model = replace(self.model, asleep=resident(self._processes))
        return failed

    async def load(self, blocks: Blocks) -> str | None:
        """See `EngineMemory.load`. Of several workers, all have parameters again or none."""
        if failed := _first(await self.call_workers("mell_load")):
            await self.call_workers("mell_drop")
            return failed
        while (await self._call("mell_fit", blocks, 0)).size > blocks:
            pass
        await self.grow(blocks)
        if failed := await self.release(blocks):
            return failed
        self._steps.resume()
        return None

    async def _call(self, method: str, *args: int) -> Fitted:
        """The pool's answer to a call, after which it has another size."""
        (answer,) = await self.call_workers(method, *args)
        fitted = Fitted(*map(Blocks, answer))
        self._size = fitted.size
        self._steps.resized(fitted.size)
        return fitted

    async def call_workers(self, method: str, *args: Any) -> Sequence[Any]:
        """The answers of all workers to a call between two steps. Raises EngineEnded."""
        try:
            return await self.unless_ended(self._core.collective_rpc_async(method, args=args))
        except EngineDeadError as error:
            raise EngineEnded(str(error)) from error

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises EngineEnded once the core ends: vLLM's client leaves calls unanswered then."""
        call, end = asyncio.create_task(work), asyncio.create_task(self._steps.end())
        try:
            await asyncio.wait((call, end), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise EngineEnded(end.result())
            return call.result()
        finally:
            call.cancel()
            end.cancel()
            await asyncio.wait((call, end))


def _first(reasons: Sequence[str | None]) -> str | None:
    """The first failure of several workers."""
    return next((reason for reason in reasons if reason is not None), None)


def measured(
    workers: Sequence[Mapping[str, int]], processes: Iterable[int], context: int, block_size: int
) -> ModelMemory:
    """The memory of an engine before its first request. `workers` are their own descriptions (`MellWorker`).

    `processes` are those of the replica; what they hold beside parameters is `fixed`, and is taken to be left asleep.
    The floor holds one request of the model's whole `context` of tokens.
    """
    parameters = sum(worker["parameter_bytes"] for worker in workers)
    fixed = max(0, resident(processes) - parameters)
    block = sum(worker["block_bytes"] for worker in workers)
    floor = Blocks(-(-context // block_size))
    return ModelMemory(Bytes(parameters), Bytes(fixed), Bytes(fixed), Bytes(block), floor)


def resident(processes: Iterable[int]) -> Bytes:
    """The resident memory of a replica's processes; those that have ended have none.

    Shared memory, such as staging slots, counts once: as much as the process has that touched most of it. The replica's
    own process touches whole payloads for their checksums, and each worker its part.
    """
    own, shared = 0, 0
    for pid in processes:
        kinds = _resident_kinds(pid)
        own += kinds.get("RssAnon", 0) + kinds.get("RssFile", 0)
        shared = max(shared, kinds.get("RssShmem", 0))
    return Bytes(own + shared)


def _resident_kinds(pid: int) -> dict[str, int]:
    """The bytes of a process by kind (proc(5), `/proc/pid/status`); empty once it has ended."""
    try:
        rows = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if row[0].startswith("Rss")}
