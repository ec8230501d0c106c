"""The made-up workloads of several models, and the tables of their results."""

from pathlib import Path

import pytest

from benchmarks.sharing.__main__ import found_by_level, levels_table, service_table
from benchmarks.sharing.workloads import LONGEST, WORKLOADS, SharingWorkload, zipf


def test_popularity_falls_by_zipfs_law() -> None:
    rates = zipf(8.0, 40)
    assert sum(rates) == pytest.approx(8.0)
    assert rates[0] == pytest.approx(2 * rates[1]) == pytest.approx(40 * rates[39])


def test_workloads_are_the_same_each_time_and_have_their_rates() -> None:
    for workload in WORKLOADS:
        rows = workload.rows()
        assert rows == workload.rows() == sorted(rows)
        assert len(rows) == pytest.approx(sum(workload.rates) * workload.horizon_s, rel=0.1)
        assert max(prompt + output for _, prompt, output, _ in rows) <= LONGEST
        assert sum(output for _, _, output, _ in rows) / len(rows) == pytest.approx(workload.output, rel=0.1)


@pytest.mark.slow
def test_tables_have_every_contender(tmp_path: Path) -> None:
    small = SharingWorkload("small", [0.05, 0.02], 100, 50, 400.0)
    found = found_by_level(small, tmp_path)
    assert [line.partition(" | ")[0] for line in levels_table(found)][2:] == [
        "| a GPU per model",
        "| an autoscaler per model",
        "| an autoscaler per model, to zero",
        "| static shares",
        "| swapping whole engines",
        "| swapping by sleep and wake",
        "| Mell",
    ]
    assert "| Mell, sleepers on 1 | 1.0 | 100 |" in "\n".join(service_table(found[2.0]))
