"""The requests of a trace, and a paced engine's answers to undisturbed requests."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from app.tinymodel import ensure_tiny_model
from deployments.engine.tokens import expected
from simulator.replay.trace import TraceRequest

_INVALID_PREFIX = "Invalid prefix encountered"
"""The error for tokens whose text changes with the next token; vLLM begins a new stream."""

SEEDED_EVERY = 6
"""Every sixth request samples with a seed: the state of its generator is lost with its replica."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One request: its time, its prompt as token ids, and its output tokens. `seeded`: sampling at temperature 1."""

    at_s: float
    label: str
    prompt: tuple[int, ...]
    output: int
    seeded: bool = False

    def body(self, model: str) -> dict[str, Any]:
        """The request's body in OpenAI's API."""
        sampling = {"temperature": 1.0, "seed": len(self.prompt)} if self.seeded else {"temperature": 0}
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }


def draw_trace(seed: object, span_s: float, per_s: float = 1.2) -> tuple[TraceRequest, ...]:
    """A small trace: Poisson arrivals, mostly short prompts, answers of some seconds."""
    chance = random.Random(f"trace/{seed}")
    found: list[TraceRequest] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(per_s)) < span_s:
        prompt = min(1500, 20 + int(chance.expovariate(1 / 350)))
        found.append(TraceRequest(len(found), at_s, prompt, chance.randint(100, 450)))
    return tuple(found)


def make_offers(arrivals: Sequence[TraceRequest], seed: object) -> tuple[Offer, ...]:
    """The requests of these arrivals, with unique prompts."""
    return tuple(
        Offer(
            arrival.at_s,
            f"chaos-{seed}-{number}",
            draw_prompt(f"{seed}/{number}", arrival.prompt_tokens),
            arrival.output_tokens,
            number % SEEDED_EVERY == SEEDED_EVERY - 1,
        )
        for number, arrival in enumerate(arrivals)
    )


def draw_prompt(seed: object, tokens: int) -> tuple[int, ...]:
    """Random token ids of the embedded model's vocabulary."""
    chance = random.Random(f"prompt/{seed}")
    return tuple(chance.randrange(3, 500) for _ in range(tokens))


def undisturbed(prompt: tuple[int, ...], output: int) -> str:
    """A paced engine's answer to an undisturbed request."""
    return text_of(prompt, expected(prompt, output))


def text_of(prompt: tuple[int, ...], output: tuple[int, ...]) -> str:
    """Output tokens as text, as vLLM's frontend detokenizes them (vllm/v1/engine/detokenizer.py)."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
    text = ""
    for token in output:
        try:
            piece = stream.step(_tokenizer(), token)
        except Exception as error:
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            stream = DecodeStream(skip_special_tokens=True)
            piece = stream.step(_tokenizer(), token)
        text += piece or ""
    return text


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(ensure_tiny_model() / "tokenizer.json"))
