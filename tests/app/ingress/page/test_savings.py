"""The sentence on what Mell saves."""

from typing import Any

import pytest

from app.ingress.page.savings import savings

NOW = 1_000.0
SCALING = {"kept": "minimum", "closed": 0, "min_replicas": 2, "linger_left_s": None} | {
    "free_replicas": 1.25,
    "reserve_replicas": 0.5,
}


def state(*requests: int, mode: str = "act", scaling: dict[str, Any] | None = None, **states: str) -> dict[str, Any]:
    """Replicas a, b, ... with these numbers of requests; `states` are those of further replicas without requests."""
    running = {"abc"[at]: ("RUNNING", count) for at, count in enumerate(requests)}
    replicas = running | {id: (other, 0) for id, other in states.items()}
    rows = [
        {"id": id, "state": shown, "requests": [{"id": f"{id}{number}"} for number in range(count)]}
        for id, (shown, count) in replicas.items()
    ]
    return {"mode": mode, "replicas": rows} | ({"scaling": scaling} if scaling else {})


def moved(source: str, began: float, **changes: Any) -> dict[str, Any]:
    return {
        "source": source,
        "started_at": began,
        "duration_s": 2.0,
        "outcome": "committed",
        "reason": "drain",
    } | changes


def test_the_saving_is_against_requests_that_stay_on_the_emptiest_replica() -> None:
    assert savings(state(9, 5), (), 3, NOW) == (
        "2 replicas serve 14 requests, which would take 3 replicas if each stayed on the emptiest one."
    )
    assert savings(state(1), (), 1, NOW) == (
        "1 replica serves 1 request; without moves these would take no more replicas now."
    )
    assert savings(state(0, 0), (), 0, NOW) == "2 replicas serve no requests."


def test_a_replica_that_starts_or_drains_counts_against_the_saving() -> None:
    found = savings(state(9, 5, x="STARTING"), (), 3, NOW)
    assert found is not None and "no more replicas" in found
    found = savings(state(9, 5, x="STOPPED"), (), 3, NOW)
    assert found is not None and "would take 3 replicas" in found


def test_the_replica_that_was_emptied_last_is_named_with_the_reason() -> None:
    records = [moved("a", 990), moved("gone", 958), moved("older", 900)]
    found = savings(state(9, 5), records, 3, NOW)
    assert found is not None
    assert found.endswith("; the last request left gone 40 s ago, because its requests fitted on the others.")
    evacuated = savings(state(9), [moved("x", 958, reason="evacuate")], 2, NOW)
    assert evacuated is not None and evacuated.endswith("because it was stopping.")


@pytest.mark.parametrize(
    "record",
    [
        moved("a", 990),
        moved("gone", 990, outcome="aborted"),
        moved("gone", 990, outcome=None, duration_s=None),
        moved("gone", 990, reason="balance"),
        moved("gone", 100),
    ],
    ids=["still there", "aborted", "under way", "another reason", "long ago"],
)
def test_other_moves_empty_no_replica(record: dict[str, Any]) -> None:
    found = savings(state(9, 5), [record], 3, NOW)
    assert found is not None and "left" not in found


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "no replica closes, because the settings keep at least 2 replicas"),
        ({"kept": "starting"}, "no replica closes while another one starts"),
        ({"kept": "prefills"}, "no replica closes: on fewer, prefills would lengthen too many steps"),
        ({"kept": "reserve"}, "no replica closes: 1.2 replicas are free, and 0.5 are kept in reserve"),
        ({"kept": "linger", "linger_left_s": 12.3}, "an empty replica closes in 12 s, unless requests come"),
        ({"kept": "in_use"}, "no replica closes: none is empty, and none can be emptied within the limits of moves"),
        ({"kept": None, "closed": 1}, "1 replica will close"),
    ],
)
def test_the_reason_for_the_number_of_replicas_follows(changes: dict[str, Any], why: str) -> None:
    found = savings(state(9, 5, scaling=SCALING | changes), (), 3, NOW)
    assert found is not None and found.endswith(f"{why}.")


@pytest.mark.parametrize("shown", [state(9, mode="observe"), state(9, mode="off"), state(x="STARTING"), state()])
def test_nothing_is_said_unless_mell_acts_on_running_replicas(shown: dict[str, Any]) -> None:
    assert savings(shown, (), 3, NOW) is None
