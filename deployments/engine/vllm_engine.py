"""The engine port on stock vLLM: AsyncLLM in this process, EngineCore and Worker in processes of their own."""

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self, TypeVar

import vllm
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from deployments.engine.port import EngineDead, EngineProcesses, EngineStats, Generated, InvalidRequest, Tie
from migration.kv.client import Copiers
from migration.kv.connector import WantedBlocks
from migration.protocol.errors import TransferFailed
from migration.protocol.messages import Fingerprint, Shard, SlotRef, Tail
from migration.protocol.ports import Slot
from migration.protocol.request import Sampling, Structured, pack_logprobs
from policies.model import Blocks, Tokens

_OWNED = (
    "kv_transfer_config",
    "worker_extension_cls",
    "distributed_executor_backend",
    "model",
    "enable_prefix_caching",
    "max_logprobs",
)

T = TypeVar("T")

_FIRST_ID = 0
"""A token id that every vocabulary has."""

USAGE = UsageContext.OPENAI_API_SERVER
"""vLLM's defaults depend on it, so that of vLLM's own server: on an H100, 8,192 tokens per step instead of 2,048."""


def engine_args(model: str, engine_kwargs: Mapping[str, Any]) -> AsyncEngineArgs:
    """vLLM's arguments for an engine with Mell's connector and worker extension.

    Raises:
        ValueError: `engine_kwargs` has an argument that Mell sets itself.
    """
    if owned := [name for name in _OWNED if name in engine_kwargs]:
        raise ValueError(f"engine_kwargs: Mell sets {', '.join(owned)}; remove it")
    # Several workers are processes of this replica. Inside a placement group vLLM would make them actors of their own.
    several = engine_kwargs.get("tensor_parallel_size", 1) > 1
    return AsyncEngineArgs(
        model=model,
        enable_prefix_caching=True,
        distributed_executor_backend="mp" if several else None,
        worker_extension_cls="migration.kv.worker.MellWorker",
        kv_transfer_config=KVTransferConfig(
            kv_connector="MellConnector",
            kv_connector_module_path="migration.kv.connector",
            kv_role="kv_both",
        ),
        **engine_kwargs,
    )


class VllmEngine:
    """One AsyncLLM with Mell's connector and worker extension."""

    def __init__(
        self,
        engine: AsyncLLM,
        latest: "_Latest",
        workers: Sequence[Mapping[str, Any]],
        copiers: Copiers | None,
    ) -> None:
        """`workers` are the workers' own descriptions (`MellWorker.mell_describe`), in the order of their ranks."""
        config = engine.vllm_config
        self._engine = engine
        self._latest = latest
        self._num_blocks: int = workers[0]["num_blocks"] - 1  # vLLM keeps one null block
        self._block_size: int = config.cache_config.block_size
        self._copiers = copiers
        self._filled: set[str] = set()
        """Loads whose blocks have all arrived, but may not be in vLLM's prefix cache yet."""
        self._caching: set[asyncio.Task[None]] = set()
        self.blocks_loaded = 0
        self._restores_seeds: bool = config.use_v2_model_runner or config.device_config.device_type == "cpu"
        self._reasons = bool(config.structured_outputs_config.reasoning_parser)
        self.max_context = Tokens(config.model_config.max_model_len)
        self.processes = _processes(workers)
        self.fingerprint = _fingerprint(config, workers)

    @classmethod
    async def start(cls, model: str, engine_kwargs: Mapping[str, Any]) -> Self:
        """Start vLLM on `model` (a folder or a hub name).

        Raises:
            ValueError: `engine_kwargs` has an argument that Mell sets itself.
        """
        args = engine_args(model, engine_kwargs)
        latest = _Latest()
        engine = AsyncLLM.from_engine_args(args, usage_context=USAGE, stat_loggers=[latest.logger])
        workers = await engine.collective_rpc("mell_describe")
        addresses = [worker["copier"] for worker in workers]
        copiers = await Copiers.connect(addresses) if all(addresses) else None
        started = cls(engine, latest, workers, copiers)
        await started._compile_sampling()
        return started

    async def _compile_sampling(self) -> None:
        """Have vLLM compile its sampling functions now, and not within the first request that needs them.

        It decorates them with `torch.compile` (v1/sample/ops: logprobs, random sampling), whatever its compilation
        mode. With the CPU build a compiler runs for seconds the first time on a machine; the engine computes nothing
        meanwhile. One request compiles them for a batch of one, two at once for batches of any other size.
        """
        sampling = Sampling(max_tokens=2, temperature=1.0, logprobs=1, ignore_eos=True)
        for size in (1, 2):
            await asyncio.gather(*(self._compile_by(f"compile-{size}-{i}", sampling) for i in range(size)))

    async def _compile_by(self, key: str, sampling: Sampling) -> None:
        async for _ in self.generate(key, (_FIRST_ID,), (), sampling):
            pass

    def tied(self, sampling: Sampling) -> Tie | None:
        """See `Engine.tied`."""
        if sampling.seeded and not self._restores_seeds:
            return Tie.SEEDED
        if sampling.structured and self._reasons:
            return Tie.REASONING
        return None

    async def generate(
        self,
        key: str,
        prompt: tuple[int, ...],
        outputs: tuple[int, ...],
        sampling: Sampling,
        tail: Tail | None = None,
    ) -> AsyncIterator[Generated]:
        """See `Engine.generate`."""
        held = {} if tail is None else {"mell_tail": asdict(tail)}
        try:
            with _refusals():
                transfer = self._transfer(mell_key=key, mell_output=len(outputs), **held)
                params = _sampling_params(sampling, len(outputs), transfer)
            async for output in self._run(key, prompt + outputs, params, sampling.priority):
                if tail is not None:
                    # The first step has taken it, or found the blocks before it gone.
                    self.discard(tail)
                    tail = None
                completion = output.outputs[0]
                if completion.finish_reason == "error":
                    raise (InvalidRequest if sampling.structured else RuntimeError)("the engine aborted the request")
                scores = () if sampling.logprobs is None else _packed(completion.logprobs)
                yield Generated(tuple(completion.token_ids), completion.finish_reason, scores)
        finally:
            if tail is not None:
                self.discard(tail)

    async def gather(self, key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        """See `Engine.gather`."""
        return await self._blocks().gather(key, first, last, slots)

    async def load(self, load: str, tokens: tuple[int, ...], first: Blocks, last: Blocks) -> None:
        """See `Engine.load`.

        A request of vLLM waits for the blocks, and is aborted once they are in its prefix cache. The caller does not
        wait for the step that puts them there: a request that is added before has it done first (`mell_filled`). If
        there is nothing to wait for, vLLM runs the load's request, which has one output token.
        """
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": self._transfer(mell_load=asdict(WantedBlocks(load, first, last)))},
        )
        copiers = self._blocks()
        request = asyncio.create_task(self._exhaust(load, tokens, params))
        filled: int | None = None
        try:
            filled = await _before(request, copiers.filled(load))
        except InvalidRequest as error:
            raise TransferFailed(str(error)) from error
        finally:
            if filled is None:
                await _end_load(load, request, copiers)
        if filled is not None:
            self.blocks_loaded += filled
            self._filled.add(load)
            caching = asyncio.create_task(self._until_cached(load, request, copiers))
            self._caching.add(caching)
            caching.add_done_callback(self._caching.discard)

    async def _until_cached(self, load: str, request: asyncio.Task[None], copiers: Copiers) -> None:
        """End a load whose blocks have arrived, once they are in the prefix cache. A failure costs only the blocks."""
        try:
            with contextlib.suppress(TransferFailed, EngineDead):
                await _before(request, copiers.loaded(load))
        finally:
            self._filled.discard(load)
            await _end_load(load, request, copiers)

    async def _exhaust(self, key: str, tokens: tuple[int, ...], params: SamplingParams) -> None:
        async for _ in self._run(key, tokens, params):
            pass

    def _transfer(self, **params: Any) -> dict[str, Any]:
        """The connector's parameters of a new request, with the loads that it may find arrived but not cached."""
        return params | ({"mell_filled": sorted(self._filled)} if self._filled else {})

    async def put(self, load: str, first: Blocks, last: Blocks, slots: Sequence[SlotRef]) -> None:
        """See `Engine.put`."""
        await self._blocks().scatter(load, first, last, slots)

    @property
    def links(self) -> Copiers | None:
        """See `Engine.links`."""
        return self._copiers

    async def gather_tail(self, key: str, tail: Tail, slots: Sequence[Slot]) -> Sequence[Shard]:
        """See `Engine.gather_tail`."""
        last = tail.last(self._block_size)
        return await self._blocks().gather(key, tail.first, last, slots, partial=True)

    async def hold(self, tail: Tail, slots: Sequence[SlotRef]) -> None:
        """See `Engine.hold`."""
        blocks = tail.last(self._block_size) - tail.first
        await self._blocks().hold(tail.name, blocks, slots)
        self.blocks_loaded += blocks

    def discard(self, tail: Tail) -> None:
        """See `Engine.discard`."""
        if self._copiers is not None:
            self._copiers.discard(tail.name)

    def _blocks(self) -> Copiers:
        if self._copiers is None:
            raise TransferFailed("the engine's KV blocks cannot be moved")
        return self._copiers

    async def _run(
        self, key: str, tokens: tuple[int, ...], params: SamplingParams, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        stream = self._engine.generate({"prompt_token_ids": list(tokens)}, params, key, priority=priority)
        try:
            async with contextlib.aclosing(stream) as outputs:
                with _refusals():
                    async for output in outputs:
                        yield output
        except EngineDeadError as error:
            raise EngineDead(str(error)) from error

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        free = round(self._num_blocks * (1.0 - self._latest.usage))
        return EngineStats(
            capacity_tokens=Tokens(self._num_blocks * self._block_size),
            free_blocks=Blocks(free),
            block_size=self._block_size,
            max_requests=self._engine.vllm_config.scheduler_config.max_num_seqs,
            running=self._latest.running,
            waiting=self._latest.waiting,
            preemptions=self._latest.preemptions,
        )

    async def check_health(self) -> None:
        """See `Engine.check_health`."""
        try:
            await self._engine.check_health()
        except EngineDeadError as error:
            raise EngineDead(str(error)) from error

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`. Retries while ended requests still hold blocks."""
        for _ in range(20):
            if await self._engine.reset_prefix_cache():
                return
            await asyncio.sleep(0.05)
        raise TransferFailed("the prefix cache is in use")

    def shutdown(self) -> None:
        """See `Engine.shutdown`."""
        if self._copiers is not None:
            self._copiers.close()
        self._engine.shutdown()


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


async def _end_load(load: str, request: asyncio.Task[None], copiers: Copiers) -> None:
    """Have everything forget a load, and abort its request."""
    copiers.forget(load)
    request.cancel()
    await asyncio.wait((request,))


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise vLLM's errors for an invalid request as the port's InvalidRequest."""
    try:
        yield
    except (ValueError, VLLMClientError) as error:
        raise InvalidRequest(str(error)) from error


def _processes(workers: Sequence[Mapping[str, Any]]) -> EngineProcesses:
    """The engine's processes. EngineCore has started the workers, or is the only worker if this process has."""
    pids, starter = tuple(worker["worker_pid"] for worker in workers), workers[0]["starter_pid"]
    return EngineProcesses(core=pids[0] if starter == os.getpid() else starter, workers=pids)


class _Latest:
    """The newest scheduler stats, written by the logger, which vLLM creates itself."""

    def __init__(self) -> None:
        self.usage = 0.0
        self.running = 0
        self.waiting = 0
        self.preemptions = 0

    def logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """The stat logger factory for AsyncLLM."""
        return _StatLogger(self)


class _StatLogger(StatLoggerBase):
    def __init__(self, latest: _Latest) -> None:
        self._latest = latest

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._latest.usage = scheduler_stats.kv_cache_usage
            self._latest.running = scheduler_stats.num_running_reqs
            self._latest.waiting = scheduler_stats.num_waiting_reqs
        if iteration_stats is not None:
            self._latest.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass


def _sampling_params(sampling: Sampling, outputs: int, transfer: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens if sampling.min_tokens > outputs else 0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        logprobs=sampling.logprobs,
        flat_logprobs=sampling.logprobs is not None,
        structured_outputs=_structured(sampling.structured),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": dict(transfer)},
    )


def _structured(wanted: Structured | None) -> StructuredOutputsParams | None:
    match wanted:
        case None:
            return None
        case Structured("json_object"):
            return StructuredOutputsParams(json_object=True)
        case Structured("choice", value):
            return StructuredOutputsParams(choice=json.loads(value))
        case Structured(kind, value):
            return StructuredOutputsParams(**{kind: value})


def _packed(flat: FlatLogprobs) -> tuple[bytes, ...]:
    """The packed logprobs of one step's tokens; vLLM lists the sampled token first, then the likeliest ones."""
    ids, values = flat.token_ids, flat.logprobs
    return tuple(
        pack_logprobs(values[start], ids[start + 1 : end], values[start + 1 : end])
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    )


def _fingerprint(config: Any, workers: Sequence[Mapping[str, Any]]) -> Fingerprint:
    """The fingerprint of model and cache; an empty `cache` means that blocks cannot be moved."""
    model = config.model_config
    names = (model.model, model.revision, model.tokenizer, model.max_model_len, vllm.__version__)
    weights = hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()[:16]
    layouts = [worker["layout"] for worker in workers]
    # A digest, since every worker lists all its layers, and fingerprints travel with every migration.
    layout = hashlib.sha256("|".join(layouts).encode()).hexdigest()[:16]
    cache = (model.dtype, config.cache_config.cache_dtype, config.cache_config.block_size, len(workers), layout)
    return Fingerprint(
        model="|".join(map(str, (*names, weights))),
        cache="|".join(map(str, cache)) if all(layouts) else "",
        block_size=config.cache_config.block_size,
        shard_bytes=max(worker["block_bytes"] for worker in workers),
        workers=len(workers),
    )
