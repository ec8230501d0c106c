"""The arguments of requests to vLLM; their effects are in the integration tests."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineDeadError

from app.tinymodel import ensure_tiny_model
from deployments.engine.vllm_engine import USAGE, VllmEngine, _fingerprint, _processes, engine_args
from migration.protocol.errors import TransferFailed
from migration.protocol.request import Sampling
from policies.model import Blocks


def bare(vllm: Any, copiers: Any = None) -> VllmEngine:
    """An engine around stand-ins for vLLM and the copiers, which has not been started."""
    engine = object.__new__(VllmEngine)
    engine._engine, engine._copiers = vllm, copiers
    engine._filled, engine._caching, engine.blocks_loaded = set(), set(), 0
    return engine


class Asked:
    """A stand-in for AsyncLLM that records arguments and generates nothing."""

    def __init__(self) -> None:
        self.priorities: list[int] = []

    async def generate(self, prompt: Any, params: Any, key: str, *, priority: int) -> AsyncIterator[Any]:
        self.priorities.append(priority)
        for step in list[Any]():
            yield step


@pytest.mark.parametrize("priority", [0, -3])
async def test_priority_is_passed_to_vllm(priority: int) -> None:
    asked = Asked()
    engine = bare(asked)
    assert [step async for step in engine.generate("r", (5,), (), Sampling(9, priority=priority))] == []
    assert asked.priorities == [priority]


class Batches:
    """In vLLM's place: the sampling of every batch that it ran, a batch being the requests that run at once."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[float, int | None]]] = []
        self._running: list[tuple[float, int | None]] = []

    async def generate(self, prompt: Any, params: Any, key: str, *, priority: int) -> AsyncIterator[Any]:
        self._running.append((params.temperature, params.logprobs))
        await asyncio.sleep(0)  # those that come at once are in the batch by now
        if self._running:
            self.batches.append(self._running)
            self._running = []
        for step in list[Any]():
            yield step


async def test_a_start_compiles_random_sampling_and_logprobs_for_one_request_and_for_several() -> None:
    vllm = Batches()
    await bare(vllm)._compile_sampling()
    assert vllm.batches == [[(1.0, 1)], [(1.0, 1)] * 2]


MODEL = str(ensure_tiny_model())
OWN = {
    "instance_id",
    "kv_transfer_config",
    "parallel_config.worker_extension_cls",
    "scheduler_config.disable_hybrid_kv_cache_manager",
}
"""Settings in which Mell's engines differ: a random name, the connector, the worker extension, and the hybrid cache
manager, which vLLM switches off beside a connector."""


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


def test_several_workers_are_processes_of_the_replica_and_one_is_where_vllm_has_it() -> None:
    assert engine_args(MODEL, {"tensor_parallel_size": 2}).distributed_executor_backend == "mp"
    assert engine_args(MODEL, {}).distributed_executor_backend is None


def described(pid: int, layout: str = "layers", parent: int = 7) -> dict[str, Any]:
    return {"layout": layout, "block_bytes": 100, "num_blocks": 9, "worker_pid": pid, "starter_pid": parent}


def test_processes_are_the_core_and_all_workers_by_rank() -> None:
    processes = _processes([described(12), described(11)])
    assert (processes.core, processes.workers) == (7, (12, 11))
    within_core = _processes([described(12, parent=os.getpid())])
    assert (within_core.core, within_core.workers) == (12, (12,))


def test_fingerprints_agree_on_the_cache_only_between_equal_layouts() -> None:
    config = engine_args(MODEL, {"dtype": "float32"}).create_engine_config(USAGE)
    one = _fingerprint(config, [described(1)])
    two, again, mixed, none = (
        _fingerprint(config, [described(1), described(2, layout)]) for layout in ("layers", "layers", "others", "")
    )
    assert len({f.model for f in (one, two, mixed, none)}) == 1
    assert two == again and len({f.cache for f in (one, two, mixed)}) == 3 and none.cache == ""
    assert (one.block_bytes, two.block_bytes) == (100, 200)


class LoadingVllm:
    """In vLLM's place: one request, which runs until `end` is set, or is aborted; later ones end at once."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.error: Exception | None = None
        self.aborts = 0
        self.transfers: list[dict[str, Any]] = []

    async def generate(self, prompt: Any, params: Any, key: str, *, priority: int) -> AsyncIterator[Any]:
        self.transfers.append(params.extra_args["kv_transfer_params"])
        if len(self.transfers) > 1:
            return
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.aborts += 1
            raise
        if self.error is not None:
            raise self.error
        yield None


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
        self.forgotten.append(load)


@dataclass
class Loading:
    """A load of blocks 1 and 2 under way."""

    vllm: LoadingVllm = field(default_factory=LoadingVllm)
    copiers: LoadingCopiers = field(default_factory=LoadingCopiers)

    async def begin(self) -> Self:
        self.engine = bare(self.vllm, self.copiers)
        self.task = asyncio.create_task(self.engine.load("m.1", (5,) * 97, Blocks(1), Blocks(3)))
        await asyncio.sleep(0.001)
        return self

    async def arrive(self) -> None:
        self.copiers.arrived.set()
        await self.task

    async def submit(self) -> list[str] | None:
        """Add a request; the loads that it may find arrived but not cached."""
        assert [step async for step in self.engine.generate("r", (5,), (), Sampling(9))] == []
        found: list[str] | None = self.vllm.transfers[-1].get("mell_filled")
        return found

    async def settle(self) -> None:
        async with asyncio.timeout(5):
            while self.engine._caching:
                await asyncio.sleep(0)


LOAD = {"mell_load": {"load": "m.1", "first": 1, "last": 3}}


async def test_load_ends_when_its_blocks_have_arrived_and_its_request_never_runs() -> None:
    loading = await Loading().begin()
    assert loading.vllm.transfers == [LOAD] and not loading.task.done()
    await loading.arrive()
    assert loading.vllm.aborts == 0, "vLLM would free the blocks before they have a name"
    loading.copiers.cached.set()
    await loading.settle()
    assert loading.vllm.aborts == 1 and loading.copiers.forgotten == ["m.1"]
    assert loading.engine.blocks_loaded == 2


async def test_requests_name_a_loads_blocks_from_their_arrival_until_they_are_cached() -> None:
    loading = await Loading().begin()
    assert await loading.submit() is None
    await loading.arrive()
    assert await loading.submit() == ["m.1"]
    later = asyncio.create_task(loading.engine.load("m.2", (5,) * 193, Blocks(3), Blocks(6)))
    await asyncio.sleep(0.001)
    assert loading.vllm.transfers[-1]["mell_filled"] == ["m.1"]
    await later
    loading.copiers.cached.set()
    await loading.settle()
    assert await loading.submit() is None


async def test_load_without_anything_to_fill_ends_with_its_request() -> None:
    loading = await Loading().begin()
    loading.vllm.end.set()
    await loading.task
    assert loading.vllm.aborts == 0 and loading.copiers.forgotten == ["m.1"]
    assert await loading.submit() is None


@pytest.mark.parametrize("cause", ["vLLM refuses it", "the copier is lost"])
async def test_load_fails_if(cause: str) -> None:
    loading = await Loading().begin()
    if cause == "vLLM refuses it":
        loading.vllm.error = ValueError("too long")
        loading.vllm.end.set()
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
        loading.vllm.error = EngineDeadError()
        loading.vllm.end.set()
    else:
        loading.copiers.lose()
    await loading.settle()
    assert loading.copiers.forgotten == ["m.1"] and await loading.submit() is None


async def test_cancelled_load_aborts_its_request() -> None:
    loading = await Loading().begin()
    loading.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading.task
    assert loading.vllm.aborts == 1 and loading.copiers.forgotten == ["m.1"]
