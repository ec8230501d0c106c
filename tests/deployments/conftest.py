"""Tests marked `virtual_time` run in an event loop in which waiting takes no time."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that a test runs in."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualLoop}
    return {"real": asyncio.new_event_loop}
