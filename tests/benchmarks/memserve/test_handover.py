"""The table of hand-overs leaves out streams that did not follow their prefill."""

from typing import Any

import pytest

from benchmarks.memserve.handover import APART, TOGETHER, VLLM_APART, VLLM_TOGETHER, HandoverSample, table

FOLLOWED = {"outcome": "committed", "path": "kv", "waited_s": 0.1}


def sample(system: str, second_s: float, record: dict[str, Any] | None = None, ttft_s: float = 0.3) -> HandoverSample:
    return HandoverSample(system, 512, ttft_s, second_s, 0.01, record)


@pytest.mark.parametrize(
    "other",
    [None, FOLLOWED | {"outcome": "aborted"}, FOLLOWED | {"path": "tokens"}, FOLLOWED | {"waited_s": 0.0}],
    ids=["not moved", "failed", "by tokens", "moved after the prefill"],
)
def test_only_streams_that_followed_their_prefill_count(other: dict[str, Any] | None) -> None:
    streams = [sample(APART, 0.04, FOLLOWED, ttft_s=0.33), sample(APART, 0.9, other), sample(TOGETHER, 0.01)]
    _, row = table(streams, [512])
    assert row.split() == [
        *("512", "1/2", "330.0", "[330.0,", "330.0]", "300.0", "[300.0,", "300.0]", "1.10"),
        *("40.0", "[40.0,", "40.0]", "4.0", "[4.0,", "4.0]", "1.0", "[1.0,", "1.0]"),
    ]


def test_context_without_such_streams_has_no_figures() -> None:
    _, row = table([sample(APART, 0.9), sample(TOGETHER, 0.01)], [512])
    assert row.split() == ["512", "0/1"]


def test_all_streams_of_vllm_count() -> None:
    """The whole run is an error, if its second server did not read the blocks."""
    _, row = table([sample(VLLM_APART, 0.01), sample(VLLM_TOGETHER, 0.01)], [512], VLLM_APART, VLLM_TOGETHER)
    assert row.split()[1] == "1/1"
