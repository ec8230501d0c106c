"""What is asked for: the requests of a trace, and what a paced engine answers to whom nothing happens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from app.ingress.openai.answers.text import TextStream
from app.replay.trace import TraceRequest
from app.tinymodel import ensure_tiny_model
from deployments.engine.tokens import expected

SEEDED_EVERY = 6
"""One in so many requests samples with a seed: its generator's state does not survive its replica."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One request: a prompt of token ids, and how many tokens it wants. `seeded`: at a temperature, with a seed."""

    at_s: float
    label: str
    prompt: tuple[int, ...]
    output: int
    seeded: bool = False

    def body(self, model: str) -> dict[str, Any]:
        """The request as OpenAI's API has it."""
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
    """A small trace: Poisson arrivals, most prompts short, answers of some seconds."""
    chance = random.Random(f"trace/{seed}")
    found: list[TraceRequest] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(per_s)) < span_s:
        prompt = min(1500, 20 + int(chance.expovariate(1 / 350)))
        found.append(TraceRequest(len(found), at_s, prompt, chance.randint(100, 450)))
    return tuple(found)


def make_offers(arrivals: Sequence[TraceRequest], seed: object) -> tuple[Offer, ...]:
    """The requests of these arrivals, with prompts that nothing else uses."""
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
    """Token ids that the embedded model knows."""
    chance = random.Random(f"prompt/{seed}")
    return tuple(chance.randrange(3, 500) for _ in range(tokens))


def undisturbed(prompt: tuple[int, ...], output: int) -> str:
    """What a paced engine answers whom nothing happens to."""
    return text_of(prompt, expected(prompt, output))


def text_of(prompt: tuple[int, ...], output: tuple[int, ...]) -> str:
    """Output tokens as the ingress writes them."""
    text = TextStream(_tokenizer(), prompt, ())
    return text.feed(output).text + text.flush()


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(ensure_tiny_model() / "tokenizer.json"))
