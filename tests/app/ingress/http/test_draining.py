"""The drain of an ingress: unready at once, answered when no call runs, repeated and undone."""

import asyncio
from typing import Any

import pytest

from app.ingress.http.draining import CloseConnections
from app.ingress.http.server import HttpServer, listen
from tests.app.ingress.fakes import Api, Exchange, body, eventually, make_app
from tests.app.ingress.http.serving import Client

DRAIN = "/mell/ingress/drain"


def drained(api: Api, state: str, running: int) -> dict[str, Any]:
    return {"id": api.backend.id, "state": state, "running_calls": running}


async def test_without_a_call_it_is_answered_at_once(api: Api) -> None:
    for _ in range(2):
        response = await api.post(DRAIN)
        assert (response.status_code, response.json()) == (200, drained(api, "DRAINING", 0))
    assert (await api.get("/health")).json()["error"]["message"] == "draining: 0 calls run"
    assert [(await api.get(path)).status_code for path in ("/health", "/-/healthz", "/ping", "/live")] == [503] * 3 + [
        200
    ]


async def test_it_is_answered_once_no_stream_runs_and_calls_are_still_taken(api: Api) -> None:
    stream = Exchange(api, body(stream=True, max_tokens=200))
    await stream.chunks(1)
    draining = asyncio.create_task(api.post(DRAIN, json={"wait_s": 60}))
    await eventually(lambda: api.backend.draining.active)
    assert (await api.complete(max_tokens=2)).status_code == 200 and not draining.done()
    await stream.ended()
    assert stream.sent[-1]["type"] == "http.response.body"
    assert (await draining).json() == drained(api, "DRAINING", 0)


async def test_after_its_time_it_says_how_many_calls_run(api: Api) -> None:
    with api.backend.gate.admit(None), api.backend.gate.admit(None):
        assert (await api.post(DRAIN, json={"wait_s": 0.05})).json() == drained(api, "DRAINING", 2)
        assert (await api.post(DRAIN, json={"wait_s": 0})).json() == drained(api, "DRAINING", 2)


async def test_it_can_be_undone_while_an_order_waits(api: Api) -> None:
    with api.backend.gate.admit(None):
        draining = asyncio.create_task(api.post(DRAIN))
        await eventually(lambda: api.backend.draining.active)
        for _ in range(2):
            assert (await api.send("DELETE", DRAIN)).json() == drained(api, "RUNNING", 1)
        assert (await draining).json() == drained(api, "RUNNING", 1)
    assert (await api.get("/health")).status_code == 200


@pytest.mark.parametrize("wait_s", [-1, 86_401, "60", None])
async def test_its_time_is_checked(api: Api, wait_s: Any) -> None:
    assert (await api.post(DRAIN, json={"wait_s": wait_s})).status_code == 400
    assert not api.backend.draining.active


async def test_behind_serves_proxy_it_is_refused(api: Api) -> None:
    api.backend.settings = api.backend.settings.model_copy(update={"port": None})
    response = await api.post(DRAIN)
    assert response.status_code == 422 and "ingress.port is null" in response.json()["error"]["message"]
    assert not api.backend.draining.active


async def test_connections_close_after_their_answers(api: Api) -> None:
    draining = api.backend.draining
    listening = await listen("127.0.0.1", 0, "mell", wait_s=0)
    server = HttpServer(CloseConnections(make_app(api.backend), draining), listening)
    client = await Client.connect(listening.getsockname()[1])
    for _ in range(2):
        assert await client.get("/live") == 200
    draining.active = True
    await client.send(b"GET /live HTTP/1.1\r\nHost: mell\r\n\r\n")
    answer = await client.ended()
    assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close\r\n" in answer.lower()
    draining.undo()
    client = await Client.connect(listening.getsockname()[1])
    for _ in range(2):
        assert await client.get("/live") == 200
    client.close()
    await server.close(1)
