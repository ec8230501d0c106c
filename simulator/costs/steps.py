"""The times of engine steps in the simulated world: the common formula, with parts of it switched off."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from policies.cost.steps import PrefillChunk
from policies.model import Tokens
from simulator.costs.costs import ComputeCosts


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
        self._formula = self._costs.steps
        self._step_s = 1 / rate
        self.prefills = self._costs.prefill
        self.interferes = self._costs.prefill and self._costs.interference
        """True if requests join an engine, and leave it, only between two steps of all its requests."""

    def decode(self, batch: int, context: float) -> Leg:
        """Steps that decode `batch` requests, whose `context` tokens in total grow by one per request and step."""
        if not self._costs.decode:
            return Leg(self._step_s, 0.0)
        return Leg(self._formula.step_s(batch, context), self._formula.context_s * batch)

    def prefill(self, batch: int, context: float, chunks: Sequence[PrefillChunk]) -> float:
        """Seconds of a step that prefills the chunks and, with interference, decodes the batch."""
        if not self.interferes:
            batch, context = 0, 0.0
        if batch and not self._costs.decode:
            return self._step_s + self._formula.compute_s(batch, chunks) - self._formula.compute_s(batch)
        return self._formula.step_s(batch, context, chunks)

    def budget(self, batch: int) -> int:
        """Tokens that a step may prefill beside the batch."""
        return max(1, self._costs.chunk_tokens - batch)

    def watermark(self, capacity: Tokens) -> float:
        """Tokens that stay free when a waiting request is admitted."""
        return self._costs.watermark * capacity

    def alone(self, prompt: Tokens, output: Tokens, ingress_s: float = 0.0) -> tuple[float, float]:
        """Seconds to the first and to the last token of a request on an idle replica, after `ingress_s` before it."""
        if not self.prefills:
            return ingress_s + self.decode(1, prompt).step_s, ingress_s + self.decode(1, prompt).seconds(output)
        first = ingress_s + self._formula.prefill_s(prompt, chunk_tokens=self.budget(0))
        return first, first + self.decode(1, prompt + 1).seconds(output - 1)
