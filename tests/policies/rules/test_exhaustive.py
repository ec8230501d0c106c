"""Policies on instances so small that the optimum is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.bounds import best_fit_decreasing
from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.model import RequestId, Tokens
from policies.rules.registry import POLICIES
from tests.policies.exhaustive import optimum
from tests.policies.settings import unhurried
from tests.policies.stepping import Events, step

CAPACITY = Tokens(100)

sizes = st.lists(st.integers(1, 100).map(Tokens), min_size=1, max_size=9)


def replicas_for(name: str, requests: list[Tokens]) -> int:
    """The number of replicas that a policy opens for requests that all arrive in one epoch."""
    cluster = Cluster(CAPACITY)
    arrived = [Arrival(RequestId(f"r{i}"), size) for i, size in enumerate(requests)]
    step(cluster, Events(arrived=arrived), POLICIES[name])
    cluster.check_integrity()
    return len(cluster.replicas)


@pytest.mark.parametrize("name", POLICIES)
@unhurried
@given(sizes)
def test_no_policy_needs_fewer_than_the_optimum(name: str, requests: list[Tokens]) -> None:
    assert replicas_for(name, requests) >= optimum(requests, CAPACITY)


@unhurried
@given(sizes)
def test_pack_is_within_one_replica_of_the_optimum(requests: list[Tokens]) -> None:
    assert replicas_for("pack", requests) <= optimum(requests, CAPACITY) + 1


def test_pack_finds_an_optimum_that_decreasing_best_fit_misses() -> None:
    requests = [Tokens(size) for size in (58, 50, 31, 20, 19, 17)]
    assert optimum(requests, CAPACITY) == replicas_for("pack", requests) == 2
    assert best_fit_decreasing(requests, CAPACITY) == 3
