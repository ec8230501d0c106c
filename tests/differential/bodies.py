"""Bodies of requests that have to be answered, drawn so that each has one right answer: greedy, or with a seed.

A trait is a group of parameters. Each endpoint has its own traits, and every one has its turn.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MODEL = "mell-tiny"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT_TOKENS, MODELS = "/v1/messages/count_tokens", "/v1/models"
BATCH = "/v1/chat/completions/batch"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

Body = dict[str, Any]
Trait = Callable[[random.Random], Body]

VOCABULARY, WHOLE = 512, range(400, 510)
"""Token ids of the tiny model, and those of them that are words."""

WORDS = [
    "a",
    "request",
    "moves",
    "between",
    "replicas",
    "while",
    "streams",
    "go on",
    "é",
    "東京",
    "🙂",
    "_",
    "42",
    "\n",
]
STOPS = [" ", "e", "th", "re", "w1", "s ", "the re", "\n", "never here", "é"]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["kv", "tokens"]}, "moved": {"type": "boolean"}},
    "required": ["kind", "moved"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<f>", "content": {"type": "regex", "pattern": "[ab]{3}"}, "end": "</f>"},
}


def generating(path: str, turn: int, draw: random.Random) -> tuple[str, Body]:
    """Name and body of an endpoint's request in that turn: one that generates tokens, one after the other."""
    body = {"model": MODEL, **_PROMPTED[path](draw), **_lengthy(path, draw), **_sampled(path, draw)}
    own = _TRAITS[path]
    turn %= len(own) + _FORMATS
    # A format stands alone: it decides which tokens there may be, and other traits could leave none.
    traits = [own[turn], *draw.sample(own, draw.choice([0, 0, 1, 2]))] if turn < len(own) else [_FORMATTED[path]]
    outputs = [trait for trait in _OUTPUTS[path] if body.get("temperature") != 0 or trait is not _several]
    traits += draw.sample(outputs, min(len(outputs), draw.choice([0, 1, 1, 2, 3])))
    for trait in traits:
        body |= trait(draw)
    if body.get("stream"):
        body.pop("prompt_logprobs", None)  # not available in a stream
        if path == RESPONSES:  # events of responses lose the logprobs of tokens that end within a character
            body = {name: value for name, value in body.items() if name not in ("include", "top_logprobs")}
    return ", ".join(dict.fromkeys(trait.__name__.strip("_") for trait in traits)), body


def beams(draw: random.Random) -> tuple[str, Body]:
    """Endpoint and body of a beam search."""
    path = draw.choice([COMPLETIONS, CHATS])
    search = {"use_beam_search": True, "n": draw.choice([2, 3]), "temperature": 0, "max_tokens": draw.randrange(3, 9)}
    more: Body = draw.choice([{}, {"length_penalty": 0.5}, {"ignore_eos": True}, {"stop_token_ids": [5, 6]}])
    prompt = {"prompt": _text(draw)} if path == COMPLETIONS else {"messages": _messages(draw)}
    return path, {"model": MODEL, **prompt, **search, **more}


def batch(draw: random.Random) -> Body:
    """Body of a batch of chats, whose parameters are those of one chat."""
    chats = [_messages(draw) for _ in range(draw.randrange(1, 4))]
    return {"model": MODEL, "messages": chats, **_lengthy(CHATS, draw), **_sampled(CHATS, draw)}


def answered_by_frontend(turn: int, draw: random.Random) -> tuple[str, Body | None]:
    """Endpoint and body of a request that needs no engine; None for a GET."""
    beside: list[Body] = [{}, _system(draw), _tools_in_messages(draw)]
    kinds: list[Callable[[], tuple[str, Body | None]]] = [
        lambda: (TOKENIZE, {"prompt": _text(draw), **draw.choice([{}, {"return_token_strs": True}])}),
        lambda: (DETOKENIZE, {"tokens": _tokens(draw)}),
        lambda: (COUNT_TOKENS, {"messages": _turns(draw), **draw.choice(beside)}),
        lambda: (TOKENIZE, {"messages": _messages(draw), **draw.choice([{}, {"add_generation_prompt": False}])}),
        lambda: (MODELS, None),
        lambda: (TOKENIZE, {"messages": _messages(draw), "chat_template_kwargs": {"enable_thinking": True}}),
    ]
    path, body = kinds[turn % len(kinds)]()
    return path, body if body is None else {"model": MODEL, **body}


# --- prompts ------------------------------------------------------------------------------------------


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randrange(1, 12)))


def _tokens(draw: random.Random) -> list[int]:
    """Any tokens, the last one a whole word."""
    return [draw.randrange(3, VOCABULARY) for _ in range(draw.choice([0, 4, 30, 31, 32, 70]))] + [draw.choice(WHOLE)]


_ONE_OR_MORE: Sequence[Callable[[random.Random], Any]] = [
    _text,
    _text,
    _tokens,
    _tokens,
    lambda draw: [_text(draw) for _ in range(draw.randrange(1, 4))],
    lambda draw: [_tokens(draw) for _ in range(draw.randrange(1, 4))],
]


def _messages(draw: random.Random) -> list[Body]:
    roles = [*draw.choice([[], ["system"]]), *draw.choice([["user"], ["user", "assistant", "user"], ["assistant"]])]
    parts = draw.random() < 0.2
    return [
        {"role": role, "content": [{"type": "text", "text": _text(draw)}] * 2 if parts else _text(draw)}
        for role in roles
    ]


def _turns(draw: random.Random) -> list[Body]:
    """Messages of Anthropic's: a system prompt stands beside them."""
    roles = draw.choice([["user"], ["user", "assistant", "user"]])
    parts = draw.random() < 0.3
    return [
        {"role": role, "content": [{"type": "text", "text": _text(draw)}] * 2 if parts else _text(draw)}
        for role in roles
    ]


def _items(draw: random.Random) -> str | list[Body]:
    """Input of responses."""
    return _text(draw) if draw.random() < 0.5 else [{"role": m["role"], "content": m["content"]} for m in _plain(draw)]


def _plain(draw: random.Random) -> list[Body]:
    return [{"role": "user", "content": _text(draw)} for _ in range(draw.choice([1, 2]))]


_PROMPTED: Mapping[str, Trait] = {
    COMPLETIONS: lambda draw: {"prompt": draw.choice(_ONE_OR_MORE)(draw)},
    CHATS: lambda draw: {"messages": _messages(draw)},
    RESPONSES: lambda draw: {"input": _items(draw)},
    MESSAGES: lambda draw: {"messages": _turns(draw)},
}

_LENGTHS: Mapping[str, Sequence[str]] = {
    COMPLETIONS: ["max_tokens"],
    CHATS: ["max_tokens", "max_completion_tokens"],
    RESPONSES: ["max_output_tokens"],
    MESSAGES: ["max_tokens"],
}


def _lengthy(path: str, draw: random.Random) -> Body:
    tokens = draw.choice([16, draw.randrange(8, 24), draw.randrange(24, 61), draw.randrange(40, 81)])
    if path == COMPLETIONS and tokens == 16:
        return draw.choice([{}, {"max_tokens": None}])
    return {draw.choice(_LENGTHS[path]): tokens}


# --- sampling -----------------------------------------------------------------------------------------


def _sampled(path: str, draw: random.Random) -> Body:
    if path == MESSAGES or draw.random() < 0.5:  # messages have no seed
        return {"temperature": 0}
    bounds = {
        "top_p": draw.choice([0.3, 0.9, 1.0]),
        "top_k": draw.choice([-1, 0, 1, 5, 40]),
        "min_p": draw.choice([0.0, 0.05, 0.3]),
    }
    chosen = dict(draw.sample(sorted(bounds.items()), draw.choice([0, 1, 1, 2, 3])))
    return {
        "temperature": draw.choice([None, None, 0.3, 0.8, 1.0, 1.5, 2.0]),
        "seed": draw.choice([0, 1, 7, -5, draw.getrandbits(62)]),
        **chosen,
    }


def _presence(draw: random.Random) -> Body:
    return {"presence_penalty": draw.choice([-1.0, 0.7, 2.0])}


def _frequency(draw: random.Random) -> Body:
    return {"frequency_penalty": draw.choice([-0.5, 0.5, 1.5])}


def _repetition(draw: random.Random) -> Body:
    return {"repetition_penalty": draw.choice([0.8, 1.2, 2.0])}


def _biased(draw: random.Random) -> Body:
    return {"logit_bias": {str(t): draw.choice([-100, -3.5, 2, 5]) for t in draw.sample(range(VOCABULARY), 20)}}


def _stopped(draw: random.Random) -> Body:
    several = draw.sample(STOPS, 3)
    return {"stop": draw.choice([draw.choice(STOPS), several, several, []])}


def _stopped_inclusively(draw: random.Random) -> Body:
    return {"include_stop_str_in_output": True, "stop": draw.sample(STOPS, 3)}


def _stopped_by_tokens(draw: random.Random) -> Body:
    return {"stop_token_ids": draw.sample(range(VOCABULARY), draw.choice([1, 30]))}


def _least(draw: random.Random) -> Body:
    return {"min_tokens": draw.randrange(1, 8), **_stopped(draw), **_stopped_by_tokens(draw)}


def _endless(draw: random.Random) -> Body:
    return {"ignore_eos": True}


def _labelled(draw: random.Random) -> Body:
    return {"user": "somebody", "priority": draw.choice([0, 3])}


def _bad_words(draw: random.Random) -> Body:
    return {"bad_words": draw.sample(["a", "re", " w1", "the request", "moves", "w12 w13"], 3)}


def _allowed(draw: random.Random) -> Body:
    return {"allowed_token_ids": sorted(draw.sample(range(3, VOCABULARY), 60)), "ignore_eos": True}


def _raw(draw: random.Random) -> Body:
    return {"skip_special_tokens": False, "spaces_between_special_tokens": draw.random() < 0.5}


def _truncated(draw: random.Random) -> Body:
    return {"truncate_prompt_tokens": draw.choice([1, 3, 40]), **draw.choice([{}, {"truncation_side": "right"}])}


def _salted(draw: random.Random) -> Body:
    return {"cache_salt": f"salt-{draw.randrange(1000)}"}


def _repeating(draw: random.Random) -> Body:
    return {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}


def _special(draw: random.Random) -> Body:
    return {"add_special_tokens": draw.random() < 0.5}


def _with_tokens(draw: random.Random) -> Body:
    return {"return_token_ids": True}


def _simply(draw: random.Random) -> Body:
    return {}


_SAMPLING: Sequence[Trait] = [
    _presence,
    _frequency,
    _repetition,
    _biased,
    _stopped,
    _stopped_by_tokens,
    _stopped_inclusively,
    _endless,
    _labelled,
    _salted,
    _simply,
]
"""Traits of every endpoint of OpenAI's."""

_OPEN: Sequence[Trait] = [_least, _bad_words, _allowed, _raw, _truncated, _repeating, _special, _with_tokens]
"""Further traits of completions and chats."""


# --- traits of one endpoint ---------------------------------------------------------------------------


def _templated(draw: random.Random) -> Body:
    parameters: list[Body] = [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"reasoning_effort": "none"},
        {"documents": [{"title": "moves", "text": "blocks"}]},
    ]
    return {"return_prompt_text": True, **draw.choice(parameters)}


def _continued(draw: random.Random) -> Body:
    messages = [{"role": "user", "content": _text(draw)}, {"role": "assistant", "content": "The blocks"}]
    return {
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "echo": draw.random() < 0.5,
    }


def _after_calls(draw: random.Random) -> Body:
    call = {"id": "call-1", "type": "function", "function": {"name": "move", "arguments": '{"replica": "a"}'}}
    return {
        "messages": [
            {"role": "user", "content": _text(draw)},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call-1", "content": _text(draw)},
        ]
    }


def _uncalled(draw: random.Random) -> Body:
    tool = {"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}
    return {"tools": [tool], **draw.choice([{"tool_choice": "none"}, {"tool_choice": "auto"}, {}])}


def _instructed(draw: random.Random) -> Body:
    return {"instructions": _text(draw)}


def _described(draw: random.Random) -> Body:
    return {"metadata": {"from": "corpus"}, "store": False, "service_tier": "auto", "truncation": "auto"}


def _unskipped(draw: random.Random) -> Body:
    return {"skip_special_tokens": False, "prompt_cache_key": "key", "max_tool_calls": 2}


def _effortless(draw: random.Random) -> Body:
    return {"reasoning": {"effort": "none"}, "include_reasoning": draw.random() < 0.5}


def _system(draw: random.Random) -> Body:
    text = _text(draw)
    return {"system": draw.choice([text, [{"type": "text", "text": text}]])}


def _stop_sequences(draw: random.Random) -> Body:
    return {"stop_sequences": draw.sample(STOPS, 3)}


def _tools_in_messages(draw: random.Random) -> Body:
    tool = {"name": "move", "description": "moves", "input_schema": {"type": "object", "properties": {}}}
    return {"tools": [tool], **draw.choice([{}, {"tool_choice": {"type": "auto"}}])}


def _bounded(draw: random.Random) -> Body:
    return {"top_k": draw.choice([1, 5]), "top_p": 0.9, "metadata": {"user_id": "somebody"}}


def _unthinking(draw: random.Random) -> Body:
    return {"thinking": {"type": "disabled"}}


_FORMATS = 4
"""Turns of formats in each round of an endpoint's traits."""

_TRAITS: Mapping[str, Sequence[Trait]] = {
    COMPLETIONS: [*_SAMPLING, *_OPEN],
    CHATS: [*_SAMPLING, *_OPEN, _templated, _continued, _after_calls, _uncalled],
    RESPONSES: [*_SAMPLING, _instructed, _described, _effortless, _unskipped],
    MESSAGES: [_system, _stop_sequences, _tools_in_messages, _bounded, _unthinking, _salted, _simply],
}


# --- formats ------------------------------------------------------------------------------------------


def _structured(draw: random.Random) -> Body:
    return draw.choice(
        [
            {"structured_outputs": {"json": SCHEMA}},
            {"structured_outputs": {"json_object": True}},
            {"structured_outputs": {"regex": "[ab]{4,12}-[0-9]{3}"}},
            {"structured_outputs": {"regex": "([a-z]{3} ){12}"}},
            {"structured_outputs": {"choice": ["north", "south-west", "up"]}},
            {"structured_outputs": {"grammar": 'root ::= ("ab" | "c")+ "."'}},
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        ]
    )


def _response_format(draw: random.Random) -> Body:
    return draw.choice(
        [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "move", "schema": SCHEMA}}},
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "text"}},
            _structured(draw),
        ]
    )


def _text_format(draw: random.Random) -> Body:
    return draw.choice(
        [
            {"text": {"format": {"type": "json_schema", "name": "move", "schema": SCHEMA}}},
            {"text": {"format": {"type": "json_object"}}},
            {"text": {"format": {"type": "text"}}},
            _structured(draw),
        ]
    )


def _output_config(draw: random.Random) -> Body:
    return {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}


_FORMATTED: Mapping[str, Trait] = {
    COMPLETIONS: _response_format,
    CHATS: _response_format,
    RESPONSES: _text_format,
    MESSAGES: _output_config,
}


# --- forms of the answer ------------------------------------------------------------------------------


def _streamed(draw: random.Random) -> Body:
    usage = {"stream_options": {"include_usage": True}}
    more = {"stream_options": {"include_usage": draw.random() < 0.8, "continuous_usage_stats": draw.random() < 0.5}}
    return {"stream": True, **draw.choice([{}, usage, usage, more])}


def _streamed_at_length(draw: random.Random) -> Body:
    return {"stream": True, "stream_interval": draw.choice([2, 5]), "stream_options": {"include_usage": True}}


def _as_events(draw: random.Random) -> Body:
    return {"stream": True}


def _scored(draw: random.Random) -> Body:
    return {"logprobs": draw.choice([0, 1, 5]), **draw.choice([{}, {"return_tokens_as_token_ids": True}])}


def _scored_chat(draw: random.Random) -> Body:
    named = {"return_tokens_as_token_ids": draw.random() < 0.3}
    return {"logprobs": True, **draw.choice([{}, named, {"top_logprobs": draw.choice([0, 1, 5, 20])}])}


def _scored_response(draw: random.Random) -> Body:
    return {"include": ["message.output_text.logprobs"], "top_logprobs": draw.choice([0, 1, 5])}


def _scored_prompt(draw: random.Random) -> Body:
    return {"prompt_logprobs": draw.choice([0, 1, 5])}


def _several(draw: random.Random) -> Body:
    return {"n": draw.choice([2, 3])}


def _echoed(draw: random.Random) -> Body:
    return {"echo": True}


_OUTPUTS: Mapping[str, Sequence[Trait]] = {
    COMPLETIONS: [
        _streamed,
        _streamed,
        _streamed_at_length,
        _scored,
        _scored_prompt,
        _several,
        _echoed,
    ],
    CHATS: [_streamed, _streamed, _streamed_at_length, _scored_chat, _scored_prompt, _several],
    RESPONSES: [_as_events, _as_events, _scored_response],
    MESSAGES: [_as_events, _as_events],
}
