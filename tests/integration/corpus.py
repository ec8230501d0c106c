"""Requests of all kinds, drawn by a seed: each parameter that is supported, alone and with others, and bad input.

What is drawn has one right answer: it is greedy or has a seed.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.integration.application import MODEL

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
VOCABULARY, WHOLE = 512, range(400, 512)
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
Body = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One request. `odd` is the name of what is odd in it, empty if it has to be answered."""

    number: int
    path: str
    body: Body
    odd: str = ""

    @property
    def choices(self) -> int:
        """The number of choices in its answer."""
        prompt = self.body.get("prompt", "")
        prompts = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
        return prompts * (self.body.get("n") or 1)


def corpus(seed: int, size: int) -> list[Case]:
    """`size` requests that have to be answered, and then those that are odd. A case depends on its number only."""
    cases = [_case(number, random.Random(f"{seed}/{number}")) for number in range(size)]
    for number, (odd, (path, changes)) in enumerate(ODD.items(), size):
        draw = random.Random(f"{seed}/{odd}")
        body = {"model": MODEL, "temperature": 0, "max_tokens": 5, **_asked(path, draw), **changes}
        cases.append(Case(number, path, {k: v for k, v in body.items() if v is not ABSENT}, odd))
    return cases


def _case(number: int, draw: random.Random) -> Case:
    path = draw.choice([COMPLETIONS, COMPLETIONS, CHATS])
    body = {**draw.choice([{}, {"model": MODEL}]), **_asked(path, draw), **_long(path, draw), **_drawn(draw)}
    # A format stands alone: it decides which tokens there may be, and other traits could leave none. Every trait has
    # its turn.
    others = [_TRAITS[number % len(_TRAITS)], *draw.sample(_TRAITS, draw.choice([0, 0, 1, 2]))]
    traits = [_structured] if draw.random() < 0.2 else others
    output = [_scored, _streamed, _echoed] if body["temperature"] == 0 else [_scored, _streamed, _echoed, _several]
    for trait in [*traits, *draw.sample(output, draw.choice([0, 1, 1, 2, 3]))]:
        body |= trait(path, draw)
    return Case(number, path, body)


def _asked(path: str, draw: random.Random) -> Body:
    return {"prompt": draw.choice(_PROMPTS)(draw)} if path == COMPLETIONS else {"messages": _messages(draw)}


def _long(path: str, draw: random.Random) -> Body:
    tokens = draw.choice([16, draw.randrange(8, 24), draw.randrange(24, 61), draw.randrange(24, 61)])
    if path == COMPLETIONS:
        return draw.choice([{}, {"max_tokens": None}]) if tokens == 16 else {"max_tokens": tokens}
    return {draw.choice(["max_tokens", "max_completion_tokens"]): tokens}


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randrange(1, 12)))


def _tokens(draw: random.Random) -> list[int]:
    """Any tokens, the last one a whole word: a prompt that ends within a character is in `ODD`."""
    return [draw.randrange(3, VOCABULARY) for _ in range(draw.choice([0, 4, 30, 31, 32, 70]))] + [draw.choice(WHOLE)]


_PROMPTS: list[Callable[[random.Random], Any]] = [
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


def _drawn(draw: random.Random) -> Body:
    if draw.random() < 0.5:
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


def _presence(path: str, draw: random.Random) -> Body:
    return {"presence_penalty": draw.choice([-1.0, 0.7, 2.0])}


def _frequency(path: str, draw: random.Random) -> Body:
    return {"frequency_penalty": draw.choice([-0.5, 0.5, 1.5])}


def _repetition(path: str, draw: random.Random) -> Body:
    return {"repetition_penalty": draw.choice([0.8, 1.2, 2.0])}


def _biased(path: str, draw: random.Random) -> Body:
    return {"logit_bias": {str(t): draw.choice([-100, -3.5, 2, 5]) for t in draw.sample(range(VOCABULARY), 20)}}


def _stopped(path: str, draw: random.Random) -> Body:
    several = draw.sample(STOPS, 3)
    return {"stop": draw.choice([draw.choice(STOPS), several, several, []])}


def _stopped_by_tokens(path: str, draw: random.Random) -> Body:
    return {"stop_token_ids": draw.sample(range(VOCABULARY), draw.choice([1, 30]))}


def _least(path: str, draw: random.Random) -> Body:
    return {"min_tokens": draw.randrange(1, 8), **_stopped(path, draw), **_stopped_by_tokens(path, draw)}


def _endless(path: str, draw: random.Random) -> Body:
    return {"ignore_eos": True}


def _plain(path: str, draw: random.Random) -> Body:
    return {}


def _labelled(path: str, draw: random.Random) -> Body:
    return {"user": "somebody", "priority": draw.choice([0, 3])}


_TRAITS = [
    _presence,
    _frequency,
    _repetition,
    _biased,
    _stopped,
    _stopped_by_tokens,
    _least,
    _endless,
    _labelled,
    _plain,
]


def _structured(path: str, draw: random.Random) -> Body:
    return draw.choice(
        [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "move", "schema": SCHEMA}}},
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "text"}},
            {"structured_outputs": {"json": SCHEMA}},
            {"structured_outputs": {"json_object": True}},
            {"structured_outputs": {"regex": "[ab]{4,12}-[0-9]{3}"}},
            {"structured_outputs": {"choice": ["north", "south-west", "up"]}},
            {"structured_outputs": {"grammar": 'root ::= ("ab" | "c")+ "."'}},
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        ]
    )


def _scored(path: str, draw: random.Random) -> Body:
    if path == COMPLETIONS:
        return {"logprobs": draw.choice([0, 1, 5]), "echo": False}
    return {"logprobs": True, **draw.choice([{}, {"top_logprobs": draw.choice([0, 1, 5, 20])}])}


def _several(path: str, draw: random.Random) -> Body:
    count = draw.choice([2, 3])
    return {"n": count, "best_of": count} if path == COMPLETIONS and draw.random() < 0.2 else {"n": count}


def _streamed(path: str, draw: random.Random) -> Body:
    return {"stream": True, **draw.choice([{}, {"stream_options": {"include_usage": draw.random() < 0.8}}])}


def _echoed(path: str, draw: random.Random) -> Body:
    return {"echo": True, "logprobs": None} if path == COMPLETIONS else {}


ABSENT = object()
_USER = {"role": "user", "content": "hello"}


def _format(value: Any) -> Body:
    return {"response_format": value}


def _outputs(**value: Any) -> Body:
    return {"structured_outputs": value}


WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "hot"],
    "top_p": [0, 1.5, "most"],
    "top_k": [-2, 1.5, "few"],
    "min_p": [-0.1, 2],
    "seed": [1 << 63, 1.5, "lucky"],
    "presence_penalty": [2.5, "much"],
    "frequency_penalty": [-2.5],
    "repetition_penalty": [0, -1],
    "logit_bias": [{"x": 1}, {"9999": 1}, {"5": 200}, [1], {}],
    "stop": ["", [""], 5, None, ["a"] * 17],
    "stop_token_ids": [[-1], ["a"], [9999], None],
    "min_tokens": [-1, 6, "some"],
    "max_tokens": [0, -1, "four", 5000, 1.5, None],
    "n": [0, -1, 17, "two", None],
    "logprobs": [-2, 6, "all"],
    "echo": ["perhaps", None],
    "prompt": [ABSENT, None, "", [], [[]], [""], [1, "a"], ["a", 1], 5, {"a": 1}, [9999], [-1], [5] * 4096],
    "model": ["other", 5, None],
    "stream": ["perhaps", None],
    "stream_options": [5],
    "suffix": ["behind"],
    "ignore_eos": ["perhaps"],
    "made_up": [1],
}
"""Parameters of completions, and what they cannot be, or leniently may."""

ODD: dict[str, tuple[str, Body]] = {
    **{f"{name} {str(value)[:30]}": (COMPLETIONS, {name: value}) for name, values in WRONG.items() for value in values},
    "usage without a stream": (COMPLETIONS, {"stream": False, "stream_options": {"include_usage": True}}),
    "a bad bias in a stream": (COMPLETIONS, {"stream": True, "logit_bias": {"9999": 1}}),
    "several greedy choices": (COMPLETIONS, {"n": 2}),
    "best_of above n": (COMPLETIONS, {"best_of": 2}),
    "echo with logprobs": (COMPLETIONS, {"echo": True, "logprobs": 1, "stream": False}),
    "a prompt that ends within a character": (COMPLETIONS, {"prompt": [450, 460, 470, 163]}),
    "a prompt that fills the context": (COMPLETIONS, {"prompt": [5] * 4091}),
    "a prompt that leaves too little": (COMPLETIONS, {"prompt": [5] * 4092, "max_tokens": 5}),
    "stops that end together": (COMPLETIONS, {"structured_outputs": {"regex": "abcd"}, "stop": ["c", "bc"]}),
    "an unknown format": (COMPLETIONS, _format({"type": "xml"})),
    "a format without type": (COMPLETIONS, _format({})),
    "a schema without a schema": (COMPLETIONS, _format({"type": "json_schema"})),
    "a schema that is none": (COMPLETIONS, _outputs(json={"type": "nothing"})),
    "a regex that is none": (COMPLETIONS, _outputs(regex="(")),
    "a grammar that is none": (COMPLETIONS, _outputs(grammar="root = ")),
    "no choice": (COMPLETIONS, _outputs(choice=[])),
    "two constraints": (COMPLETIONS, _outputs(regex="a", choice=["a"])),
    "no constraint": (COMPLETIONS, _outputs()),
    "both ways of constraint": (COMPLETIONS, {**_outputs(regex="a"), **_format({"type": "json_object"})}),
    **{
        f"messages {str(value)[:60]}": (CHATS, {"messages": value})
        for value in [
            ABSENT,
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
    },
    "top_logprobs alone": (CHATS, {"messages": [_USER], "top_logprobs": 2}),
    "top_logprobs 21": (CHATS, {"messages": [_USER], "logprobs": True, "top_logprobs": 21}),
    "top_logprobs -2": (CHATS, {"messages": [_USER], "logprobs": True, "top_logprobs": -2}),
    "logprobs as a number": (CHATS, {"messages": [_USER], "logprobs": 5}),
    "two lengths": (CHATS, {"messages": [_USER], "max_completion_tokens": 3}),
    "no length at all": (CHATS, {"messages": [_USER], "max_completion_tokens": 0, "max_tokens": ABSENT}),
    "too long a chat": (CHATS, {"messages": [_USER], "max_completion_tokens": 5000, "max_tokens": ABSENT}),
    "an unknown member of a chat": (CHATS, {"messages": [_USER], "made_up": 1}),
    "another model for a chat": (CHATS, {"messages": [_USER], "model": "other"}),
}
"""Changes to a short greedy request that make it invalid or unusual. `ABSENT` leaves a parameter out."""
