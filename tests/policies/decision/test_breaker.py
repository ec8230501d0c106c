"""Pairs of replicas between which moves keep failing."""

import pytest

from policies.decision.breaker import Breaker
from policies.model import ReplicaId

A, B, C = map(ReplicaId, "abc")


def broken(failures: int, at: float = 0.0) -> Breaker:
    breaker = Breaker(failures=3, rest_s=10.0)
    for _ in range(failures):
        breaker.failed((A, B), at)
    return breaker


@pytest.mark.parametrize(("failures", "blocks"), [(0, False), (2, False), (3, True), (4, True)])
def test_three_failures_in_a_row_open_it(failures: int, blocks: bool) -> None:
    assert broken(failures).blocks((A, B), 1.0) is blocks


def test_a_success_in_between_begins_the_count_anew() -> None:
    breaker = broken(2)
    breaker.succeeded((A, B))
    assert not breaker.failed((A, B), 0.0)


def test_after_its_rest_one_attempt_decides() -> None:
    breaker = broken(3)
    assert breaker.resting(9.9) == ((A, B),)
    assert not breaker.blocks((A, B), 10.0)
    assert breaker.failed((A, B), 10.0)
    assert breaker.blocks((A, B), 19.9)


def test_other_pairs_and_the_way_back_are_not_meant() -> None:
    breaker = broken(3)
    assert not breaker.blocks((B, A), 1.0)
    assert not breaker.blocks((A, C), 1.0)


def test_a_replica_that_is_gone_is_forgotten() -> None:
    breaker = broken(3)
    breaker.forget(B)
    assert not breaker.blocks((A, B), 1.0)
