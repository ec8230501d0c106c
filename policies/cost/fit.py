"""The live fit of step times: least squares over what engines report in every epoch.

Step times are linear in five quantities of a step: 1, the prefilled tokens, the decoding requests, their context, and
the attended pairs of tokens. So the sums over any number of steps satisfy the same formula, and a replica reports sums
(`StepTotals`), not steps. One observation is the mean step of one replica in one epoch.

    coefficients   those that are not below zero with the least sum of squared relative errors; weights are numbers of
                   steps and fade with age. Relative, so that a stall or a long prefill does not outweigh ordinary steps
    error          the share ERROR_QUANTILE of the newest observations was predicted, from those of earlier epochs
                   alone, with at most this relative error
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil

from policies.cost.steps import PrefillChunk, StepCosts, proportional

HALF_LIFE_S = 300.0
"""The age, in seconds, at which an observation has lost half of its weight. Drivers and clocks change slowly."""
LEAST_STEPS = 20.0
"""The least weight, in steps, of a fit."""
LEAST_PREFILLED = 128
"""The least number of prefilled tokens behind a fit: steps that only decode show no price of a prefill."""
ERROR_QUANTILE = 0.9
REMEMBERED = 200
"""The number of newest predictions in the error."""

_RIDGE = 1e-9
"""The relative weight of zero for each coefficient: it decides where observations fit any share of two
coefficients."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over an engine's steps since its start.

    `seconds` are their durations, `prefilled` the prefilled tokens, `decodes` the decoding requests, `context` the
    tokens of these, and `attended` the pairs of a prefilled token and a token before it.
    """

    steps: int = 0
    seconds: float = 0.0
    prefilled: int = 0
    decodes: int = 0
    context: float = 0.0
    attended: float = 0.0

    def add(
        self, seconds: float, decodes: int, context: float, chunks: Sequence[PrefillChunk] = (), steps: int = 1
    ) -> "StepTotals":
        """The sums with one more step, or with `steps` equal ones."""
        return StepTotals(
            self.steps + steps,
            self.seconds + steps * seconds,
            self.prefilled + steps * sum(chunk.tokens for chunk in chunks),
            self.decodes + steps * decodes,
            self.context + steps * context,
            self.attended + steps * sum(chunk.attended for chunk in chunks),
        )

    def since(self, earlier: "StepTotals") -> "StepTotals":
        """The sums over the steps after `earlier`."""
        return StepTotals(
            self.steps - earlier.steps,
            self.seconds - earlier.seconds,
            self.prefilled - earlier.prefilled,
            self.decodes - earlier.decodes,
            self.context - earlier.context,
            self.attended - earlier.attended,
        )


NO_STEPS = StepTotals()
"""The totals of an engine that has just started, or whose steps are not reported."""


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """Fitted step times. `error` is relative (see the module), `observations` the number of predictions behind it."""

    costs: StepCosts
    error: float
    observations: int


class StepFit:
    """The fit of one pool's replicas. Times are in seconds of any clock that does not run backwards."""

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._half_life_s = half_life_s
        self._squares = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._products = [0.0] * _SIZE
        self._weight = 0.0
        self._prefilled = 0
        self._newest: float | None = None
        self._errors: deque[float] = deque(maxlen=REMEMBERED)
        self._earlier: list[float] | None = None
        """The coefficients by all epochs before the newest; None without enough of them."""
        self._coefficients: list[float] | None = None

    def add(self, totals: StepTotals, now: float) -> None:
        """Add the steps of one replica in one epoch. Totals without steps or without time are no observation."""
        if totals.steps <= 0 or totals.seconds <= 0:
            return
        step_s, row, weight = totals.seconds / totals.steps, _mean_step(totals), float(totals.steps)
        if now != self._newest:
            self._earlier = self._solved() if self._weight >= LEAST_STEPS else None
            self._fade(now)
        if self._earlier is not None:
            self._errors.append(abs(_dot(self._earlier, row) - step_s) / step_s)
        relative = weight / step_s**2
        for i, (x, squares) in enumerate(zip(row, self._squares, strict=True)):
            weighted = relative * x
            self._products[i] += weighted * step_s
            for j, y in enumerate(row):
                squares[j] += weighted * y
        self._weight += weight
        self._prefilled += totals.prefilled
        self._coefficients = None

    @property
    def fitted(self) -> FittedSteps | None:
        """The fit; None with fewer steps or prefilled tokens, and while no prediction has been compared with a
        measurement.
        """
        if self._weight < LEAST_STEPS or self._prefilled < LEAST_PREFILLED or not self._errors:
            return None
        overhead_s, prefilled_s, decode_s, context_s, attention_s = self._solved()
        costs = StepCosts(proportional(prefilled_s), overhead_s, decode_s - prefilled_s, context_s, attention_s)
        errors = sorted(self._errors)
        return FittedSteps(costs, errors[ceil(ERROR_QUANTILE * len(errors)) - 1], len(errors))

    def to_json(self) -> dict[str, float] | None:
        """The fitted coefficients in seconds, the error and the number of observations; None before there is a fit."""
        fitted = self.fitted
        if fitted is None:
            return None
        costs = fitted.costs
        return {
            "overhead_s": costs.overhead_s,
            "token_s": costs.linear[0][1],
            "sequence_s": costs.sequence_s,
            "context_s": costs.context_s,
            "attention_s": costs.attention_s,
            "error": fitted.error,
            "observations": fitted.observations,
        }

    def _fade(self, now: float) -> None:
        """Reduce the weight of earlier observations by the time since the newest one."""
        passed_s = 0.0 if self._newest is None else max(0.0, now - self._newest)
        self._newest = now
        if passed_s and self._weight:
            # The last evidence stays until there is newer.
            share = max(0.5 ** (passed_s / self._half_life_s), min(1.0, LEAST_STEPS / self._weight))
            self._weight *= share
            self._products = [share * value for value in self._products]
            self._squares = [[share * value for value in row] for row in self._squares]

    def _solved(self) -> list[float]:
        if self._coefficients is None:
            self._coefficients = not_negative(self._squares, self._products)
        return self._coefficients


_SIZE = 5


def _mean_step(totals: StepTotals) -> tuple[float, ...]:
    """The quantities of a mean step."""
    sums = totals.prefilled, totals.decodes, totals.context, totals.attended
    return 1.0, *(each / totals.steps for each in sums)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def not_negative(squares: Sequence[Sequence[float]], products: Sequence[float]) -> list[float]:
    """The x, no member below zero, that minimises x'Ax - 2x'b for the normal equations A = `squares`, b = `products`.

    Exact: the minimum solves the equations of its own members above zero, so all subsets of members are tried.
    """
    size = len(products)
    best, least = [0.0] * size, 0.0
    for count in range(1, size + 1):
        for members in combinations([i for i in range(size) if squares[i][i] > 0], count):
            part = [[squares[i][j] * (1 + _RIDGE * (i == j)) for j in members] for i in members]
            found = _solve(part, [products[i] for i in members])
            if found is None or min(found) < 0:
                continue
            # At the solution of its own equations, the objective is -x'b.
            value = -_dot(found, [products[i] for i in members])
            if value < least:
                best, least = [0.0] * size, value
                for i, x in zip(members, found, strict=True):
                    best[i] = x
    return best


def _solve(rows: list[list[float]], right: list[float]) -> list[float] | None:
    """The solution of linear equations with a symmetric, positive definite matrix; None if it is singular."""
    size = len(right)
    scale = [rows[i][i] ** -0.5 for i in range(size)]
    table = [[rows[i][j] * scale[i] * scale[j] for j in range(size)] + [right[i] * scale[i]] for i in range(size)]
    for i in range(size):
        if table[i][i] <= _RIDGE / 2:
            return None
        for j in range(i + 1, size):
            factor = table[j][i] / table[i][i]
            table[j] = [a - factor * b for a, b in zip(table[j], table[i], strict=True)]
    for i in reversed(range(size)):
        table[i][-1] = (
            table[i][-1] - _dot(table[i][i + 1 : size], [table[j][-1] for j in range(i + 1, size)])
        ) / table[i][i]
    return [table[i][-1] * scale[i] for i in range(size)]
