"""An engine without a model, queues or memory limits; its failures are knobs."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Collection, Sequence

from deployments.cache.mirror import Mirror
from deployments.engine.port import (
    EngineDead,
    EngineProcesses,
    EngineStats,
    InvalidRequest,
    ProfilerUnavailable,
    ProfileSession,
    Tie,
)
from deployments.engine.tokens import TOKEN_BYTES, ContextDigest, TokenSlots, expected, pack, token_layouts, unpack
from migration.kv.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, PoolContents
from migration.protocol.core_messages import Adapter, decode_request
from migration.protocol.errors import BlocksGone, Refused, TransferFailed
from migration.protocol.layouts import Resharding
from migration.protocol.messages import Fingerprint, Shard, SlotRef, Tail
from migration.protocol.ports import HALTED, Generated, OutputSink, Slot, WorkerLinks
from migration.protocol.request import RequestSpec, Trait
from policies.causes import Cause
from policies.model import Blocks, Tokens
from policies.prefix.names import Naming, digests, name_of
from policies.prefix.tree import HeldPrefix


def encode_pooled(vector: Sequence[float]) -> bytes:
    """The rest of a step with this vector, as vLLM's core sends it."""
    import torch
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    from deployments.engine.core import RestEncoder

    output = EngineCoreOutput("", [], pooling_output=torch.tensor(vector), finish_reason=FinishReason.STOP)
    rest = RestEncoder().encode(output, 0.0)
    assert rest is not None
    return rest


def pooled(tokens: Sequence[int]) -> list[float]:
    """The vector of a pooled prompt."""
    return [float(len(tokens)), float(sum(tokens)), tokens[0] / 8, -tokens[-1] / 8]


class FakeEngine:
    """An engine whose steps take `step_s` seconds, and yield one token for every request. A pooled one takes one step.

    A prefill takes one step for every `prefill_tokens` tokens, if set; else the whole of it is one step.

    Each of its `workers` holds a part of every block's tokens.
    """

    def __init__(
        self,
        step_s: float = 0.001,
        num_blocks: int = 256,
        block_size: int = 4,
        model: str = "fake",
        cache: str = "fake-cache",
        workers: int = 1,
    ) -> None:
        self.links: WorkerLinks | None = None
        self.fingerprint = Fingerprint(model, cache, block_size, token_layouts(block_size, workers))
        self.processes = EngineProcesses(core=os.getpid(), workers=(os.getpid(),) * workers)
        self.max_context = Tokens(num_blocks * block_size)
        self.tasks: tuple[str, ...] = ("generate",)
        self.step_s = step_s
        self.dead = False
        self.ties: Tie | None = None
        self.refusal: str | None = None
        self.grammar_s = 0.0
        self.refuses_grammars = False
        self.adapters: list[str] = []
        self.preempted: set[str] = set()
        self.halting: set[str] = set()
        self.prefill_tokens: int | None = None
        self._computed: dict[str, int] = {}
        self._stepped = asyncio.Event()
        """Set, and replaced, once a request has computed more."""
        self.profiled: ProfileSession | None = None
        self.blocks_loaded = 0
        self.tail_ends: list[int] = []
        """For each context that began with a tail: the tokens up to the tail's end."""
        self.naming: Naming | None = None
        self.host_blocks = Blocks(0)
        self.pins: dict[str, Sequence[int]] = {}
        self.mirror = Mirror()
        self.mirror.take(0, [PoolContents(b"")])
        self.evicted_unseen = 0
        """The number of blocks that the mirror still has, of the first ones that a migration needs."""
        self._num_blocks = num_blocks
        self._contexts: dict[str, list[int]] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._tails: dict[str, Tail | None] = {}
        self.holds: dict[str, bytes] = {}
        """The content of held blocks, packed, by the names of the holds."""
        self._cache: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._slots = TokenSlots(self.fingerprint.shard_bytes, workers)

    def tied(self, traits: frozenset[Trait]) -> Tie | None:
        """See `Engine.tied`."""
        return self.ties

    async def load_adapter(self, adapter: Adapter) -> None:
        """See `Engine.load_adapter`."""
        self.adapters.append(adapter.lora_name)

    async def check_grammar(self, spec: RequestSpec, outputs: tuple[int, ...]) -> None:
        """See `Engine.check_grammar`."""
        if Trait.STRUCTURED in spec.traits:
            await asyncio.sleep(self.grammar_s)
            if self.refuses_grammars:
                raise Refused("the engine cannot continue the grammar", Cause.GRAMMAR)

    def add(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None
    ) -> None:
        """See `Engine.add`."""
        self._runs[key] = asyncio.create_task(self._run(key, spec, outputs, sink, tail))
        self._tails[key] = tail

    def abort(self, key: str) -> None:
        """See `Engine.abort`."""
        if run := self._runs.pop(key, None):
            run.cancel()
            self._contexts.pop(key, None)
            self._slots.take(self._tails.pop(key))

    async def _run(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None
    ) -> None:
        if self.refusal is not None:
            self._runs.pop(key)
            sink.fail(InvalidRequest(self.refusal))
            return
        async with contextlib.aclosing(self.drawn(key, spec, outputs, tail)) as steps:
            async for step in steps:
                if self.dead:
                    self._runs.pop(key)
                    sink.fail(EngineDead("killed by a test"))
                    return
                if step.finish:
                    self._runs.pop(key)
                sink.take(step)

    async def drawn(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], tail: Tail | None = None
    ) -> AsyncGenerator[Generated]:
        """The steps of a run, up to the last one."""
        request = decode_request(spec.body)
        if request.pooled:
            await asyncio.sleep(self.step_s)
            yield Generated((), "stop", encode_pooled(pooled(prompt_of(spec))))
            return
        top = request.sampling.get("logprobs")
        context = [*prompt_of(spec), *outputs]
        digest = ContextDigest(pack(self._read(context, tail)))
        self._contexts[key] = context
        try:
            chunk = self.prefill_tokens or len(context)
            self._compute(key, 0)
            for computed in range(chunk, len(context), chunk):
                await asyncio.sleep(self.step_s)
                self._compute(key, computed)
            for count in range(len(outputs) + 1, spec.max_tokens + 1):
                await asyncio.sleep(self.step_s)
                self._compute(key, len(context))
                token = digest.next_token()
                rest = None if top is None else digest.next_logprobs(top)
                context.append(token)
                digest.extend(pack((token,)))
                finish = "length" if count == spec.max_tokens else HALTED if key in self.halting else None
                yield Generated((token,), finish, rest)
                if finish:
                    return
        finally:
            self.halting.discard(key)
            self._contexts.pop(key, None)
            self._computed.pop(key, None)

    def _compute(self, key: str, tokens: int) -> None:
        self._computed[key] = tokens
        self._stepped.set()
        self._stepped = asyncio.Event()

    def halt(self, key: str, left: int) -> None:
        """See `Engine.halt`."""
        if key in self._contexts:
            self.halting.add(key)

    async def gather(self, key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        """See `Engine.gather`."""
        size = self.fingerprint.block_size
        if (held := self.holds.get(key)) is not None:
            block = size * TOKEN_BYTES
            return self._slots.write(slots, held[first * block : last * block], checked=True)
        context = self._contexts.get(key)
        if context is None or key in self.preempted:
            raise BlocksGone("the request holds no blocks")
        if last * size > self._computed.get(key, 0):
            raise TransferFailed(f"block {last} is not full")
        return self._slots.write(slots, pack(context[first * size : last * size]))

    async def computed(self, key: str) -> Tokens | None:
        """See `Engine.computed`."""
        return None if key in self.preempted or key not in self._computed else Tokens(self._computed[key])

    async def computed_beyond(self, key: str, tokens: Tokens) -> Tokens:
        """See `Engine.computed_beyond`."""
        while (computed := await self.computed(key)) is None or computed <= tokens:
            await self._stepped.wait()
        return computed

    async def load(self, load: str, spec: RequestSpec, outputs: tuple[int, ...], first: Blocks, last: Blocks) -> None:
        """See `Engine.load`."""
        tokens = prompt_of(spec) + outputs
        size = self.fingerprint.block_size
        with self._slots.loading(load, first, last) as staged:
            held = unpack(await staged.whole())
            await asyncio.sleep(self.step_s)
        if any(tokens[: b * size] not in self._cache for b in range(1, first + 1)):
            return
        for block in range(first, last):
            prefix = tokens[: (block + 1) * size]
            self._cache[prefix] = held[(block - first) * size : (block - first + 1) * size]
            self._mirror(BlocksStored([name_of(digests(prefix, size)[-1])]))
            self.blocks_loaded += 1

    async def put(
        self, load: str, first: Blocks, last: Blocks, slots: Sequence[SlotRef], cuts: Resharding | None = None
    ) -> None:
        """See `Engine.put`."""
        self._slots.put(load, first, last, slots, cuts)

    async def gather_tail(self, key: str, tail: Tail, slots: Sequence[Slot]) -> Sequence[Shard]:
        """See `Engine.gather_tail`."""
        context = self._contexts.get(key)
        if context is None or key in self.preempted:
            raise BlocksGone("the request holds no blocks")
        return self._slots.write(slots, pack(context[tail.first * self.fingerprint.block_size : tail.tokens]))

    def names(self, spec: RequestSpec, outputs: tuple[int, ...]) -> Sequence[int]:
        """See `Engine.names`."""
        return [name_of(digest) for digest in digests(prompt_of(spec) + outputs, self.fingerprint.block_size)]

    def present(self, spec: RequestSpec, outputs: tuple[int, ...]) -> HeldPrefix:
        """See `Engine.present`."""
        return HeldPrefix(max(self.evicted_unseen, self.mirror.held(self.names(spec, outputs)).hbm))

    def _mirror(self, event: CacheEvent) -> None:
        self.mirror.take(self.mirror.version + 1, [event])

    async def hold_prefix(self, hold: str, spec: RequestSpec, outputs: tuple[int, ...]) -> Blocks:
        """See `Engine.hold_prefix`. Only loaded blocks are in the cache."""
        await asyncio.sleep(self.step_s)
        context, size = prompt_of(spec) + outputs, self.fingerprint.block_size
        held = b""
        for end in range(size, len(context) + 1, size):
            block = self._cache.get(context[:end])
            if block is None:
                break
            held += pack(block)
        self.holds[hold] = held
        return Blocks(len(held) // (size * TOKEN_BYTES))

    def release_prefix(self, hold: str) -> None:
        """See `Engine.release_prefix`."""
        self.holds.pop(hold, None)

    def expect(self, tail: str) -> None:
        """See `Engine.expect`."""
        self._slots.expect(tail)

    async def hold(self, tail: Tail, slots: Sequence[SlotRef], cuts: Resharding | None = None) -> None:
        """See `Engine.hold`."""
        self._slots.hold(tail, self.fingerprint.block_size, slots, cuts)
        self.blocks_loaded += tail.last(self.fingerprint.block_size) - tail.first

    def discard(self, tail: str) -> None:
        """See `Engine.discard`."""
        self._slots.discard(tail)

    @property
    def held_tails(self) -> int:
        """The number of held tails."""
        return self._slots.held_tails

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        used = sum(-(-len(c) // self.fingerprint.block_size) for c in self._contexts.values())
        return EngineStats(
            capacity_tokens=self.max_context,
            free_blocks=Blocks(self._num_blocks - used),
            block_size=self.fingerprint.block_size,
            max_requests=64,
            running=len(self._contexts),
            waiting=0,
            preemptions=0,
        )

    @property
    def death(self) -> str | None:
        """See `Engine.death`."""
        return "killed by a test" if self.dead else None

    async def check_health(self) -> None:
        """See `Engine.check_health`."""
        if self.death is not None:
            raise EngineDead(self.death)

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        self._cache.clear()
        self._mirror(CacheCleared())

    async def delete(self, names: Collection[int] | None) -> Blocks:
        """See `Engine.delete`."""
        size, found = self.fingerprint.block_size, []
        for context in list(self._cache):
            name = name_of(digests(context, size)[-1])
            if names is None or name in names:
                del self._cache[context]
                found.append(name)
        self._mirror(BlocksRemoved(found))
        return Blocks(len(found))

    async def pin(self, pin: str, names: Sequence[int]) -> Blocks:
        """See `Engine.pin`."""
        self.pins[pin] = names
        return Blocks(self.mirror.held_by_host(names))

    async def unpin(self, pin: str) -> Blocks:
        """See `Engine.unpin`."""
        return Blocks(len(self.pins.pop(pin, ())))

    @property
    def profiling(self) -> bool:
        """See `Engine.profiling`."""
        return self.profiled is not None

    async def start_profile(self, session: ProfileSession) -> None:
        """See `Engine.start_profile`."""
        if self.profiling:
            raise ProfilerUnavailable("a session is under way")
        self.profiled = session

    async def stop_profile(self) -> None:
        """See `Engine.stop_profile`."""
        if not self.profiling:
            raise ProfilerUnavailable("no session is under way")
        self.profiled = None

    def shutdown(self) -> None:
        """See `Engine.shutdown`."""
        self.dead = True

    def _read(self, context: list[int], tail: Tail | None) -> list[int]:
        """The context as read from its KV blocks, and behind them from the tail."""
        size = self.fingerprint.block_size
        read, cached = list(context), 0
        while cached < (len(context) - 1) // size:
            held = self._cache.get(tuple(context[: (cached + 1) * size]))
            if held is None:
                break
            read[cached * size : (cached + 1) * size] = held
            cached += 1
        rest = unpack(self._slots.take(tail))
        if tail is not None and tail.first <= cached < tail.last(size):
            read[cached * size : tail.tokens] = rest[(cached - tail.first) * size :]
            self.tail_ends.append(tail.tokens)
        return read


def prompt_of(spec: RequestSpec) -> tuple[int, ...]:
    """The prompt in a request's body."""
    return tuple(decode_request(spec.body).prompt_token_ids or ())


def expected_logprobs(prompt: tuple[int, ...], count: int, top: int) -> tuple[tuple[int, bytes], ...]:
    """The logprobs of an undisturbed run, with the index of each token."""
    contexts = (prompt + expected(prompt, index) for index in range(count))
    return tuple((i, ContextDigest(pack(context)).next_logprobs(top)) for i, context in enumerate(contexts))
