"""The engine port on stock vLLM: its core's client in this process, EngineCore and Worker in processes of their own."""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self, TypeVar

import msgspec
import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.utils import normalize_value
from vllm.tracing import init_tracer
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value

from deployments.cache.feed import CacheFeed, EventFolder
from deployments.cache.mirror import Mirror
from deployments.engine.adapters import LoadedAdapters
from deployments.engine.arguments import engine_config, is_pooling
from deployments.engine.core import CoreClient, CoreRun, CoreRuns, EngineMetrics
from deployments.engine.naming import BlockNamer
from deployments.engine.pairing import VllmHalf
from deployments.engine.pooling import measure_capacity
from deployments.engine.port import (
    EngineDead,
    EngineProcesses,
    EngineStats,
    ProfilerUnavailable,
    ProfileSession,
    RequestFailed,
    Tie,
)
from deployments.engine.resizing import VllmMemory, measured
from deployments.engine.weights import name_weights
from migration.concurrency import Tasks
from migration.kv.cache_events import encode_names
from migration.kv.connector import DeletedBlocks, PinnedBlocks, WantedBlocks
from migration.kv.copier.client import Copiers
from migration.kv.history import draws_one_number
from migration.kv.pool import declared_times
from migration.protocol.continuing import continued, holding, loading, plain_spec, rehearsing
from migration.protocol.core_messages import Adapter, Frames, decode_request, encode_request
from migration.protocol.errors import Refused, TransferFailed
from migration.protocol.layouts import Extent, Resharding, ShardLayout, ShardShape, heads_of
from migration.protocol.messages import Fingerprint, Shard, SlotRef, Tail
from migration.protocol.ports import OutputSink, Slot
from migration.protocol.request import RequestSpec, Trait
from migration.run.outputs import OutputQueue, running
from policies.causes import Cause
from policies.model import Blocks, Bytes, Tokens
from policies.prefix.names import Naming
from policies.prefix.tree import HeldPrefix

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_ID = 0
"""A token id that every vocabulary has."""


class VllmEngine:
    """One engine core with Mell's worker extension and, unless its model pools, Mell's connector."""

    def __init__(
        self,
        core: CoreClient,
        workers: Sequence[Mapping[str, Any]],
        copiers: Copiers | None,
        tasks: Sequence[str],
        events: EventFolder,
        audit_s: float,
        fingerprint: Fingerprint,
    ) -> None:
        """`workers` are the workers' own descriptions (`MellWorker.mell_describe`), in the order of their ranks.

        The core publishes the changes of its cache in `events`. The mirror is audited every `audit_s` seconds.
        """
        config = core.vllm_config
        self._core = core
        self._adapters = LoadedAdapters(core.add_lora_async)
        self._block_size: int = config.cache_config.block_size
        self._capacity = _capacity(config, workers[0])
        self.memory = self._elastic(config, workers)
        self._metrics = EngineMetrics(config, self._size * self._block_size)
        self._runs = CoreRuns(core, self._metrics.record)
        self._numbers = itertools.count()
        self._max_requests: int = config.scheduler_config.max_num_seqs
        self._step_tokens: int = config.scheduler_config.max_num_batched_tokens
        self._max_adapters: int = config.lora_config.max_loras if config.lora_config is not None else 0
        self._copiers = copiers
        self._pools = is_pooling(config)
        self.tasks = tuple(tasks)
        self._loads: set[str] = set()
        """Those that have not ended."""
        self._filled: set[str] = set()
        """Loads whose blocks have all arrived, but may not be in vLLM's prefix cache yet."""
        self._ending = Tasks()
        self._paused = False
        """The engine computes nothing: it lacks its parameters."""
        self._holds: dict[str, asyncio.Task[None]] = {}
        """The requests of the holds, by their names."""
        self.profiling = False
        self.blocks_loaded = 0
        self._seed_tie = _seed_tie(config)
        self.max_context = Tokens(config.model_config.max_model_len)
        self.processes = _processes(workers)
        self.fingerprint = fingerprint
        self.half: VllmHalf | None = None
        self._reading = asyncio.create_task(self._runs.read())
        self._unsupported: str | None = workers[0]["unsupported"]
        self._mirror = Mirror(_why_unmirrored(config, workers))
        # Without a mirror nobody knows them, although the connector may keep some.
        self.host_blocks = Blocks(workers[0]["host_blocks"] if self._mirror.off is None else 0)
        self._feed: CacheFeed | None = None
        self._namer: BlockNamer | None = None
        self._unused = _unused_blocks(config)
        if self._mirror.off is None:
            self._feed = CacheFeed(self._mirror, events, self._publishing_cache, audit_s)
            self._namer = BlockNamer(self._block_size, config.cache_config.prefix_caching_hash_algo)
        else:
            events.remove()
        self.naming: Naming | None = None if self._namer is None else self._namer.naming

    @classmethod
    async def start(
        cls,
        model: str,
        engine_kwargs: Mapping[str, Any],
        audit_s: float = 60.0,
        dram_gib: float = 0.0,
        declared: float | None = None,
    ) -> Self:
        """Start vLLM on `model` (a folder or a hub name). The mirror is audited every `audit_s` seconds.

        `dram_gib` is the size of its tier of host memory; 0: none. `declared` makes its KV pool elastic, see
        `engine_args`.

        Raises:
            ValueError: `engine_kwargs` has an argument that Mell sets itself, no engine of Mell runs the model, or its
                KV pool cannot be elastic.
        """
        events = EventFolder()
        try:
            config = engine_config(model, engine_kwargs, events.endpoint, dram_gib, declared)
            return await cls._start(config, events, audit_s)
        except BaseException:
            events.remove()
            raise

    @classmethod
    async def _start(cls, config: VllmConfig, events: EventFolder, audit_s: float) -> Self:
        maybe_register_config_serialize_by_value()
        if endpoint := config.observability_config.otlp_traces_endpoint:
            # The engine's other processes inherit it. They trace their start.
            init_tracer("vllm.llm_engine", endpoint)
        with contextlib.ExitStack() as failed:
            core = CoreClient(config)
            failed.callback(core.shutdown)
            workers = await core.collective_rpc_async("mell_describe")
            addresses = [worker["copier"] for worker in workers]
            copiers = await Copiers.connect(addresses, config.cache_config.block_size) if all(addresses) else None
            if copiers is not None:
                failed.callback(copiers.close)
            tasks = await core.get_supported_tasks_async()
            # Behind the start, which has fetched the files.
            fingerprint = await asyncio.to_thread(_fingerprint, config, workers)
            started = cls(core, workers, copiers, tasks, events, audit_s, fingerprint)
            failed.callback(started.shutdown)
            if started.memory is not None:
                started.half = await started._describe_half(started.memory)
            await started._prepare()
            failed.pop_all()
        return started

    def _elastic(self, config: VllmConfig, workers: Sequence[Mapping[str, Any]]) -> VllmMemory | None:
        """The engine's elastic pool, if it has one. Raises ValueError if its blocks cannot change their places."""
        times = declared_times(config)
        if times is None:
            return None
        if reason := workers[0]["unsupported"]:
            raise ValueError(f"memory.budget_mib: {reason}, so the KV pool cannot change its size; remove budget_mib")
        processes = (os.getpid(), *_processes(workers).all)
        return VllmMemory(
            self._core,
            self,
            measured(workers, processes, config.model_config.max_model_len, self._block_size),
            size=Blocks(int(self._capacity / times)),
            declared=self._capacity,
            processes=processes,
            sleepless=workers[0]["kept_parameters"],
        )

    async def _describe_half(self, memory: VllmMemory) -> VllmHalf:
        """The engine's side of pairs; its memory by layers."""
        layers, *_ = await self._core.collective_rpc_async("mell_pair_describe")
        memory.model = replace(memory.model, layers=layers["layers"], layer=Bytes(layers["parameters"]))

        def forgotten() -> None:
            if self._feed is not None:
                # vLLM publishes the reset with the next step.
                self._feed.resync()

        return VllmHalf(self._core, memory, layers["layers"], layers["unable"], self._lose_loads, forgotten)

    async def pause(self) -> None:
        """See `Steps.pause`. The mirror has no block either."""
        self._paused = True
        await self._runs.idle.wait()
        await self.reset_prefix_cache()
        if self._feed is not None:
            await self._feed.pause()

    def resume(self) -> None:
        """See `Steps.resume`."""
        self._paused = False
        if self._feed is not None:
            self._feed.resume()

    @property
    def use(self) -> float:
        """See `Steps.use`."""
        use: float = self._metrics.scheduler.kv_cache_usage
        return use

    @property
    def running(self) -> int:
        """See `Steps.running`."""
        running: int = self._metrics.scheduler.num_running_reqs
        return running

    def resized(self, blocks: Blocks) -> None:
        """See `Steps.resized`."""
        self._metrics.resize(blocks * self._block_size)

    async def end(self) -> str:
        """See `Steps.end`."""
        await asyncio.wait((self._reading,))
        return self.death or ""

    @property
    def _size(self) -> Blocks:
        """The blocks that the engine hands out."""
        return self._capacity if self.memory is None else self.memory.size

    async def _prepare(self) -> None:
        """Measure or compile, in steps of the engine, what the first requests would wait for otherwise."""
        config = self._core.vllm_config
        if self._pools:
            capacity = await measure_capacity(self, config, self.tasks, time.perf_counter)
            self._capacity = Blocks(capacity // self._block_size)
            await self.reset_prefix_cache()
            return
        if not self.fingerprint.cache:
            log.warning("requests move by tokens only: %s", self._unsupported or "the prefix cache is off")
        await self._compile_sampling()

    async def _compile_sampling(self) -> None:
        """Have vLLM compile its sampling functions now, and not within the first request that needs them.

        It decorates them with `torch.compile` (v1/sample/ops: logprobs, random sampling), whatever its compilation
        mode. With the CPU build a compiler runs for seconds the first time on a machine; the engine computes nothing
        meanwhile. One request compiles them for a batch of one, two at once for batches of any other size.
        """
        for size in (1, 2):
            await asyncio.gather(*(self._compile_by(f"compile-{size}-{i}") for i in range(size)))

    async def _compile_by(self, key: str) -> None:
        spec = plain_spec(key, (_FIRST_ID,), 2, temperature=1.0, logprobs=1, ignore_eos=True)
        async with running(self, key, spec) as steps:
            async for _ in steps:
                pass

    @contextlib.asynccontextmanager
    async def _publishing_cache(self) -> AsyncGenerator[None]:
        """Have the core publish the contents of its prefix cache, by a request of one token."""
        name = f"cache-{next(self._numbers)}"
        spec = plain_spec(name, (_FIRST_ID,), 1)
        self._runs.start(CoreRun(name, name, OutputQueue()), continued(spec, name, name, (), {"mell_contents": True}))
        try:
            yield
        finally:
            self._runs.abort(name)

    @property
    def mirror(self) -> Mirror:
        """See `Engine.mirror`."""
        if self._feed is not None:
            self._feed.catch_up()
        return self._mirror

    def tied(self, traits: frozenset[Trait]) -> Tie | None:
        """See `Engine.tied`."""
        return self._seed_tie if Trait.SEEDED in traits else None

    async def load_adapter(self, adapter: Adapter) -> None:
        """See `Engine.load_adapter`."""
        if self._core.vllm_config.lora_config is None:
            raise Refused("adapters need engine_kwargs.enable_lora: true", Cause.ADAPTER)
        await self._adapters.load(adapter)

    async def check_grammar(self, spec: RequestSpec, outputs: tuple[int, ...]) -> None:
        """See `Engine.check_grammar`. The grammar is in vLLM's cache afterwards, if its backend has one."""
        if Trait.STRUCTURED not in spec.traits:
            return
        name, queue = f"grammar-{next(self._numbers)}", OutputQueue()
        self._start_run(CoreRun(name, name, queue), rehearsing(spec, name, outputs))
        try:
            await queue.exhaust()
        except RequestFailed as error:
            raise Refused("the engine cannot continue the grammar: its log has the reason", Cause.GRAMMAR) from error
        finally:
            self._runs.abort(name)

    def add(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None
    ) -> None:
        """See `Engine.add`."""
        transfer = self._arrived()
        self._metrics.steps.begin(time.monotonic())
        if tail is not None:
            transfer["mell_tail"] = asdict(tail)
            self.blocks_loaded += tail.last(self._block_size) - tail.first
        # vLLM would take a second request of one id for a continuation of the first.
        name = f"{key}-{next(self._numbers)}"
        run = CoreRun(key, name, sink, Trait.STRUCTURED in spec.traits, spec.prompt_tokens, continues=bool(outputs))
        self._start_run(run, continued(spec, name, key, outputs, transfer, self._adapter(spec)))

    def _start_run(self, run: CoreRun, request: Frames) -> None:
        """Add a request to the core. An engine that is paused has none."""
        if self._paused:
            asyncio.get_running_loop().call_soon(run.sink.fail, RequestFailed("the replica is asleep"))
        else:
            self._runs.start(run, request)

    def _adapter(self, spec: RequestSpec) -> Adapter | None:
        """The adapter of a request, as this engine has loaded it."""
        if spec.adapter is None:
            return None
        adapter = self._adapters.get(spec.adapter)
        assert adapter is not None, "a replica loads the adapter of a request before it takes the request"
        return adapter

    def abort(self, key: str) -> None:
        """See `Engine.abort`."""
        self._runs.abort(key)

    def halt(self, key: str, left: int) -> None:
        """See `Engine.halt`."""
        if self._copiers is not None:
            self._runs.halt(key, left)
            self._copiers.halt(key)

    async def gather(self, key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        """See `Engine.gather`."""
        return await self._blocks().gather(key, first, last, slots)

    async def computed(self, key: str) -> Tokens | None:
        """See `Engine.computed`."""
        computed = await self._blocks().computed(key)
        return None if computed is None else Tokens(computed)

    async def computed_beyond(self, key: str, tokens: Tokens) -> Tokens:
        """See `Engine.computed_beyond`."""
        computed = await self._blocks().computed(key, tokens)
        assert computed is not None, "the copiers have waited for that"
        return Tokens(computed)

    async def load(self, load: str, spec: RequestSpec, outputs: tuple[int, ...], first: Blocks, last: Blocks) -> None:
        """See `Engine.load`.

        A request of vLLM waits for the blocks, and is aborted once they are in its prefix cache. The caller does not
        wait for the step that puts them there: a request that is added before has it done first (`mell_filled`). If
        there is nothing to wait for, vLLM runs the load's request, which has one output token.
        """
        copiers, queue = self._blocks(), OutputQueue()
        wanted = asdict(WantedBlocks(load, first, last))
        # vLLM computes the last token of any prompt: it stands behind the blocks.
        end = last * self._block_size + 1
        frames = loading(spec, load, outputs[:end], wanted, end, self._arrived(), self._adapter(spec))
        self._start_run(CoreRun(load, load, queue), frames)
        self._loads.add(load)
        request = asyncio.create_task(queue.exhaust())
        filled: int | None = None
        try:
            filled = await _before(request, copiers.filled(load))
        except RequestFailed as error:
            raise TransferFailed(str(error)) from error
        finally:
            if filled is None:
                await self._end_load(load, request)
        if filled is not None:
            self.blocks_loaded += filled
            self._filled.add(load)
            self._ending.start(self._until_cached(load, request))

    async def _until_cached(self, load: str, request: asyncio.Task[None]) -> None:
        """End a load whose blocks have arrived, once they are in the prefix cache. A failure costs only the blocks."""
        try:
            with contextlib.suppress(TransferFailed, EngineDead, RequestFailed):
                await _before(request, self._blocks().loaded(load))
        finally:
            self._filled.discard(load)
            await self._end_load(load, request)

    async def _end_load(self, load: str, request: asyncio.Task[None]) -> None:
        """Have everything forget a load or a hold, and abort its request."""
        self._loads.discard(load)
        self._blocks().forget(load)
        self._runs.abort(load)
        request.cancel()
        await asyncio.wait((request,))

    def _lose_loads(self) -> None:
        """Have all loads fail, those as well whose blocks have arrived: they wait for a step, which may not come."""
        for load in tuple(self._loads):
            self._blocks().forget(load)

    def _arrived(self) -> dict[str, Any]:
        """The connector's parameter of a new request for the loads that it may find arrived but not cached."""
        return {"mell_filled": sorted(self._filled)} if self._filled else {}

    async def put(
        self, load: str, first: Blocks, last: Blocks, slots: Sequence[SlotRef], cuts: Resharding | None = None
    ) -> None:
        """See `Engine.put`."""
        await self._blocks().scatter(load, first, last, slots, cuts)

    @property
    def links(self) -> Copiers | None:
        """See `Engine.links`."""
        return self._copiers

    async def gather_tail(self, key: str, tail: Tail, slots: Sequence[Slot]) -> Sequence[Shard]:
        """See `Engine.gather_tail`."""
        last = tail.last(self._block_size)
        return await self._blocks().gather(key, tail.first, last, slots, partial=True)

    def names(self, spec: RequestSpec, outputs: tuple[int, ...]) -> Sequence[int]:
        """See `Engine.names`."""
        if self._namer is None:
            return ()
        adapter = self._adapter(spec)
        request = decode_request(spec.body)
        request = msgspec.structs.replace(request, prompt_token_ids=request.context(outputs))
        return self._namer.names(request, lambda: encode_request(request, spec.body[1:]), adapter)

    def present(self, spec: RequestSpec, outputs: tuple[int, ...]) -> HeldPrefix:
        """See `Engine.present`."""
        held = self.mirror.held(self.names(spec, outputs))
        return HeldPrefix(max(0, held.hbm - self._unused), held.dram)

    async def hold_prefix(self, hold: str, spec: RequestSpec, outputs: tuple[int, ...]) -> Blocks:
        """See `Engine.hold_prefix`. A request of vLLM waits in vain, with the blocks as its own (see `connector`)."""
        copiers, queue = self._blocks(), OutputQueue()
        await self._swap_in(hold, spec, outputs)
        # A context that ends with a full block is followed by any token, since vLLM computes the last one.
        context = (*outputs, _FIRST_ID)
        end = (spec.prompt_tokens + len(outputs)) // self._block_size * self._block_size + 1
        frames = holding(spec, hold, context, end, self._arrived(), self._adapter(spec))
        self._start_run(CoreRun(hold, hold, queue), frames)
        request = asyncio.create_task(queue.exhaust())
        held: int | None = None
        try:
            held = await _before(request, copiers.held(hold))
        except RequestFailed as error:
            raise TransferFailed(str(error)) from error
        finally:
            if held is None:
                await self._end_load(hold, request)
        if held is None:
            raise TransferFailed("the engine did not hold the prefix")
        self._holds[hold] = request
        return Blocks(held)

    async def _swap_in(self, hold: str, spec: RequestSpec, outputs: tuple[int, ...]) -> None:
        """Have the prefix's blocks that only the host has loaded, if they take at most half of the free memory.

        vLLM runs a request of one token for it, as for a load without blocks. Requests on their way here find room in
        the other half: none waits for the copy.
        """
        held = self.mirror.held(self.names(spec, outputs))
        if held.dram and 2 * held.dram <= self.stats().free_blocks:
            end = Blocks(held.blocks)
            await self.load(f"{hold}-in", spec, outputs, end, end)

    def release_prefix(self, hold: str) -> None:
        """See `Engine.release_prefix`."""
        if (request := self._holds.pop(hold, None)) is not None:
            self._ending.start(self._end_load(hold, request))

    def expect(self, tail: str) -> None:
        """See `Engine.expect`."""
        if self._copiers is not None:
            self._copiers.expect(tail)

    async def hold(self, tail: Tail, slots: Sequence[SlotRef], cuts: Resharding | None = None) -> None:
        """See `Engine.hold`."""
        await self._blocks().hold(tail, slots, cuts=cuts)

    def discard(self, tail: str) -> None:
        """See `Engine.discard`."""
        if self._copiers is not None:
            self._copiers.discard(tail)

    def _blocks(self) -> Copiers:
        if self._copiers is None:
            raise TransferFailed("the engine's KV blocks cannot be moved")
        return self._copiers

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        capacity = self._capacity if self.memory is None else self.memory.capacity
        if self._pools:
            free = max(0, self._capacity - -(-self._runs.prompt_tokens // self._block_size))
        else:
            free = capacity - round(self._size * self._metrics.scheduler.kv_cache_usage)
        return EngineStats(
            capacity_tokens=Tokens(capacity * self._block_size),
            free_blocks=Blocks(free),
            block_size=self._block_size,
            max_requests=self._max_requests,
            running=self._metrics.scheduler.num_running_reqs,
            waiting=self._metrics.scheduler.num_waiting_reqs,
            preemptions=self._metrics.preemptions,
            steps=self._metrics.steps.totals,
            step_tokens=self._step_tokens,
            max_adapters=self._max_adapters,
            nominal_tokens=Tokens(0 if self.memory is None else self.memory.start * self._block_size),
        )

    @property
    def death(self) -> str | None:
        """See `Engine.death`."""
        return self._runs.death

    async def check_health(self) -> None:
        """See `Engine.check_health`."""
        if self.death is not None:
            raise EngineDead(self.death)

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`. Retries while ended requests still hold blocks."""
        for _ in range(20):
            if await self._core.reset_prefix_cache_async(reset_connector=self.host_blocks > 0):
                if self._feed is not None:
                    # vLLM publishes the reset with the next step.
                    self._feed.resync()
                return
            await asyncio.sleep(0.05)
        raise TransferFailed("the prefix cache is in use")

    async def delete(self, names: Collection[int] | None) -> Blocks:
        """See `Engine.delete`."""
        if self.mirror.off is not None:
            raise TransferFailed(f"the blocks of its cache have no names: {self.mirror.off}")
        encoded = None if names is None else encode_names(names)
        return await self._ordered({"mell_delete": asdict(DeletedBlocks(encoded))})

    async def pin(self, pin: str, names: Sequence[int]) -> Blocks:
        """See `Engine.pin`."""
        return await self._ordered_of_tier({"mell_pin": asdict(PinnedBlocks(pin, encode_names(names)))})

    async def unpin(self, pin: str) -> Blocks:
        """See `Engine.unpin`."""
        return await self._ordered_of_tier({"mell_unpin": pin})

    async def _ordered_of_tier(self, transfer: Mapping[str, Any]) -> Blocks:
        """The reply to an order to the tier of host memory. Raises TransferFailed."""
        if not self.host_blocks:
            raise TransferFailed("there is no tier of host memory")
        return await self._ordered(transfer)

    async def _ordered(self, transfer: Mapping[str, Any]) -> Blocks:
        """The connector's reply to an order about blocks, their number. Raises TransferFailed."""
        try:
            return Blocks((await self._command(transfer))["mell_blocks"])
        except (RequestFailed, EngineDead) as error:
            raise TransferFailed(str(error)) from error

    async def _command(self, transfer: Mapping[str, Any]) -> Mapping[str, Any]:
        """The connector's reply to parameters, which a request of one token carries. Raises RequestFailed."""
        name, queue = f"command-{next(self._numbers)}", OutputQueue()
        reply: dict[str, Any] = {}
        run = CoreRun(name, name, queue, reply=reply.update)
        self._start_run(run, continued(plain_spec(name, (_FIRST_ID,), 1), name, name, (), transfer))
        try:
            await queue.exhaust()
        finally:
            self._runs.abort(name)
        return reply

    async def start_profile(self, session: ProfileSession) -> None:
        """See `Engine.start_profile`."""
        if self._core.vllm_config.profiler_config.profiler is None:
            raise ProfilerUnavailable("the engine has no profiler: set engine_kwargs.profiler_config")
        if self.profiling:
            raise ProfilerUnavailable("a session is under way: stop it first")
        try:
            await self._core.profile_async(
                True, session.prefix or None, session.delay_iterations, session.max_iterations
            )
        except Exception as error:
            raise ProfilerUnavailable(str(error)) from error
        self.profiling = True

    async def stop_profile(self) -> None:
        """See `Engine.stop_profile`."""
        if not self.profiling:
            raise ProfilerUnavailable("no session is under way")
        # Also if it fails: an engine that hangs would not be noticed during a session.
        self.profiling = False
        try:
            await self._core.profile_async(False)
        except Exception as error:
            raise ProfilerUnavailable(str(error)) from error

    def shutdown(self) -> None:
        """See `Engine.shutdown`."""
        if self._copiers is not None:
            self._copiers.close()
        if self._feed is not None:
            self._feed.close()
        self._reading.cancel()
        self._core.shutdown()


async def _before(request: asyncio.Task[None], waiting: Coroutine[Any, Any, T]) -> T | None:
    """The result of `waiting`, or None if the request ends before. Raises the exception of whichever ends first."""
    other = asyncio.create_task(waiting)
    try:
        await asyncio.wait((other, request), return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            request.result()
            return None
        return other.result()
    finally:
        other.cancel()
        await asyncio.wait((other,))


def _processes(workers: Sequence[Mapping[str, Any]]) -> EngineProcesses:
    """The engine's processes. EngineCore has started the workers, or is the only worker if this process has."""
    pids, starter = tuple(worker["worker_pid"] for worker in workers), workers[0]["starter_pid"]
    return EngineProcesses(core=pids[0] if starter == os.getpid() else starter, workers=pids)


def _capacity(config: Any, worker: Mapping[str, Any]) -> Blocks:
    """The size of the KV cache: the blocks that contexts of the model's full length would hold, if they had all of it.

    In a cache that is not plain (sliding windows, state-space layers), a block in this count is not a block of vLLM's:
    a long context holds fewer of those, and vLLM computes how many tokens they suffice for.
    """
    cache = config.cache_config
    if worker["plain"]:
        return Blocks(worker["num_blocks"] - 1)  # vLLM keeps one null block
    return Blocks(cache.kv_cache_size_tokens // cache.block_size)


def _why_unmirrored(config: Any, workers: Sequence[Mapping[str, Any]]) -> str | None:
    """The reason why the engine's prefix cache cannot be followed by its events; None if it can."""
    if reason := workers[0]["unmirrored"]:
        return str(reason)
    if not config.cache_config.enable_prefix_caching:
        return "the prefix cache is off"
    if not envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES:
        return "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0"
    return None


def _unused_blocks(config: Any) -> int:
    """The number of cached blocks at the end of a prefix that vLLM computes anyway: a draft model may read them."""
    speculative = config.speculative_config
    return int(speculative is not None and speculative.use_eagle_block_drop())


def _seed_tie(config: Any) -> Tie | None:
    """The reason why a seeded request cannot be continued exactly by an engine of this configuration."""
    if config.speculative_config is not None:
        return Tie.DRAFTED
    on_cpu = config.device_config.device_type == "cpu"
    restored = config.use_v2_model_runner or (on_cpu and draws_one_number())
    return None if restored else Tie.SEEDED


def _fingerprint(config: Any, workers: Sequence[Mapping[str, Any]]) -> Fingerprint:
    """The fingerprint of model and cache; an empty `cache` means that blocks cannot be moved.

    They reach a request by the prefix cache alone. Reads the files of weights (`weights`), which may take seconds.
    """
    model, cache = config.model_config, config.cache_config
    names = (model.model, model.revision, model.tokenizer, model.max_model_len, vllm.__version__)
    movable = all(worker["layout"] for worker in workers) and cache.enable_prefix_caching
    speculative = getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    drafts = draft is not None and getattr(speculative, "method", None) != "ngram"
    layouts = _layouts(model, cache.block_size, workers if movable else (_NO_BLOCKS,) * len(workers), drafts)
    kinds = (cache.cache_dtype, cache.block_size)
    # Digests, since fingerprints travel with every migration.
    values = (*_settings(cache, _KV_SETTINGS), *(() if draft is None else _weights(draft, config)))
    # Shards that cannot be cut are part of the kind of cache, for whoever predicts which replicas exchange blocks.
    values += tuple(f"{rank}/{len(workers)}={shard.order}" for rank, shard in enumerate(layouts) if shard.indivisible)
    return Fingerprint(
        model="|".join(map(str, (*names, _digest(_weights(model, config))))),
        cache="|".join(map(str, (*kinds, _digest(values)))) if movable else "",
        block_size=cache.block_size,
        layouts=layouts,
    )


def _layouts(
    model: Any, block_size: int, workers: Sequence[Mapping[str, Any]], drafts: bool
) -> tuple[ShardLayout, ...]:
    """The shards of all workers; if the engine `drafts`, with layers of another model."""
    total, count = model.get_total_num_kv_heads(), len(workers)
    heads = [heads_of(rank, count, total) for rank in range(count)]
    return tuple(_layout(worker, own, block_size, drafts) for worker, own in zip(workers, heads, strict=True))


_NO_BLOCKS: Mapping[str, Any] = {"layout": (0, 0, None, "", ""), "quantized": False, "block_bytes": 0}
"""The description of a worker whose blocks are not moved."""


def _layout(worker: Mapping[str, Any], heads: Extent, block_size: int, drafts: bool) -> ShardLayout:
    shape, whole = ShardShape(*worker["layout"]), ""
    if worker["quantized"]:
        whole = "its values have scales, which may be each worker's own"
    elif drafts:
        whole = "the heads of the draft model's layers may be divided otherwise"
    elif shape.heads != heads.size:
        whole = "the heads in its layers are not those of the model"
    # The description of layers that are unlike is long.
    order = shape.order if shape.heads else _digest((shape.order,))
    layers = Extent(0, shape.layers)
    return ShardLayout(layers, heads, block_size, shape.dtype, order, shape.head_axis, worker["block_bytes"], whole)


_MODEL_SETTINGS = (
    *("dtype", "quantization", "quantization_config", "code_revision", "tokenizer_mode", "disable_sliding_window"),
    *("model_impl", "model_class_overrides", "model_weights", "convert", "pooler_config"),
)
_LOAD_SETTINGS = ("load_format", "model_loader_extra_config", "ignore_patterns")
_LORA_SETTINGS = ("lora_dtype", "target_modules")
_KV_SETTINGS = ("kv_cache_dtype_skip_layers", "sliding_window")
"""The members of vLLM's configuration that change weights or KV; the model's own, such as rope, are in its config."""


def _weights(model: Any, config: Any) -> tuple[str, ...]:
    """All that decides the values of a model's weights, beside its name."""
    load = getattr(config, "load_config", None)
    fetched = getattr(load, "download_dir", None)
    tokenizer = () if model.tokenizer == model.model else (model.tokenizer, getattr(model, "tokenizer_revision", None))
    return (
        model.hf_config.to_json_string(),
        *_settings(model, _MODEL_SETTINGS),
        *_settings(load, _LOAD_SETTINGS),
        *_settings(getattr(config, "lora_config", None), _LORA_SETTINGS),
        name_weights(model.model, model.revision, fetched),
        *(() if not tokenizer else (name_weights(*tokenizer, fetched),)),
    )


def _settings(config: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Members of a part of vLLM's configuration, the same text in every process; those of None are None."""
    return tuple(f"{name}={normalize_value(getattr(config, name, None))}" for name in names)


def _digest(values: Sequence[str]) -> str:
    return hashlib.sha256("|".join(values).encode()).hexdigest()[:16]
