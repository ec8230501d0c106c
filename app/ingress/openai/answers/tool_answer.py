"""From the tokens of one conversation to one choice of a chat that may call tools."""

import json
from collections.abc import AsyncGenerator
from typing import Any

from app.ingress.openai.answers.calls import Calling, Said, joined
from app.ingress.openai.answers.choice import Choice, Outset
from app.ingress.openai.answers.logprobs import Scored


class CallingChoice(Choice):
    """A choice whose text is read for calls, token by token: how many came in a step makes no difference."""

    def __init__(self, outset: Outset, calling: Calling) -> None:
        super().__init__(outset, calling.special_tokens)
        self._by_one = True
        self._calling = calling
        self._called = False
        self._fed: list[tuple[str, tuple[int, ...], bool]] = []
        """What is new to the reading: text, its tokens, and whether the answer ends with it."""

    @property
    def finish(self) -> str | None:
        """See `Choice.finish`."""
        return self._calling.reason if self._called and self._finish == "stop" else self._finish

    async def whole(self) -> dict[str, Any]:
        """See `Choice.whole`."""
        scored: list[Scored] = []
        async for _ in self._pieces():
            scored += self._scored
        texts, tokens, _ = zip(*self._fed, strict=True)
        said = self._heard(self._begin().whole("".join(texts), sum(tokens, ())))
        return {
            "index": self._index,
            "message": _message(said),
            "logprobs": self._logprobs(scored),
            "finish_reason": self.finish,
        }

    async def events(self, start: str, tail: str) -> AsyncGenerator[bytes, None]:
        """See `Choice.events`; a step after which there is nothing to tell has no event, unless it is the first."""
        reading = self._begin()
        start, opening = self._begun(start, tail)
        async for _ in self._pieces():
            fed, self._fed = self._fed, []
            said = self._heard(joined([reading.part(*one) for one in fed]))
            delta = _delta(said)
            chunk = ""
            if delta or self._scorer is not None or self._finish:
                rest = {
                    "delta": delta,
                    "logprobs": self._logprobs(self._scored),
                    "finish_reason": self.finish,
                }
                chunk = f"{start}{json.dumps(rest, separators=(',', ':'))[1:]}]{tail}"
            if opening or chunk:
                yield (opening + chunk).encode()
            opening = ""

    def _begin(self) -> Any:
        return self._calling.begin(self._prompt)

    def _heard(self, said: Said) -> Said:
        said = said if self._calling.parallel else said.first_call()
        self._called = self._called or bool(said.calls)
        return said

    def _feed(self, tokens: tuple[int, ...]) -> str:
        text = super()._feed(tokens)
        self._fed.append((text, tokens, self._finish is not None))
        return text

    def _end(self) -> str:
        text = super()._end()
        self._fed.append((text, (), True))
        return text


def _message(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.calls:
        message |= {"content": said.text or None, "tool_calls": [call.whole() for call in said.calls]}
    return message


def _delta(said: Said) -> dict[str, Any]:
    content = {"content": said.text} if said.text else {}
    return content | ({"tool_calls": [call.delta() for call in said.calls]} if said.calls else {})
