"""The cases of the corpus, by number: requests of every endpoint with every parameter, then bad and unusual ones."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.adapters import ADAPTERS
from tests.differential.bodies import (
    BATCH,
    CHATS,
    COMPLETIONS,
    MESSAGES,
    MODEL,
    RESPONSES,
    Body,
    answered_by_frontend,
    batch,
    beams,
    generating,
)
from tests.differential.forced import FORCED
from tests.differential.odd import ODD


class Course(StrEnum):
    """The course of a request, which decides how it can be disturbed."""

    STEPS = "steps"
    """One token after the other: it can be moved."""
    ROUNDS = "rounds"
    """Beam search: a request of one token per beam and round. Each is placed, none lives long enough to be moved."""
    FRONTEND = "frontend"
    """No engine takes part."""
    ODD = "odd"
    """Refused, or unusual: compared only."""


@dataclass(frozen=True)
class Case:
    """One request; without a body it is a GET.

    `forced` names the part of the answer that the request forces, "reasoning" or "calls". The output tokens with the
    indices `inside` belong to that part.
    """

    number: int
    name: str
    path: str
    body: Body | None
    course: Course
    forced: str = ""
    inside: range = range(0)

    @property
    def asked(self) -> Mapping[str, Any]:
        """The members of the body."""
        return self.body or {}

    @property
    def streamed(self) -> bool:
        """True if the answer is asked for as a stream."""
        return bool(self.asked.get("stream"))

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken, so that only a tie leaves a choice."""
        return self.asked.get("temperature") == 0

    @property
    def choices(self) -> int:
        """The number of sequences that engines generate for it."""
        if self.path == BATCH:
            return len(self.asked["messages"])
        prompt = self.asked.get("prompt", "")
        prompts = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
        return prompts * (self.asked.get("n") or 1)

    def __str__(self) -> str:
        """Number and name."""
        return f"{self.number} ({self.name})"


_CYCLE = (COMPLETIONS, CHATS, RESPONSES, COMPLETIONS, MESSAGES, CHATS, COMPLETIONS, RESPONSES, CHATS, COMPLETIONS)
"""The endpoints of successive cases that generate."""


def corpus(seed: int, size: int) -> list[Case]:
    """`size` requests that have to be answered, and after them all odd ones. A case depends on its number only.

    The forced ones are the last of the `size`. Raises ValueError if these are more.
    """
    drawn = size - len(FORCED)
    if drawn < 0:
        raise ValueError(f"the corpus has at least {len(FORCED)} cases")
    cases = [_drawn(number, random.Random(f"{seed}/{number}")) for number in range(drawn)]
    for number, forced in enumerate(FORCED, drawn):
        cases.append(Case(number, forced.name, forced.path, forced.body, Course.STEPS, forced.part, forced.inside))
    for number, (name, (path, changes)) in enumerate(ODD.items(), size):
        cases.append(_odd(number, name, path, changes, random.Random(f"{seed}/{name}")))
    return cases


def _drawn(number: int, draw: random.Random) -> Case:
    turn, place = divmod(number, len(_CYCLE) + 2)
    if place == len(_CYCLE) and turn % 3 == 2:
        return Case(number, "batch", BATCH, batch(draw), Course.STEPS)
    if place == len(_CYCLE):
        path, body = beams(draw)
        return Case(number, "beam search", path, body, Course.ROUNDS)
    if place > len(_CYCLE):
        path, asked = answered_by_frontend(turn, draw)
        return Case(number, path.rpartition("/")[2], path, asked, Course.FRONTEND)
    path = _CYCLE[place]
    name, body = generating(path, turn * _CYCLE.count(path) + _CYCLE[:place].count(path), draw)
    if place == turn % len(_CYCLE):
        adapter = ADAPTERS[turn % len(ADAPTERS)]
        return Case(number, f"{name}, adapter", path, {**body, "model": adapter}, Course.STEPS)
    return Case(number, name, path, body, Course.STEPS)


def _odd(number: int, name: str, path: str, changes: Body, draw: random.Random) -> Case:
    body = _SHORT[path] | {"model": MODEL, "temperature": 0} | changes
    return Case(number, name, path, {k: v for k, v in body.items() if v is not ...}, Course.ODD)


_USER = {"role": "user", "content": "hello"}
_SHORT: Mapping[str, Body] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 5},
    CHATS: {"messages": [_USER], "max_completion_tokens": 5},
    RESPONSES: {"input": "hello", "max_output_tokens": 5},
    MESSAGES: {"messages": [_USER], "max_tokens": 5},
}
"""Short requests, which `ODD` changes."""
