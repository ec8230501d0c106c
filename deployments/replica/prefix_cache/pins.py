"""Pins: prefixes that stay in the tier of host memory for a time, under a budget."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from deployments.api.calls import PinAnswer, PinRefusal
from deployments.engine.port import Engine
from migration.concurrency import Tasks
from migration.protocol.errors import TransferFailed
from policies.model import Blocks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pin:
    """The names of pinned blocks, and the end of their pin, which a renewal replaces."""

    names: tuple[int, ...]
    expiry: asyncio.TimerHandle


class Pins:
    """The pins of an engine; they hold at most the share `pin_share` of its tier of host memory.

    What changes them happens one after another: the engine answers later, and what is decided meanwhile must count it.
    """

    def __init__(self, engine: Engine, pin_share: float = 0.25) -> None:
        self._engine = engine
        self._budget = Blocks(int(engine.host_blocks * pin_share))
        self._pins: dict[str, _Pin] = {}
        self._pinning = asyncio.Lock()
        self._expiring = Tasks()

    async def delete(self, names: Collection[int] | None) -> Blocks:
        """Delete the blocks of these names from the prefix cache, None: all; their number. Their pins end.

        No later request finds the blocks. What uses some of them keeps those.

        Raises:
            TransferFailed: the blocks have no names, or the engine could not.
        """
        async with self._pinning:
            deleted = None if names is None else set(names)
            for name in [name for name, pin in self._pins.items() if deleted is None or deleted & set(pin.names)]:
                await self._unpin(name)
            return await self._engine.delete(names)

    async def pin(self, names: Sequence[int], ttl_s: float) -> PinAnswer:
        """Keep a prefix in the host's memory for that many seconds; 0 ends its pin.

        The pin is of as many of the prefix's first blocks as the host has, and a later one of the same blocks replaces
        it.

        Raises:
            TransferFailed: the engine could not.
        """
        if not self._engine.host_blocks:
            return PinAnswer(refusal=PinRefusal.NO_TIER, why="there is no tier of host memory: set cache.dram_gib")
        async with self._pinning:
            prefix = tuple(names[: self._engine.mirror.held_by_host(names)])
            if not prefix:
                return PinAnswer(refusal=PinRefusal.UNKNOWN, why="the host's memory has no block of the prompt")
            name = f"pin-{prefix[-1]:x}"
            if ttl_s:
                return await self._pin(name, prefix, ttl_s)
            if name not in self._pins:
                why = "the prompt is not pinned, or its pin has expired"
                return PinAnswer(refusal=PinRefusal.UNKNOWN, why=why)
            return PinAnswer(await self._unpin(name))

    async def _pin(self, name: str, prefix: tuple[int, ...], ttl_s: float) -> PinAnswer:
        pinned = {block for other, pin in self._pins.items() if other != name for block in pin.names}
        if (wanted := len(pinned.union(prefix))) > self._budget:
            why = f"{wanted} blocks would be pinned, and {self._budget} can be (cache.pin_share)"
            return PinAnswer(refusal=PinRefusal.BUDGET, why=why)
        if (earlier := self._pins.get(name)) is not None:
            earlier.expiry.cancel()
        expiry = asyncio.get_running_loop().call_later(ttl_s, self._expire, name)
        # Before the call: the engine may carry it out although it fails here.
        self._pins[name] = _Pin(prefix, expiry)
        try:
            count = await self._engine.pin(name, prefix)
        except BaseException:
            expiry.cancel()
            self._expire(name)
            raise
        self._pins[name] = _Pin(prefix[:count], expiry)
        return PinAnswer(count)

    async def reset(self, reset: Callable[[], Awaitable[str | None]]) -> str | None:
        """Have the engine's memory reset; the reason why it is not. The engine has no pins then."""
        async with self._pinning:
            if (failure := await reset()) is None:
                for pin in self._pins.values():
                    pin.expiry.cancel()
                self._pins.clear()
            return failure

    @property
    def pinned(self) -> Blocks:
        """The number of pinned blocks."""
        return Blocks(len({block for pin in self._pins.values() for block in pin.names}))

    def _expire(self, name: str) -> None:
        self._expiring.start(self._end(name, self._pins[name].expiry))

    async def _end(self, name: str, expiry: asyncio.TimerHandle) -> None:
        """End a pin, unless it is renewed or ended before its turn comes."""
        async with self._pinning:
            if (pin := self._pins.get(name)) is not None and pin.expiry is expiry:
                await self._unpin(name)

    async def _unpin(self, name: str) -> Blocks:
        """End a pin. A failure costs nothing: the engine that failed has no pins."""
        self._pins.pop(name).expiry.cancel()
        try:
            return await self._engine.unpin(name)
        except TransferFailed as error:
            log.warning("a pin could not be ended: %s", error)
            return Blocks(0)
