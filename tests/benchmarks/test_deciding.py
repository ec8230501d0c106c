"""The benchmarks of decisions run, and their figures are of what they say."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import epoch, floor, planner


@pytest.mark.parametrize("benchmark", [epoch, planner])
def test_the_load_is_there_for_as_long_as_is_asked(benchmark: ModuleType, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    benchmark.main(["--policy", "pack", "--replicas", "13", "--epochs", "4", "--json", str(figures)])
    [speed] = json.loads(figures.read_text())
    assert (speed["policy"], speed["epochs"]) == ("pack", 4)
    assert speed["requests"] > 100
    assert all(value > 0 for name, value in speed.items() if name.endswith("_ms"))


def test_an_epoch_that_decides_nothing_keeps_up_with_the_load() -> None:
    times = floor.measure(replicas=10, epochs=5)
    assert {name: len(found) for name, found in times.items()} == {"out": 5, "sizes": 5, "sizes, numpy": 5, "in": 5}
