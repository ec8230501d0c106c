"""From conversations to OpenAI's objects and events: what completions and chats have in common."""

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from app.ingress.asgi import DONE
from app.ingress.errors import ApiError
from app.ingress.openai.answers.choice import Choice, Outset, Shape
from app.ingress.openai.answers.tool_answer import CallingChoice
from app.ingress.openai.generation import Plan
from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import Generation
from app.ingress.streams.conversation import Opened
from app.ingress.telemetry.requests import RequestObserver
from migration.concurrency import gather, merge


class Answer:
    """Tells the choices of an answer, and counts what was used. If one fails, all of it does."""

    def __init__(
        self,
        request: Generation,
        plan: Plan,
        conversations: Sequence[Opened],
        model: Model,
        shape: Shape,
        observer: RequestObserver,
    ) -> None:
        begin = Choice if plan.calling is None else partial(CallingChoice, calling=plan.calling)
        self._choices = [
            begin(
                Outset(
                    index,
                    opened,
                    model.tokenizer,
                    shape,
                    request.stops,
                    plan.prompt(index),
                    plan.samplings[index],
                    observer.choice(opened.conversation),
                )
            )
            for index, opened in enumerate(conversations)
        ]
        self._observer = observer
        self._plan = plan
        self._model = model
        self._shape = shape
        self._created = int(time.time())

    def usage(self) -> dict[str, int]:
        """OpenAI's usage object: a prompt counts once, however many choices it has."""
        prompt, completion = self._plan.prompt_tokens, sum(choice.completion_tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    async def whole(self) -> dict[str, Any]:
        """The answer as one object. Raises ApiError."""
        try:
            choices = await gather([choice.whole() for choice in self._choices])
        except ApiError as error:
            raise self._blamed(error) from error
        return {**self._head(self._shape.whole), "choices": choices, "usage": self.usage()}

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as server-sent events as they come; an error after the start is an event too."""
        head = self._head(self._shape.chunk)
        start = f"data: {json.dumps(head, separators=(',', ':'))[:-1]},"
        tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        told = [choice.events(start, tail) for choice in self._choices]
        try:
            async with aclosing(told[0] if len(told) == 1 else merge(told)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ApiError as error:
            blamed = self._blamed(error)
            self._observer.failed(blamed)
            yield blamed.event()
        else:
            if include_usage:
                yield f"data: {json.dumps({**head, 'choices': [], 'usage': self.usage()})}\n\n".encode()
        yield DONE

    def close(self) -> int:
        """Tell the observer how far the answer has come, however it was left; the tokens that were used."""
        usage = self.usage()
        self._observer.answered(usage["completion_tokens"], [choice.finish for choice in self._choices])
        return usage["total_tokens"]

    def _blamed(self, error: ApiError) -> ApiError:
        """An engine that refuses a request does not say for which parameter. All but the form were checked before."""
        form = self._plan.form
        if form is None or (error.status, error.param) != (400, None):
            return error
        return replace(error, message=f"{form}: {error.message}", param=form)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._plan.id, "object": kind, "created": self._created, "model": self._model.id}
