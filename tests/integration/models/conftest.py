"""The engines that several tests of this folder share."""

from collections.abc import AsyncIterator

import pytest_asyncio

from app.tinymodel import ensure_tiny_model
from tests.integration.models.pair import CHUNK, EnginePair, pair_of_engines


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def two_engines() -> AsyncIterator[EnginePair]:
    """Two replicas on an engine each, whose steps are short, and whose pools are elastic: they can be paired."""
    async with pair_of_engines(str(ensure_tiny_model()), declared=3.0, max_num_batched_tokens=CHUNK) as pair:
        yield pair
