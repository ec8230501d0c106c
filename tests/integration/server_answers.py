"""Answers of a server, whole or streamed, in one form; and the differences between two of them."""

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.integration.corpus import Case


@dataclass(frozen=True)
class Token:
    """A token with its logprob, its offset or its bytes, and the likeliest tokens with their logprobs."""

    text: str
    logprob: float
    where: Any
    likeliest: tuple[tuple[str, float], ...]


@dataclass
class Choice:
    """One choice so far; `steps` counts the JSON objects that it came in."""

    text: str = ""
    finish: str | None = None
    tokens: list[Token] = field(default_factory=list)
    steps: int = 0


@dataclass
class ServerAnswer:
    """An answer so far. `members` are the paths of its JSON members, `[]` for each item of a list."""

    status: int
    media: str
    id: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    members: set[str] = field(default_factory=set)

    def take(self, body: dict[str, Any]) -> None:
        """Add a whole answer, or a chunk of one."""
        self.members |= set(_members(body))
        self.error = body.get("error") or self.error
        self.id = body.get("id", self.id)
        self.usage = body.get("usage") or self.usage
        for choice in body.get("choices", []):
            self._take(self.choices.setdefault(choice["index"], Choice()), choice)

    def _take(self, so_far: Choice, choice: dict[str, Any]) -> None:
        text = choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content")
        so_far.text += text or ""
        so_far.steps += 1
        so_far.finish = choice["finish_reason"] or so_far.finish
        so_far.tokens += _tokens(choice.get("logprobs") or {})


_LEAST = -9999.0
"""The servers' value for minus infinity. Which of the impossible tokens they list is chance."""

Watch = Callable[[ServerAnswer], Awaitable[None]]


async def ask(http: httpx.AsyncClient, case: Case, label: str, watch: Watch | None = None) -> ServerAnswer:
    """Send a request; `watch` is awaited after each object of the answer."""
    headers = {"X-Request-Id": label}
    async with http.stream("POST", case.path, json=case.body, headers=headers) as response:
        answer = ServerAnswer(response.status_code, response.headers["content-type"].partition(";")[0])
        if answer.media != "text/event-stream":
            answer.take(json.loads(await response.aread()))
            return answer
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.done = True
            elif line:
                answer.take(json.loads(line.removeprefix("data: ")))
                if watch is not None:
                    await watch(answer)
    return answer


def differences(one: ServerAnswer, other: ServerAnswer, noise: float) -> list[str]:
    """The differences between two answers to the same request. `noise` is the tolerance for logprobs."""
    heads = [(t.status, t.media, t.done, t.error is not None) for t in (one, other)]
    if heads[0] != heads[1]:
        return [f"{heads[0]} != {heads[1]} ({one.error or other.error})"]
    found = []
    usages = [
        {k: t.usage[k] for k in ("prompt_tokens", "completion_tokens")} if t.usage else None for t in (one, other)
    ]
    if usages[0] != usages[1]:
        found.append(f"usage {usages[0]} != {usages[1]}")
    if one.choices.keys() != other.choices.keys():
        return [*found, f"choices {sorted(one.choices)} != {sorted(other.choices)}"]
    for index, choice in one.choices.items():
        found += [f"choice {index}: {text}" for text in _apart(choice, other.choices[index], noise)]
    return found


def _apart(one: Choice, other: Choice, noise: float) -> Iterator[str]:
    if one.text != other.text:
        yield f"text {one.text!r} != {other.text!r}"
    if one.finish != other.finish:
        yield f"finish_reason {one.finish!r} != {other.finish!r}"
    if len(one.tokens) != len(other.tokens):
        yield f"{len(one.tokens)} tokens with logprobs, not {len(other.tokens)}"
        return
    for index, (token, another) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        if not _alike(token, another, noise):
            yield f"token {index}: {token} != {another}"
            return


def _alike(one: Token, other: Token, noise: float) -> bool:
    """True if two tokens agree. Of equally likely tokens, either server may list another one."""
    mine, theirs = dict(one.likeliest), dict(other.likeliest)
    shared = mine.keys() & theirs.keys()
    return (
        (one.text, one.where) == (other.text, other.where)
        and _near([one.logprob], [other.logprob], noise)
        and _near(sorted(v for _, v in one.likeliest), sorted(v for _, v in other.likeliest), noise)
        and len(shared) >= sum(value > _LEAST for value in mine.values()) - 1
        and _near([mine[k] for k in shared], [theirs[k] for k in shared], noise)
    )


def _near(ones: Sequence[float], others: Sequence[float], noise: float) -> bool:
    return len(ones) == len(others) and all(abs(a - b) <= noise for a, b in zip(ones, others, strict=True))


def _tokens(logprobs: dict[str, Any]) -> list[Token]:
    if "tokens" not in logprobs:
        return [
            Token(t["token"], t["logprob"], t["bytes"], tuple((o["token"], o["logprob"]) for o in t["top_logprobs"]))
            for t in logprobs.get("content") or ()
        ]
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"))
    return [Token(a, b, c, tuple((d or {}).items())) for a, b, c, d in zip(*columns, strict=True)]


def _members(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _members(item, f"{path}[]")
    elif isinstance(value, dict) and path != "choices[].logprobs.top_logprobs[]":
        for name, member in value.items():
            inner = f"{path}.{name}".lstrip(".")
            yield inner
            yield from _members(member, inner)
