"""Allocate, rule by rule (Fig. 10)."""

import pytest

from policies.model import ReplicaState
from policies.rules.mell import mell, mell_repaired
from policies.rules.policy import Policy
from tests.policies.rules.mell.clusters import after, cluster, named, shown

both = pytest.mark.parametrize("policy", [mell(), mell_repaired()], ids=["mell", "mell_repaired"])


@pytest.mark.parametrize(
    ("before", "then"),
    [
        pytest.param("A: M.4 | B: L.6 | C: T.2", "A: M.4 | B: L.6 x.2 | C: T.2", id="a LARGE replica comes first"),
        pytest.param("A: L.7 | B: L.6", "A: L.7 | B: L.6 x.2", id="the one with the most free memory"),
        pytest.param("A: L.6 G.05 G.05 | B: L.701", "A: L.6 G.05 G.05 | B: L.701 x.2", id="or with fewer requests"),
        pytest.param("A: T.2 | B: L.9 | C: M.5 | D: T.2", "A: T.2 | B: L.9 | C: M.5 x.2 | D: T.2", id="then MEDIUM"),
        pytest.param("A: T.2 | B: S.3 | C: T.2", "A: T.2 | B: S.3 | C: T.2 x.2", id="then the latest TINY one"),
        pytest.param(
            "A: T.2 | B: S.3 | C: T.2 T.2 T.2 T.25", "A: T.2 | B: S.3 x.2 | C: T.25 T.2 T.2 T.2", id="then any"
        ),
        pytest.param("A: S.3 S.3 S.3 | B: L.9", "A: S.3 S.3 S.3 | B: L.9 | gpu-0: x.2", id="then a new one"),
    ],
)
def test_tiny_requests_go_to(before: str, then: str) -> None:
    assert after(mell(), cluster(before), arrived="x.2") == then


@pytest.mark.parametrize(
    ("before", "arrived", "then"),
    [
        pytest.param("A: L.6 | B: S.3", "x.3", "A: L.6 x.3 | B: S.3", id="a LARGE replica comes first"),
        pytest.param("A: L.6 | B: L.55", "x.4", "A: L.6 | B: L.55 x.4", id="the one with the most free memory"),
        pytest.param("A: L.6 | B: M.4", "x.45", "A: L.6 | B: x.45 M.4", id="unless the sum is above C"),
        pytest.param("A: L.6 | B: M.4", "x.4", "A: L.6 x.4 | B: M.4", id="the sum may be C"),
        pytest.param("A: L.52 S.26 | B: S.3", "x.26", "A: L.52 S.26 | B: S.3 x.26", id="no two beside a LARGE one"),
        pytest.param("A: S.3 | B: M.4 | C: S.3 | D: L.9", "x.3", "A: S.3 | B: M.4 | C: S.3 x.3 | D: L.9", id="SMALL"),
        pytest.param("A: M.4 | B: M.4 | C: S.3", "x.4", "A: M.4 | B: M.4 x.4 | C: S.3", id="MEDIUM with MEDIUM"),
        pytest.param(
            "A: S.3 | B: S.3 S.3 S.3", "x.3", "A: S.3 | B: S.3 S.3 S.3 | gpu-0: x.3", id="the latest one or a new one"
        ),
        pytest.param("A: S.3 | B: T.2", "x.4", "A: S.3 | B: T.2 | gpu-0: x.4", id="no other category"),
    ],
)
def test_small_and_medium_requests_go_to(before: str, arrived: str, then: str) -> None:
    assert after(mell(), cluster(before), arrived=arrived) == then


@pytest.mark.parametrize(
    ("before", "arrived", "then"),
    [
        pytest.param("A: L.55 T.2 T.13 | B: T.2", "x.26", "A: L.55 x.26 T.13 | B: T.2 T.2", id="the smallest enough"),
        pytest.param("A: L.55 T.2 T.15 | B: T.2", "x.4", "A: L.55 x.4 | B: T.2 T.2 T.15", id="several if need be"),
        pytest.param("A: L.55 G.05 | B: T.2", "x.42", "A: L.55 x.42 | B: T.2 G.05", id="grains too"),
        pytest.param("A: L.55 T.2 T.13 | B: L.65", "x.4", "A: L.55 x.4 | B: L.65 T.2 T.13", id="to another LARGE one"),
    ],
)
def test_tiny_units_in_the_way_are_allocated_anew(before: str, arrived: str, then: str) -> None:
    assert after(mell(), cluster(before), arrived=arrived) == then


@pytest.mark.parametrize(
    ("before", "then"),
    [
        pytest.param("A: T.2", "A: T.2 | gpu-0: x.6", id="alone on a new replica"),
        pytest.param("A: M.35 S.3 | B: S.3", "A: S.3 | B: S.3 | gpu-0: x.6 M.35", id="with the largest that fits"),
        pytest.param("A: M.45 | B: S.3 S.26", "A: M.45 | B: S.26 | gpu-0: x.6 S.3", id="a MEDIUM one may not fit"),
        pytest.param(
            "A: M.4 M.35 | B: M.39 M.34",
            "A: M.39 M.35 | B: M.34 | gpu-0: x.6 M.4",
            id="its gap is filled by the latest",
        ),
        pytest.param("A: M.39 M.35 | B: M.4 M.34", "A: M.39 M.35 | B: M.34 | gpu-0: x.6 M.4", id="not by earlier ones"),
        pytest.param("A: S.3 | B: M.4", "A: S.3 | gpu-0: x.6 M.4", id="what is left empty is closed"),
    ],
)
def test_large_requests_go_to(before: str, then: str) -> None:
    assert after(mell(), cluster(before), arrived="x.6") == then


def test_a_new_large_replica_takes_arrivals_before_it_takes_from_others() -> None:
    assert after(mell(), cluster("A: M.4 M.35"), arrived="x.6 y.35") == "A: M.4 M.35 | gpu-0: x.6 y.35"


@pytest.mark.parametrize(
    ("before", "arrived", "then"),
    [
        pytest.param("A: S.3", "x.4", "A: x.4 S.3", id="in another category"),
        pytest.param("A: T.2", "x.6", "A: x.6 T.2", id="LARGE beside TINY"),
        pytest.param("A: L.6", "x.6 y.2", "A: L.6 y.2 ; x.6", id="or waits, and lets others pass"),
    ],
)
def test_without_a_new_replica_a_request_goes_where_it_fits(before: str, arrived: str, then: str) -> None:
    assert after(mell(), cluster(before, more=0), arrived=arrived) == then


def test_a_replica_that_starts_is_asked_for_when_nothing_else_takes_the_request() -> None:
    made = cluster("A: S.3", starts_as=ReplicaState.STARTING)
    assert after(mell(), made, arrived="x.6 y.6") == "A: x.6 S.3 | gpu-0*: ; y.6"
    assert after(mell(), made, arrived="z.3") == "A: x.6 S.3 | gpu-0*: ; y.6 z.3", "both fit on the one that starts"


def test_room_on_a_starting_replica_is_reserved() -> None:
    made = cluster(starts_as=ReplicaState.STARTING)
    assert after(mell(), made, arrived="x.6 y.4 z.1") == "gpu-0*: | gpu-1*: ; x.6 y.4 z.1"


@both
def test_an_empty_replica_is_used_before_one_is_started(policy: Policy) -> None:
    made = cluster("A: L.9 | B:", starts_as=ReplicaState.STARTING)
    assert after(policy, made, arrived="x.6") == "A: L.9 | B: x.6"


@both
@pytest.mark.parametrize(
    ("before", "waiting", "replica"),
    [
        pytest.param("A: L.55 T.2 T.2 | B: M.4", "x.4", "B", id="nothing is moved for it"),
        pytest.param("A: L.6 | B:", "x.6", "B", id="an empty replica"),
        pytest.param("A: L.6", "x.6", None, id="nowhere"),
    ],
)
def test_place_moves_and_opens_nothing(policy: Policy, before: str, waiting: str, replica: str | None) -> None:
    made = cluster(before, waiting)
    drawing = shown(made)
    found = policy.place(made, named(made, "x"))
    assert (found.id if found else None) == replica
    assert shown(made) == drawing
