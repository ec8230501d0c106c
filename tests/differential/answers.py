"""Answers in one form: the chunks of a stream joined, and identifiers and times replaced.

How many tokens one chunk carries depends on timing, so chunks that continue one another are joined: those of a
completion or a chat into one, of typed events those that follow each other. What is left of a stream does not depend
on its chunks, yet keeps the order of everything else.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Any
"""A value parsed from JSON."""


@dataclass(frozen=True)
class ServerAnswer:
    """An answer: its status, its media type, and its document, normalised.

    `ended` is true after a `[DONE]`, and `broken` if the server closed the connection within the answer.
    """

    status: int
    media: str
    document: Json
    ended: bool = False
    broken: bool = False

    @classmethod
    def whole(cls, status: int, media: str, text: str) -> "ServerAnswer":
        """An answer that came at once; one that is not JSON is its text."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError:
            document = text
        return cls(status, media, normalised(document))

    @classmethod
    def stream(cls, status: int, media: str, lines: Iterable[str]) -> "ServerAnswer":
        """An answer that came as server-sent events, by its lines. Raises ValueError for another line than SSE's."""
        events, name, ended = [], "", False
        for line in lines:
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif line == "data: [DONE]":
                ended = True
            elif field == "data":
                event = json.loads(value)
                events.append({"event": name, **event} if name else event)
                name = ""
            elif line:
                raise ValueError(f"not an event of a stream: {line!r}")
        return cls(status, media, normalised(joined(events)), ended)

    @property
    def error(self) -> Mapping[str, Json] | None:
        """The error's members, also of a stream that was broken off. None for an answer."""
        last = self.document[-1] if isinstance(self.document, list) and self.document else self.document
        found = last.get("error") if isinstance(last, dict) else None
        return found if isinstance(found, dict) else None

    @property
    def prompt_tokens(self) -> int | None:
        """The length of the prompt as the usage states it, None without."""
        return next(_named(self.document, ("prompt_tokens", "input_tokens")), None)

    @property
    def output_tokens(self) -> int | None:
        """The tokens of all choices as the usage states them, None without."""
        return max(_named(self.document, ("completion_tokens", "output_tokens")), default=None)


def _named(value: Json, names: Sequence[str]) -> Iterator[int]:
    """The whole numbers of members with these names, wherever they stand."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        if name in names and isinstance(member, int):
            yield member
        yield from _named(member, names)


# --- joining ------------------------------------------------------------------------------------------

_TEXTS = {"text", "content", "reasoning", "arguments", "delta", "thinking", "partial_json", "refusal"}
"""Members whose texts continue in the next chunk."""

_COLUMNS = {"tokens", "token_logprobs", "top_logprobs", "text_offset", "content", "token_ids", "logprobs"}
"""Members whose lists continue in the next chunk."""


_REASONING = {"reasoning", "thinking"}
_BEGIN = "<think>"
"""vLLM's reasoning parser drops this mark if it is alone in a chunk, and keeps it beside other tokens."""


def _unmarked(value: Json, reasons: bool = False) -> Json:
    """The value without marks in its reasoning, of which it is a part if it `reasons`.

    Whether they are there depends on how an engine's tokens were cut into outputs.
    """
    match value:
        case str():
            return value.replace(_BEGIN, "") if reasons else value
        case list():
            return [_unmarked(member, reasons) for member in value]
        case dict():
            reasons = reasons or "reasoning" in str(value.get("type", ""))
            return {name: _unmarked(each, reasons or name in _REASONING) for name, each in value.items()}
    return value


def joined(events: Sequence[Json]) -> Json:
    """The events of a stream: the one document of a completion or a chat, else a list of events.

    An error that breaks a completion off stays an event of its own.
    """
    events = [_unmarked(event) for event in events]
    chunks = [event for event in events if "choices" in event]
    if chunks:
        whole: Json = {}
        for chunk in chunks:
            whole = _join(whole, chunk)
        rest = [event for event in events if "choices" not in event]
        return [whole, *rest] if rest else whole
    merged: list[Json] = []
    for event in events:
        event = {name: value for name, value in event.items() if name != "sequence_number"}
        if merged and _continues(event) and _key(event) == _key(merged[-1]):
            merged[-1] = _join(merged[-1], event)
        else:
            merged.append(event)
    return merged


def _continues(event: Json) -> bool:
    kind = str(event.get("type", ""))
    return kind.endswith((".delta", "_block_delta"))


def _key(event: Json) -> tuple[Json, ...]:
    inner = event.get("delta")
    kind = inner.get("type") if isinstance(inner, dict) else None
    return event.get("type"), kind, *(event.get(name) for name in ("index", "output_index", "content_index"))


def _join(first: Json, then: Json) -> Json:
    """A chunk and its successor as one chunk."""
    if isinstance(then, dict) and isinstance(first, dict | None):
        first = first or {}
        return {name: _member(name, first.get(name), then.get(name)) for name in {**first, **then}}
    return first if then is None else then


def _member(name: str, first: Json, then: Json) -> Json:
    match first, then:
        case str(), str() if name in _TEXTS:
            return first + then
        case ((None | list()), list()) if name in ("choices", "tool_calls"):
            return _by_index(first or [], then)
        case list(), list() if name in _COLUMNS:
            return first + then
        case _:
            return _join(first, then)


def _by_index(first: Sequence[Json], then: Sequence[Json]) -> list[Json]:
    """One chunk may have several parts of an index."""
    parts = {part["index"]: part for part in first}
    for part in then:
        parts[part["index"]] = _join(parts.get(part["index"], {}), part)
    return [parts[index] for index in sorted(parts)]


# --- normalising --------------------------------------------------------------------------------------

_IDENTIFIERS = {"id", "item_id", "call_id", "response_id", "tool_call_id", "request_id", "signature"}
_TIMES = {"created", "created_at", "completed_at"}
_OF_THE_CACHE = {"cached_tokens", "cache_write_tokens"}
"""Counts that depend on the requests before."""
_SWITCHED = {"prompt_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens"}
"""Members that also depend on them, and that a server has with `enable_prompt_tokens_details` only."""


def normalised(document: Json) -> Json:
    """The document with its identifiers numbered in the order in which they come, and without times.

    Equal identifiers stay equal, and keep their kind ("cmpl", "resp"). The fingerprint of a server's settings is left
    out, and so are the numbers of tokens that a cache had of the prompt.
    """
    return _normalised("", document, {})


def _normalised(name: str, value: Json, seen: dict[str, str]) -> Json:
    match value:
        case dict():
            members = {inner: member for inner, member in _whole_prompt(value).items() if inner not in _SWITCHED}
            return {inner: _normalised(inner, member, seen) for inner, member in members.items()}
        case list():
            return [_normalised(name, item, seen) for item in value]
        case str() if name in _IDENTIFIERS:
            kind = re.match(r"[a-z]+(?=[-_])", value)
            return seen.setdefault(value, f"{kind[0] if kind else ''}#{len(seen)}")
        case str() if name == "system_fingerprint":
            return "a fingerprint"
        case int() | float() if name in _TIMES:
            return "a time"
        case int() if name in _OF_THE_CACHE:
            return "of the cache"
        case _:
            return value


def _whole_prompt(usage: Mapping[str, Json]) -> Mapping[str, Json]:
    """Of Anthropic's usage, `input_tokens` with those of the cache, which it leaves out; others as they are."""
    cached = sum(usage.get(f"cache_{way}_input_tokens") or 0 for way in ("read", "creation"))
    return {**usage, "input_tokens": usage["input_tokens"] + cached} if cached else usage
