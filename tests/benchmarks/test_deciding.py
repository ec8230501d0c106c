"""The benchmarks of decisions run, and their figures have the requested shape."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import epoch, floor, planner


@pytest.mark.parametrize("benchmark", [epoch, planner])
def test_load_lasts_for_all_epochs(benchmark: ModuleType, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    benchmark.main(["--policy", "pack", "--replicas", "13", "--epochs", "4", "--json", str(figures)])
    written = json.loads(figures.read_text())
    for [speed] in written.values() if benchmark is planner else [written]:
        assert (speed["policy"], speed["epochs"]) == ("pack", 4)
        assert speed["requests"] > 100
        assert all(value > 0 for name, value in speed.items() if name.endswith("_ms"))


def test_planner_runs_with_prompts_that_share_blocks(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    planner.main(["--replicas", "13", "--epochs", "4", "--documents", "3", "--json", str(figures)])
    (speed,) = json.loads(figures.read_text())["parts"]
    assert speed["requests"] > 100 and speed["place_p50_ms"] > 0


def test_pools_share_the_memory_of_nodes() -> None:
    speed = epoch.measure_pools("pack", 3, 4, epochs=8)
    assert (speed.pools, speed.replicas, speed.epochs) == (3, 12, 8)
    assert speed.requests == 3 * 60 and speed.moves_per_epoch > 0 and speed.p50_ms > 0


def test_bare_epochs_time_every_part() -> None:
    times = floor.measure(replicas=10, epochs=5)
    assert {name: len(found) for name, found in times.items()} == {"out": 5, "sizes": 5, "sizes, numpy": 5, "in": 5}
