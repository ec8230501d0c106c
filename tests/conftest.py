"""Unit tests run without a cluster: whatever would start one fails. No test fails because the machine is slow."""

import asyncio
import gc
from collections.abc import Callable, Generator, Mapping

import hypothesis
import pytest

from tests.counts import LONG
from tests.virtual_time import VirtualLoop

hypothesis.settings.register_profile(
    "unhurried",
    hypothesis.settings(),
    max_examples=100 if LONG else 25,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("unhurried")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports and the list of tests make millions of objects: garbage is not looked for until then, nor among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def no_cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `ray.init` raise outside of integration tests."""
    if not request.node.get_closest_marker("integration"):
        import ray

        def refuse(*args: object, **kwargs: object) -> None:
            raise RuntimeError("a unit test must not start Ray")

        monkeypatch.setattr(ray, "init", refuse)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop of a test: those marked `virtual_time` run in one in which waiting takes no time."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualLoop}
    return {"real": asyncio.new_event_loop}
