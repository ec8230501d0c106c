"""The rules for verdicts on claims."""

import pytest

from benchmarks.evaluation.sections.claims import Verdict, holds_on, up_to, within


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param([True, True], Verdict.REPRODUCES, id="on all workloads"),
        pytest.param([False, True], Verdict.PARTLY, id="on some"),
        pytest.param([False, False], Verdict.NOT, id="on none"),
    ],
)
def test_claim_about_every_workload(held: list[bool], expected: Verdict) -> None:
    assert holds_on(held) == expected


def test_claim_about_no_workloads_is_an_error() -> None:
    with pytest.raises(ValueError, match="no workloads"):
        holds_on([])


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        pytest.param(0.20, Verdict.REPRODUCES, id="more than promised"),
        pytest.param(0.12, Verdict.REPRODUCES, id="four fifths of it"),
        pytest.param(0.11, Verdict.PARTLY, id="less than that"),
        pytest.param(0.06, Verdict.PARTLY, id="two fifths of it"),
        pytest.param(0.05, Verdict.NOT, id="less than that, too"),
        pytest.param(-0.15, Verdict.NOT, id="the reverse"),
    ],
)
def test_claim_up_to_a_value(best: float, expected: Verdict) -> None:
    assert up_to(best, promised=0.15) == expected


@pytest.mark.parametrize(("most", "expected"), [(10, Verdict.REPRODUCES), (11, Verdict.NOT)])
def test_claim_of_a_limit(most: float, expected: Verdict) -> None:
    assert within(most, 10) == expected
