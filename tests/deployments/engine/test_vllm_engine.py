"""The arguments of requests to vLLM; their effects are in the integration tests."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.engine.vllm_engine import VllmEngine
from migration.protocol.request import Sampling


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
    engine = object.__new__(VllmEngine)
    engine._engine = asked = Asked()
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
    engine = object.__new__(VllmEngine)
    engine._engine = vllm = Batches()
    await engine._compile_sampling()
    assert vllm.batches == [[(1.0, 1)], [(1.0, 1)] * 2]
