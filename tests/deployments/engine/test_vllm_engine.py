"""Requests and outputs between the port and vLLM's core; their effects are in the integration tests."""

import asyncio
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.cache.factories import engine_receiver_cache_from_config, processor_cache_from_config
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from app.tinymodel import ensure_tiny_model
from app.vllm_cli.arguments import make_arg_parser
from deployments.cache.feed import EventFolder
from deployments.cache.mirror import Mirror
from deployments.engine import vllm_engine
from deployments.engine.arguments import USAGE, check_model, engine_args, engine_config, frontend_args, is_pooling
from deployments.engine.core import CoreRuns, StepMeter, Take
from deployments.engine.port import EngineDead, InvalidRequest, RequestFailed, Tie
from deployments.engine.vllm_engine import VllmEngine, _capacity, _fingerprint, _processes, _seed_tie, _why_unmirrored
from migration.concurrency import Tasks
from migration.kv.copier.client import Copiers
from migration.kv.pool import declared_times
from migration.protocol.continuing import plain_spec
from migration.protocol.core_messages import Frames
from migration.protocol.errors import Refused, TransferFailed
from migration.protocol.messages import Fingerprint, Tail
from migration.protocol.ports import HALTED, Generated
from migration.run.outputs import OutputQueue
from policies.causes import Cause
from policies.cost.fit import StepTotals
from policies.model import Blocks
from policies.prefix.tree import HeldPrefix
from tests.integration.models.rows import How, row
from tests.tinyvision import ensure_tiny_vision


class FakeCore:
    """In the core's place: records requests and aborts; a test makes its outputs."""

    def __init__(self) -> None:
        self.requests: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self.dead = False

    def send_request(self, frames: Frames) -> None:
        if self.dead:
            raise EngineDeadError
        self.requests.append(MsgpackDecoder(EngineCoreRequest).decode(frames))

    def send_abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def deliver(self, take: Take) -> None:
        while not isinstance(outputs := await self.outputs.get(), Exception):
            take(outputs)
        raise outputs

    async def step(self, *outputs: EngineCoreOutput) -> None:
        """The outputs of one step, as they come over the wire."""
        step = EngineCoreOutputs(outputs=list(outputs))
        self.outputs.put_nowait(MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(step)))
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def over(core: FakeCore, copiers: Any = None) -> VllmEngine:
    """An engine over a fake core and stand-ins for copiers."""
    engine = object.__new__(VllmEngine)
    engine._runs, engine._numbers = CoreRuns(core, lambda outputs: None), itertools.count()
    engine._loads, engine._filled, engine._ending, engine.blocks_loaded = set(), set(), Tasks(), 0
    engine._block_size, engine._copiers = 16, copiers
    engine._mirror, engine._feed, engine._namer = Mirror("not followed"), None, None
    engine._metrics = SimpleNamespace(steps=StepMeter(0))  # type: ignore[assignment]
    engine._pools, engine._paused, engine.memory = False, False, None
    engine._reading = asyncio.create_task(engine._runs.read())
    return engine


class Taken(OutputQueue):
    """All that a run yielded."""

    @property
    def all(self) -> list[Generated | Exception]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]


async def test_requests_reach_the_core_under_names_that_are_never_used_twice() -> None:
    engine = over(core := FakeCore())
    for _ in range(2):
        engine.add("r.0", plain_spec("r", (5, 6), 9, stop_token_ids=[7]), (), Taken())
    first, second = core.requests
    assert first.request_id != second.request_id
    assert (first.prompt_token_ids, first.sampling_params.max_tokens) == ([5, 6], 9)
    assert first.sampling_params.stop_token_ids == [7]
    assert first.sampling_params.extra_args == {"kv_transfer_params": {"mell_key": "r.0", "mell_output": 0}}


@pytest.mark.parametrize(
    ("halted", "limit", "step", "finish"),
    [
        (True, 9, (1,), HALTED),
        (True, 4, (1,), "length"),
        (False, 9, (1,), "length"),
        (True, 9, (1, 1, 1), HALTED),
        (True, 6, (1, 1, 1), "length"),
    ],
    ids=["behind a token", "at its last token", "not at all", "behind drafts", "at its last token behind drafts"],
)
async def test_halted_request_ends_without_a_reason_of_vllms(
    halted: bool, limit: int, step: tuple[int, ...], finish: str
) -> None:
    halting: list[str] = []
    engine = over(core := FakeCore(), SimpleNamespace(halt=halting.append))
    engine.add("r.0", plain_spec("r", (5,), limit, logprobs=1), (6, 7), sink := Taken())
    if halted:
        engine.halt("r.0", limit - 2)
    (name,) = (request.request_id for request in core.requests)
    scores = LogprobsLists(np.array([[7, 8]]), np.array([[-0.5, -1.5]], np.float32), np.array([1]))
    await core.step(EngineCoreOutput(name, list(step)))
    await core.step(EngineCoreOutput(name, [2], scores, finish_reason=FinishReason.LENGTH))
    first, last = sink.all
    assert isinstance(last, Generated) and last.rest is not None
    assert (first, last.tokens, last.finish) == (Generated(step), (2,), finish)
    told = MsgpackDecoder(EngineCoreOutput).decode(last.rest).finish_reason
    assert told is (None if finish == HALTED else FinishReason.LENGTH), "the reader goes by the rest"
    engine.abort("r.0")
    assert core.aborted == [] and halting == ["r.0"] * halted and not engine._runs._left


async def test_blocks_are_deleted_by_a_request_of_one_token_whose_end_has_their_number() -> None:
    engine = over(core := FakeCore())
    with pytest.raises(TransferFailed, match="not followed"):
        await engine.delete(None)
    engine._mirror = Mirror()
    for names, sent in (([5, 1 << 63], b"\0" * 7 + b"\5\x80" + b"\0" * 7), (None, None)):
        deleting = asyncio.create_task(engine.delete(names))
        await settle()
        request = core.requests[-1]
        assert (len(request.prompt_token_ids or ()), request.sampling_params.max_tokens) == (1, 1)
        assert request.sampling_params.extra_args["kv_transfer_params"]["mell_delete"] == {"names": sent}
        assert not deleting.done()
        end = {"finish_reason": FinishReason.LENGTH, "kv_transfer_params": {"mell_blocks": 2}}
        await core.step(EngineCoreOutput(request.request_id, [0], **end))
        assert await deleting == 2
    deleting = asyncio.create_task(engine.delete(None))
    await settle()
    await core.step(EngineCoreOutput(core.requests[-1].request_id, [], finish_reason=FinishReason.ERROR))
    with pytest.raises(TransferFailed):
        await deleting
    assert not core.aborted and not engine._runs._runs


async def test_free_blocks_of_an_elastic_pool_are_those_of_its_announced_size() -> None:
    """vLLM's usage is of the blocks that it hands out; requests may use more than the pool will have."""
    engine, use = over(FakeCore()), 0.5
    engine._max_requests = engine._step_tokens = engine._max_adapters = 64
    steps, sizes = StepMeter(0), list[int]()
    metrics: Any = SimpleNamespace(
        scheduler=SchedulerStats(kv_cache_usage=use), preemptions=0, steps=steps, resize=sizes.append
    )
    engine._metrics = metrics
    memory: Any = SimpleNamespace(capacity=Blocks(30), size=Blocks(100), start=Blocks(80))
    engine.memory = memory
    stats = engine.stats()
    assert (stats.capacity_tokens, stats.nominal_tokens, stats.free_blocks) == (30 * 16, 80 * 16, 30 - 50)
    engine.resized(Blocks(100))
    assert sizes == [100 * 16]


async def test_a_pooled_request_occupies_its_prompt_until_it_ends() -> None:
    engine = over(core := FakeCore())
    engine._pools, engine._capacity, engine._max_requests = True, Blocks(10), 64
    scheduler = SchedulerStats(kv_cache_usage=0.5)
    metrics: Any = SimpleNamespace(scheduler=scheduler, preemptions=0, steps=StepMeter(0))
    engine._metrics, engine._step_tokens, engine._max_adapters = metrics, 64, 0
    assert (engine.stats().capacity_tokens, engine.stats().free_blocks) == (160, 10)
    for key, tokens in (("1.0", 40), ("2.0", 400)):
        engine.add(key, plain_spec(key, (5,) * tokens, 1), (), Taken())
        if key == "1.0":
            assert engine.stats().free_blocks == 7
    assert engine.stats().free_blocks == 0, "and not less than none"
    first, second = (request.request_id for request in core.requests)
    await core.step(EngineCoreOutput(first, [], finish_reason=FinishReason.STOP))
    engine.abort("2.0")
    assert engine.stats().free_blocks == 10 and core.aborted == [second]


async def test_outputs_go_to_their_runs_up_to_the_last() -> None:
    engine = over(core := FakeCore())
    one, two = Taken(), Taken()
    for key, sink in (("1.0", one), ("2.0", two)):
        engine.add(key, plain_spec(key, (5,), 9), (), sink)
    first, second = (request.request_id for request in core.requests)
    await core.step(EngineCoreOutput(first, [7]), EngineCoreOutput(second, [8, 9]), EngineCoreOutput("unknown", [1]))
    await core.step(EngineCoreOutput(first, [], finish_reason=FinishReason.STOP))
    engine.abort("1.0")
    engine.abort("2.0")
    await core.step(EngineCoreOutput(second, [1]))
    assert one.all == [Generated((7,)), Generated((), "stop")] and two.all == [Generated((8, 9))]
    assert core.aborted == [second]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
async def test_the_rest_of_an_output_is_all_of_it_but_id_and_tokens() -> None:
    engine, sink = over(core := FakeCore()), Taken()
    engine.add("r.0", plain_spec("r", (5,), 9, logprobs=1), (), sink)
    scores = LogprobsLists(np.array([[7, 8]]), np.array([[-0.5, -1.5]], np.float32), np.array([1]))
    prompt = LogprobsTensors(torch.ones(2, 200), torch.zeros(2, 200), torch.ones(2))
    (name,) = (request.request_id for request in core.requests)
    began = time.monotonic()
    scheduled = EngineCoreEvent(EngineCoreEventType.SCHEDULED, began - 5)
    await core.step(
        EngineCoreOutput(name, [7], scores, prompt, events=[scheduled], prefill_stats=PrefillStats(num_prompt_tokens=1))
    )
    await core.step(EngineCoreOutput(name, [2], finish_reason=FinishReason.STOP, stop_reason=2))
    first, last = (MsgpackDecoder(EngineCoreOutput).decode(step.rest) for step in sink.all)  # type: ignore[union-attr]
    assert (first.request_id, first.new_token_ids) == ("", [])
    assert first.new_logprobs.logprob_token_ids.tolist() == [[7, 8]]
    assert torch.equal(first.new_prompt_logprobs_tensors.logprob_token_ids, torch.ones(2, 200))
    assert first.prefill_stats.num_prompt_tokens == 1
    age_s = -first.events[0].timestamp
    assert -1e-3 < age_s - 5 < time.monotonic() - began, "relative: other nodes have other clocks"
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, 2)


REGEX: dict[str, Any] = {"structured_outputs": {"regex": "a"}}


@pytest.mark.parametrize(
    ("form", "outputs", "tokens", "error"),
    [
        ({}, (), [], RequestFailed),
        (REGEX, (), [], InvalidRequest),
        (REGEX, (7,), [], RequestFailed),
        (REGEX, (7,), [8], InvalidRequest),
    ],
    ids=[
        "not without a grammar",
        "with a grammar",
        "not with one that another engine has compiled",
        "with one that refuses the next token",
    ],
)
async def test_a_request_that_the_engine_aborts_is_invalid(
    form: Any, outputs: tuple[int, ...], tokens: list[int], error: type
) -> None:
    engine, sink = over(core := FakeCore()), Taken()
    engine.add("r.0", plain_spec("r", (5,), 9, **form), outputs, sink)
    await core.step(EngineCoreOutput(core.requests[0].request_id, tokens, finish_reason=FinishReason.ERROR))
    (failure,) = sink.all
    assert type(failure) is error


async def test_a_grammar_is_tried_by_a_request_of_one_token() -> None:
    engine = over(core := FakeCore())
    await engine.check_grammar(plain_spec("r", (5, 6), 9), (7,))
    assert core.requests == [], "there is no grammar"
    for reason, refused in ((FinishReason.LENGTH, False), (FinishReason.ERROR, True)):
        trying = asyncio.create_task(engine.check_grammar(plain_spec("r", (5, 6), 9, seed=1, **REGEX), (7, 8)))
        await settle()
        tried = core.requests[-1]
        params = tried.sampling_params.extra_args["kv_transfer_params"]
        assert params == {"mell_context": [5, 6, 7, 8], "mell_output": 2}
        assert (tried.prompt_token_ids, tried.sampling_params.max_tokens, tried.sampling_params.seed) == ([5], 1, None)
        await core.step(EngineCoreOutput(tried.request_id, [9] * (not refused), finish_reason=reason))
        if refused:
            with pytest.raises(Refused) as raised:
                await trying
            assert raised.value.cause is Cause.GRAMMAR
        else:
            await trying


@pytest.mark.parametrize("error", [EngineDeadError(), ValueError("not a message")], ids=["dead", "unreadable"])
async def test_every_run_fails_when_the_core_dies_and_later_ones_do(error: Exception) -> None:
    engine, sink, late = over(core := FakeCore()), Taken(), Taken()
    await engine.check_health()
    engine.add("r.0", plain_spec("r", (5,), 9), (), sink)
    core.outputs.put_nowait(error)
    await settle()
    core.dead = True
    engine.add("r.1", plain_spec("r", (5,), 9), (), late)
    assert late.all == []
    await settle()
    assert [type(each) for each in (*sink.all, *late.all)] == [EngineDead] * 2
    with pytest.raises(EngineDead):
        await engine.check_health()


async def test_a_sink_that_fails_loses_its_own_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Taken):
        def take(self, step: Generated) -> None:
            raise ZeroDivisionError

    engine, bad, good = over(core := FakeCore()), Broken(), Taken()
    for key, sink in (("1.0", bad), ("2.0", good)):
        engine.add(key, plain_spec(key, (5,), 9), (), sink)
    await core.step(*(EngineCoreOutput(request.request_id, [7]) for request in core.requests))
    assert [type(each) for each in bad.all] == [RequestFailed] and good.all == [Generated((7,))]


async def test_a_start_compiles_random_sampling_and_logprobs_for_one_request_and_for_several() -> None:
    engine = over(core := FakeCore())
    compiling = asyncio.create_task(engine._compile_sampling())
    for size in (1, 2):
        await settle()
        batch, core.requests = core.requests, []
        assert [(r.sampling_params.temperature, r.sampling_params.logprobs) for r in batch] == [(1.0, 1)] * size
        await core.step(*(EngineCoreOutput(r.request_id, [1], finish_reason=FinishReason.LENGTH) for r in batch))
    await compiling


MODEL = str(ensure_tiny_model())
OWN = {
    "instance_id",
    "kv_transfer_config",
    "parallel_config.worker_extension_cls",
}
"""Settings in which Mell's engines differ: a random name, the connector, and the worker extension."""


def different(one: VllmConfig, other: VllmConfig) -> set[str]:
    """The settings in which two configurations of an engine differ."""
    settings, others = flat(one), flat(other)
    return {name for name in settings | others if settings.get(name) != others.get(name)}


def flat(config: VllmConfig) -> dict[str, str]:
    """All settings as texts, by section and name; a section that is not there counts as a setting."""
    found: dict[str, Any] = {}
    for section, value in vars(config).items():
        if section.endswith("_config") and section not in OWN and hasattr(value, "__dict__"):
            found |= {f"{section}.{name}": field for name, field in vars(value).items()}
        else:
            found[section] = value
    return {name: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for name, value in found.items()}


@pytest.mark.parametrize("workers", [1, 2])
def test_engine_runs_with_the_configuration_of_vllms_own_server(workers: int) -> None:
    """Sizes of batches follow from the usage context and the number of workers (on GPUs, from the memory, too)."""
    parser = make_arg_parser(FlexibleArgumentParser())
    server = ["--model", MODEL, "--dtype", "float32", "--tensor-parallel-size", str(workers)]
    stock = AsyncEngineArgs.from_cli_args(parser.parse_args(server))
    kwargs = {"dtype": "float32", "tensor_parallel_size": workers}
    expected = stock.create_engine_config(UsageContext.OPENAI_API_SERVER)
    made = engine_args(MODEL, kwargs).create_engine_config(USAGE)
    assert different(made, expected) == OWN
    without = engine_args(MODEL, kwargs).create_engine_config()
    assert ("scheduler_config.max_num_seqs" in different(without, expected)) == (workers > 1)


@pytest.mark.parametrize("name", ["distributed_executor_backend", "kv_transfer_config"])
def test_argument_that_mell_sets_itself_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Mell sets {name}; remove it"):
        engine_args(MODEL, {name: None})


def test_media_are_cached_by_the_ingress_only_and_bounded_alike_on_both_sides() -> None:
    kwargs = {"dtype": "float32", "limit_mm_per_prompt": {"image": 3}, "max_num_batched_tokens": 96, "max_num_seqs": 9}
    model = str(ensure_tiny_vision())
    engine, frontend = (made(model, kwargs).create_engine_config(USAGE) for made in (engine_args, frontend_args))
    assert engine_receiver_cache_from_config(engine) is None
    assert isinstance(processor_cache_from_config(frontend), MultiModalProcessorOnlyCache)
    budgets = [MultiModalBudget(config, MULTIMODAL_REGISTRY) for config in (engine, frontend)]
    assert [(budget.encoder_cache_size, dict(budget.mm_limits)) for budget in budgets] == [(96, {"image": 3})] * 2


@pytest.mark.parametrize("made_by", [engine_args, frontend_args])
def test_tables_of_the_settings_become_vllms_configurations(made_by: Callable[..., AsyncEngineArgs]) -> None:
    tables = {"reasoning_config": {"reasoning_start_str": "<think>"}, "structured_outputs_config": {}}
    made = made_by(MODEL, tables | {"pooler_config": {"dimensions": 8}})
    assert made.reasoning_config.reasoning_start_str == "<think>" and made.pooler_config.dimensions == 8
    assert not isinstance(made.structured_outputs_config, dict)
    with pytest.raises(ValueError, match="made_up"):
        made_by(MODEL, {"reasoning_config": {"made_up": 1}})


def test_a_pooling_model_has_vllms_own_configuration_and_no_connector() -> None:
    kwargs = {"dtype": "float32", "runner": "pooling", "convert": "embed"}
    made, stock = engine_config(MODEL, kwargs), AsyncEngineArgs(model=MODEL, **kwargs)
    assert different(made, stock.create_engine_config(USAGE)) == {"instance_id", "parallel_config.worker_extension_cls"}
    assert is_pooling(made) and made.kv_transfer_config is None


def test_a_model_that_generates_has_the_connector() -> None:
    made = engine_config(MODEL, {"dtype": "float32"})
    assert not is_pooling(made) and made.kv_transfer_config.kv_connector == "MellConnector"


def test_an_elastic_pool_has_mells_executor_and_the_multiple_that_it_declares() -> None:
    made = engine_config(MODEL, {"max_model_len": 64, "block_size": 32}, declared=2.5)
    assert made.parallel_config.distributed_executor_backend == "migration.kv.executor.ElasticExecutor"
    assert declared_times(made) == 2.5
    assert declared_times(engine_config(MODEL, {"max_model_len": 64, "block_size": 32})) is None


def test_a_pooling_model_has_no_elastic_pool() -> None:
    kwargs = {"dtype": "float32", "runner": "pooling", "convert": "embed"}
    with pytest.raises(ValueError, match=r"memory\.budget_mib: a pooling model's KV pool keeps its size"):
        engine_config(MODEL, kwargs, declared=2.0)


@pytest.mark.parametrize("reason", [None, "the model has 2 KV cache groups"])
async def test_a_pool_is_elastic_if_its_blocks_can_change_their_places(reason: str | None) -> None:
    engine = over(FakeCore())
    core: Any = None
    engine._core, engine._capacity = core, Blocks(24575)
    config = engine_config(MODEL, {"max_model_len": 64, "block_size": 32}, declared=3.0)
    workers = [described(os.getpid(), parameter_bytes=0, kept_parameters=None, unsupported=reason)]
    if reason is not None:
        with pytest.raises(ValueError, match=rf"memory\.budget_mib: {reason}, so the KV pool cannot change its size"):
            engine._elastic(config, workers)
        return
    memory = engine._elastic(config, workers)
    assert memory is not None and (memory.size, memory.declared) == (8191, 24575)
    assert engine._elastic(engine_config(MODEL, {"max_model_len": 64, "block_size": 32}), workers) is None


def test_several_workers_are_processes_of_the_replica_and_one_is_where_vllm_has_it() -> None:
    assert engine_args(MODEL, {"tensor_parallel_size": 2}).distributed_executor_backend == "mp"
    assert engine_args(MODEL, {}).distributed_executor_backend is None


def described(pid: int, layout: str = "layers", parent: int = 7, heads: int = 0, **members: Any) -> dict[str, Any]:
    """A worker with two layers of `heads` KV heads; 0: of unlike ones."""
    shape = [2, heads, 0 if heads > 1 else None, "float32", layout] if layout else None
    sizes = {"block_bytes": 100 * max(1, heads), "num_blocks": 9}
    return {"layout": shape, "quantized": False, "worker_pid": pid, "starter_pid": parent, **sizes, **members}


def test_processes_are_the_core_and_all_workers_by_rank() -> None:
    processes = _processes([described(12), described(11)])
    assert (processes.core, processes.workers) == (7, (12, 11))
    within_core = _processes([described(12, parent=os.getpid())])
    assert (within_core.core, within_core.workers) == (12, (12,))


def test_layouts_that_cannot_be_cut_are_part_of_the_cache() -> None:
    config = engine_args(MODEL, {"dtype": "float32"}).create_engine_config(USAGE)
    one = _fingerprint(config, [described(1)])
    two, again, mixed, none = (
        _fingerprint(config, [described(1), described(2, layout)]) for layout in ("layers", "layers", "others", "")
    )
    assert len({f.model for f in (one, two, mixed, none)}) == 1
    assert two == again and len({f.cache for f in (one, two, mixed)}) == 3 and none.cache == ""
    assert (one.block_bytes, two.block_bytes) == (100, 200)


def test_layouts_name_the_heads_of_each_worker_and_the_cache_does_not() -> None:
    config = engine_args(MODEL, {"dtype": "float32"}).create_engine_config(USAGE)
    one = _fingerprint(config, [described(1, heads=2)])
    two = _fingerprint(config, [described(1, heads=1), described(2, heads=1)])
    assert one.cache == two.cache != ""
    assert [shard.heads for shard in (*one.layouts, *two.layouts)] == [(0, 2), (0, 1), (1, 2)]
    assert {shard.indivisible for shard in (*one.layouts, *two.layouts)} == {""}


@pytest.mark.parametrize(
    ("heads", "members", "reason"),
    [(4, {}, "not those of the model"), (2, {"quantized": True}, "scales")],
    ids=["heads of another model", "values with scales"],
)
def test_shards_that_cannot_be_cut_have_the_reason(heads: int, members: dict[str, Any], reason: str) -> None:
    config = engine_args(MODEL, {"dtype": "float32"}).create_engine_config(USAGE)
    (shard,) = _fingerprint(config, [described(1, heads=heads, **members)]).layouts
    assert reason in shard.indivisible


@pytest.mark.parametrize(("method", "indivisible"), [("ngram", False), ("eagle", True)])
def test_shards_with_layers_of_a_draft_model_cannot_be_cut(method: str, indivisible: bool) -> None:
    config = engine_args(MODEL, {"dtype": "float32"}).create_engine_config(USAGE)
    drafting = SimpleNamespace(method=method, draft_model_config=config.model_config)
    object.__setattr__(config, "speculative_config", drafting)
    (shard,) = _fingerprint(config, [described(1, heads=2)]).layouts
    assert bool(shard.indivisible) is indivisible


def fingerprint(model: str = MODEL, **kwargs: Any) -> Fingerprint:
    return _fingerprint(engine_args(model, {"dtype": "float32", **kwargs}).create_engine_config(USAGE), [described(1)])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"dtype": "bfloat16"},
        {"load_format": "dummy"},
        {"model_loader_extra_config": {"enable_multithread_load": True}},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        {"hf_overrides": {"rms_norm_eps": 0.5}},
        {"code_revision": "v2"},
        {"revision": "v2"},
        {"max_model_len": 64},
        {"enable_lora": True, "lora_dtype": "float16"},
    ],
    ids=lambda kwargs: ",".join(kwargs),
)
def test_engines_with_other_weights_have_other_fingerprints(kwargs: dict[str, Any]) -> None:
    assert fingerprint().model != fingerprint(**kwargs).model and fingerprint().model == fingerprint().model


def test_engines_that_quantize_have_other_fingerprints() -> None:
    made = engine_args(MODEL, {"dtype": "float32"}).create_engine_config(USAGE)
    plain = _fingerprint(made, [described(1)])
    for member, value in (("quantization", "fp8"), ("quantization_config", {"linear_scheme_override": "fp8"})):
        config = engine_args(MODEL, {"dtype": "float32"}).create_engine_config(USAGE)
        setattr(config.model_config, member, value)
        assert _fingerprint(config, [described(1)]).model != plain.model


def test_settings_of_the_cache_are_in_the_fingerprint_of_the_cache_alone() -> None:
    made, one = engine_args(MODEL, {"dtype": "float32"}).create_engine_config(USAGE), fingerprint()
    made.cache_config.kv_cache_dtype_skip_layers = ["1"]
    other = _fingerprint(made, [described(1)])
    assert other.model == one.model and other.cache != one.cache


def test_engines_with_other_files_under_one_path_have_other_fingerprints(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    before = fingerprint(str(folder))
    (weights,) = folder.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    after = fingerprint(str(folder))
    assert before.model != after.model and before.cache == after.cache


def test_blocks_of_engines_without_a_prefix_cache_cannot_be_moved() -> None:
    config = engine_args(MODEL, {"enable_prefix_caching": False}).create_engine_config(USAGE)
    assert _fingerprint(config, [described(1)]).cache == ""


@pytest.mark.parametrize(("plain", "blocks"), [(True, 8), (False, 100)])
def test_capacity_of_a_cache_that_is_not_plain_is_vllms_own(plain: bool, blocks: int) -> None:
    cache = SimpleNamespace(kv_cache_size_tokens=3205, block_size=32)
    assert _capacity(SimpleNamespace(cache_config=cache), {"num_blocks": 9, "plain": plain}) == blocks


@pytest.mark.parametrize(
    ("speculative", "device", "tie"),
    [(None, "cpu", None), (None, "cuda", Tie.SEEDED), ({}, "cpu", Tie.DRAFTED), ({}, "cuda", Tie.DRAFTED)],
)
def test_seeded_requests_stay_where_their_draws_cannot_be_repeated(
    speculative: dict[str, Any] | None, device: str, tie: Tie | None
) -> None:
    device_config = SimpleNamespace(device_type=device)
    made = {"speculative_config": speculative, "use_v2_model_runner": False, "device_config": device_config}
    assert _seed_tie(SimpleNamespace(**made)) is tie


def test_a_seed_ties_a_request_to_an_engine_on_cpus_whose_draws_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(
        speculative_config=None, use_v2_model_runner=False, device_config=SimpleNamespace(device_type="cpu")
    )
    assert _seed_tie(config) is None

    def forward_cpu(self: Any, logits: Any) -> Any:
        return logits.exponential_()

    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", forward_cpu)
    assert _seed_tie(config) is Tie.SEEDED


@pytest.mark.parametrize(
    ("feature", "model", "reason"),
    [
        ("Encoder-decoder models (Whisper)", {"is_encoder_decoder": True}, "an encoder and a decoder"),
        ("Diffusion models", {"is_encoder_decoder": False, "is_diffusion": True}, "revises its tokens"),
    ],
)
def test_a_model_that_no_engine_can_run_is_refused(feature: str, model: dict[str, bool], reason: str) -> None:
    assert row(feature).how is How.REFUSED
    with pytest.raises(ValueError, match=reason):
        check_model(SimpleNamespace(**model))


@pytest.mark.parametrize("failing", ["get_supported_tasks_async", "_compile_sampling"])
async def test_a_start_that_fails_leaves_nothing_open(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core, the connections to its copiers and, if there is an engine already, that to the cache's events."""
    config = engine_config(MODEL, {"dtype": "float32", "max_model_len": 64, "block_size": 32}, "ipc:///tmp/none")
    worker = described(1) | {"copier": "there", "plain": True, "host_blocks": 0, "unmirrored": "", "unsupported": None}
    core, copiers = Mock(vllm_config=config), Mock()
    core.collective_rpc_async = AsyncMock(return_value=[worker])
    core.get_supported_tasks_async = AsyncMock(return_value=["generate"])
    core.deliver = AsyncMock(side_effect=EngineDeadError)
    monkeypatch.setattr(vllm_engine, "CoreClient", Mock(return_value=core))
    monkeypatch.setattr(Copiers, "connect", AsyncMock(return_value=copiers))
    monkeypatch.setattr(vllm_engine, "CacheFeed", feed := Mock())
    engine_made = failing == "_compile_sampling"
    failure = AsyncMock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(VllmEngine if engine_made else core, failing, failure)
    events = EventFolder()
    with pytest.raises(ZeroDivisionError):
        await VllmEngine._start(config, events, 60)
    events.remove()
    assert core.shutdown.called and copiers.close.called
    assert feed.return_value.close.called == feed.called == engine_made


@pytest.mark.slow
async def test_an_encoder_decoder_model_does_not_start(tmp_path: Path) -> None:
    config = WhisperConfig(vocab_size=512, d_model=64, encoder_layers=1, decoder_layers=1, num_mel_bins=80)
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    WhisperFeatureExtractor().save_pretrained(tmp_path)
    for file in ensure_tiny_model().glob("token*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(ValueError, match="encoder and a decoder"):
        await VllmEngine.start(str(tmp_path), {"max_model_len": 64})


@pytest.mark.parametrize(("caching", "endpoint"), [(True, "ipc:///folder/events"), (False, None)])
def test_an_engine_publishes_the_changes_of_its_prefix_cache_if_it_has_one(caching: bool, endpoint: str | None) -> None:
    kwargs = {"enable_prefix_caching": caching, "max_model_len": 64, "block_size": 32}
    published = engine_config(MODEL, kwargs, "ipc:///folder/events").kv_events_config
    assert (published.endpoint if published is not None else None) == endpoint
    assert published is None or published.enable_kv_cache_events


@pytest.mark.parametrize(("dram_gib", "connector"), [(0.0, "MellConnector"), (0.5, "TieredConnector")])
def test_an_engine_has_a_tier_of_host_memory_if_it_is_configured(dram_gib: float, connector: str) -> None:
    chosen = engine_config(MODEL, {"max_model_len": 64, "block_size": 32}, dram_gib=dram_gib).kv_transfer_config
    assert chosen.kv_connector == connector
    assert chosen.kv_connector_extra_config.get("cpu_bytes_to_use", 0) == dram_gib * (1 << 30)
    assert chosen.kv_connector_extra_config.get("offload_prompt_only") is (False if dram_gib else None)


@pytest.mark.parametrize(
    ("caching", "unmirrored", "reason"),
    [
        (True, None, None),
        (False, None, "the prefix cache is off"),
        (True, "the model has 2 KV cache groups", "the model has 2 KV cache groups"),
    ],
)
def test_a_cache_that_cannot_be_followed_has_a_reason(
    caching: bool, unmirrored: str | None, reason: str | None
) -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching))
    assert _why_unmirrored(config, [{"unmirrored": unmirrored}]) == reason


class LoadingCopiers:
    """In the copiers' place: a load whose blocks arrive, and are in the cache, when the events are set."""

    def __init__(self) -> None:
        self.arrived, self.cached = asyncio.Event(), asyncio.Event()
        self.lost = False
        self.forgotten: list[str] = []

    async def filled(self, load: str) -> int:
        await self._until(self.arrived)
        return 2

    async def loaded(self, load: str) -> None:
        await self._until(self.cached)

    async def _until(self, event: asyncio.Event) -> None:
        await event.wait()
        if self.lost:
            raise TransferFailed("the connection has ended")

    def lose(self) -> None:
        self.lost = True
        self.arrived.set()
        self.cached.set()

    def forget(self, load: str) -> None:
        """The calls that still wait fail."""
        self.forgotten.append(load)
        self.lose()

    def discard(self, name: str) -> None:
        self.forgotten.append(name)


class HoldingCopiers(LoadingCopiers):
    """A hold of seven blocks is admitted at once; a load has nothing to fill, and ends with its request."""

    async def held(self, hold: str) -> int:
        return 7


class TierMirror:
    """The mirror of an engine that has that many of a prefix's blocks, by tier."""

    def __init__(self, hbm: int, dram: int) -> None:
        self._held = HeldPrefix(hbm, dram)

    def held(self, names: Sequence[int]) -> HeldPrefix:
        return self._held


@pytest.mark.parametrize(
    ("dram", "free", "loads"),
    [(4, 8, [{"load": "h-in", "first": 7, "last": 7}]), (4, 7, []), (0, 8, [])],
    ids=["the host has the rest", "there is no room for it", "all is in the engine's own memory"],
)
async def test_hold_loads_first_what_only_the_host_has(dram: int, free: int, loads: list[Any]) -> None:
    engine = over(core := FakeCore(), HoldingCopiers())
    engine._mirror = TierMirror(3, dram)  # type: ignore[assignment]
    engine.stats = lambda: SimpleNamespace(free_blocks=free)  # type: ignore[method-assign, assignment, return-value]
    engine._holds = {}
    holding = asyncio.create_task(engine.hold_prefix("h", plain_spec("r", (5,) * 120, 9), ()))
    await settle()
    if loads:
        (request,) = core.requests
        assert len(request.prompt_token_ids) == 7 * 16 + 1 and not holding.done(), "the hold comes behind the load"
        await core.step(EngineCoreOutput("h-in", [1], finish_reason=FinishReason.LENGTH))
        await settle()
    async with asyncio.timeout(5):
        assert await holding == 7
    sent = [request.sampling_params.extra_args["kv_transfer_params"] for request in core.requests]
    assert [each["mell_load"] for each in sent if "mell_load" in each] == loads
    assert [each["mell_hold"] for each in sent if "mell_hold" in each] == ["h"]
    engine.release_prefix("h")


@pytest.mark.parametrize("end", ["first step", "error", "abort"])
async def test_tail_of_a_run_is_left_to_the_workers(end: str) -> None:
    """A step may need it that was planned before the run was aborted."""
    engine, tail = over(core := FakeCore(), copiers := LoadingCopiers()), Tail("m.tail", Blocks(1), 20)
    engine.add("r.1", plain_spec("r", (5,) * 19, 9), (6,), sink := Taken(), tail)
    (request,) = core.requests
    transfer = request.sampling_params.extra_args["kv_transfer_params"]
    assert transfer["mell_tail"] == {"name": "m.tail", "first": 1, "tokens": 20}
    if end != "abort":
        finish = FinishReason.ERROR if end == "error" else None
        await core.step(EngineCoreOutput(request.request_id, [7], finish_reason=finish))
        assert len(sink.all) == 1
    engine.abort("r.1")
    assert copiers.forgotten == []
    engine.discard("m.tail")
    assert copiers.forgotten == ["m.tail"], "no other call would have been noticed"


@dataclass
class Loading:
    """A load of blocks 1 and 2 under way."""

    core: FakeCore = field(default_factory=FakeCore)
    copiers: LoadingCopiers = field(default_factory=LoadingCopiers)

    async def begin(self) -> Self:
        self.engine = over(self.core, self.copiers)
        self.task = asyncio.create_task(self.engine.load("m.1", SPEC, (6,) * 10, Blocks(1), Blocks(3)))
        await settle()
        return self

    @property
    def transfers(self) -> list[dict[str, Any]]:
        """The connector's parameters of all requests."""
        return [request.sampling_params.extra_args["kv_transfer_params"] for request in self.core.requests]

    async def arrive(self) -> None:
        self.copiers.arrived.set()
        await self.task

    async def submit(self) -> list[str] | None:
        """Add a request; the loads that it may find arrived but not cached."""
        self.engine.add(f"r.{len(self.core.requests)}", plain_spec("r", (5,), 9), (), Taken())
        found: list[str] | None = self.transfers[-1].get("mell_filled")
        return found

    async def settle(self) -> None:
        async with asyncio.timeout(5):
            while self.engine._ending:
                await asyncio.sleep(0)


SPEC = plain_spec("r", (5,) * 90, 99, seed=1, logprobs=2)

LOAD = {"mell_load": {"load": "m.1", "first": 1, "last": 3}}


async def test_load_ends_when_its_blocks_have_arrived_and_its_request_never_runs() -> None:
    loading = await Loading().begin()
    (request,) = loading.core.requests
    assert request.prompt_token_ids == [5] * 49 and request.sampling_params.max_tokens == 1
    assert request.sampling_params.seed is None and request.sampling_params.logprobs is None
    assert loading.transfers == [LOAD] and not loading.task.done()
    await loading.arrive()
    assert not loading.core.aborted, "vLLM would free the blocks before they have a name"
    loading.copiers.cached.set()
    await loading.settle()
    assert loading.core.aborted == ["m.1"] and loading.copiers.forgotten == ["m.1"]
    assert loading.engine.blocks_loaded == 2


async def test_requests_name_a_loads_blocks_from_their_arrival_until_they_are_cached() -> None:
    loading = await Loading().begin()
    assert await loading.submit() is None
    await loading.arrive()
    assert await loading.submit() == ["m.1"]
    later = asyncio.create_task(loading.engine.load("m.2", SPEC, (), Blocks(3), Blocks(5)))
    await settle()
    assert loading.transfers[-1]["mell_filled"] == ["m.1"]
    await later
    loading.copiers.cached.set()
    await loading.settle()
    assert await loading.submit() is None


async def test_load_without_anything_to_fill_ends_with_its_request() -> None:
    loading = await Loading().begin()
    await loading.core.step(EngineCoreOutput("m.1", [1], finish_reason=FinishReason.LENGTH))
    await loading.task
    assert not loading.core.aborted and loading.copiers.forgotten == ["m.1"]
    assert await loading.submit() is None


@pytest.mark.parametrize("cause", ["vLLM refuses it", "the copier is lost"])
async def test_load_fails_if(cause: str) -> None:
    loading = await Loading().begin()
    if cause == "vLLM refuses it":
        await loading.core.step(EngineCoreOutput("m.1", [], finish_reason=FinishReason.ERROR))
    else:
        loading.copiers.lose()
    with pytest.raises(TransferFailed):
        await loading.task
    assert loading.copiers.forgotten == ["m.1"] and await loading.submit() is None


@pytest.mark.parametrize("lost", ["the copier", "vLLM"])
async def test_loss_after_the_arrival_ends_the_load(lost: str) -> None:
    loading = await Loading().begin()
    await loading.arrive()
    if lost == "vLLM":
        loading.core.outputs.put_nowait(EngineDeadError())
    else:
        loading.copiers.lose()
    await loading.settle()
    assert loading.copiers.forgotten == ["m.1"] and await loading.submit() is None


@pytest.mark.parametrize("arrived", [False, True])
async def test_loads_fail_while_the_engine_is_paused(arrived: bool) -> None:
    loading = await Loading().begin()
    if arrived:
        await loading.arrive()
    loading.engine._lose_loads()
    if not arrived:
        with pytest.raises(TransferFailed):
            await loading.task
    await loading.settle()
    assert loading.core.aborted == ["m.1"] and set(loading.copiers.forgotten) == {"m.1"}
    loading.copiers.forgotten.clear()
    loading.engine._lose_loads()
    assert not loading.copiers.forgotten, "no load is left"


async def test_cancelled_load_aborts_its_request() -> None:
    loading = await Loading().begin()
    loading.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading.task
    assert loading.core.aborted == ["m.1"] and loading.copiers.forgotten == ["m.1"]


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:4317"])
async def test_an_engine_traces_its_start_if_vllms_traces_are_on(
    endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: Any, **kwargs: Any) -> None:
        raise EngineDeadError

    traced: list[str] = []
    monkeypatch.setattr(vllm_engine, "CoreClient", start)
    monkeypatch.setattr(vllm_engine, "init_tracer", lambda name, collector: traced.append(collector))
    with pytest.raises(EngineDeadError):
        await VllmEngine.start(MODEL, {"otlp_traces_endpoint": endpoint})
    assert traced == ([endpoint] if endpoint else [])


# --- the times of steps -----------------------------------------------------------------------------------


def token(prefilled: int | None = None, cached: int = 0) -> EngineCoreOutput:
    """A request's output of one step; the first one after a prefill."""
    stats = None if prefilled is None else PrefillStats(num_computed_tokens=prefilled, num_cached_tokens=cached)
    return EngineCoreOutput("r", [7], prefill_stats=stats)


def message(at: float, *outputs: EngineCoreOutput, running: int = 1, usage: float = 0.5) -> EngineCoreOutputs:
    stats = SchedulerStats(num_running_reqs=running, kv_cache_usage=usage)
    return EngineCoreOutputs(outputs=list(outputs), scheduler_stats=stats, timestamp=at)


def metered(*messages: EngineCoreOutputs, begun: float | None = 1.0) -> StepTotals:
    """The steps of an engine with 100 tokens of KV, which was idle until `begun`."""
    meter = StepMeter(100)
    if begun is not None:
        meter.begin(begun)
    for each in messages:
        meter.record(each)
    return meter.totals


def test_a_step_lasts_from_the_message_before_it() -> None:
    totals = metered(message(1.5, token(20, 4)), message(1.6, token(), token(), usage=0.6), message(1.8, token()))
    assert (totals.steps, totals.prefilled, totals.attended, totals.decodes) == (3, 20, 20 * 14, 3)
    assert (totals.seconds, totals.context) == pytest.approx((0.8, 50 + 60))


def test_a_prefill_over_several_steps_counts_with_all_of_them() -> None:
    totals = metered(message(1.2), message(1.4), message(1.7, token(50)))
    assert (totals.steps, totals.prefilled) == (3, 50)
    assert totals.seconds == pytest.approx(0.7)


def test_an_idle_engine_takes_no_steps() -> None:
    busy = (message(1.1, token(5)), message(1.2, token(), running=0))
    waiting = (message(3.0, running=0), message(4.0, running=0), message(5.0, token(9)))
    assert metered(*busy, *waiting) == metered(*busy)
    assert metered(*busy).seconds == pytest.approx(0.2)


def test_messages_without_statistics_are_no_steps() -> None:
    assert metered(EngineCoreOutputs(outputs=[token(5)])) == StepTotals()
    assert metered(message(1.1, token(5)), begun=None) == StepTotals()
