"""The hit rates of one cache for all."""

import pytest

from policies.model import RequestId, Tokens
from simulator.caches.oracles import HitRates, oracles
from simulator.workload.workload import Job


def job(number: int, names: tuple[int, ...], tokens: int) -> Job:
    return Job(RequestId(f"r{number}"), float(number), Tokens(tokens), Tokens(1), names)


JOBS = [job(0, (1, 2), 25), job(1, (3, 4), 25), job(2, (1, 2), 25), job(3, (1, 2), 20)]


@pytest.mark.parametrize(
    ("capacity", "pooled"),
    [
        (40, (20 + 10) / 95),  # the last token of a prompt is always computed
        (30, (10 + 10) / 95),  # of a prompt, the last block is dropped first
        (20, 10 / 95),
        (9, 0.0),
        (None, None),
    ],
)
def test_least_recently_used_blocks_are_dropped(capacity: int | None, pooled: float | None) -> None:
    found = oracles(JOBS, 10, capacity)
    assert found.unlimited == pytest.approx(30 / 95)
    assert found.pooled == (None if pooled is None else pytest.approx(pooled))


def test_no_prompts_no_hits() -> None:
    assert oracles([], 10, 100) == HitRates(0.0, 0.0)
