"""The OpenAI side of a replay: which model is there, and one streamed completion."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from app.replay.errors import BadInput
from app.replay.stream import Lines, Stream, message_of
from app.replay.trace import Arrival

Clock = Callable[[], float]
"""Seconds since the replay began."""

FIRST_ORDINARY_TOKEN = 3
"""Ids below are special (unknown, begin, end) in Llama's vocabularies and in those modelled on them."""
SAFE_VOCABULARY = 256
"""Every tokenizer with a byte alphabet has that many ids."""

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 300.0
"""A stream without a byte for that long is taken for dead, so that a replay comes to an end."""
KEEPALIVE_S = 2.0
"""Below uvicorn's 5 s: a connection that the server is about to close must not be used again."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a request must know of the model it goes to; `context` is None where the endpoint does not say."""

    id: str
    context: int | None = None
    vocabulary: int = SAFE_VOCABULARY


def connect(url: str, admin_key: str | None = None) -> httpx.AsyncClient:
    """A client without a limit on connections: the trace alone says how many requests are under way."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
    timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None)
    headers = {"Accept-Encoding": "identity"}
    if admin_key:
        headers["Authorization"] = f"Bearer {admin_key}"
    try:
        # Proxies of the environment would be measured, too.
        return httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, headers=headers, trust_env=False)
    except httpx.InvalidURL as error:
        raise BadInput(f"{url} is not a URL: {error}.") from None


async def find_model(http: httpx.AsyncClient) -> Model:
    """The first model that the endpoint serves."""
    where = f"{http.base_url}".rstrip("/")
    try:
        response = await http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise BadInput(f"{where} cannot be reached: {reason}.") from None
    if response.status_code != httpx.codes.OK:
        message = message_of(response.content).rstrip(".")
        raise BadInput(f"{where}/v1/models answered {response.status_code}: {message}.")
    try:
        entry = response.json()["data"][0]
        return Model(str(entry["id"]), entry.get("max_model_len"), entry.get("vocab_size") or SAFE_VOCABULARY)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BadInput(f"{where}/v1/models does not list a model.") from None


def completion(model: Model, arrival: Arrival, seed: int) -> dict[str, Any]:
    """The body of one request: random tokens, the same for the same seed and row."""
    chance = random.Random(f"{seed}-{arrival.row}")
    vocabulary = range(FIRST_ORDINARY_TOKEN, model.vocabulary)
    return {
        "model": model.id,
        "prompt": chance.choices(vocabulary, k=arrival.prompt_tokens),
        "max_tokens": arrival.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def complete(http: httpx.AsyncClient, model: Model, seed: int, stream: Stream, clock: Clock) -> None:
    """Send one request and feed its answer to `stream`, which is told of every end but a cancellation."""
    body = completion(model, stream.arrival, seed)
    headers = {"X-Request-Id": f"replay-{seed}-{stream.arrival.row}"}
    lines = Lines()
    try:
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                message = message_of(await response.aread())
                return stream.fail(f"HTTP {response.status_code}", message, clock())
            stream.open()
            async for data in response.aiter_raw():
                now_s = clock()
                for line in lines.feed(data):
                    stream.feed(line, now_s)
        stream.end(clock())
    except Exception as error:  # whatever one request meets is a finding, and must not end the others
        stream.fail(type(error).__name__, str(error), clock())
