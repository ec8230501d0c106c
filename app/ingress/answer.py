"""From the tokens of a conversation to OpenAI's objects and events: what completions and chats have in common."""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from app.ingress.conversation import Conversation
from app.ingress.errors import ApiError
from app.ingress.model import Model
from app.ingress.schema import Generation
from app.ingress.text import TextStream


@dataclass(frozen=True, slots=True)
class Shape:
    """How an endpoint writes its answers.

    `whole` and `chunk` are the names of its objects. A choice holds `said(text)` in a whole answer; in a chunk the
    text as JSON between `before` and `after`. `opening` is what a chunk before the first one holds, if there is one.
    """

    whole: str
    chunk: str
    said: Callable[[str], dict[str, Any]]
    before: str
    after: str = ""
    opening: str | None = None


class Answer:
    """Turns a conversation into text, step by step, and counts what was used."""

    def __init__(self, request: Generation, conversation: Conversation, model: Model, shape: Shape) -> None:
        self._conversation = conversation
        sampling = conversation.spec.sampling
        self._text = TextStream(model.tokenizer, conversation.spec.prompt, request.stops, sampling.min_tokens)
        self._model = model
        self._shape = shape
        self._created = int(time.time())
        self.finish: str | None = None
        self.completion_tokens = 0

    async def pieces(self) -> AsyncIterator[str]:
        """The text of every step; afterwards `finish` is set. Raises ApiError."""
        cursor = self._conversation.cursor
        async for tokens in self._conversation.steps():
            self.completion_tokens += len(tokens)
            # With the newest token came the end, if there is one.
            finish = cursor.finish if self.completion_tokens == cursor.next_index else None
            # A token that ends the answer by itself is not a part of its text.
            piece = self._text.feed(tokens[:-1] if finish == "stop" else tokens)
            self.finish = "stop" if piece.stopped else finish
            yield piece.text + (self._text.flush() if self.finish and not piece.stopped else "")
            if self.finish:
                return
        # The end came without a token of its own.
        self.finish = cursor.finish
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
        choice = {"index": 0, **self._shape.said(text), "logprobs": None, "finish_reason": self.finish}
        return {**self._head(self._shape.whole), "choices": [choice], "usage": self.usage()}

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as server-sent events, one per engine step; an error after the start is an event too."""
        shape, head = self._shape, self._head(self._shape.chunk)
        tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        start = f'data: {json.dumps(head, separators=(",", ":"))[:-1]},"choices":[{{"index":0,'
        # Written together with the first text: a client that times the first chunk times the first token.
        opening = f'{start}{shape.opening},"logprobs":null,"finish_reason":null}}]{tail}' if shape.opening else ""
        start += shape.before
        try:
            async for text in self.pieces():
                reason = f'"{self.finish}"' if self.finish else "null"
                chunk = f'{start}{json.dumps(text)}{shape.after},"logprobs":null,"finish_reason":{reason}}}]{tail}'
                yield (opening + chunk).encode()
                opening = ""
        except ApiError as error:
            yield f"data: {json.dumps(error.body())}\n\n".encode()
        else:
            if include_usage:
                yield f"data: {json.dumps({**head, 'choices': [], 'usage': self.usage()})}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._conversation.id, "object": kind, "created": self._created, "model": self._model.id}
