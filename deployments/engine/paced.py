"""A memory-bound engine without a GPU: real queues, batches and KV blocks, and steps of configured duration.

Replicas that share a few cores are not like GPUs: closing one makes the others faster. The speed of a paced engine is
independent of other load, and it needs hardly any CPU. A small machine therefore holds many replicas of a real
application, and the effects of policies can be measured. It only lacks a model (see `tokens`).
"""

import asyncio
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from deployments.cache.mirror import Mirror
from deployments.engine.batching import BatchedSequence, EngineStep, TokenBatch
from deployments.engine.pace import Pace, read_pace
from deployments.engine.paced_half import PacedHalf
from deployments.engine.port import (
    EngineDead,
    EngineProcesses,
    EngineStats,
    InvalidRequest,
    ProfilerUnavailable,
    ProfileSession,
    Tie,
)
from deployments.engine.tokens import TokenSlots, token_layouts
from migration.kv.cache_events import BlocksRemoved, BlocksStored, PoolContents
from migration.memory.run import EngineEnded, Fitted
from migration.protocol.core_messages import Adapter, Prefilled, decode_request, encode_prefilled
from migration.protocol.errors import BlocksGone, Refused, TransferFailed
from migration.protocol.layouts import Resharding
from migration.protocol.messages import Fingerprint, Shard, SlotRef, Tail
from migration.protocol.ports import HALTED, Generated, OutputSink, Slot, WorkerLinks
from migration.protocol.request import RequestSpec, Trait
from policies.causes import Cause
from policies.cost.fit import NO_STEPS
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes, Tokens
from policies.prefix.names import Naming, default_naming, digests, name_of
from policies.prefix.tree import HeldPrefix

log = logging.getLogger(__name__)

_NOTHING = EngineStep()
_NO_TIER = "a paced engine has no tier of host memory"


_MIB = 1 << 20


class PacedMemory:
    """Implements `EngineMemory`: the blocks of a paced engine are counted, and its memory is only a number."""

    sleepless: str | None = None

    def __init__(self, engine: "PacedEngine", pace: Pace, declared: float) -> None:
        floor = Blocks(-(-pace.max_model_len // pace.block_size))
        self._engine = engine
        self.capacity = self.start = engine.blocks
        self.declared = Blocks(int(engine.blocks * declared))
        layers, layer, block = pace.num_layers, Bytes(round(pace.layer_mib * _MIB)), Bytes(round(pace.block_mib * _MIB))
        self.model = ModelMemory(Bytes(layers * layer), Bytes(0), Bytes(0), block, floor, layers, layer)

    @property
    def size(self) -> Blocks:
        """See `EngineMemory.size`."""
        return self._engine.blocks

    @property
    def used(self) -> Blocks:
        """See `EngineMemory.used`."""
        return self._engine.used

    def measure(self, held: MemoryPlan) -> None:
        """See `EngineMemory.measure`. There is no memory."""

    def announce(self, blocks: Blocks) -> None:
        """See `EngineMemory.announce`."""
        self.capacity = blocks

    async def fit(self, blocks: Blocks) -> Fitted:
        """See `EngineMemory.fit`. Its blocks have no places: none has to move."""
        self._check()
        over = self._engine.used + self._engine.running - blocks
        if self.size > blocks and over > 0:
            return Fitted(self.size, Blocks(over))
        self._engine.resize(Blocks(min(self.size, blocks)))
        return Fitted(self.size)

    async def release(self, blocks: Blocks) -> str | None:
        """See `EngineMemory.release`."""
        self._check()
        return None

    async def grow(self, blocks: Blocks) -> None:
        """See `EngineMemory.grow`."""
        self._check()
        self._engine.resize(Blocks(max(self.size, blocks)))

    async def drop(self) -> str | None:
        """See `EngineMemory.drop`."""
        self._check()
        await self._engine.reset_prefix_cache()
        self._engine.resize(Blocks(0))
        return None

    async def load(self, blocks: Blocks) -> str | None:
        """See `EngineMemory.load`."""
        self._check()
        self._engine.resize(blocks)
        return None

    def _check(self) -> None:
        if self._engine.death is not None:
            raise EngineEnded(self._engine.death)


@dataclass(frozen=True, slots=True)
class _Output:
    """One run, its sink, and the number of likeliest tokens with every token's logprob; None: no logprobs.

    The run is finished once its context has `limit` tokens; it ends before if it is halted.
    """

    sequence: BatchedSequence
    limit: int
    sink: OutputSink
    logprobs: int | None
    begun: int
    """The length of the context at the run's beginning."""

    @property
    def prefilled(self) -> Prefilled | None:
        """Of the run's prompt, in its first step."""
        first = len(self.sequence.context) == self.begun + 1
        return Prefilled(self.begun, self.sequence.cached or 0) if first else None

    @property
    def rest(self) -> bytes | None:
        """See `Generated.rest`. The digest lacks the new token, whose logprobs follow from those before it."""
        if self.logprobs is not None:
            return self.sequence.digest.next_logprobs(self.logprobs, self.prefilled)
        return None if self.prefilled is None else encode_prefilled(self.prefilled)


class PacedEngine:
    """One loop for all requests, with one timer per step and none when idle.

    A step that ends late (because the process is busy) does not delay later steps, unless it is late by more than one
    step.
    """

    def __init__(self, model: str, pace: Pace) -> None:
        size = pace.block_size
        self.max_context = Tokens(pace.max_model_len)
        self.tasks: tuple[str, ...] = ("generate",)
        self.processes = EngineProcesses(core=os.getpid(), workers=(os.getpid(),))
        self.links: WorkerLinks | None = None
        marks = f"paced|{model}|{pace.max_model_len}", f"paced|{size}"
        self.fingerprint = Fingerprint(*marks, size, token_layouts(size))
        self._pace = pace
        self._costs = pace.costs
        self._batch = TokenBatch(pace)
        self._outputs: dict[str, _Output] = {}
        self._holds: dict[str, BatchedSequence] = {}
        self._loads: list[asyncio.Future[None]] = []
        self._slots = TokenSlots(self.fingerprint.shard_bytes)
        self.blocks_loaded = 0
        self.naming: Naming | None = default_naming(size)
        self.host_blocks = Blocks(0)
        self.mirror = Mirror()
        self.mirror.take(0, (PoolContents(b""),))
        self.memory: PacedMemory | None = None
        self.half: PacedHalf | None = None
        self.profiling = False
        self._death: str | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | asyncio.Task[None] | None = None
        self._due = 0.0
        self._is_halted = False
        """True from a step that the other engine of a pair has lost, until `resume`."""
        self._step = _NOTHING
        self._steps = NO_STEPS
        self._loading: list[asyncio.Future[None]] = []
        self._computing: list[tuple[str, Tokens, asyncio.Future[Tokens]]] = []
        """Waits for a run to have computed more than that many tokens."""

    @classmethod
    async def start(
        cls,
        model: str,
        engine_kwargs: Mapping[str, Any],
        audit_s: float = 0.0,
        dram_gib: float = 0.0,
        declared: float | None = None,
    ) -> Self:
        """Start an engine; `model` is only a name. Its mirror needs no audit, and it has no tier of host memory.

        `declared` makes its pool elastic, as for `VllmEngine`.

        Raises:
            ValueError: `engine_kwargs` are not valid for `Pace`.
        """
        pace = read_pace(engine_kwargs)
        await asyncio.sleep(pace.startup_s)
        engine = cls(model, pace)
        if declared is not None:
            engine.memory = PacedMemory(engine, pace, declared)
            engine.half = PacedHalf(engine, pace, engine.memory.model.block)
        return engine

    def tied(self, traits: frozenset[Trait]) -> Tie | None:
        """See `Engine.tied`."""
        return None

    async def load_adapter(self, adapter: Adapter) -> None:
        """See `Engine.load_adapter`."""
        raise Refused("a paced engine has no model, and so no adapters", Cause.ADAPTER)

    async def check_grammar(self, spec: RequestSpec, outputs: tuple[int, ...]) -> None:
        """See `Engine.check_grammar`. A paced engine has no grammars."""

    def add(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None
    ) -> None:
        """See `Engine.add`. The next token is a function of the context, independent of temperature and seed."""
        request, held = decode_request(spec.body), self._slots.take(tail)
        try:
            self._check(spec, outputs)
        except (EngineDead, InvalidRequest) as error:
            self._loop.call_soon(sink.fail, error)
            return
        context = request.context(outputs)
        by_priority = self._pace.scheduling_policy == "priority"
        turn, salt = spec.priority if by_priority else 0, request.cache_salt
        sequence = BatchedSequence(key, context, spec.prompt_tokens + spec.max_tokens, turn, salt=salt)
        sequence.reads_cache = not request.sampling.get("skip_reading_prefix_cache", False)
        if tail is not None:
            sequence.tail, sequence.tail_first = held, tail.first
        self._outputs[key] = _Output(sequence, sequence.end, sink, request.sampling.get("logprobs"), len(context))
        self._batch.scheduler.enqueue(sequence)
        self._wake()

    def abort(self, key: str) -> None:
        """See `Engine.abort`."""
        output = self._outputs.pop(key, None)
        if output is not None:
            self._batch.remove(output.sequence)

    def halt(self, key: str, left: int) -> None:
        """See `Engine.halt`."""
        if output := self._outputs.get(key):
            sequence = output.sequence
            sequence.end = min(sequence.end, len(sequence.context) + 1)

    async def gather(self, key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        """See `Engine.gather`."""
        sequence = self._holding(key)
        held = self._batch.held(sequence, first, last)
        if held is None:
            raise TransferFailed(f"only {sequence.computed} tokens are computed, block {last} is not full")
        return self._slots.write(slots, held, checked=key in self._holds)

    async def computed(self, key: str) -> Tokens | None:
        """See `Engine.computed`."""
        output = self._outputs.get(key)
        return Tokens(output.sequence.computed) if output is not None and output.sequence.blocks else None

    async def computed_beyond(self, key: str, tokens: Tokens) -> Tokens:
        """See `Engine.computed_beyond`."""
        self._check_alive()
        computed = await self.computed(key)
        if computed is not None and computed > tokens:
            return computed
        waiting: asyncio.Future[Tokens] = self._loop.create_future()
        self._computing.append((key, tokens, waiting))
        return await waiting

    async def load(self, load: str, spec: RequestSpec, outputs: tuple[int, ...], first: Blocks, last: Blocks) -> None:
        """See `Engine.load`. Once whole, a load takes part in one step, like a decoding request."""
        self._check_alive()
        with self._slots.loading(load, first, last) as staged:
            held = await staged.whole()
            self._check_alive()
            stepped = self._loop.create_future()
            self._loads.append(stepped)
            self._wake()
            await stepped
        request = decode_request(spec.body)
        context = request.context(outputs)
        loaded = self._batch.take_in(context, first, held, request.cache_salt)
        self._mirror_changes()
        if loaded is None:
            raise TransferFailed(f"no room for {last - first} blocks")
        self.blocks_loaded += loaded

    async def put(
        self, load: str, first: Blocks, last: Blocks, slots: Sequence[SlotRef], cuts: Resharding | None = None
    ) -> None:
        """See `Engine.put`."""
        self._slots.put(load, first, last, slots, cuts)

    async def gather_tail(self, key: str, tail: Tail, slots: Sequence[Slot]) -> Sequence[Shard]:
        """See `Engine.gather_tail`."""
        sequence = self._holding(key)
        held = self._batch.held_tail(sequence, tail.first, tail.tokens)
        if held is None:
            raise TransferFailed(f"only {sequence.computed} of {tail.tokens} tokens are computed")
        return self._slots.write(slots, held)

    def names(self, spec: RequestSpec, outputs: tuple[int, ...]) -> Sequence[int]:
        """See `Engine.names`."""
        request = decode_request(spec.body)
        context = request.context(outputs)
        return [name_of(digest) for digest in digests(context, self._pace.block_size, request.cache_salt)]

    def present(self, spec: RequestSpec, outputs: tuple[int, ...]) -> HeldPrefix:
        """See `Engine.present`."""
        request = decode_request(spec.body)
        return HeldPrefix(self._batch.present(request.context(outputs), request.cache_salt))

    async def hold_prefix(self, hold: str, spec: RequestSpec, outputs: tuple[int, ...]) -> Blocks:
        """See `Engine.hold_prefix`."""
        self._check_alive()
        request = decode_request(spec.body)
        context = request.context(outputs)
        sequence = self._holds[hold] = self._batch.hold(hold, context, request.cache_salt)
        return Blocks(len(sequence.blocks))

    def release_prefix(self, hold: str) -> None:
        """See `Engine.release_prefix`."""
        if (sequence := self._holds.pop(hold, None)) is not None:
            self._batch.release(sequence)

    def expect(self, tail: str) -> None:
        """See `Engine.expect`."""
        self._slots.expect(tail)

    async def hold(self, tail: Tail, slots: Sequence[SlotRef], cuts: Resharding | None = None) -> None:
        """See `Engine.hold`."""
        self._slots.hold(tail, self._pace.block_size, slots, cuts)
        self.blocks_loaded += tail.last(self._pace.block_size) - tail.first

    def discard(self, tail: str) -> None:
        """See `Engine.discard`."""
        self._slots.discard(tail)

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        pool, scheduler, size = self._batch.pool, self._batch.scheduler, self._pace.block_size
        capacity = pool.size if self.memory is None else self.memory.capacity
        return EngineStats(
            capacity_tokens=Tokens(capacity * size),
            free_blocks=Blocks(pool.free - pool.size + capacity),
            block_size=size,
            max_requests=self._pace.max_num_seqs,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            steps=self._steps,
            step_tokens=self._pace.max_num_batched_tokens,
            nominal_tokens=Tokens(
                (self._pace.num_gpu_blocks_override if self.memory is None else self.memory.start) * size
            ),
        )

    @property
    def blocks(self) -> Blocks:
        """The number of its KV blocks."""
        return Blocks(self._batch.pool.size)

    @property
    def used(self) -> Blocks:
        """The number of KV blocks of requests."""
        return Blocks(self._batch.pool.size - self._batch.pool.free)

    @property
    def running(self) -> int:
        """The number of running requests."""
        return len(self._batch.scheduler.running)

    def resize(self, blocks: Blocks) -> None:
        """Have that many KV blocks from now on. Requests that use more keep theirs until they need another one."""
        self._batch.pool.resize(blocks)
        self._mirror_changes()
        self._wake()

    def forget(self) -> str | None:
        """Have all requests computed anew, with an empty prefix cache; the reason why not, if blocks are held.

        It makes no step from now on, until `resume`.
        """
        self._halt()
        self._fail_loads("its KV was lost with the other engine of its pair")
        while self._batch.scheduler.running:
            self._batch.scheduler.preempt(self._batch.release)
        self._batch.pool.trim(0)
        self._mirror_changes()
        return "blocks are held for copies" if self.used else None

    def resume(self) -> None:
        """Make steps again: the one under way is lost."""
        self._halt()
        self._is_halted = False
        self._wake()

    @property
    def death(self) -> str | None:
        """See `Engine.death`."""
        return self._death

    async def check_health(self) -> None:
        """See `Engine.check_health`."""
        if self._death is not None:
            raise EngineDead(self._death)

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        self._batch.pool.trim(0)
        self._mirror_changes()

    async def delete(self, names: Collection[int] | None) -> Blocks:
        """See `Engine.delete`."""
        deleted = self._batch.pool.delete(None if names is None else frozenset(names))
        self._mirror_changes()
        return Blocks(deleted)

    async def pin(self, pin: str, names: Sequence[int]) -> Blocks:
        """See `Engine.pin`."""
        raise TransferFailed(_NO_TIER)

    async def unpin(self, pin: str) -> Blocks:
        """See `Engine.unpin`."""
        raise TransferFailed(_NO_TIER)

    async def start_profile(self, session: ProfileSession) -> None:
        """See `Engine.start_profile`."""
        raise ProfilerUnavailable("a paced engine has no profiler")

    async def stop_profile(self) -> None:
        """See `Engine.stop_profile`."""
        raise ProfilerUnavailable("a paced engine has no profiler")

    def shutdown(self) -> None:
        """See `Engine.shutdown`."""
        self._die("it was shut down")

    # --- inside ---------------------------------------------------------------------------------------

    def _holding(self, key: str) -> BatchedSequence:
        """The run `key`. Raises BlocksGone if it holds no blocks."""
        output = self._outputs.get(key)
        sequence = self._holds.get(key) if output is None else output.sequence
        if sequence is None or not sequence.blocks:
            raise BlocksGone("the request holds no blocks (waiting, preempted or ended)")
        return sequence

    def _check_alive(self) -> None:
        if self._death is not None:
            raise TransferFailed(f"the engine died: {self._death}")

    def _check(self, spec: RequestSpec, outputs: tuple[int, ...]) -> None:
        if self._death is not None:
            raise EngineDead(self._death)
        if Trait.POOLED in spec.traits:
            raise InvalidRequest("a paced engine has no pooling model")
        if spec.prompt_tokens + spec.max_tokens > self._pace.max_model_len:
            raise InvalidRequest(f"prompt and max_tokens exceed max_model_len, {self._pace.max_model_len}")
        if len(outputs) >= spec.max_tokens:
            raise InvalidRequest(f"all {spec.max_tokens} output tokens have been generated already")

    def _wake(self) -> None:
        """Schedule a step for the next turn of the event loop, unless one is in progress."""
        if self._death is None and self._timer is None and not self._is_halted:
            self._due = self._loop.time()
            self._timer = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """End one step and begin the next."""
        try:
            self._end_step()
            self._begin_step()
            self._mirror_changes()
        except Exception as error:
            log.exception("the engine failed")
            self._die(f"it failed: {error}")

    def _mirror_changes(self) -> None:
        """Have the mirror follow the pool."""
        if self._batch.pool.has_changed:
            stored, removed = self._batch.pool.take_changes()
            self.mirror.take(self.mirror.version + 1, (BlocksStored([*stored]), BlocksRemoved([*removed])))

    def _end_step(self) -> None:
        for token in self._batch.end(self._step):
            key = token.sequence.id
            output = self._outputs.pop(key) if token.last else self._outputs[key]
            finish = "length" if token.sequence.end == output.limit else HALTED
            step = Generated((token.token,), finish if token.last else None, output.rest, output.prefilled)
            output.sink.take(step)
        for load in self._loading:
            if not load.done():
                load.set_result(None)
        self._answer_waits()

    def _answer_waits(self) -> None:
        """End the waits for what runs have computed now; drop those that were given up."""
        waits, self._computing = self._computing, []
        for key, tokens, waiting in waits:
            output = self._outputs.get(key)
            if waiting.done():
                continue
            if output is not None and output.sequence.computed > tokens:
                waiting.set_result(Tokens(output.sequence.computed))
            else:
                self._computing.append((key, tokens, waiting))

    def _begin_step(self) -> None:
        step = self._batch.begin()
        self._loading, self._loads = self._loads, []
        self._step, self._timer = step or _NOTHING, None
        if step is None and not self._loading:
            return
        step = self._step
        decodes = step.decodes + len(self._loading)
        seconds = self._costs.step_s(decodes, step.context, step.prefills)
        if self.half is not None and self.half.is_shared:
            self._timer = self._loop.create_task(self._share_step(self.half, seconds, decodes))
            return
        self._note_step(max(self._due + seconds, self._loop.time()), decodes)
        self._timer = self._loop.call_at(self._due, self._turn)

    async def _share_step(self, half: PacedHalf, seconds: float, decodes: int) -> None:
        """Perform a step of a pair."""
        tokens = decodes + sum(chunk.tokens for chunk in self._step.prefills)
        try:
            ended = await half.step(seconds, tokens, self._due)
        except Exception as error:
            log.exception("the engine failed")
            self._die(f"it failed: {error}")
            return
        if ended is None:
            self._halt()
            return
        self._note_step(ended, decodes)
        self._turn()

    def _note_step(self, due: float, decodes: int) -> None:
        """Note when the step under way ends."""
        began, self._due = self._due, due
        self._steps = self._steps.add(due - began, decodes, self._step.context, self._step.prefills)

    def _halt(self) -> None:
        """Drop the step under way, and make none until `resume`."""
        if self._timer is not None and self._timer is not asyncio.current_task():
            self._timer.cancel()
        self._timer, self._step, self._is_halted = None, _NOTHING, True

    def _die(self, why: str) -> None:
        """End the engine: fail all requests and loads."""
        self._death = self._death or why
        self._halt()
        if self.half is not None:
            self.half.end()
        outputs, self._outputs = self._outputs, {}
        for output in outputs.values():
            output.sink.fail(EngineDead(self._death))
        self._fail_loads(f"the engine died: {self._death}")
        for _, _, waiting in self._computing:
            if not waiting.done():
                waiting.set_exception(TransferFailed(f"the engine died: {self._death}"))

    def _fail_loads(self, why: str) -> None:
        """Fail the loads that wait for the end of a step."""
        for waiting in (*self._loads, *self._loading):
            if not waiting.done():
                waiting.set_exception(TransferFailed(why))
        self._loads, self._loading = [], []
