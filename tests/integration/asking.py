"""Sends cases of the corpus to a server, a few at a time, and moves them while they run."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tests.differential.answers import ServerAnswer
from tests.differential.cases import Case
from tests.integration.application import Client, eventually

AT_ONCE = 8
STREAM = "text/event-stream"


async def ask(http: httpx.AsyncClient, case: Case, label: str) -> ServerAnswer:
    """Send a case, as `label`."""
    method = "GET" if case.body is None else "POST"
    text, broken = "", False
    async with http.stream(method, case.path, json=case.body, headers={"X-Request-Id": label}) as response:
        try:
            async for part in response.aiter_text():
                text += part
        except httpx.RemoteProtocolError:
            broken = True  # vLLM's way to end a stream that it has to refuse
    media = response.headers.get("content-type", "").partition(";")[0]
    if media == STREAM:
        answer = ServerAnswer.stream(response.status_code, media, text.split("\n"))
    else:
        answer = ServerAnswer.whole(response.status_code, media, text)
    return replace(answer, broken=broken)


async def ask_all(url: str, cases: Iterable[Case], at_once: int = AT_ONCE) -> dict[int, ServerAnswer]:
    """The answers of a server, by case."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:

        async def one(case: Case) -> tuple[int, ServerAnswer]:
            async with gate:
                return case.number, await ask(http, case, f"case-{case.number}")

        return dict(await asyncio.gather(*map(one, cases)))


# --- moved --------------------------------------------------------------------------------------------


async def two_run(client: Client) -> None:
    """Wait until there is another replica to move to: a test before may have killed one."""

    async def so() -> bool:
        return len(await client.running()) >= 2

    await eventually(so, within_s=120)


@dataclass
class Sightings:
    """The requests on all replicas as `/mell/state` last showed them."""

    running: Sequence[dict[str, Any]] = ()
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def of(self, label: str) -> list[dict[str, Any]]:
        """The requests with that label: one for each choice that has not ended."""
        return [request for request in self.running if request["label"] == label]

    async def look(self, client: Client) -> None:
        """Look again and again."""
        while True:
            self.running = [request for replica in await client.running() for request in replica["requests"]]
            async with self.changed:
                self.changed.notify_all()
            await asyncio.sleep(0.03)


@asynccontextmanager
async def sightings(client: Client) -> AsyncIterator[Sightings]:
    """Sightings that are renewed within the block."""
    seen = Sightings()
    looking = asyncio.create_task(seen.look(client))
    try:
        yield seen
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


@dataclass(frozen=True)
class OrderedMove:
    """A move of the choice with the number `choice`, once the output has `tokens` tokens, or of what is left."""

    tokens: int
    choice: int
    path: str


@dataclass(frozen=True)
class Moved:
    """The outcome of an ordered move; `at` is the output's length at the freeze, None if it never came to that."""

    outcome: str
    at: int | None = None


ENDED = "too late"
"""The outcome of a move whose request had ended."""

_OVER = {"the request ended by itself", "the client left"}
"""Errors of such migrations. The ingress leaves a choice that a stop string ends."""


async def ask_and_move(
    client: Client, seen: Sightings, case: Case, label: str, prompt_tokens: int, moves: Sequence[OrderedMove]
) -> tuple[ServerAnswer, list[Moved]]:
    """Send a case and move it, one move after the other. `prompt_tokens` is the length of its prompt."""
    asking = asyncio.create_task(ask(client.http, case, label))
    made: list[Moved] = []
    for move in moves:
        found = await _sighted(seen, label, prompt_tokens + move.tokens, asking)
        if not found:
            made.append(Moved(ENDED))
            continue
        made.append(await _move(client, found[move.choice % len(found)]["id"], move.path, prompt_tokens))
    return await asking, made


async def _sighted(
    seen: Sightings, label: str, tokens: int, asking: "asyncio.Task[ServerAnswer]"
) -> Sequence[dict[str, Any]]:
    """The label's requests once one of them has that many tokens; none if the answer comes first."""
    async with seen.changed:
        while not asking.done():
            found = seen.of(label)
            if any(request["tokens"] >= tokens for request in found):
                return sorted(found, key=lambda request: str(request["id"]))
            await seen.changed.wait()
    return ()


async def _move(client: Client, request: str, path: str, prompt_tokens: int) -> Moved:
    reply = await client.move(request, path=path)
    if reply.status_code == 202:
        record = await client.outcome(reply.json()["id"])
        at = None if record.get("tokens") is None else int(record["tokens"]) - prompt_tokens
        return Moved(ENDED if record["error"] in _OVER else str(record["outcome"]), at)
    message = str(reply.json()["error"]["message"])
    return Moved(ENDED if reply.status_code == 404 or message.endswith("is not here") else message)
