"""Short workloads."""

import shutil
from pathlib import Path

import pytest

from benchmarks.evaluation.runs.case import LENGTHS
from simulator.workload.lengths import SHIPPED_PATH
from tests.simulator.replay.make_small_trace import PATH

RECORDED = ("azure2023_conv", "azure2023_code", "mooncake_conversation", "burstgpt_like_1400s")


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A folder with all files of the report, filled with the project's own traces."""
    folder = tmp_path / "traces"
    folder.mkdir()
    shutil.copy(SHIPPED_PATH, folder / LENGTHS)
    for name in RECORDED:
        shutil.copy(PATH, folder / f"{name}.csv.gz")
    return folder
