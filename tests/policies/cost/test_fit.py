"""The live fit of step times."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.fit import LEAST_PREFILLED, LEAST_STEPS, StepFit, StepTotals, not_negative
from policies.cost.steps import PrefillChunk, StepCosts, proportional

COSTS = StepCosts(proportional(1e-4), 0.02, 5e-5, 4e-7, 1e-9)
"""Decodes cost more than their tokens, and context and attention count."""


def epochs(costs: StepCosts, count: int, seed: int = 0, noise: float = 0.0) -> Iterator[StepTotals]:
    """The steps of `count` epochs of a replica whose load wanders."""
    draw = random.Random(seed)
    for _ in range(count):
        totals = StepTotals()
        for _ in range(20):
            batch, mean = draw.randint(1, 64), draw.randint(100, 4000)
            chunks = [PrefillChunk(draw.randint(1, 2048), draw.choice((0, 2048)))] if draw.random() < 0.3 else []
            seconds = costs.step_s(batch, batch * mean, chunks) * draw.uniform(1 - noise, 1 + noise)
            totals = totals.add(seconds, batch, batch * mean, chunks)
        yield totals


def fit_of(*parts: Iterator[StepTotals], every_s: float = 1.0) -> StepFit:
    fit = StepFit()
    for now, totals in enumerate(totals for part in parts for totals in part):
        fit.add(totals, now * every_s)
    return fit


def step_errors(fit: StepFit, costs: StepCosts) -> list[float]:
    """Relative errors for steps of all kinds."""
    fitted = fit.fitted
    assert fitted is not None
    kinds: list[tuple[int, int, list[PrefillChunk]]] = [
        (1, 100, []),
        (64, 200_000, []),
        (0, 0, [PrefillChunk(2048, 2048)]),
        (32, 30_000, [PrefillChunk(512, 0)]),
    ]
    return [abs(fitted.costs.step_s(*kind) / costs.step_s(*kind) - 1) for kind in kinds]


def test_exact_steps_give_the_exact_formula() -> None:
    fit = fit_of(epochs(COSTS, 40))
    assert max(step_errors(fit, COSTS)) < 1e-4
    assert fit.fitted is not None and fit.fitted.costs.context_s == pytest.approx(4e-7, rel=1e-3)


def test_noise_appears_in_the_error_and_hardly_in_the_formula() -> None:
    fit = fit_of(epochs(COSTS, 200, noise=0.3))
    assert max(step_errors(fit, COSTS)) < 0.1
    assert fit.fitted is not None and 0.02 < fit.fitted.error < 0.15 and fit.fitted.observations > 150


def test_there_is_no_fit_before_a_prediction_was_compared() -> None:
    prompt = [PrefillChunk(LEAST_PREFILLED, 0)]
    seen = [StepTotals().add(0.02, 1, 100, prompt, steps=int(LEAST_STEPS) + 1), StepTotals().add(0.02, 1, 101)]
    fits = [fit_of(iter(seen[:count])).fitted for count in range(3)]
    assert fits[:2] == [None, None]
    assert fits[2] is not None and fits[2].observations == 1


@pytest.mark.parametrize("totals", [StepTotals(), StepTotals(steps=5), StepTotals(steps=-5, seconds=-1.0)])
def test_an_idle_epoch_is_no_observation(totals: StepTotals) -> None:
    fit, idle = fit_of(epochs(COSTS, 5)), fit_of(epochs(COSTS, 5))
    idle.add(totals, 9.0)
    assert idle.fitted == fit.fitted


def test_decodes_alone_are_no_fit_since_they_show_no_price_of_a_prefill() -> None:
    decodes = [StepTotals().add(COSTS.step_s(b, 500 * b), b, 500 * b, steps=30) for b in (1, 5, 20, 50, 60, 30)]
    assert fit_of(iter(decodes)).fitted is None
    prompt = [PrefillChunk(LEAST_PREFILLED, 0)]
    fitted = fit_of(iter([*decodes, StepTotals().add(COSTS.step_s(0, 0, prompt), 0, 0, prompt)])).fitted
    assert fitted is not None
    for step in ((40, 20_000, []), (0, 0, prompt)):
        assert fitted.costs.step_s(*step) == pytest.approx(COSTS.step_s(*step), rel=1e-2)


def test_a_stall_does_not_move_the_fit() -> None:
    stall = StepTotals().add(8.0, 10, 10_000)
    fit = fit_of(epochs(COSTS, 30), iter([stall]), epochs(COSTS, 3, seed=1))
    assert max(step_errors(fit, COSTS)) < 0.01


def test_the_fit_follows_a_change() -> None:
    slower = replace(COSTS, overhead_s=0.05)
    fit = fit_of(epochs(COSTS, 50), epochs(slower, 150, seed=1), every_s=20.0)
    assert max(step_errors(fit, slower)) < 0.05


def test_sums_are_added_and_subtracted_alike() -> None:
    first, second, third = epochs(COSTS, 3)
    assert values(third.since(second)) == pytest.approx(
        [a - b for a, b in zip(values(third), values(second), strict=True)]
    )
    assert values(first.add(0.5, 3, 40.0, [PrefillChunk(10, 5)], steps=2).since(first)) == pytest.approx(
        (2, 1.0, 20, 6, 80.0, 200.0)
    )


def values(totals: StepTotals) -> tuple[float, ...]:
    return tuple(getattr(totals, name) for name in StepTotals.__slots__)


@given(
    st.lists(st.tuples(*[st.floats(0.0, 10.0)] * 3), min_size=3, max_size=8),
    st.lists(st.floats(-5.0, 5.0), min_size=8, max_size=8),
    st.tuples(*[st.floats(0.0, 3.0)] * 3),
)
def test_no_other_coefficients_fit_better(
    rows: list[tuple[float, ...]], right: list[float], other: tuple[float, ...]
) -> None:
    targets = right[: len(rows)]
    squares = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    products = [sum(row[i] * y for row, y in zip(rows, targets, strict=True)) for i in range(3)]

    def missed(x: tuple[float, ...]) -> float:
        return sum(
            (sum(a * b for a, b in zip(row, x, strict=True)) - y) ** 2 for row, y in zip(rows, targets, strict=True)
        )

    found = tuple(not_negative(squares, products))
    assert min(found) >= 0
    assert missed(found) <= missed(other) * (1 + 1e-6) + 1e-6
