"""The gap of the hand-over is found by its tokens, not by its size."""

import pytest

from benchmarks.instruments.moved import handed_over
from benchmarks.load import TimedStream


def make_stream(*gaps: float) -> TimedStream:
    """A stream whose chunks arrive at these distances."""
    arrivals = [1.0]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
    return TimedStream(arrivals=arrivals)


@pytest.mark.parametrize(("frozen_at", "gap"), [(101, 0.5), (102, 0.25), (103, 0.125)])
def test_gap_behind_the_last_token_of_the_source(frozen_at: int, gap: float) -> None:
    """A larger gap elsewhere, caused by the copying, is not the hand-over."""
    assert handed_over(make_stream(0.5, 0.25, 0.125), frozen_at, context=100, output=4) == pytest.approx(gap)


@pytest.mark.parametrize(
    ("frozen_at", "output"),
    [(None, 4), (100, 4), (104, 4), (102, 5)],
    ids=["never frozen", "before its first token", "behind its last token", "a chunk of two tokens"],
)
def test_hand_over_is_unknown(frozen_at: int | None, output: int) -> None:
    assert handed_over(make_stream(0.5, 0.25, 0.125), frozen_at, context=100, output=output) is None
