"""Requests that are refused or unusual, as changes to a short greedy one. `...` leaves a member out."""

from collections.abc import Mapping
from typing import Any

from tests.differential.bodies import CHATS, COMPLETIONS, MESSAGES, RESPONSES, Body

_USER = {"role": "user", "content": "hello"}
_TOOL = {"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}

_WRONG: Mapping[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "hot"],
    "top_p": [0, 1.5, "most"],
    "top_k": [-2, 1.5, "few"],
    "min_p": [-0.1, 2],
    "seed": [1 << 63, 1.5, "lucky"],
    "presence_penalty": [2.5, "much"],
    "frequency_penalty": [-2.5],
    "repetition_penalty": [0, -1],
    "logit_bias": [{"x": 1}, {"9999": 1}, {"5": 200}, [1], {}],
    "stop": ["", [""], 5, None],
    "stop_token_ids": [[-1], ["a"], [9999], None],
    "min_tokens": [-1, 6, "some"],
    "max_tokens": [0, -1, "four", 5000, 1.5, None],
    "n": [0, -1, "two", None],
    "logprobs": [-2, 6, 21, "all"],
    "prompt_logprobs": [-2, 21, "all"],
    "echo": ["perhaps", None],
    "prompt": [..., None, "", [], [[]], [""], [1, "a"], ["a", 1], 5, {"a": 1}, [9999], [-1], [5] * 4096],
    "model": ["other", 5, None],
    "stream": ["perhaps", None],
    "stream_options": [5],
    "suffix": ["behind"],
    "ignore_eos": ["perhaps"],
    "bad_words": [[""], ["é" * 300], 5],
    "allowed_token_ids": [[], [9999], ["a"]],
    "logprob_token_ids": [[1]],
    "truncate_prompt_tokens": [-2, 5000],
    "thinking_token_budget": [-5, "much"],
    "repetition_detection": [{"max_pattern_size": 1, "min_count": 1}],
    "cache_salt": ["", "a/b"],
    "stream_interval": [0],
    "priority": ["high"],
    "made_up": [1],
}
"""Members of completions, and what they cannot be, or leniently may."""


def _format(value: Any) -> Body:
    return {"response_format": value}


def _outputs(**value: Any) -> Body:
    return {"structured_outputs": value}


_COMPLETIONS: Mapping[str, Body] = {
    **{f"{name} {str(value)[:30]}": {name: value} for name, values in _WRONG.items() for value in values},
    "usage without a stream": {"stream": False, "stream_options": {"include_usage": True}},
    "a bad bias in a stream": {"stream": True, "logit_bias": {"9999": 1}},
    "several greedy choices": {"n": 2},
    "best_of above n": {"best_of": 2},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "echo with logprobs, streamed": {"echo": True, "logprobs": 1, "stream": True},
    "logprobs of the prompt alone": {"echo": True, "logprobs": 2, "max_tokens": 0},
    "logprobs of a streamed prompt": {"prompt_logprobs": 1, "stream": True},
    "a streamed beam search": {"use_beam_search": True, "n": 2, "stream": True},
    "a beam search with echo and logprobs": {"use_beam_search": True, "n": 2, "echo": True, "logprobs": 1},
    "a prompt that ends within a character": {"prompt": [450, 460, 470, 163]},
    "that, echoed": {"prompt": [450, 460, 470, 163], "echo": True},
    "a prompt that fills the context": {"prompt": [5] * 4091},
    "a prompt that leaves too little": {"prompt": [5] * 4092, "max_tokens": 5},
    "stops that end together": {"structured_outputs": {"regex": "abcd"}, "stop": ["c", "bc"]},
    "an unknown format": _format({"type": "xml"}),
    "a format without type": _format({}),
    "a schema without a schema": _format({"type": "json_schema"}),
    "a schema that is none": _outputs(json={"type": "nothing"}),
    "a regex that is none": _outputs(regex="("),
    "a regex that is none, streamed": {**_outputs(regex="("), "stream": True},
    "a grammar that is none": _outputs(grammar="root = "),
    "no choice": _outputs(choice=[]),
    "two constraints": _outputs(regex="a", choice=["a"]),
    "no constraint": _outputs(),
    "both ways of constraint": {**_outputs(regex="a"), **_format({"type": "json_object"})},
}

_MESSAGES: list[Any] = [
    ...,
    None,
    [],
    "hello",
    [5],
    [{"role": "user"}],
    [{"content": "hello"}],
    [{"role": "robot", "content": "hello"}],
    [{"role": "developer", "content": "hello"}],
    [{"role": "tool", "content": "hello", "tool_call_id": "call-1"}],
    [{"role": "user", "content": "hello", "name": "somebody"}],
    [{"role": "assistant", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "a " * 5000}],
]

_CHATS: Mapping[str, Body] = {
    **{f"messages {str(value)[:60]}": {"messages": value} for value in _MESSAGES},
    "top_logprobs alone": {"top_logprobs": 2},
    "top_logprobs 21": {"logprobs": True, "top_logprobs": 21},
    "top_logprobs -2": {"logprobs": True, "top_logprobs": -2},
    "logprobs as a number": {"logprobs": 5},
    "two lengths": {"max_completion_tokens": 3, "max_tokens": 5},
    "no length at all": {"max_completion_tokens": 0},
    "too long a chat": {"max_completion_tokens": 5000},
    "an unknown member of a chat": {"made_up": 1},
    "another model for a chat": {"model": "other"},
    "a call without tools": {"tool_choice": "required"},
    "a call of an unknown tool": {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "fly"}}},
    "a tool without a name": {"tools": [{"type": "function", "function": {}}]},
    "a template of the client": {"chat_template": "{{ messages }}"},
    "an unknown effort": {"reasoning_effort": "enormous"},
    "a final message both ways": {"continue_final_message": True, "add_generation_prompt": True},
}

_RESPONSES: Mapping[str, Body] = {
    **{f"input {str(v)[:30]}": {"input": v} for v in (..., None, "", 5, [], [{"role": "user"}], [5])},
    **{f"max_output_tokens {v}": {"max_output_tokens": v} for v in (0, -1, "four", 5000)},
    "in the background": {"background": True},
    "after an unknown response": {"previous_response_id": "resp_1"},
    "a badly named response": {"previous_response_id": "1"},
    "an unknown response's format": {"text": {"format": {"type": "xml"}}},
    "a penalty too high": {"presence_penalty": 3},
    "another model for a response": {"model": "other"},
    "an unknown tool in a response": {"tools": [{"type": "function", "name": "move"}], "tool_choice": {"type": "x"}},
    "a prompt template": {"prompt": {"id": "pmpt_1"}},
    "a bad bias in events": {"stream": True, "logit_bias": {"9999": 1}},
}

_OF_ANTHROPIC: Mapping[str, Body] = {
    **{f"Anthropic's messages {str(v)[:30]}": {"messages": v} for v in (..., None, [], "hello", [{"role": "robot"}])},
    **{f"Anthropic's max_tokens {v}": {"max_tokens": v} for v in (..., 0, -1, "four", 5000)},
    "too many stop sequences": {"stop_sequences": [str(i) for i in range(40)]},
    "an unknown block": {"messages": [{"role": "user", "content": [{"type": "song", "text": "la"}]}]},
    "another model for a message": {"model": "other"},
    "no model for a message": {"model": ...},
    "a small thinking budget": {"thinking": {"type": "enabled", "budget_tokens": 5}},
    "a tool choice without a name": {"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool"}},
    "a tool choice without tools": {"tool_choice": {"type": "any"}},
    "events of an unknown model": {"model": "other", "stream": True},
}

ODD: Mapping[str, tuple[str, Body]] = {
    name: (path, changes)
    for path, odd in {COMPLETIONS: _COMPLETIONS, CHATS: _CHATS, RESPONSES: _RESPONSES, MESSAGES: _OF_ANTHROPIC}.items()
    for name, changes in odd.items()
}
"""Endpoint and changes, by name."""
