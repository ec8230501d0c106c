"""Requests that force reasoning or tool calls, which random weights never write, long enough to be moved in the middle.

Reasoning ends by a budget of tokens, or not at all; calls are forced by their schema or a regex.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.differential.bodies import CHATS, MESSAGES, MODEL, RESPONSES, WHOLE, Body

END_OF_REASONING = 511
"""The tiny model's token `</think>`."""

_END_OF_TEXT = 2

REASONING, CALLS = "reasoning", "calls"


@dataclass(frozen=True)
class ForcedPart:
    """A request and the part of its answer that it forces; the output tokens `inside` belong to that part."""

    name: str
    path: str
    body: Body
    part: str
    inside: range


_WHY = "([a-z]{3} ){90}"
_IN_ARGUMENTS = range(75, 120)
"""The name and the first argument take fewer tokens, `_WHY` takes more: a token has at most four characters of it."""

_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"replica": {"enum": ["a", "b"]}, "why": {"type": "string", "pattern": f"^{_WHY}$"}},
    "required": ["replica", "why"],
    "additionalProperties": False,
}
_STRICT = [{"name": name, "strict": True} for name in ("move", "drain")]
"""Arguments follow their schema only in calls of strict tools."""

_LOOSE: Body = {"type": "function", "function": {"name": "move", "parameters": _PARAMETERS}}
_CALL = r'<tool_call>\n\{"name": "move", "arguments": \{"replica": "[ab]", "why": "' + _WHY + r'"\}\}\n</tool_call>'

_USER = {"role": "user", "content": "Where do blocks move?"}
_CHAT: Body = {"model": MODEL, "messages": [_USER], "temperature": 1, "seed": 7, "max_tokens": 1500}
_RESPONSE: Body = {"model": MODEL, "input": "Where do blocks move?", "temperature": 1, "seed": 7}
_MESSAGE: Body = {"model": MODEL, "messages": [_USER], "temperature": 0, "max_tokens": 1500}

_TOOLS: Mapping[str, list[Body]] = {
    CHATS: [{"type": "function", "function": {"parameters": _PARAMETERS, **named}} for named in _STRICT],
    RESPONSES: [{"type": "function", "parameters": _PARAMETERS, **named} for named in _STRICT],
    MESSAGES: [{"input_schema": _PARAMETERS, **named} for named in _STRICT],
}

_BUDGET = 60
_THINKING: Body = {"chat_template_kwargs": {"enable_thinking": True}}
_BUDGETED: Body = _THINKING | {
    "thinking_token_budget": _BUDGET,
    "ignore_eos": True,
    "logit_bias": {str(token): -100 for token in [_END_OF_TEXT, *range(97, 259), 510, END_OF_REASONING]},
}
"""Reasoning that only its budget ends, and that has no tokens that are parts of characters: a stream's chunks decide
whether one of those shows at its end."""

_IN_WORDS: Body = _THINKING | {"logit_bias": {str(token): 100 for token in WHOLE[:40]}, "ignore_eos": True}
"""Reasoning that never ends: responses have no budget."""


def _called(path: str, choice: Any, **more: Any) -> Body:
    base = {CHATS: _CHAT, RESPONSES: _RESPONSE, MESSAGES: _MESSAGE}[path]
    return {**base, "tools": _TOOLS[path], "tool_choice": choice, **more}


def _calls() -> Iterator[ForcedPart]:
    forced: Sequence[tuple[str, str, Body]] = [
        ("a named call", CHATS, _called(CHATS, {"type": "function", "function": {"name": "drain"}})),
        ("a required call", CHATS, _called(CHATS, "required", parallel_tool_calls=False)),
        (
            "a call by regex",
            CHATS,
            {**_CHAT, "tools": [_LOOSE], "tool_choice": "auto", "structured_outputs": {"regex": _CALL}},
        ),
        ("a named call", RESPONSES, _called(RESPONSES, {"type": "function", "name": "drain"})),
        ("a required call", RESPONSES, _called(RESPONSES, "required", parallel_tool_calls=False)),
        ("a named call", MESSAGES, _called(MESSAGES, {"type": "tool", "name": "drain"})),
        ("any call", MESSAGES, _called(MESSAGES, {"type": "any", "disable_parallel_tool_use": True})),
    ]
    for name, path, body in forced:
        yield ForcedPart(name, path, body, CALLS, _IN_ARGUMENTS)


def _reasoning() -> Iterator[ForcedPart]:
    budgeted = {**_CHAT, **_BUDGETED, "max_tokens": 140}
    while_thinking, after = range(4, _BUDGET - 4), range(_BUDGET + 4, 120)
    required = {"tools": _TOOLS[CHATS], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 1500}
    required |= {"ignore_eos": False}
    forced: Sequence[tuple[str, str, Body, range]] = [
        ("reasoning", CHATS, budgeted, while_thinking),
        ("reasoning, then text", CHATS, budgeted | {"logprobs": True, "top_logprobs": 2}, after),
        ("reasoning, then a format", CHATS, budgeted | {"structured_outputs": {"regex": "[a-c]{70}"}}, while_thinking),
        ("a format after reasoning", CHATS, budgeted | {"structured_outputs": {"regex": "[a-c]{90}"}}, after),
        ("reasoning, then a call", CHATS, budgeted | required, while_thinking),
        ("unwanted reasoning", CHATS, budgeted | {"include_reasoning": False}, range(0)),
        ("reasoning without end", RESPONSES, {**_RESPONSE, **_IN_WORDS, "max_output_tokens": 140}, range(4, 130)),
        ("reasoning without end", MESSAGES, {**_MESSAGE, **_THINKING, "max_tokens": 120}, range(4, 110)),
    ]
    for name, path, body, inside in forced:
        yield ForcedPart(name, path, body, REASONING if inside else "", inside)


def _whole_and_streamed() -> Iterator[ForcedPart]:
    for forced in (*_calls(), *_reasoning()):
        yield forced
        streamed = {"stream": True, **({"stream_options": {"include_usage": True}} if forced.path == CHATS else {})}
        yield replace(forced, name=f"{forced.name}, streamed", body=forced.body | streamed)


FORCED: Sequence[ForcedPart] = list(_whole_and_streamed())
"""Each once whole and once as a stream."""


def part_of(document: Any, part: str) -> str:
    """The longest text of that part anywhere in an answer's document, whatever the endpoint. Empty if there is none."""
    return max(_texts(document, part), key=len, default="")


def _texts(value: Any, part: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _texts(item, part)
    elif isinstance(value, dict):
        for name, member in value.items():
            if name in _MEMBERS[part] and isinstance(member, str):
                yield member
            elif name == "input" and part == CALLS:
                yield json.dumps(member) if member else ""
            elif name == "text" and part == REASONING and value.get("type") == "reasoning_text":
                yield member
            else:
                yield from _texts(member, part)


_MEMBERS = {REASONING: {"reasoning", "thinking"}, CALLS: {"arguments", "partial_json"}}
