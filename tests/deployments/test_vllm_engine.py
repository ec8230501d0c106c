"""What vLLM is told of a request. How its engine takes that is in the integration tests."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.engine.vllm_engine import VllmEngine
from migration.protocol.request import Sampling


class Asked:
    """In vLLM's place: keeps how it was asked, and answers nothing."""

    def __init__(self) -> None:
        self.priorities: list[int] = []

    async def generate(self, prompt: Any, params: Any, key: str, *, priority: int) -> AsyncIterator[Any]:
        self.priorities.append(priority)
        for step in list[Any]():
            yield step


@pytest.mark.parametrize("priority", [0, -3])
async def test_the_priority_goes_along(priority: int) -> None:
    engine = object.__new__(VllmEngine)
    engine._engine = asked = Asked()
    assert [step async for step in engine.generate("r", (5,), (), Sampling(9, priority=priority))] == []
    assert asked.priorities == [priority]
