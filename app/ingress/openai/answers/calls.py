"""Calls of tools in the text of an answer: what a client is told of them, and how JSON is read for them.

A reading gets the text piece by piece, as tokens make it, and is a function of that text alone. So a request that
moves between replicas calls what it would have called.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from app.ingress.openai.sampling import Structured


@dataclass(frozen=True, slots=True)
class Call:
    """A call, or more of its arguments, which are JSON.

    `index` counts the calls of an answer. `id` and `name` are told with the first part of a call, and only then.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def delta(self) -> dict[str, Any]:
        """As OpenAI has it in a chunk."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {"index": self.index, **self.whole()}

    def whole(self) -> dict[str, Any]:
        """As OpenAI has it in a whole answer."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer, or a part of it, says to the client: text, and calls in the order of their indices."""

    text: str = ""
    calls: tuple[Call, ...] = ()

    def first_call(self) -> "Said":
        """It without any call but the first of the answer."""
        return replace(self, calls=tuple(call for call in self.calls if call.index == 0))


def joined(parts: Iterable[Said]) -> Said:
    """Several parts as one, in which each call is told once."""
    text = ""
    calls: dict[int, Call] = {}
    for part in parts:
        text += part.text
        for call in part.calls:
            known = calls.get(call.index)
            calls[call.index] = replace(known, arguments=known.arguments + call.arguments) if known else call
    return Said(text, tuple(calls[index] for index in sorted(calls)))


class Reading(Protocol):
    """Looks for calls in one answer, either in `whole` or in its parts."""

    def part(self, text: str, tokens: tuple[int, ...], over: bool) -> Said:
        """What there is to tell after some more tokens and the text that they complete; `over` with the last ones.

        Raises:
            ApiError: the text cannot be read.
        """
        ...

    def whole(self, text: str, tokens: tuple[int, ...]) -> Said:
        """What there is to tell of a whole answer. Raises ApiError as `part` does."""
        ...


@dataclass(frozen=True, slots=True)
class Calling:
    """How calls of tools come about in the answers to a request.

    `begin` makes a reading of one answer, for the token ids of its prompt. `structured` is what the engine is told
    about its form. Special tokens are a part of the text if `special_tokens`. `reason` is the finish reason of an
    answer that ends by itself and has calls; of those, all but the first are left out unless `parallel`.
    """

    begin: Callable[[tuple[int, ...]], Reading]
    structured: Structured | None
    reason: str
    parallel: bool = True
    special_tokens: bool = False


def new_call(index: int, name: str) -> Call:
    """A call that begins, with an id like those of vLLM's server."""
    return Call(index, "", f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", name)


class NamedReading:
    """Reads an answer that is nothing but the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def part(self, text: str, tokens: tuple[int, ...], over: bool) -> Said:
        """See `Reading.part`."""
        if not text:
            return Said()
        call = Call(0) if self._begun else new_call(0, self._name)
        self._begun = True
        return Said(calls=(replace(call, arguments=text),))

    def whole(self, text: str, tokens: tuple[int, ...]) -> Said:
        """See `Reading.whole`."""
        return self.part(text, tokens, over=True)


_HEAD = re.compile(r'\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:')
"""A call up to its arguments. Whoever compiles a schema keeps the order of its properties."""


class ListReading:
    """Reads an answer that is a list of calls, as `schema_of_calls` wants it; cut off, it is told as far as it goes."""

    def __init__(self) -> None:
        self._held = ""
        self._index = 0
        self._arguments: _Arguments | None = None

    def part(self, text: str, tokens: tuple[int, ...], over: bool) -> Said:
        """See `Reading.part`."""
        self._held += text
        calls: list[Said] = []
        while self._held:
            if self._arguments is None:
                head = _HEAD.match(self._held)
                if head is None:
                    break
                self._held = self._held[head.end() :]
                self._arguments = _Arguments()
                calls.append(Said(calls=(new_call(self._index, json.loads(head[1])),)))
            arguments, self._held = self._arguments.take(self._held)
            if arguments:
                calls.append(Said(calls=(Call(self._index, arguments),)))
            if self._arguments.over:
                self._arguments = None
                self._index += 1
        return joined(calls)

    def whole(self, text: str, tokens: tuple[int, ...]) -> Said:
        """See `Reading.whole`."""
        return self.part(text, tokens, over=True)


class _Arguments:
    """Finds the end of a JSON value in an object of which it is the last member; it is `over` with that object."""

    def __init__(self) -> None:
        self.over = False
        self._depth = 0
        self._quoted = self._escaped = False

    def take(self, text: str) -> tuple[str, str]:
        """What of a piece of text belongs to the value, without space around it, and what comes after the object."""
        value: list[str] = []
        for at, character in enumerate(text):
            if not self._quoted and not self._depth:
                if character == "}":
                    self.over = True
                    return "".join(value), text[at + 1 :]
                if character.isspace():
                    continue
            value.append(character)
            self._follow(character)
        return "".join(value), ""

    def _follow(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = character == "\\"
            self._quoted = character != '"'
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
