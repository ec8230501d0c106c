"""The end of a start: nothing is ready before the port is open."""

import logging
import socket

import pytest
from starlette.applications import Starlette

from app.service import starting
from app.service.starting import StartProgress, serve_own_port
from tests.app.ingress.configs import ingress_config

READY = "Mell is ready"


async def test_nothing_is_ready_before_the_port_is_open(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    monkeypatch.setattr(starting, "_BIND_WAIT_S", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = ingress_config(host="127.0.0.1", port=other.getsockname()[1])
        progress = StartProgress.of(config)
        progress.count([1])
        with pytest.raises(OSError, match="in use"):
            await serve_own_port(Starlette(), config, "mell", progress)
        assert READY not in caplog.text
    server = await serve_own_port(Starlette(), config, "mell", progress)
    assert READY in caplog.text and progress.ended
    await server.close(1.0)


@pytest.mark.parametrize("port", [None, 8000])
def test_engines_are_awaited_beside_the_port(port: int | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    progress = StartProgress([2], "http://x", is_listening=port is None)
    if port is not None:
        progress.begin_listening()
    for running in (1, 1):
        progress.count([running])
    assert caplog.messages[-1] == "1 of 2 engines run" and len(set(caplog.messages)) == len(caplog.messages)
    progress.lower_initial([1])
    assert caplog.messages[-1].startswith(READY)


def test_further_replicas_of_one_model_are_not_those_of_another() -> None:
    progress = StartProgress([1, 2], "http://x", is_listening=True)
    progress.count([3, 0])
    assert (progress.running, progress.initial, progress.ended) == (1, 3, False)
    progress.count([3, 1])
    progress.lower_initial([3, 1])
    assert (progress.running, progress.initial, progress.ended) == (2, 2, True)
