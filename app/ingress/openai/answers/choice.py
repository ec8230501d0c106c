"""From the tokens of one conversation to one choice of an answer: its text, its logprobs, and how it ended."""

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.ingress.openai.answers.logprobs import Scored, Scorer
from app.ingress.openai.answers.text import TextStream
from app.ingress.openai.sampling import Prompt, Sampling
from app.ingress.streams.conversation import Opened
from app.ingress.telemetry.requests import StepTimer


@dataclass(frozen=True, slots=True)
class Shape:
    """How an endpoint writes its answers.

    `whole` and `chunk` are the names of its objects. A choice holds `said(text)` in a whole answer; in a chunk the
    text as JSON between `before` and `after`. `logprobs` makes the object of some tokens with so many likeliest each.
    `opening` is what a chunk before a choice's first one holds, if there is one.
    """

    whole: str
    chunk: str
    said: Callable[[str], dict[str, Any]]
    logprobs: Callable[[Sequence[Scored], int], dict[str, Any]]
    before: str
    after: str = ""
    opening: str | None = None


@dataclass(frozen=True, slots=True)
class Outset:
    """What a choice is made of."""

    index: int
    opened: Opened
    tokenizer: Any
    shape: Shape
    stops: tuple[str, ...]
    prompt: Prompt
    sampling: Sampling
    steps: StepTimer


class Choice:
    """Turns a conversation into text, step by step.

    Special tokens are a part of the text if `special_tokens`.
    """

    def __init__(self, outset: Outset, special_tokens: bool = False) -> None:
        prompt, sampling, stops = outset.prompt, outset.sampling, outset.stops
        self._steps = outset.steps
        self._conversation, self._close = outset.opened.conversation, outset.opened.close
        self._text = TextStream(outset.tokenizer, prompt.tokens, stops, sampling.min_tokens, special_tokens)
        self._top = sampling.logprobs or 0
        self._scorer = None if sampling.logprobs is None else Scorer(outset.tokenizer, self._top)
        self._prompt = prompt.tokens
        self._index = outset.index
        self._shape = outset.shape
        self._by_one = bool(stops)
        self._echo = prompt.echo
        self._scored: list[Scored] = []
        """The tokens of the newest step, if logprobs are asked for."""
        self._finish: str | None = None
        self.completion_tokens = 0

    @property
    def finish(self) -> str | None:
        """How it ended; None as long as it has not."""
        return self._finish

    async def whole(self) -> dict[str, Any]:
        """The choice as one object. Raises ApiError."""
        texts, scored = [], []
        async for text in self._pieces():
            texts.append(text)
            scored += self._scored
        return {
            "index": self._index,
            **self._shape.said("".join(texts)),
            "logprobs": self._logprobs(scored),
            "finish_reason": self._finish,
        }

    async def events(self, start: str, tail: str) -> AsyncGenerator[bytes, None]:
        """The choice as server-sent events, one per engine step, between `start` and `tail`. Raises ApiError."""
        shape = self._shape
        start, opening = self._begun(start, tail)
        start += shape.before
        logprobs = "null"
        async for text in self._pieces():
            if self._scorer is not None:
                logprobs = json.dumps(shape.logprobs(self._scored, self._top), separators=(",", ":"))
            reason = f'"{self._finish}"' if self._finish else "null"
            chunk = f'{start}{json.dumps(text)}{shape.after},"logprobs":{logprobs},"finish_reason":{reason}}}]{tail}'
            yield (opening + chunk).encode()
            opening = ""

    def _begun(self, start: str, tail: str) -> tuple[str, str]:
        """How its chunks start, and the opening one, if there is one.

        That is written together with the first text: a client that times the first chunk times the first token.
        """
        start += f'"choices":[{{"index":{self._index},'
        opening = self._shape.opening
        return start, f'{start}{opening},"logprobs":null,"finish_reason":null}}]{tail}' if opening else ""

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        return None if self._scorer is None else self._shape.logprobs(scored, self._top)

    async def _pieces(self) -> AsyncGenerator[str, None]:
        """The text of every step; with the last one `_finish` is set. Raises ApiError."""
        async for tokens in self._conversation.steps():
            self._steps.step()
            yield self._take(tokens)
            if self._finish:
                break
        else:
            # The end came without a token of its own.
            self._finish, self._scored = self._conversation.finish, []
            yield self._end()
        self._conversation.stopped()
        # A stop string ends the choice here, and nowhere else yet. Others of the answer may go on for long.
        await self._close()

    def _take(self, tokens: tuple[int, ...]) -> str:
        first = self.completion_tokens
        if self._by_one and len(tokens) > 1:
            # What comes after a stop string does not count, as if the tokens had come one by one.
            text = ""
            for token in tokens:
                text += self._feed((token,))
                if self._finish:
                    break
        else:
            text = self._feed(tokens)
        if self._scorer is not None:
            conversation = self._conversation
            extras, conversation.extras = conversation.extras, []
            self._scorer.take(extras)
            self._scored = self._scorer.read(conversation.tokens, first, self.completion_tokens)
        return self._echoed(text)

    def _feed(self, tokens: tuple[int, ...]) -> str:
        conversation = self._conversation
        self.completion_tokens += len(tokens)
        # With the newest token came the end, if there is one.
        finish = conversation.finish if self.completion_tokens == len(conversation.tokens) else None
        # A token that ends the answer by itself is not a part of its text.
        piece = self._text.feed(tokens[:-1] if finish == "stop" else tokens)
        self._finish = "stop" if piece.stopped else finish
        return piece.text + (self._text.flush() if self._finish and not piece.stopped else "")

    def _end(self) -> str:
        return self._echoed(self._text.flush())

    def _echoed(self, text: str) -> str:
        echo, self._echo = self._echo, ""
        return echo + text
