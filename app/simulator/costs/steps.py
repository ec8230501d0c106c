"""The times of engine steps."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from app.simulator.costs.costs import ComputeCosts
from policies.model import Tokens


class PrefillChunk(NamedTuple):
    """The number of tokens of one request that a step prefills, and the number of tokens before them."""

    tokens: int
    before: int


class Leg(NamedTuple):
    """A sequence of steps with the same requests: the first takes `step_s`, each later one `growth_s` longer.

    Steps are counted in fractions, as a fluid: that is exact except within a step.
    """

    step_s: float
    growth_s: float

    def steps(self, seconds: float) -> float:
        """The number of steps done in that time."""
        # The numerically stable solution of seconds = steps * step_s + steps**2 * growth_s / 2.
        return 2 * seconds / (self.step_s + math.sqrt(self.step_s * self.step_s + 2 * self.growth_s * seconds))

    def seconds(self, steps: float) -> float:
        """The time of that number of steps."""
        return steps * (self.step_s + steps * self.growth_s / 2)


class StepTimes:
    """Step times under given costs. `rate`, in tokens per second and request, is for costs without decode times."""

    def __init__(self, costs: ComputeCosts | None, rate: float) -> None:
        self._costs = costs or ComputeCosts(((1, 0.0),), decode=False, prefill=False)
        self._step_s = 1 / rate
        self._linear: dict[int, float] = {}
        self.prefills = self._costs.prefill
        self.interferes = self._costs.prefill and self._costs.interference

    def decode(self, batch: int, context: float) -> Leg:
        """Steps that decode `batch` requests, whose `context` tokens in total grow by one per request and step."""
        if not self._costs.decode:
            return Leg(self._step_s, 0.0)
        step_s = self._costs.overhead_s + self.linear(batch) + self._costs.context_s * context
        return Leg(step_s, self._costs.context_s * batch)

    def prefill(self, batch: int, context: float, chunks: Sequence[PrefillChunk]) -> float:
        """Seconds of a step that prefills the chunks and, with interference, decodes the batch."""
        if not self.interferes:
            batch, context = 0, 0.0
        more = self._costs.attention_s * sum(c.tokens * (c.before + c.tokens / 2) for c in chunks)
        more += self.linear(batch + sum(c.tokens for c in chunks))
        if batch and not self._costs.decode:
            return self._step_s + more - self.linear(batch)
        return self._costs.overhead_s + more + self._costs.context_s * context

    def budget(self, batch: int) -> int:
        """Tokens that a step may prefill beside the batch."""
        return max(1, self._costs.chunk_tokens - batch)

    def watermark(self, capacity: Tokens) -> float:
        """Tokens that stay free when a waiting request is admitted."""
        return self._costs.watermark * capacity

    def alone(self, prompt: Tokens, output: Tokens) -> tuple[float, float]:
        """Seconds to the first and to the last token of a request on an idle replica."""
        if not self.prefills:
            return self.decode(1, prompt).step_s, self.decode(1, prompt).seconds(output)
        chunk = self.budget(0)
        starts = range(0, prompt, chunk)
        first = sum(self.prefill(0, 0.0, [PrefillChunk(min(chunk, prompt - start), start)]) for start in starts)
        return first, first + self.decode(1, prompt + 1).seconds(output - 1)

    def prefill_rate(self, batch: int, context: float) -> float:
        """Tokens per second that a replica prefills beside a batch, attention left out."""
        if not self.prefills:
            return math.inf
        chunk = self.budget(batch)
        return chunk / self.prefill(batch, context, [PrefillChunk(chunk, 0)])

    def boundary(self, batch: int, context: float, seconds: float) -> float:
        """The tokens whose prefill delays the decoding requests of a replica by `seconds`."""
        if not self.prefills:
            return math.inf
        chunk = self.budget(batch)
        taken = self.prefill(batch, context, [PrefillChunk(chunk, 0)])
        if batch and self.interferes:
            taken -= self.decode(batch, context).step_s
        return chunk * seconds / taken if taken > 0 else math.inf

    def linear(self, tokens: int) -> float:
        """Seconds of a step of `tokens` tokens without attention."""
        if tokens not in self._linear:
            self._linear[tokens] = interpolate(self._costs.linear, tokens)
        return self._linear[tokens]


def interpolate(knots: Sequence[tuple[int, float]], x: float) -> float:
    """Linear interpolation between (x, y) pairs, constant before the first pair, extrapolated with the last slope."""
    if x <= knots[0][0] or len(knots) == 1:
        return knots[0][1]
    index = min(max(1, bisect_left(knots, (x,))), len(knots) - 1)
    (x0, y0), (x1, y1) = knots[index - 1], knots[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
