"""Which requests an overload evicts."""

import pytest

from policies.rules.overload import Overload, relieve, victims
from tests.policies.rules.drawn import drawn, shown


@pytest.mark.parametrize(
    ("replica", "expected"),
    [
        pytest.param("60 40", [], id="a full replica is not overloaded"),
        pytest.param("60 41", ["a1"], id="one token too many"),
        pytest.param("70 20 15", ["a2"], id="the youngest, if that is enough"),
        pytest.param("70 20 5 15", ["a3"], id="the youngest, be it larger than another that would do"),
        pytest.param("60 35 10 10", ["a3", "a2"], id="as many as it takes"),
        pytest.param("60 45 2", ["a1"], id="not a younger one that the cure does not need"),
        pytest.param("60 44 20 20", ["a1"], id="a replica may be left full"),
        pytest.param("85 20 10 10", ["a3", "a1"], id="of two that the cure does not both need the older stays"),
    ],
)
def test_victims(replica: str, expected: list[str]) -> None:
    cluster = drawn(replica)
    assert [q.id for q in victims(cluster, cluster.running()[0])] == expected


@pytest.mark.parametrize("reason", ["pinned", "resting"])
def test_a_request_that_must_stay_is_no_victim(reason: str) -> None:
    cluster = drawn("70 20 15")
    replica = cluster.running()[0]
    youngest = list(replica.requests.values())[-1]
    setattr(youngest, reason, True)
    assert [q.id for q in victims(cluster, replica)] == ["a1"]


def test_evicted_requests_wait() -> None:
    cluster = drawn("70 35 | 20 | 90 20")
    assert [q.id for q in relieve(cluster, Overload.EVICT)] == ["a1", "c1"]
    assert shown(cluster) == "70 | 20 | 90 ; 35 20"
    assert [e.request for e in cluster.decisions.settle().evicted] == ["a1", "c1"]


def test_stalled_requests_stay() -> None:
    cluster = drawn("70 35 | 20")
    assert relieve(cluster, Overload.STALL) == []
    assert shown(cluster) == "70 35 | 20"
