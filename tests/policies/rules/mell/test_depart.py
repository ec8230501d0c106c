"""Depart, rule by rule (Fig. 10). `x` ends."""

import pytest

from policies.rules.mell import mell, mell_repaired
from tests.policies.rules.mell.clusters import after, cluster, plan_after


@pytest.mark.parametrize(
    ("before", "then"),
    [
        pytest.param("A: T.2 | B: T.2 x.2", "A: T.2 | B: T.2", id="TINY"),
        pytest.param("A: S.3 S.3 | B: S.3 x.3", "A: S.3 S.3 | B: S.3", id="SMALL"),
        pytest.param("A: M.4 M.4 | B: x.4 M.4 | C: S.3", "A: M.4 M.4 | B: M.4 | C: S.3", id="the latest MEDIUM one"),
        pytest.param("A: L.6 x.2 | B: T.2", "A: L.6 | B: T.2", id="TINY of LARGE"),
        pytest.param("A: L.6 x.3 | B: S.3", "A: L.6 | B: S.3", id="SMALL of LARGE"),
        pytest.param("A: L.6 | B: x.6 M.4", "A: L.6 | B: M.4", id="LARGE"),
    ],
)
def test_rule_1_the_latest_replica_of_its_category_is_left_alone(before: str, then: str) -> None:
    assert after(mell(), cluster(before), departed="x") == then


@pytest.mark.parametrize(
    ("before", "then"),
    [
        pytest.param("A: T.2 x.2 | B: T.2 | C: T.25 T.13", "A: T.25 T.2 | B: T.2 | C: T.13", id="TINY from the latest"),
        pytest.param(
            "A: x.13 T.25 T.25 T.25 G.05 | B: T.25 T.13 T.2",
            "A: T.25 T.25 T.25 T.2 G.05 | B: T.25 T.13",
            id="the largest that fits",
        ),
        pytest.param("A: T.2 x.2 | B: T.2 | C: M.4 T.15", "A: T.2 T.15 | B: T.2 | C: M.4", id="the latest is MEDIUM"),
        pytest.param(
            "A: T.2 x.2 | B: T.2 | C: M.4 T.15 | D: T.2", "A: T.2 T.2 | B: T.2 | C: M.4 T.15", id="the latest is TINY"
        ),
        pytest.param(
            "A: L.6 x.2 | B: T.13 | C: T.2 T.15 | D: L.9", "A: L.6 T.2 | B: T.13 | C: T.15 | D: L.9", id="TINY of LARGE"
        ),
        pytest.param(
            "A: S.3 x.2 | B: S.3 T.2 | C: M.4 T.2 | D: T.13",
            "A: S.3 T.13 | B: S.3 T.2 | C: M.4 T.2",
            id="TINY of SMALL",
        ),
    ],
)
def test_rule_2_a_tiny_request_is_replaced(before: str, then: str) -> None:
    assert after(mell(), cluster(before), departed="x") == then


def test_rule_2_a_medium_donor_is_refilled_in_turn() -> None:
    before = "A: T.2 x.2 | B: T.2 T.13 | C: M.4 T.15 | D: M.4"
    assert after(mell(), cluster(before), departed="x") == "A: T.2 T.15 | B: T.13 | C: M.4 T.2 | D: M.4"


@pytest.mark.parametrize(
    ("before", "then"),
    [
        pytest.param("A: S.3 x.3 | B: S.26 S.3 | C: M.4", "A: S.3 S.3 | B: S.26 | C: M.4", id="SMALL by SMALL"),
        pytest.param("A: M.4 x.4 | B: M.45 M.35 | C: S.3", "A: M.45 M.4 | B: M.35 | C: S.3", id="MEDIUM by MEDIUM"),
        pytest.param("A: M.4 x.3 | B: M.4 | C: S.3 S.26", "A: M.4 S.3 | B: M.4 | C: S.26", id="SMALL of MEDIUM"),
        pytest.param("A: M.45 x.4 T.2 | B: M.4", "A: M.45 M.4 | gpu-0: T.2", id="TINY makes room"),
        pytest.param(
            "A: M.4 x.34 | B: S.3 S.3 | C: M.4 | D: M.45 M.45",
            "A: M.45 M.4 | B: S.3 S.3 | C: M.4 | D: M.45",
            id="the latest one",
        ),
    ],
)
def test_rule_3_a_small_or_medium_request_is_replaced(before: str, then: str) -> None:
    assert after(mell(), cluster(before), departed="x") == then


@pytest.mark.parametrize(
    ("before", "then"),
    [
        pytest.param(
            "A: L.6 x.3 | B: M.4 S.26 | C: M.35 M.35 | D: L.9",
            "A: L.6 M.4 | B: M.35 S.26 | C: M.35 | D: L.9",
            id="from the replica of the highest priority, which the latest one refills",
        ),
        pytest.param(
            "A@n0: L.6 x.3 | B@n1: S.3 | C@n0: S.3 S.28 T.2 | D: L.9",
            "A: L.6 S.3 | B: S.3 | C: S.28 T.2 | D: L.9",
            id="a neighbour has priority",
        ),
        pytest.param("A: L.7 x.3 | B: M.4 | D: L.9", "A: L.7 | B: M.4 | D: L.9", id="nothing fits"),
        pytest.param("A: L.6 x.3 G.1 | B: M.4 | D: L.9", "A: L.6 M.4 | D: L.9 G.1", id="TINY makes room"),
    ],
)
def test_rule_3_beside_a_large_request(before: str, then: str) -> None:
    assert after(mell(), cluster(before), departed="x") == then


@pytest.mark.parametrize(
    ("before", "then"),
    [
        pytest.param("A: x.6 M.4 | B: M.4 | C: L.9", "B: M.4 M.4 | C: L.9", id="MEDIUM joins the latest MEDIUM one"),
        pytest.param("A: x.6 T.2 G.05 | B: L.6 | C: L.9", "B: L.6 T.2 G.05 | C: L.9", id="TINY joins a LARGE one"),
        pytest.param("A: x.6 S.3 | B: L.9", "B: L.9 | gpu-0: S.3", id="or activates a new one"),
    ],
)
def test_rule_4_units_beside_a_large_request_are_allocated_anew(before: str, then: str) -> None:
    assert after(mell(), cluster(before), departed="x") == then


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("A: T.2 | B: T.2 x.2", id="TINY"),
        pytest.param("A: S.3 S.3 | B: S.3 x.3", id="SMALL"),
        pytest.param("A: M.4 M.4 | B: x.4 M.4 | C: S.3", id="MEDIUM"),
    ],
)
def test_repaired_nothing_is_drawn_from_earlier_replicas_either(before: str) -> None:
    assert plan_after(mell_repaired(), cluster(before), departed="x").moves == ()


def test_an_emptied_replica_is_not_refilled() -> None:
    plan = plan_after(mell(), cluster("A: x.2 | B: T.2"), departed="x")
    assert (plan.moves, plan.closed) == ((), ("A",))


def test_a_multi_item_moves_as_one() -> None:
    plan = plan_after(mell(), cluster("A: L.6 x.2 | B: G.1 G.1 T.21 | C: L.9"), departed="x")
    assert {(m.request, m.target) for m in plan.moves} == {("T#4", "A")}
    plan = plan_after(mell(), cluster("A: L.6 x.2 | B: G.11 G.11 | C: L.9"), departed="x")
    assert {(m.source, m.target, m.unit) for m in plan.moves} == {("B", "A", plan.moves[0].unit)}
    assert len(plan.moves) == 2
