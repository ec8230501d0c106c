"""POST /v1/completions: from a validated request to tokens, and from tokens back to an answer."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from app.ingress.conversation import Conversation
from app.ingress.errors import ApiError
from app.ingress.schema import CompletionRequest
from app.ingress.text import TextStream
from migration.request import IngressId, RequestSpec, Sampling
from policies.model import RequestId

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of the completions endpoint."""


@dataclass(frozen=True, slots=True)
class Model:
    """The served model, as far as the ingress knows it. `tokenizer` is a `tokenizers.Tokenizer`."""

    id: str
    tokenizer: Any
    vocab_size: int
    max_context: int
    created: int


def to_spec(
    request: CompletionRequest, model: Model, request_id: RequestId, label: str, ingress: IngressId
) -> RequestSpec:
    """What replicas need to know of a request.

    Raises:
        ApiError: 404 for another model, 400 for a prompt that cannot be served.
    """
    if request.model not in (None, model.id):
        raise ApiError(404, f"the model {request.model!r} does not exist", param="model", code="model_not_found")
    prompt = _tokens(request.prompt, model)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if len(prompt) + max_tokens > model.max_context:
        raise ApiError(
            400,
            f"this model's context is {model.max_context} tokens; the prompt has {len(prompt)} and max_tokens "
            f"is {max_tokens}",
            param="max_tokens" if len(prompt) < model.max_context else "prompt",
            code="context_length_exceeded",
        )
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=request.seed,
        ignore_eos=request.ignore_eos,
    )
    return RequestSpec(request_id, label, prompt, sampling, ingress)


def _tokens(prompt: str | list[int], model: Model) -> tuple[int, ...]:
    if isinstance(prompt, str):
        ids = tuple(model.tokenizer.encode(prompt).ids)
        if not ids:
            raise ApiError(400, "the prompt is empty", param="prompt", code="invalid_value")
        return ids
    if bad := [t for t in prompt if not 0 <= t < model.vocab_size]:
        raise ApiError(
            400,
            f"prompt: token id {bad[0]} is not in [0, {model.vocab_size})",
            param="prompt",
            code="invalid_value",
        )
    return tuple(prompt)


class Answer:
    """Turns a conversation into text, step by step, and counts what was used."""

    def __init__(self, request: CompletionRequest, conversation: Conversation, model: Model) -> None:
        self._conversation = conversation
        self._text = TextStream(model.tokenizer, conversation.spec.prompt, request.stops)
        self._model = model
        self._created = int(time.time())
        self.finish: str | None = None
        self.completion_tokens = 0

    async def pieces(self) -> AsyncIterator[str]:
        """The text of every step; afterwards `finish` is set. Raises ApiError."""
        async for tokens in self._conversation.steps():
            self.completion_tokens += len(tokens)
            piece = self._text.feed(tokens)
            if piece.stopped:
                self.finish = "stop"
            elif self.completion_tokens == self._conversation.cursor.next_index:
                # The newest token: if there is an end, it came with this one.
                self.finish = self._conversation.cursor.finish
            yield piece.text + (self._text.flush() if self.finish and not piece.stopped else "")
            if self.finish:
                return
        # The end came without a token of its own.
        self.finish = self._conversation.cursor.finish
        yield self._text.flush()

    def usage(self) -> dict[str, int]:
        """OpenAI's usage object."""
        prompt = len(self._conversation.spec.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer as one object. Raises ApiError."""
        text = "".join([piece async for piece in self.pieces()])
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": self.finish}
        return {**self._head(), "choices": [choice], "usage": self.usage()}

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as server-sent events, one per engine step; an error after the start is an event too."""
        tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        start = f'data: {json.dumps(self._head(), separators=(",", ":"))[:-1]},"choices":[{{"index":0,"text":'
        try:
            async for text in self.pieces():
                reason = f'"{self.finish}"' if self.finish else "null"
                yield f'{start}{json.dumps(text)},"logprobs":null,"finish_reason":{reason}}}]{tail}'.encode()
        except ApiError as error:
            yield f"data: {json.dumps(error.body())}\n\n".encode()
        else:
            if include_usage:
                last = {**self._head(), "choices": [], "usage": self.usage()}
                yield f"data: {json.dumps(last)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._conversation.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model.id,
        }
