"""A real engine that drops its parameters and its pool, and loads them again: its answers are those of before."""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.tinymodel import ensure_tiny_model
from benchmarks.instruments.models import MODELS
from deployments.engine.port import EngineDead
from migration.memory.tables import PoolState
from migration.protocol.continuing import plain_spec
from migration.protocol.core_messages import decode_logprobs
from migration.protocol.errors import TransferFailed
from migration.run.outputs import running
from policies.memory.plan import ASLEEP, MemoryPlan
from tests.counts import LONG_ONLY
from tests.integration.models.pair import EnginePair, prompt_of
from tests.integration.models.test_resizing import Orders, elastic_pair

pytestmark = LONG_ONLY

SWITCHES = 40
SAMPLING: Sequence[dict[str, Any]] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7})


def resident(pair: EnginePair) -> int:
    """The resident bytes of the worker."""
    (pid,) = pair.engine.processes.workers
    return int(psutil.Process(pid).memory_info().rss)


async def answers(pair: EnginePair, name: str) -> list[tuple[tuple[int, ...], Any]]:
    """Tokens and logprobs, greedy and seeded; without the times of an output's first step."""

    async def one(number: int) -> tuple[tuple[int, ...], Any]:
        tokens: tuple[int, ...] = ()
        scores, key = [], f"{name} {number}"
        spec = plain_spec(key, tuple(prompt_of(300, "asleep")), 40, logprobs=3, ignore_eos=True, **SAMPLING[number])
        async with running(pair.engine, key, spec) as steps:
            async for step in steps:
                tokens += step.tokens
                scores.append(decode_logprobs(step.rest or b""))
        return tokens, scores

    return [await one(number) for number in range(len(SAMPLING))]


async def has_woken(pair: EnginePair, orders: Orders) -> None:
    """Nothing is cached, and the audit behind the wake finds no difference."""
    assert pair.engine._feed is not None
    checks = pair.engine.mirror.checks
    pair.engine._feed.resync()
    async with asyncio.timeout(20):
        while pair.engine.mirror.checks == checks:
            await asyncio.sleep(0.01)
    assert orders.resizer.state is PoolState.SETTLED and pair.engine.mirror.exact
    assert pair.engine.mirror.resyncs == {"start": 1}


async def test_an_engine_that_slept_answers_as_before_and_its_memory_was_the_machines_meanwhile(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODELS["middle"].folder(), model)
    async with elastic_pair(model=model) as pair:
        orders = Orders(pair)
        want, size = await answers(pair, "before"), orders.memory.size
        parameters = orders.memory.model.parameters
        assert parameters == pytest.approx(340e6, rel=0.01)
        awake, asleep, woken = resident(pair), list[int](), list[int]()
        for number in range(SWITCHES):
            await orders.obey(ASLEEP)
            assert orders.resizer.state is PoolState.ASLEEP and orders.resizer.report.held == ASLEEP
            asleep.append(resident(pair))
            assert pair.engine.mirror.exact and not pair.engine.mirror.hbm.blocks
            await orders.order(size)
            woken.append(resident(pair))
            got = await answers(pair, f"behind {number}")
            assert got == want
        assert awake - asleep[0] >= 0.8 * parameters, (awake, asleep)
        # A tenth of the parameters in all switches: less than any one that stayed.
        assert max(asleep[1:]) - asleep[0] < 0.1 * parameters, asleep
        # The parameters come alone: copies that a load makes on its way are the machine's again.
        assert max(woken) <= awake, (awake, woken)
        print("resident MiB awake, asleep, woken", awake >> 20, [n >> 20 for n in asleep], [n >> 20 for n in woken])
        assert orders.memory.model.asleep >= asleep[-1]
        await has_woken(pair, orders)

        await orders.obey(ASLEEP)
        with pytest.raises(TransferFailed, match="the replica is asleep"):
            await pair.engine.delete(None)
        await pair.engine._core.collective_rpc_async(spoil)
        await orders.order(size)
        assert await answers(pair, "spoiled") != want, "the comparison sees one wrong layer"
        await pair.engine.delete(None)

        await orders.obey(ASLEEP)
        weights, before = model / "model.safetensors", resident(pair)
        weights.rename(tmp_path / "away")
        for failures in (1, 2):
            await orders.obey(MemoryPlan(size))
            assert orders.resizer.state is PoolState.ASLEEP and orders.resizer.wakes.failed == failures
            assert orders.resizer.cause is not None and resident(pair) - before < 0.1 * parameters
        assert not orders.given_up
        (tmp_path / "away").rename(weights)
        await orders.order(size)
        assert await answers(pair, "behind two failures") == want

        await orders.obey(ASLEEP)
        psutil.Process(pair.engine.processes.core).kill()
        async with asyncio.timeout(20):
            await pair.engine.end()
        with pytest.raises(EngineDead):
            await pair.engine.check_health()


def spoil(worker: Any) -> None:
    """In a worker: the next load has noise in one layer, and later ones have none."""
    import torch
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    whole = DefaultModelLoader.get_all_weights

    def noisy(self: Any, *args: Any) -> Iterator[tuple[str, Any]]:
        DefaultModelLoader.get_all_weights = whole
        for name, weight in whole(self, *args):
            yield name, weight + 0.5 * weight.std() * torch.randn_like(weight) if ".5.mlp.down" in name else weight

    DefaultModelLoader.get_all_weights = noisy


async def test_layers_are_dropped_alone_and_shared_parameters_are_shared_again(tmp_path: Path) -> None:
    async with elastic_pair(model=tied(tmp_path / "tied")) as pair:
        orders, want = Orders(pair), await answers(pair, "before")
        await pair.engine.reset_prefix_cache()
        (kept,) = await pair.engine._core.collective_rpc_async(reload_one_layer)
        assert kept, "the others are not loaded again"
        assert await answers(pair, "one layer") == want
        size = orders.memory.size
        await orders.obey(ASLEEP)
        await orders.order(size)
        assert await answers(pair, "all layers") == want


def reload_one_layer(worker: Any) -> bool:
    """In a worker: drop and load the second layer. True if the first one has kept its packed weight."""
    first, second = worker.model_runner.get_model().model.layers[:2]
    before = first.mlp.down_proj.cpu_linear
    worker.mell_parameters.drop(second.modules())
    assert not hasattr(second.mlp.down_proj, "cpu_linear")
    worker.mell_parameters.load()
    return first.mlp.down_proj.cpu_linear is before


def tied(folder: Path) -> Path:
    """A copy of the tiny model that computes its logits by its embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = ensure_tiny_model()
    config = LlamaConfig.from_pretrained(tiny, tie_word_embeddings=True)
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        LlamaForCausalLM(config).eval().to(torch.float32).save_pretrained(folder)
    return folder
