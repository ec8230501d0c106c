"""The autoscaling policy that Serve's controller calls."""

from dataclasses import dataclass

import pytest

from deployments.scaling import KeepTarget


@dataclass
class Context:
    """The little that the policy reads of Serve's context."""

    target_num_replicas: int
    current_num_replicas: int = 0
    total_num_requests: float = 0


@pytest.mark.parametrize("target", [0, 1, 2, 100])
@pytest.mark.parametrize("requests", [0, 1000])
def test_the_target_stays_whatever_the_load(target: int, requests: int) -> None:
    assert KeepTarget()(Context(target, 5, requests)) == (target, {})


def test_it_is_made_with_whatever_serve_passes() -> None:
    assert KeepTarget(anything=1)(Context(3)) == (3, {})
