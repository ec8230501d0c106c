"""The elastic pool of a vLLM engine, over calls to its core."""

import asyncio
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from deployments.engine import arguments
from deployments.engine.resizing import VllmMemory, measured, resident
from deployments.engine.vllm_messages import EngineDeadError
from migration.kv.staging import HostSegment
from migration.memory.run import EngineEnded, Fitted
from migration.protocol.errors import TransferFailed
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes

MODEL = ModelMemory(Bytes(1), Bytes(1), Bytes(1), Bytes(1), Blocks(1))


@pytest.mark.parametrize(
    ("runner", "second", "message"),
    [
        ("generate", True, "vLLM's second model runner keeps block tables"),
        ("pooling", False, "a pooling model's KV pool"),
    ],
)
def test_engine_whose_pool_cannot_be_elastic_is_refused(
    monkeypatch: pytest.MonkeyPatch, runner: str, second: bool, message: str
) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(runner_type=runner), use_v2_model_runner=second)
    args = SimpleNamespace(create_engine_config=lambda usage: config)
    monkeypatch.setattr(arguments, "engine_args", lambda *_: args)
    with pytest.raises(ValueError, match=f"memory.budget_mib: {message}"):
        arguments.engine_config("model", {}, declared=2.0)


class Core:
    """Implements `CoreCalls`, gives the answers of a test, and `Steps`: 5 requests use a fourth of the pool."""

    use, running = 0.25, 5

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[Any, ...]] = []
        self.sizes: list[int] = []
        self.over = asyncio.Event()
        self.blocked = False

    def resized(self, blocks: Blocks) -> None:
        self.sizes.append(blocks)

    async def pause(self) -> None:
        self.calls.append(("pause",))
        if self.blocked:
            raise TransferFailed("the prefix cache is in use")

    def resume(self) -> None:
        self.calls.append(("resume",))

    async def collective_rpc_async(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        self.calls.append((method, *args))
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def end(self) -> str:
        await self.over.wait()
        return "it was killed"


def memory(core: Core, model: ModelMemory = MODEL) -> VllmMemory:
    """A pool of 100 blocks."""
    return VllmMemory(core, core, model, Blocks(100), Blocks(300), (os.getpid(),))


async def test_sizes_are_those_of_the_newest_answer() -> None:
    core = Core([(80, 0, 7)], [(200, 0, 0)])
    pool = memory(core)
    assert (pool.size, pool.used, pool.capacity) == (100, 25, 100)
    assert await pool.fit(Blocks(60)) == Fitted(Blocks(80), Blocks(0), Blocks(7))
    assert (pool.size, pool.used, pool.capacity) == (80, 20, 100)
    await pool.grow(Blocks(200))
    pool.announce(Blocks(200))
    assert (pool.size, pool.capacity, core.sizes) == (200, 200, [80, 200])
    assert core.calls == [("mell_fit", 60, 5), ("mell_grow", 200)]


async def test_memory_is_given_back_by_all_workers_or_there_is_a_reason() -> None:
    core = Core([None, None], [None, "no memory"])
    pool = memory(core)
    assert await pool.release(Blocks(60)) is None
    assert await pool.release(Blocks(60)) == "the memory of KV blocks was not given back: no memory"
    assert core.calls == [("mell_release", 61)] * 2


async def test_all_memory_is_dropped_once_nothing_computes_and_what_is_left_is_measured() -> None:
    core = Core([(40, 0, 0)], [(0, 0, 0)], [None, None], [None, None])
    pool = memory(core)
    assert await pool.drop() is None
    assert core.calls == [("pause",), *[("mell_fit", 0, 0)] * 2, ("mell_release", 1), ("mell_drop",)]
    assert pool.size == 0 and pool.model.asleep > 1 << 20, "this process holds some MiB"
    core.blocked = True
    assert await pool.drop() == "the prefix cache is in use" and core.calls[-1] == ("pause",)


async def test_a_load_ends_with_the_ordered_pool_before_anything_computes() -> None:
    core = Core([None, None], [(0, 0, 0)], [(60, 0, 0)], [None, None])
    pool = memory(core)
    assert await pool.load(Blocks(60)) is None
    calls = [("mell_load",), ("mell_fit", 60, 0), ("mell_grow", 60), ("mell_release", 61), ("resume",)]
    assert core.calls == calls and pool.size == 60


async def test_where_one_worker_cannot_load_all_drop_again() -> None:
    core = Core([None, "the file is gone"], [None, None])
    assert await memory(core).load(Blocks(60)) == "the file is gone"
    assert core.calls == [("mell_load",), ("mell_drop",)]


async def test_a_call_ends_with_the_core() -> None:
    core = Core()
    call = asyncio.create_task(memory(core).grow(Blocks(200)))
    await asyncio.sleep(0)
    core.over.set()
    with pytest.raises(EngineEnded, match="it was killed"):
        await call
    with pytest.raises(EngineEnded):
        await memory(Core(EngineDeadError())).grow(Blocks(200))


SHARED = 64 << 20
TOUCHES = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
sys.stdin.readline()
for at in range(0, len(mapped), mmap.PAGESIZE):
    mapped[at] = 1
print("touched", flush=True)
sys.stdin.readline()
"""


def test_memory_that_two_processes_share_counts_once() -> None:
    segment = HostSegment.create(SHARED)
    command = [sys.executable, "-c", TOUCHES, segment.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        both = os.getpid(), other.pid
        before = resident(both)
        view = segment.view(0, SHARED)
        for at in range(0, SHARED, mmap.PAGESIZE):
            view[at] = 1
        view.release()
        other.stdin.write("\n")
        assert other.stdout.readline() == "touched\n"
        assert SHARED <= resident(both) - before < 1.1 * SHARED
        other.stdin.write("\n")
    segment.close()
    assert resident((other.pid,)) == 0, "it has ended"


def test_memory_is_that_of_all_workers_and_processes() -> None:
    found = measured([{"parameter_bytes": 100, "block_bytes": 7}] * 2, [], 1000, 32)
    assert (found.parameters, found.fixed, found.block, found.floor) == (200, 0, 14, 32)


def test_what_processes_hold_beyond_a_plan_counts_as_fixed_and_never_less_again() -> None:
    pool = memory(Core())
    pool.measure(plan := MemoryPlan(Blocks(10)))
    assert pool.model == MODEL, "a single look may have seen what is gone soon"
    pool.measure(plan)
    assert pool.model.asleep == pool.model.fixed
    held = pool.model.need(plan)
    assert held >= psutil.Process().memory_info().rss - (50 << 20) and pool.model.parameters == MODEL.parameters
    more = memory(Core(), replace(MODEL, fixed=Bytes(1 << 40)))
    for _ in range(3):
        more.measure(plan)
    assert more.model.fixed == 1 << 40, "pages that nothing has used yet hide what else there is"
