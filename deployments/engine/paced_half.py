"""A paced engine's half of a pair: two engines that wait for each other as two GPUs do, with times instead of layers.

A step takes the time of the engine's own layers here, and that of the remote ones at the buddy, which is asked by a
message. An engine runs one part at a time, of its own steps or of the buddy's. Copies and loads take the time of their
bytes. What has no time here is exact without it: the next token is a function of the context.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from deployments.engine.pace import Pace
from migration.concurrency import Tasks
from migration.memory.pair_run import HOP_S, PairLook
from migration.memory.run import EngineEnded
from migration.sockets import open_local
from policies.cost.steps import HopCosts
from policies.model import Blocks

_MIB = 1 << 20
_RETRY_S = 0.05


class BuddyGone(Exception):
    """The buddy's engine does not answer."""


class LayerCall(msgspec.Struct, frozen=True):
    """Run a part of a step for `seconds` seconds, or keep `guests` layers from now on. The first has the `epoch`."""

    epoch: int | None = None
    seconds: float | None = None
    guests: int | None = None


class LayerAnswer(msgspec.Struct, frozen=True):
    """The call was at the buddy for `seconds` seconds; `failure` is the reason why it was refused."""

    seconds: float = 0.0
    failure: str | None = None


class SharedTurns:
    """The use of an engine by parts of steps, one at a time, in the order of their arrival."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_at = 0.0

    async def run(self, seconds: float, since: float) -> float:
        """Use the engine for `seconds`, from `since` on, or from when it is free; the time when that ends."""
        ends = self._free_at = max(since, self._free_at) + seconds
        await asyncio.sleep(max(0.0, ends - self._clock()))
        return ends


class BuddyLine:
    """A connection to the buddy's engine: one call at a time, each with an answer within `HOP_S` seconds."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._calling = asyncio.Lock()

    @classmethod
    async def open(cls, address: str, epoch: int) -> "BuddyLine":
        """Connect to the buddy of a pair. Raises BuddyGone."""
        try:
            line = cls(*await open_local(address))
        except OSError as error:
            raise BuddyGone(str(error)) from error
        try:
            await line.call(LayerCall(epoch=epoch))
        except BuddyGone:
            line.close()
            raise
        return line

    @property
    def has_ended(self) -> bool:
        """True once the buddy has closed the connection."""
        return self._reader.at_eof()

    async def call(self, call: LayerCall) -> float:
        """Make a call; the seconds for which it was at the buddy. Raises BuddyGone."""
        async with self._calling:
            try:
                async with asyncio.timeout(HOP_S):
                    self._writer.write(msgspec.json.encode(call) + b"\n")
                    line = await self._reader.readline()
            except (OSError, TimeoutError) as error:
                raise BuddyGone(str(error) or f"the buddy has not answered within {HOP_S:g} s") from error
        if not line:
            raise BuddyGone("the buddy has closed its connection")
        answer = msgspec.json.decode(line, type=LayerAnswer)
        if answer.failure is not None:
            raise BuddyGone(answer.failure)
        return answer.seconds

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


class PacedGuests:
    """Runs parts of the buddy's steps: `run(seconds)` takes their turn. `layers` are the buddy's that are here."""

    def __init__(self, epoch: int, run: Callable[[float], Awaitable[object]]) -> None:
        self.layers = 0
        self.served = 0
        self.ended: str | None = None
        """The reason why no guest is served any more; None while they are, or before the first."""
        self._epoch = epoch
        self._run = run
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving = Tasks()

    async def listen(self) -> str:
        """Wait for the buddy; the address."""
        address = f"\0mell-paced-{os.getpid()}-{secrets.token_hex(8)}"
        self._server = await asyncio.start_unix_server(self._accept, address)
        return address

    def close(self, reason: str = "the pair is over") -> None:
        """Serve nobody any more."""
        self.ended, self.layers = self.ended or reason, 0
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.start(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met = False
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                call, began = msgspec.json.decode(line, type=LayerCall), time.perf_counter()
                met = met or (call.epoch == self._epoch and self.ended is None)
                failure = None if met else f"this is no pair of epoch {call.epoch}"
                if met:
                    await self._do(call)
                writer.write(msgspec.json.encode(LayerAnswer(time.perf_counter() - began, failure)) + b"\n")
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            if met:
                self.close("the buddy has closed its connection")

    async def _do(self, call: LayerCall) -> None:
        if call.seconds is not None:
            await self._run(call.seconds)
            self.served += 1
        if call.guests is not None:
            self.layers = call.guests


class PairedEngine(Protocol):
    """A paced engine as its half sees it."""

    @property
    def death(self) -> str | None: ...

    @property
    def used(self) -> Blocks: ...

    @property
    def running(self) -> int: ...

    def forget(self) -> str | None:
        """Have all requests computed anew, with an empty prefix cache; the reason why not, if blocks are held."""
        ...

    def resume(self) -> None:
        """Make steps again: the one under way is lost."""
        ...


@dataclass(frozen=True, slots=True)
class StepParts:
    """The seconds of a step: those of the layers here, and those of the remote ones, which it runs `first` if so."""

    here: float
    there: float
    there_first: bool


class PacedHalf:
    """Implements `EngineHalf`."""

    def __init__(self, engine: PairedEngine, pace: Pace, block_bytes: int) -> None:
        self.layers = pace.num_layers
        self.unable = None if pace.num_layers > 1 else "the engine has no layers to give (engine_kwargs.num_layers)"
        self._engine = engine
        self._pace = pace
        self._layer_block_bytes = block_bytes / max(1, pace.num_layers)
        self._hop = HopCosts(pace.hop_s, pace.hop_s_per_token)
        self._clock = asyncio.get_running_loop().time
        self._turns = SharedTurns(self._clock)
        self._stepping = asyncio.Lock()
        """Held by a step, and by a layer that changes its place between two steps."""
        self._guests: PacedGuests | None = None
        self._line: BuddyLine | None = None
        self._remote = range(0)
        self._copying: asyncio.Task[None] | None = None
        self._copied = Blocks(0)
        self._lost: str | None = None
        self._look = PairLook()

    @property
    def is_shared(self) -> bool:
        """True while steps run layers of the other engine, or parts of them run there."""
        return bool(self._remote) or (self._guests is not None and self._guests.layers > 0)

    # --- steps ----------------------------------------------------------------------------------------

    async def step(self, seconds: float, tokens: int, began: float) -> float | None:
        """Perform a step of `tokens` tokens, which on a whole engine takes `seconds`, from `began` on.

        The time of its end; None if the step is lost, and with it all until `EngineHalf.be_whole`.
        """
        async with self._stepping:
            parts = self._parts(seconds)
            if parts.there_first and not await self._hopped(parts.there, tokens):
                return None
            ends = await self._turns.run(parts.here, self._clock() if parts.there_first else began)
            if parts.there and not parts.there_first:
                return self._clock() if await self._hopped(parts.there, tokens) else None
            return ends

    def _parts(self, seconds: float) -> StepParts:
        """The parts of a step. Each has the overhead of a whole one."""
        overhead, remote = self._pace.costs.overhead_s, len(self._remote)
        if not remote:
            return StepParts(seconds, 0.0, there_first=False)
        there = (seconds - overhead) * remote / self.layers
        return StepParts(seconds - there, overhead + there, there_first=self._remote.start == 0)

    async def _hopped(self, seconds: float, tokens: int) -> bool:
        """Have the buddy run the remote layers of a step; False if it is lost."""
        began, line = self._clock(), self._line
        if self._lost is None and line is not None:
            try:
                await asyncio.sleep(self._hop.seconds(tokens))
                busy_s = await line.call(LayerCall(seconds=seconds))
            except BuddyGone as error:
                self._lose(str(error))
            else:
                look = self._look
                self._look = replace(
                    look,
                    hops=look.hops + 1,
                    hop_tokens=look.hop_tokens + tokens,
                    hop_seconds=look.hop_seconds + self._clock() - began,
                    buddy_seconds=look.buddy_seconds + busy_s,
                )
                return True
        self._look = replace(self._look, lost_steps=self._look.lost_steps + 1)
        return False

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason

    # --- EngineHalf -----------------------------------------------------------------------------------

    async def listen(self, epoch: int) -> str:
        """See `EngineHalf.listen`."""
        self._check()
        self._lost, self._look, self._remote = None, PairLook(), range(0)
        self._guests = PacedGuests(epoch, lambda seconds: self._turns.run(seconds, self._clock()))
        return await self._guests.listen()

    async def link(self, address: str, epoch: int) -> str | None:
        """See `EngineHalf.link`."""
        self._check()
        try:
            self._line = await BuddyLine.open(address, epoch)
        except BuddyGone as error:
            return str(error)
        return None

    async def copy(self, layer: int, back: bool) -> None:
        """See `EngineHalf.copy`."""
        self._check()
        self._copied = self._engine.used
        size = self._copied * self._layer_block_bytes
        self._copying = asyncio.create_task(self._pass(size, self._pace.copy_mib_per_s))

    async def give(self, layer: int) -> str | None:
        """See `EngineHalf.give`."""
        return await self._exchange({*self._remote, layer})

    async def take_back(self, layer: int) -> str | None:
        """See `EngineHalf.take_back`."""
        return await self._exchange({*self._remote} - {layer})

    async def forget(self, layer: int, back: bool) -> None:
        """See `EngineHalf.forget`."""
        self._end_copy()

    async def load(self) -> str | None:
        """See `EngineHalf.load`."""
        self._check()
        await self._pass(len(self._remote) * self._pace.layer_mib * _MIB, self._pace.load_mib_per_s)
        return None

    async def look(self) -> PairLook:
        """See `EngineHalf.look`."""
        self._check()
        guests, line = self._guests, self._line
        if line is not None and line.has_ended:
            self._lose("the buddy's engine is gone")
        elif line is not None and guests is not None and guests.ended is not None:
            self._lose(guests.ended)
        return replace(
            self._look,
            remote=len(self._remote),
            is_copying=self._copying is not None and not self._copying.done(),
            lost=self._lost,
            guest_layers=0 if guests is None else guests.layers,
            served=0 if guests is None else guests.served,
        )

    async def abandon(self) -> None:
        """See `EngineHalf.abandon`."""
        self._check()
        self._lose("the pair is given up")
        self._end()

    async def forget_kv(self, within_s: float) -> str | None:
        """See `EngineHalf.forget_kv`."""
        deadline = self._clock() + within_s
        while True:
            self._check()
            failure = self._engine.forget()
            if failure is None or self._clock() >= deadline:
                return failure
            await asyncio.sleep(_RETRY_S)

    async def be_whole(self) -> None:
        """See `EngineHalf.be_whole`."""
        self._check()
        self._remote = range(0)
        self._engine.resume()

    async def close(self) -> None:
        """See `EngineHalf.close`."""
        self._check()
        self._end()

    def end(self) -> None:
        """The engine has ended."""
        self._end()

    # --- inside ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._engine.death is not None:
            raise EngineEnded(self._engine.death)

    async def _exchange(self, remote: set[int]) -> str | None:
        """Let a copied layer change its place; its last blocks are copied while the engine stands still."""
        async with self._stepping:
            self._check()
            rest = self._engine.running + max(0, self._engine.used - self._copied)
            self._end_copy()
            await self._pass(rest * self._layer_block_bytes, self._pace.copy_mib_per_s)
            try:
                if self._line is None:
                    raise BuddyGone(self._lost or "there is no connection")
                await self._line.call(LayerCall(guests=len(remote)))
            except BuddyGone as error:
                self._lose(str(error))
                return str(error)
            self._remote = range(min(remote), max(remote) + 1) if remote else range(0)
            return None

    async def _pass(self, size: float, mib_per_s: float) -> None:
        """Let the time of `size` bytes pass."""
        await asyncio.sleep(size / (mib_per_s * _MIB))

    def _end_copy(self) -> None:
        if self._copying is not None:
            self._copying.cancel()
        self._copying = None

    def _end(self) -> None:
        self._end_copy()
        if self._line is not None:
            self._line.close()
        if self._guests is not None:
            self._guests.close()
        self._line = self._guests = None
