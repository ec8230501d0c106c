"""The OpenAI side of a replay: the served model, and one streamed completion."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.client.api import ApiClient
from app.client.errors import BadAnswer, ClientError, ErrorAnswer, NoAnswer
from simulator.errors import BadInput
from simulator.replay.stream import AnswerStream
from simulator.replay.trace import TraceRequest

Clock = Callable[[], float]
"""Seconds since the start of the replay."""

FIRST_ORDINARY_TOKEN = 3
"""Lower ids are special tokens (unknown, begin, end) in Llama's and similar vocabularies."""
SAFE_VOCABULARY = 256
"""Minimum size of the vocabulary of a tokenizer with a byte alphabet."""

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 300.0
"""A stream without a byte for this time counts as dead, so that every replay ends."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of the endpoint; `context` is None if the endpoint does not list it."""

    id: str
    context: int | None = None
    vocabulary: int = SAFE_VOCABULARY


def connect(url: str, admin_key: str | None = None, timeout_s: float = CONNECT_TIMEOUT_S) -> ApiClient:
    """A client of the endpoint, without the environment's proxies, whose latency would distort measurements.

    Raises:
        BadInput: `url` is invalid.
    """
    try:
        return ApiClient(url, admin_key, timeout_s=timeout_s, connect_s=CONNECT_TIMEOUT_S, silence_s=SILENCE_TIMEOUT_S)
    except ValueError as error:
        raise BadInput(f"{error}.") from None


async def find_model(api: ApiClient) -> ServedModel:
    """The first model listed by the endpoint.

    Raises:
        BadInput: the endpoint does not answer or lists no model.
    """
    try:
        entry = (await api.models())[0]
        return ServedModel(str(entry["id"]), entry.get("max_model_len"))
    except NoAnswer as error:
        raise BadInput(f"{api.url} cannot be reached: {error.message.rstrip('.')}.") from None
    except ErrorAnswer as error:
        raise BadInput(f"{api.url}/v1/models answered {error.status}: {error.message.rstrip('.')}.") from None
    except (BadAnswer, LookupError):
        raise BadInput(f"{api.url}/v1/models does not list a model.") from None


def completion(model: ServedModel, request: TraceRequest, seed: int) -> dict[str, Any]:
    """The body of one request with random prompt tokens, determined by seed and row."""
    chance = random.Random(f"{seed}-{request.row}")
    vocabulary = range(FIRST_ORDINARY_TOKEN, model.vocabulary)
    return {
        "model": model.id,
        "prompt": chance.choices(vocabulary, k=request.prompt_tokens),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def complete(api: ApiClient, model: ServedModel, seed: int, stream: AnswerStream, clock: Clock) -> None:
    """Send one request and feed its answer to `stream`, which records every end except cancellation."""
    body = completion(model, stream.request, seed)
    try:
        async with api.stream(body, f"replay-{seed}-{stream.request.row}") as events:
            stream.open()
            async for event in events:
                stream.feed(event, clock())
        stream.end(clock())
    except ClientError as error:
        stream.fail(error.kind, error.message, clock())
    except Exception as error:  # the failure of one request must not end the others
        stream.fail(type(error).__name__, str(error), clock())
