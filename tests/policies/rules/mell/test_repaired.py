"""The deviations of `mell_repaired` from Fig. 10."""

import pytest

from policies.rules.mell import mell, mell_repaired
from tests.policies.cluster.named import impose
from tests.policies.rules.mell.clusters import after, cluster, plan_after, shown


@pytest.mark.parametrize(
    ("before", "grown"),
    [
        pytest.param("A: x.25 T.2 | B: L.6", "x.26", id="TINY to SMALL"),
        pytest.param("A: x.33 S.3 | B: M.4", "x.34", id="SMALL to MEDIUM"),
        pytest.param("A: x.3 S.3 | B: L.9", "x.6", id="SMALL to LARGE"),
    ],
)
def test_a_request_that_changes_its_class_stays_where_it_fits(before: str, grown: str) -> None:
    assert plan_after(mell_repaired(), cluster(before), grown=grown).moves == ()
    assert plan_after(mell(), cluster(before), grown=grown).moves != ()


@pytest.mark.parametrize(
    ("before", "grown", "then"),
    [
        pytest.param("A: x.6 M.35 G.05 | B: M.4", "x.61", "A: x.61 M.35 | B: M.4 G.05", id="LARGE loses a grain"),
        pytest.param("A: x.5 M.4 G.03 G.07 | B: M.4", "x.54", "A: x.54 M.4 G.03 | B: M.4 G.07", id="the right grain"),
        pytest.param("A: L.51 x.45 | B: M.4", "x.51", "A: x.51 | B: L.51 M.4", id="one of two LARGE ones"),
        pytest.param("A: x.4 T.2 T.2 T.2 | B: M.4", "x.47", "A: x.47 T.2 T.2 | B: M.4 T.2", id="TINY"),
    ],
)
def test_an_overload_displaces_the_smallest_request_that_cures_it(before: str, grown: str, then: str) -> None:
    assert after(mell_repaired(), cluster(before), grown=grown).replace("gpu-0", "B") == then


@pytest.mark.parametrize(
    ("before", "arrived", "then"),
    [
        pytest.param("A: S.3 | B: S.3 S.3 S.3", "x.3", "A: S.3 x.3 | B: S.3 S.3 S.3", id="an earlier replica"),
        pytest.param("A: M.5 | B: T.2", "x.3", "A: M.5 x.3 | B: T.2", id="SMALL beside MEDIUM"),
        pytest.param("A: T.2 | B: L.9", "x.4", "A: x.4 T.2 | B: L.9", id="MEDIUM beside TINY"),
        pytest.param("A: T.2 | B: L.9", "x.6", "A: x.6 T.2 | B: L.9", id="LARGE beside TINY"),
        pytest.param("A: M.5 T.2 T.13 | B: L.65", "x.4", "A: M.5 x.4 | B: L.65 T.2 T.13", id="if TINY make room"),
    ],
)
def test_every_replica_is_tried_before_one_is_opened(before: str, arrived: str, then: str) -> None:
    assert after(mell_repaired(), cluster(before), arrived=arrived) == then
    assert plan_after(mell(), cluster(before), arrived=arrived).opened


def test_an_emptied_replica_is_used_before_one_is_opened() -> None:
    made = cluster("Z: | A: x.6 S.3 | B: L.9")
    impose(made, min_replicas=3)
    plan = plan_after(mell_repaired(), made, departed="x")
    assert (shown(made), plan.moves) == ("Z: | A: S.3 | B: L.9", ()), "its own before any other"


def test_tiny_units_fill_the_room_of_a_new_large_replica() -> None:
    before = "A: L.9 | B: T.2 T.2 T.2 T.2 | C: T.25 T.2 T.2 T.15"
    then = "A: L.9 | B: T.2 T.2 T.2 T.2 | C: T.2 T.15 | gpu-0: x.55 T.25 T.2"
    assert after(mell_repaired(), cluster(before), arrived="x.55") == then


@pytest.mark.parametrize(
    ("before", "then"),
    [
        pytest.param(
            "A: L.8 x.2 | B: T.25 G.11 G.1", "A: L.8 G.11 | B: T.25 G.1", id="a single request if no unit fits"
        ),
        pytest.param("A: L.7 x.3 | B: T.2 G.05", "A: L.7 T.2 G.05", id="beside LARGE, and the replica is empty"),
        pytest.param("A: M.4 x.4 T.2 | B: T.2 T.15 T.13", "A: M.4 T.2 T.2 T.15 | B: T.13", id="beside MEDIUM"),
    ],
)
def test_tiny_units_fill_a_hole_that_nothing_else_fills(before: str, then: str) -> None:
    assert after(mell_repaired(), cluster(before), departed="x") == then


@pytest.mark.parametrize(("size", "then"), [("x.3", "A: L.6 x.3"), ("x.31", "A: L.6 | gpu-0: x.31")])
def test_room_is_kept_for_growth(size: str, then: str) -> None:
    assert after(mell_repaired(), cluster("A: L.6", headroom=120), arrived=size) == then
