"""The GPU benchmark without a GPU: real bytes between processes, with CuPy faked."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.stages import STAGES, machine, measure
from benchmarks.transfer.gpu_ends import CacheShape
from tests.migration import fake_cupy

ROOT = Path(__file__).parents[3]


def test_block_of_an_8b_model_is_2_mib() -> None:
    assert CacheShape().block_bytes == 2 << 20


@pytest.mark.slow
def test_every_stage_is_measured_and_blocks_arrive() -> None:
    shape = CacheShape(layers=3, blocks=16, heads=2, tokens=4, content=8)
    with fake_cupy.installed():
        runs = measure(shape, "cpu", 4 * shape.block_bytes, repeat=2, prepare=fake_cupy.install)
    assert {stage: len(runs[stage]) for stage in STAGES} == dict.fromkeys(STAGES, 2)
    assert all(seconds > 0 for stage in STAGES for seconds in runs[stage])


@pytest.mark.slow
@pytest.mark.skipif(len(machine()) > 1, reason="there is a GPU")
def test_benchmark_without_a_gpu_exits_with_2_and_the_reason() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu.stages"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("no CUDA device: ") and done.stderr.endswith("nothing was measured\n")
