"""The engines that several tests of this folder share."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from app.tinymodel import ensure_tiny_model
from tests.integration.models.pair import CHUNK, EnginePair, pair_of_engines


@pytest.fixture(autouse=True)
def answers_of_any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process read the answers of engines that were started with this variable.

    Before each test, the variables of vLLM are as they were when the tests began.
    """
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def two_engines() -> AsyncIterator[EnginePair]:
    """Two replicas on an engine each, whose steps are short, and whose pools are elastic: they can be paired."""
    async with pair_of_engines(str(ensure_tiny_model()), declared=3.0, max_num_batched_tokens=CHUNK) as pair:
        yield pair
