"""The table in section VII of the paper, against a small computation."""

from fractions import Fraction
from itertools import combinations_with_replacement

import pytest

LEAST = {"L": Fraction(1, 2), "M": Fraction(1, 3), "S": Fraction(1, 4)}
"""A request of a class holds more than this share of the capacity."""

SINGLE = {"L": Fraction(1), "M": Fraction(1, 2), "S": Fraction(1, 3)}
COMBINED = SINGLE | {"L": Fraction(5, 6)}
"""Weights of section VII, before Lemma 2.1: a LARGE request is combined if the *algorithm* has put a SMALL or MEDIUM
one beside it. TINY requests weigh nothing."""

TABLE: dict[str, Fraction] = {
    "L": Fraction(1),
    "LM": Fraction(4, 3),
    "LS": Fraction(7, 6),
    "MM": Fraction(1),
    "MSS": Fraction(7, 6),
    "SSS": Fraction(1),
}
"""Table I: what one replica of an optimal allocation may hold, and its weight there."""


def packings() -> list[str]:
    """Every set of requests above a quarter that fits on one replica: its least sizes add up to less than it has."""
    sets = ("".join(c) for n in range(1, 4) for c in combinations_with_replacement("LMS", n))
    return [s for s in sets if sum(LEAST[kind] for kind in s) < 1]


def heaviest(packing: str) -> Fraction:
    """The most that a packing can weigh, whatever the algorithm has put beside its LARGE request."""
    return max(sum((weights[kind] for kind in packing), Fraction()) for weights in (SINGLE, COMBINED))


def test_table_1_lists_combinations_that_cannot_be_enlarged() -> None:
    largest = {p for p in packings() if not any(set(p) < set(q) or (p != q and p in q) for q in packings())}
    assert largest <= set(TABLE) | {"MMS"}
    assert "MMS" in packings(), "two requests above C/3 and one above C/4 add up to more than 11/12 of C: they may fit"


@pytest.mark.parametrize("packing", ["LM", "LS"])
def test_table_1_omits_a_single_large_request_beside_another(packing: str) -> None:
    assert heaviest(packing) > TABLE[packing]


def test_a_single_large_request_beside_a_medium_one_is_too_heavy_for_lemma_2_2() -> None:
    assert heaviest("LM") == Fraction(3, 2) > Fraction(4, 3)


def test_so_lemma_2_2_gives_three_halves_instead_of_four_thirds() -> None:
    assert max(map(heaviest, packings())) == Fraction(3, 2)
    combined = [sum((COMBINED[kind] for kind in p), Fraction()) for p in packings() if len(p) > 1]
    assert max(combined) == Fraction(4, 3), "what the lemma's proof looks at"


def test_lemma_2_2_is_printed_the_wrong_way_round() -> None:
    # Two MEDIUM requests: OPT is 1 and W is 1, and 1 is not at most 3/4. What follows from a table of upper bounds on
    # the weight of each replica of an optimum is W <= 4/3 OPT.
    optimum, weight = 1, TABLE["MM"]
    assert optimum > Fraction(3, 4) * weight
    assert all(weight <= Fraction(4, 3) * optimum for weight in TABLE.values())
