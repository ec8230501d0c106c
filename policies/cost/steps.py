"""The time of an engine step: one formula for the simulator, the paced engine and the decision.

A step decodes B requests with T tokens of context in total, and prefills chunks of p tokens, each after c tokens of its
request. With n = B + sum(p) it takes

    overhead + linear(n) + sequence * B + context * T + attention * sum(p * (c + p / 2))

seconds. The prefill of p tokens after c cached ones, F(p, c), is the sum of its steps, on an idle replica or beside a
decoding batch.

Where k replicas hold a part of the layers each, every step passes through all of them, part after part, and they run
each other's steps in lockstep: a cycle takes k times the longest part, the hop behind it included. Of two replicas with
half-steps a and b that is 2 max(a, b).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Knots = tuple[tuple[int, float], ...]
"""(x, y) pairs with rising x: y is interpolated linearly between them, constant before the first pair, and extrapolated
with the last slope."""


class PrefillChunk(NamedTuple):
    """The number of tokens of one request that a step prefills, and the number of tokens before them."""

    tokens: int
    before: int

    @property
    def attended(self) -> float:
        """The pairs of a token of the chunk and a token before it."""
        return self.tokens * (self.before + self.tokens / 2)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The coefficients of the formula, in seconds; see the module.

    `linear` is over the tokens computed in a step: weights are read once and multiplied with every token. `overhead_s`
    is per step, `sequence_s` per decoding request beyond its token, `context_s` per decoding step and token of context
    (the time to read its KV), `attention_s` per prefilled token and token before it.
    """

    linear: Knots
    overhead_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    attention_s: float = 0.0

    def step_s(self, batch: float, context: float, chunks: Sequence[PrefillChunk] = ()) -> float:
        """Seconds of a step that decodes `batch` requests with `context` tokens in total and prefills the chunks."""
        return self.overhead_s + self.compute_s(batch, chunks) + self.context_s * context

    def compute_s(self, batch: float, chunks: Sequence[PrefillChunk] = ()) -> float:
        """The part of `step_s` beside the overhead and the context of decoding requests."""
        attention_s = self.attention_s * sum(chunk.attended for chunk in chunks)
        tokens = batch + sum(chunk.tokens for chunk in chunks)
        return attention_s + interpolate(self.linear, tokens) + self.sequence_s * batch

    def prefill_s(
        self, tokens: int, cached: int = 0, chunk_tokens: int | None = None, batch: int = 0, context: float = 0.0
    ) -> float:
        """F(p, c): seconds to prefill `tokens` tokens after `cached` ones, beside a decoding batch (none: idle).

        A step prefills at most `chunk_tokens` tokens (None: all of them). The chunks of a prompt attend to the same
        pairs of tokens as one chunk does, so the sum over the steps is a product.
        """
        if tokens <= 0:
            return 0.0
        size = chunk_tokens or tokens
        whole, rest = divmod(tokens, size)
        decoding_s = self.overhead_s + self.sequence_s * batch + self.context_s * context
        seconds = whole * (decoding_s + interpolate(self.linear, batch + size)) if whole else 0.0
        if rest:
            seconds += decoding_s + interpolate(self.linear, batch + rest)
        return seconds + self.attention_s * PrefillChunk(tokens, cached).attended


@dataclass(frozen=True, slots=True)
class HopCosts:
    """The time of a hop, in which the hidden states of a step's tokens go from one replica to another one."""

    latency_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, tokens: float) -> float:
        """Seconds of the hop of a step that computes that number of tokens."""
        return self.latency_s + self.token_s * tokens


class WholeStep(NamedTuple):
    """The time of a step on a replica with all layers, in seconds, and the number of tokens that it computes."""

    step_s: float
    tokens: float


def cycle_s(steps: Sequence[WholeStep], size: int, overhead_s: float, hop: HopCosts) -> float:
    """Seconds of a cycle of `size` replicas that hold a part of the layers each; one step of each that has one.

    Every part has the overhead of a whole step. The result is 0 without steps.
    """
    parts = (overhead_s + (step.step_s - overhead_s) / size + hop.seconds(step.tokens) for step in steps)
    return size * max(parts, default=0.0)


def prompt_chunks(tokens: int, chunk_tokens: int | None, cached: int = 0) -> Iterator[PrefillChunk]:
    """The chunks, of `chunk_tokens` at most, in which `tokens` tokens after `cached` ones are prefilled alone."""
    size = chunk_tokens or max(1, tokens)
    return (PrefillChunk(min(size, tokens - start), cached + start) for start in range(0, tokens, size))


def proportional(per_token_s: float) -> Knots:
    """The knots of a time in proportion to the tokens of a step, from one token on."""
    return (1, per_token_s), (2, 2 * per_token_s)


def interpolate(knots: Knots, x: float) -> float:
    """The value of `knots` at `x`."""
    if x <= knots[0][0] or len(knots) == 1:
        return knots[0][1]
    index = min(max(1, bisect_left(knots, (x,))), len(knots) - 1)
    (x0, y0), (x1, y1) = knots[index - 1], knots[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
