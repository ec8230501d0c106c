"""Prompts that are looked up: the placement that would follow, its reasons, and a memory that stays as it is."""

import pickle
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.decision.deciding import match_prompt, place
from policies.decision.matching import Basis, PromptMatch
from policies.decision.memory import PoolMemory
from policies.decision.placement import NoReplica, Place, Queue
from policies.model import ReplicaId, RequestId
from policies.prefix.routing import Routing
from policies.rules.registry import POLICIES
from tests.policies.decision.test_routing import CAPACITY, PROMPT, A, B, C, arrival, memory


def state(made: PoolMemory) -> bytes:
    """All of a memory, without the index of replicas, which is made on demand."""
    made.cluster._rooms = None
    return pickle.dumps(made)


def chosen(found: PromptMatch) -> tuple[ReplicaId, Basis]:
    assert found.routed is not None
    return found.routed.placing.replica, found.routed.basis


@pytest.mark.parametrize("routing", list(Routing))
@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(
    st.lists(st.lists(st.integers(1, 900), max_size=2), min_size=3, max_size=3),
    st.lists(st.integers(0, len(PROMPT)), min_size=3, max_size=3),
    st.lists(st.floats(0, 5), min_size=3, max_size=3),
    st.integers(1, 1200),
)
def test_the_placement_that_follows_is_the_one_that_was_found(
    policy: str, routing: Routing, sizes: list[list[int]], lengths: list[int], waits: list[float], tokens: int
) -> None:
    replicas = (A, B, C)
    caches: Mapping[ReplicaId, tuple[int, ...]] = {r: PROMPT[:n] for r, n in zip(replicas, lengths, strict=True)}
    made = memory(dict(zip(replicas, sizes, strict=True)), caches, routing, policy)
    for replica, seconds in zip(replicas, waits, strict=True):
        made.router.queues.add(RequestId(f"prefill {replica}"), replica, seconds, 0.0)
    place(made, arrival("first", session="s"), 0.0)
    new = arrival("new", tokens, PROMPT[: tokens // 10], session="s")

    before = state(made)
    found = match_prompt(made, new, 1.0)
    assert state(made) == before

    placed = place(made, new, 1.0)
    assert found.routed is not None and isinstance(placed, Place | Queue)
    assert (type(found.routed.placing), found.routed.placing.replica) == (type(placed), placed.replica)
    (its,) = [replica for replica in found.replicas if replica.score.replica == placed.replica]
    assert its.score.hbm + its.score.dram == placed.matched.predicted
    assert its.fits or isinstance(placed, Queue)
    assert its.favoured is (found.routed.basis is not Basis.POLICY)


def test_a_prompt_has_its_tokens_by_replica_and_the_favoured_ones_are_near_the_best_score() -> None:
    made = memory({A: [300], B: [100], C: [200]}, {A: PROMPT[:5], B: PROMPT, C: PROMPT})
    made.router.queues.add(RequestId("long"), C, 0.01, 0.0)
    found = match_prompt(made, arrival(), 0.0)
    assert (found.tokens, found.block_tokens, found.full_blocks) == (101, 10, 10)
    assert {r.score.replica: r.score.hbm for r in found.replicas} == {A: 50, B: 100, C: 100}
    assert {r.score.replica for r in found.replicas if r.favoured} == {B, C}
    assert chosen(found) == (C, Basis.CONTENT), "of both, it is the best fit"


def test_the_policy_alone_decides_about_a_prompt_that_no_replica_has() -> None:
    made = memory({A: [300], B: [100]}, {A: [], B: PROMPT})
    found = match_prompt(made, arrival(names=(7, 8, 9)), 0.0)
    assert chosen(found) == (A, Basis.POLICY) and not any(replica.favoured for replica in found.replicas)
    assert found.replicas[0].score.score_s > 1.0, "scores are there all the same"


def test_a_session_is_the_reason_if_it_decides() -> None:
    made = memory({A: [500], B: [100]}, {}, Routing.SESSION)
    place(made, arrival("p", session="s"), 0.0, exclude=[A])
    assert chosen(match_prompt(made, arrival(session="s"), 1.0)) == (B, Basis.SESSION)
    assert chosen(match_prompt(made, arrival(names=(), session="t"), 1.0)) == (A, Basis.POLICY)


def test_a_prompt_without_room_would_queue() -> None:
    made = memory({A: [950, 10], B: [950]}, {A: PROMPT, B: []})
    document = match_prompt(made, arrival(), 0.0).to_json()
    assert (document["replica"], document["queues"], document["by"]) == (B, True, "policy")
    assert [replica["fits"] for replica in document["replicas"]] == [False, False]


def test_replicas_that_are_excluded_or_absent_are_no_part_of_it() -> None:
    made = memory({A: [300], B: [100]}, {A: [], B: PROMPT})
    found = match_prompt(made, arrival(), 0.0, exclude=[B])
    assert chosen(found)[0] == A and [r.score.replica for r in found.replicas] == [A]
    document = match_prompt(made, arrival(), 0.0, exclude=[A, B]).to_json()
    assert place(made, arrival(), 0.0, exclude=[A, B]) == NoReplica()
    assert (document["replica"], document["by"], document["queues"], document["replicas"]) == (None, None, False, [])


def test_before_the_first_report_nothing_is_known() -> None:
    document = match_prompt(PoolMemory(memory({A: []}, {}).terms), arrival(), 0.0).to_json()
    assert document["block_size"] == document["full_blocks"] == 0
    assert CAPACITY > document["prompt_tokens"] == 101
