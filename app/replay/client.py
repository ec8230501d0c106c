"""The OpenAI side of a replay: which model is there, and one streamed completion."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.client.api import ApiClient
from app.client.errors import BadAnswer, ClientError, ErrorAnswer, NoAnswer
from app.replay.errors import BadInput
from app.replay.stream import Stream
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


@dataclass(frozen=True, slots=True)
class Model:
    """What a request must know of the model it goes to; `context` is None where the endpoint does not say."""

    id: str
    context: int | None = None
    vocabulary: int = SAFE_VOCABULARY


def connect(url: str, admin_key: str | None = None, timeout_s: float = CONNECT_TIMEOUT_S) -> ApiClient:
    """A client of the endpoint; proxies of the environment would be measured, too, and are not used.

    Raises:
        BadInput: `url` is not one.
    """
    try:
        return ApiClient(url, admin_key, timeout_s=timeout_s, connect_s=CONNECT_TIMEOUT_S, silence_s=SILENCE_TIMEOUT_S)
    except ValueError as error:
        raise BadInput(f"{error}.") from None


async def find_model(api: ApiClient) -> Model:
    """The first model that the endpoint serves.

    Raises:
        BadInput: the endpoint does not answer, or not with a model.
    """
    try:
        entry = (await api.models())[0]
        return Model(str(entry["id"]), entry.get("max_model_len"), entry.get("vocab_size") or SAFE_VOCABULARY)
    except NoAnswer as error:
        raise BadInput(f"{api.url} cannot be reached: {error.message.rstrip('.')}.") from None
    except ErrorAnswer as error:
        raise BadInput(f"{api.url}/v1/models answered {error.status}: {error.message.rstrip('.')}.") from None
    except (BadAnswer, LookupError):
        raise BadInput(f"{api.url}/v1/models does not list a model.") from None


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


async def complete(api: ApiClient, model: Model, seed: int, stream: Stream, clock: Clock) -> None:
    """Send one request and feed its answer to `stream`, which records every end but a cancellation."""
    body = completion(model, stream.arrival, seed)
    try:
        async with api.stream(body, f"replay-{seed}-{stream.arrival.row}") as events:
            stream.open()
            async for event in events:
                stream.feed(event, clock())
        stream.end(clock())
    except ClientError as error:
        stream.fail(error.kind, error.message, clock())
    except Exception as error:  # whatever one request meets is a finding, and must not end the others
        stream.fail(type(error).__name__, str(error), clock())
