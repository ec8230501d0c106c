"""The running application as tests see it: its HTTP endpoint, its processes, and its switches for faults."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from app.client.api import ApiClient
from app.client.sse import Event

MODEL = "mell-tiny"
BLOCK = 32


@dataclass
class Answer:
    """A streamed answer so far. `tokens` counts SSE chunks, one per engine step."""

    text: str = ""
    tokens: int = 0
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, tokens: int) -> None:
        """Wait until that many tokens came, or the answer is over."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: self.tokens >= tokens or self.done)

    async def take(self, event: Event) -> None:
        """Take one event, and wake whoever waits for it."""
        if "error" in event:
            self.error = event["error"]
        elif event["choices"]:
            choice = event["choices"][0]
            self.text += choice["text"]
            self.tokens += 1
            self.finish = choice["finish_reason"]
        else:
            self.usage = event["usage"]
        async with self.changed:
            self.changed.notify_all()

    async def end(self) -> None:
        """`[DONE]` has come."""
        self.done = True
        async with self.changed:
            self.changed.notify_all()


@dataclass
class Application:
    """A running Mell. `folder` holds its configuration and its log; its clients have the admin key, if there is one."""

    url: str
    faults: Path
    capacity: int
    folder: Path
    admin_key: str | None = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator["Client"]:
        """A client that leaves nothing open."""
        async with ApiClient(self.url, self.admin_key, timeout_s=120, silence_s=120) as api:
            yield Client(api)


class Client:
    """The HTTP client of tests. Orders and calls by `http` return responses, also for errors."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self.http = api.http

    async def stream(self, answer: Answer, prompt: list[int], max_tokens: int, label: str, **extra: Any) -> None:
        """Fill `answer` from a streamed completion."""
        body = request(prompt, max_tokens, stream=True, stream_options={"include_usage": True}, **extra)
        async with self._api.stream(body, label) as events:
            async for event in events:
                await answer.take(event)
        await answer.end()

    async def complete(self, prompt: list[int] | str, max_tokens: int, **extra: Any) -> tuple[str, dict[str, Any]]:
        """Text and whole body of a completion that is not streamed."""
        body = await self._api.complete(request(prompt, max_tokens, **extra))
        return body["choices"][0]["text"], body

    async def state(self) -> dict[str, Any]:
        """GET /mell/state."""
        return await self._api.state()

    async def metrics(self) -> dict[str, Metric]:
        """GET /metrics, by family."""
        response = await self.http.get("/metrics")
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(response.text)}

    async def running(self) -> list[dict[str, Any]]:
        """The replicas that run."""
        return [r for r in (await self.state())["replicas"] if r["state"] == "RUNNING"]

    async def move(self, reference: str, **body: Any) -> httpx.Response:
        """POST /mell/migrations."""
        return await self.http.post("/mell/migrations", json={"request_id": reference, **body})

    async def migrations(self) -> list[dict[str, Any]]:
        """GET /mell/migrations."""
        return await self._api.migrations()

    async def drain(self, replica: str) -> httpx.Response:
        """POST /mell/replicas/{id}/drain."""
        return await self.http.post(f"/mell/replicas/{replica}/drain")

    async def set_role(self, replica: str, role: str | None) -> httpx.Response:
        """POST /mell/replicas/{id}/role."""
        return await self.http.post(f"/mell/replicas/{replica}/role", json={"role": role})

    async def set_memory(self, replica: str, blocks: int | None) -> httpx.Response:
        """POST /mell/replicas/{id}/memory."""
        return await self.http.post(f"/mell/replicas/{replica}/memory", json={"blocks": blocks})

    async def set_bounds(self, least: int, most: int) -> None:
        """Set the bounds on the number of replicas."""
        await self._api.set_bounds(least, most)

    async def set_mode(self, mode: str) -> None:
        """Set the scheduler's mode."""
        await self._api.set_mode(mode)

    async def outcome(self, migration: str) -> dict[str, Any]:
        """The record of a migration once it has ended."""
        found: list[dict[str, Any]] = []

        async def ended() -> bool:
            found[:] = [m for m in await self.migrations() if m["id"] == migration and m["outcome"]]
            return bool(found)

        await eventually(ended)
        return found[0]

    async def idle(self) -> None:
        """Wait until no replica holds a request, a block or a staging slot."""

        async def nothing() -> bool:
            return all(
                not r["requests"] and r["used_tokens"] == 0 and r["staging_slots_in_use"] == 0
                for r in await self.running()
            )

        await eventually(nothing)

    async def settle(self) -> None:
        """Wait until all is idle, and the scheduler has found it so in an epoch: it places as if nothing had been."""
        await self.idle()
        seen = set()

        async def two_epochs_passed() -> bool:  # the one under way may have looked before
            seen.add(total(await self.metrics(), "mell_gpu_seconds_total"))  # grows in every epoch
            return len(seen) > 2

        await eventually(two_epochs_passed)


def total(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The sum of the samples of that name which have those labels."""
    samples = (sample for family in families.values() for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


async def eventually(condition: Callable[[], Awaitable[bool]], within_s: float = 30) -> None:
    """Poll until the condition holds. Raises TimeoutError when it does not in time."""
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.1)


def request(prompt: list[int] | str, max_tokens: int, **extra: Any) -> dict[str, Any]:
    """A greedy request that goes on to its last token."""
    fixed = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return fixed | extra


def prompt(tokens: int, seed: object) -> list[int]:
    """Token ids that no other test uses."""
    draw = random.Random(str(seed))
    return [draw.randrange(3, 500) for _ in range(tokens)]


def processes(title: str) -> list[psutil.Process]:
    """The processes with that text in their titles, the oldest first."""
    found = [p for p in psutil.process_iter(["cmdline", "create_time"]) if title in " ".join(p.info["cmdline"] or [])]
    return sorted(found, key=lambda p: p.info["create_time"])


def process(title: str) -> psutil.Process:
    """The newest process with that text in its title. Raises LookupError."""
    found = processes(title)
    if not found:
        raise LookupError(title)
    return found[-1]
