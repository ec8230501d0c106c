"""The HTTP API as chaos and soak use it: streams that can be watched, and the operator's calls."""

import asyncio
import json
from typing import Any, Self

import httpx

from app.replay.stream import Lines
from benchmarks.chaos.heard import Heard
from benchmarks.chaos.offers import Offer
from benchmarks.servers import MODEL

CONTROL_S = 20.0
"""An order may be repeated inside for 12 s while the scheduler is being replaced."""


class Client:
    """One server. Streams have no time-out: how long one may be silent is not this client's to say."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self._http = httpx.AsyncClient(base_url=url, trust_env=False, timeout=CONTROL_S, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def stream(self, offer: Offer, heard: Heard) -> None:
        """Fill `heard` from a streamed answer, until it ends in whatever way."""
        loop = asyncio.get_running_loop()
        heard.sent_s = loop.time()
        headers, body = {"X-Request-Id": offer.label}, offer.body(MODEL)
        try:
            call = self._http.stream("POST", "/v1/completions", json=body, headers=headers, timeout=None)
            async with call as response:
                await self._read(response, heard)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            heard.broken = f"{type(error).__name__}: {error}"
        finally:
            heard.ended_s = loop.time()

    async def _read(self, response: httpx.Response, heard: Heard) -> None:
        if response.status_code != httpx.codes.OK:
            heard.fail(json.loads(await response.aread())["error"])
            heard.done = True
            return
        lines = Lines()
        async for data in response.aiter_bytes():
            for line in lines.feed(data):
                heard.take(line)

    async def state(self) -> dict[str, Any]:
        """GET /mell/state. Raises httpx.HTTPError."""
        answer = (await self._http.get("/mell/state")).raise_for_status()
        return dict(answer.json())

    async def migrations(self) -> list[dict[str, Any]]:
        """GET /mell/migrations, newest first. Raises httpx.HTTPError."""
        answer = (await self._http.get("/mell/migrations")).raise_for_status()
        return list(answer.json()["migrations"])

    async def move(self, label: str, path: str, target: str | None = None) -> tuple[int, str]:
        """POST /mell/migrations: the status, and the migration's id or why there is none."""
        order = {"request_id": label, "path": path} | ({"target": target} if target else {})
        return _answer(await self._http.post("/mell/migrations", json=order))

    async def drain(self, replica: str) -> tuple[int, str]:
        """POST /mell/replicas/{id}/drain: the status, and the replica or why it is not drained."""
        return _answer(await self._http.post(f"/mell/replicas/{replica}/drain"))


def _answer(response: httpx.Response) -> tuple[int, str]:
    body = response.json()
    return response.status_code, str(body["id"] if response.is_success else body["error"]["message"])
