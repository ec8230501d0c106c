"""Made-up sessions, whose prompts begin alike, drawn from a seed.

    sharegpt_like   conversations: a prompt is the conversation so far, with all answers, and a new message
    loogle_like     questions about a document: a prompt is the document and one question
    loogle_at_once  the same, and the questions do not wait for the answers before
    react_like      agents with the same long instructions: a prompt is these, the steps so far, and a tool's result

The lengths are invented; only their orders of magnitude are those of the data sets that the names allude to. The
requests of a session come one after the other, each some time after the end of the answer before, or of the request.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import NamedTuple

_TOKENS = range(3, 500)
"""The token ids of texts: those that paced engines generate, without special ones."""
_SPREAD = 0.6
"""The standard deviation of the logarithms of lengths."""


class Passage(NamedTuple):
    """A part of a prompt: the first `tokens` tokens of the text of that name."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request for `output` tokens: of session `session`, which begins at `at_s` seconds.

    It is sent `think_s` seconds after the end of the answer before it. Answers are passages of later prompts, by the
    name `answer`.
    """

    session: str
    at_s: float
    think_s: float
    prompt: tuple[Passage, ...]
    output: int
    answer: str

    @property
    def prompt_tokens(self) -> int:
        """The length of its prompt."""
        return sum(passage.tokens for passage in self.prompt)


@dataclass(frozen=True, slots=True)
class SessionShape:
    """The lengths of sessions in tokens, most of them means; times are in seconds.

    All sessions share `instructions`, the requests of one a `document`. With `chained`, a prompt has the earlier
    messages and answers, too. The number of requests is `turns`, or drawn with this mean if it `varies`.
    """

    instructions: int = 0
    document: int = 0
    turns: int = 5
    varies: bool = False
    message: float = 100.0
    output: float = 100.0
    think_s: float = 1.0
    chained: bool = True
    waits: bool = True
    """A request waits for the answer before."""
    longest: int = 3000
    """A session ends before a prompt and its answer would be longer."""


SHAPES: Mapping[str, SessionShape] = {
    "sharegpt_like": SessionShape(turns=4, varies=True, message=120.0, output=120.0, think_s=3.0),
    "loogle_like": SessionShape(document=1000, turns=5, message=30.0, output=20.0, think_s=1.0, chained=False),
    "loogle_at_once": SessionShape(
        document=1000, turns=5, message=30.0, output=20.0, think_s=0.2, chained=False, waits=False
    ),
    "react_like": SessionShape(instructions=1500, turns=5, message=100.0, output=50.0, think_s=0.5),
}


def sessions(shape: SessionShape, begins_s: Iterable[float], seed: int) -> Iterator[SessionRequest]:
    """The requests of sessions that begin at these times, session by session. Equal seeds give equal requests."""
    for number, at_s in enumerate(begins_s):
        yield from _session(shape, f"s{number}", at_s, Random(f"{seed}-session-{number}"))


def _session(shape: SessionShape, name: str, at_s: float, chance: Random) -> Iterator[SessionRequest]:
    context = [Passage("instructions", shape.instructions), Passage(f"{name}/document", shape.document)]
    turns = 1 + int(math.log(1 - chance.random()) / math.log(1 - 1 / shape.turns)) if shape.varies else shape.turns
    for turn in range(turns):
        message = Passage(f"{name}/message-{turn}", _length(shape.message, chance))
        output = _length(shape.output, chance)
        think_s = chance.expovariate(1 / shape.think_s) if turn else 0.0
        prompt = tuple(passage for passage in (*context, message) if passage.tokens)
        if not shape.waits:
            at_s, think_s = at_s + think_s, 0.0
        session = name if shape.waits else f"{name}/{turn}"
        request = SessionRequest(session, at_s, think_s, prompt, output, f"{name}/answer-{turn}")
        if request.prompt_tokens + output > shape.longest:
            return
        yield request
        if shape.chained:
            context += [message, Passage(request.answer, output)]


def _length(mean: float, chance: Random) -> int:
    """A length with that mean, log-normal."""
    return max(1, round(mean * chance.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)))


@dataclass(slots=True)
class Texts:
    """The tokens of passages: drawn from their texts' names and `seed`, unless they are in `known`."""

    seed: object
    known: dict[str, list[int]] = field(default_factory=dict)

    def tokens(self, passages: Iterable[Passage]) -> list[int]:
        """The tokens of passages, one after the other."""
        return list(chain.from_iterable(self._tokens(passage) for passage in passages))

    def _tokens(self, passage: Passage) -> list[int]:
        text = self.known.get(passage.text, [])
        if len(text) < passage.tokens:
            draw = Random(f"{self.seed}-{passage.text}")
            text = self.known[passage.text] = draw.choices(_TOKENS, k=passage.tokens)
        return text[: passage.tokens]
