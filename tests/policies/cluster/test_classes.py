"""Size classes: a size on a boundary belongs to the smaller class, whatever the capacity."""

from fractions import Fraction

import pytest

from policies.cluster.classes import Classes, Kind
from policies.model import Tokens

CAPACITIES = [24, 1000, 13698, 16846]
BOUNDARIES = [(8, Kind.GRAIN), (4, Kind.TINY), (3, Kind.SMALL), (2, Kind.MEDIUM)]


def by_definition(tokens: int, capacity: int) -> Kind:
    """The table of the paper, in exact arithmetic."""
    share = Fraction(tokens, capacity)
    return Kind(sum(share > Fraction(1, parts) for parts, _ in BOUNDARIES))


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize(("parts", "kind"), BOUNDARIES, ids=["C/8", "C/4", "C/3", "C/2"])
def test_boundary_belongs_to_the_smaller_class(capacity: int, parts: int, kind: Kind) -> None:
    classes = Classes(Tokens(capacity))
    assert classes.kind(Tokens(capacity // parts)) is kind
    assert classes.kind(Tokens(capacity // parts + 1)) is Kind(kind + 1)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_every_size_is_in_the_class_of_its_share(capacity: int) -> None:
    classes = Classes(Tokens(capacity))
    assert [classes.kind(Tokens(n)) for n in range(1, capacity + 1)] == [
        by_definition(n, capacity) for n in range(1, capacity + 1)
    ]


def test_a_request_alone_on_a_replica_is_large() -> None:
    assert Classes(Tokens(100)).kind(Tokens(100)) is Kind.LARGE


@pytest.mark.parametrize("kind", Kind)
def test_ceiling_is_the_last_size_of_its_class(kind: Kind) -> None:
    classes = Classes(Tokens(1000))
    ceiling = classes.ceiling(kind)
    if kind is Kind.LARGE:
        assert ceiling == float("inf")
    else:
        assert classes.kind(Tokens(int(ceiling))) is kind and classes.kind(Tokens(int(ceiling) + 1)) is Kind(kind + 1)
