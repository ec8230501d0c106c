"""Update, rule by rule (Fig. 10), and growth within a class, which the paper hardly covers. `x` grows."""

import pytest

from policies.rules.mell import mell
from tests.policies.rules.mell.clusters import after, cluster, plan_after


@pytest.mark.parametrize(
    ("before", "grown", "then"),
    [
        pytest.param("A: x.25 T.2 | B: L.6", "x.26", "A: T.2 | B: L.6 x.26", id="TINY to SMALL"),
        pytest.param("A: x.33 S.3 | B: M.4", "x.34", "A: S.3 | B: M.4 x.34", id="SMALL to MEDIUM"),
        pytest.param("A: x.25 L.6 | B: M.4", "x.34", "A: L.6 x.34 | B: M.4", id="TINY to MEDIUM, where it already is"),
        pytest.param("A: x.12 T.2 | B: L.6", "x.13", "A: T.2 x.13 | B: L.6", id="a grain to TINY stays"),
        pytest.param(
            "A: x.3 L.6 | B: L.501", "x.39", "A: L.6 | B: L.501 x.39", id="to the one of the highest priority"
        ),
        pytest.param("A: x.3 T.2 | B: L.9", "x.6", "A: T.2 | B: L.9 | gpu-0: x.6", id="SMALL to LARGE"),
    ],
)
def test_rule_1_a_request_of_another_class_is_allocated_anew(before: str, grown: str, then: str) -> None:
    assert after(mell(), cluster(before), grown=grown) == then


@pytest.mark.parametrize(
    ("before", "then"),
    [
        pytest.param(
            "A: x.25 T.2 | B: T.2 | C: L.9 | D: S.3",
            "A: T.2 T.2 | C: L.9 | D: S.3 x.26",
            id="TINY, refilled with TINY, not with SMALL",
        ),
        pytest.param(
            "A: x.33 S.3 S.3 | B: S.28 | C: M.4 | D: M.4",
            "A: S.3 S.3 S.28 | C: M.4 | D: M.4 x.34",
            id="SMALL with SMALL",
        ),
    ],
)
def test_a_request_departs_with_its_old_class_from_the_old_category(before: str, then: str) -> None:
    grown = "x.26" if "x.25" in before else "x.34"
    assert after(mell(), cluster(before), grown=grown) == then


@pytest.mark.parametrize(
    ("before", "grown", "then"),
    [
        pytest.param("A: L.51 x.45 | B: M.4", "x.51", "A: L.51 M.4 | gpu-0: x.51", id="it leaves a LARGE replica"),
        pytest.param("A: x.5 M.4 | B: M.4", "x.51", "A: x.51 M.4 | B: M.4", id="it stays on a MEDIUM one"),
        pytest.param(
            "A: x.5 M.48 G.01 | B: M.4 | C: L.9", "x.53", "A: x.53 M.4 G.01 | B: M.48 | C: L.9", id="others must leave"
        ),
    ],
)
def test_rule_2_a_request_grows_to_large(before: str, grown: str, then: str) -> None:
    assert after(mell(), cluster(before), grown=grown) == then


@pytest.mark.parametrize(
    ("before", "grown", "then"),
    [
        pytest.param("A: x.6 M.4 | B: M.4", "x.61", "A: x.61 | B: M.4 M.4", id="what was beside it leaves"),
        pytest.param(
            "A: x.55 M.35 G.05 G.05 | B: L.9",
            "x.56",
            "A: x.56 M.35 | B: L.9 G.05 G.05",
            id="what still fits comes back",
        ),
        pytest.param(
            "A: x.6 M.4 | B: S.28 | C: L.9", "x.61", "A: x.61 S.28 | C: L.9 | gpu-0: M.4", id="and the hole is refilled"
        ),
        pytest.param(
            "A: x.55 M.35 G.1 | B: L.55 | C: L.9",
            "x.59",
            "A: x.59 G.1 | B: L.55 M.35 | C: L.9",
            id="to where more is free",
        ),
    ],
)
def test_rule_3_a_large_request_outgrows_its_replica(before: str, grown: str, then: str) -> None:
    made = cluster(before)
    assert after(mell(), made, grown=grown) == then


@pytest.mark.parametrize(
    ("before", "grown", "then"),
    [
        pytest.param("A: x.4 M.45 T.15 | B: T.2", "x.41", "A: M.45 x.41 | B: T.2 T.15", id="a TINY unit leaves MEDIUM"),
        pytest.param(
            "A: x.4 S.28 T.13 T.19 | B: T.2",
            "x.41",
            "A: x.41 S.28 T.19 | B: T.2 T.13",
            id="the smallest that is enough",
        ),
        pytest.param("A: x.3 S.3 S.3 G.1 | B: S.3", "x.33", "A: x.33 S.3 S.3 | B: S.3 G.1", id="a multi-item"),
        pytest.param("A: M.4 S.33 x.26 | B: S.3", "x.28", "A: M.4 S.33 | B: S.3 x.28", id="or a SMALL one if it must"),
        pytest.param("A: x.2 T.25 T.25 T.25 | B: T.2", "x.25", "A: x.25 T.25 T.25 T.25 | B: T.2", id="what fits stays"),
    ],
)
def test_growth_within_a_class(before: str, grown: str, then: str) -> None:
    assert after(mell(), cluster(before), grown=grown) == then


def test_a_request_that_shrinks_stays() -> None:
    assert plan_after(mell(), cluster("A: x.34 M.4 | B: L.6"), grown="x.3").moves == ()
