"""The processes and CPU times of compared servers."""

import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.load import Load
from benchmarks.servers import VLLM_SERVER
from benchmarks.serving import RunningServer, _row, served

LOAD = Load(tokens_per_s=1000.0, ttft_p50=0.1, ttft_p99=0.2, itl_p50=0.01, itl_p99=0.02, chunks_per_token=1.0)
TITLE = "ray::ServeReplica:mell:Engine"
SPIN_S = 0.1
SPIN = f"import time; t = time.process_time()\nwhile time.process_time() - t < {2 * SPIN_S}: pass"
SPIN_ON = f"{SPIN}\ninput()"


def test_a_process_counts_for_its_kind_and_the_keeper_of_the_command_for_none() -> None:
    """The keeper's arguments name the frontend that it starts."""
    start = f"import subprocess, sys\n{SPIN}\nsubprocess.run([sys.executable, '-c', {SPIN_ON!r}, {TITLE!r}])"
    with subprocess.Popen([sys.executable, "-c", start, VLLM_SERVER], stdin=subprocess.PIPE) as keeper:
        server = RunningServer("mell", 1, psutil.Process(keeper.pid))
        deadline = time.monotonic() + 30
        while server.cpu_s()["replica_cpu"] < SPIN_S and time.monotonic() < deadline:
            time.sleep(0.05)
        used, frontend = server.cpu_s(), server.frontend_mib()
        keeper.communicate(b"\n")
    assert used["replica_cpu"] >= SPIN_S <= used["other_cpu"]
    assert "frontend_cpu" not in used and frontend == 0


def test_added_time_is_without_that_of_an_idle_server() -> None:
    own = {"frontend_cpu": 70e-6, "replica_cpu": 20e-6, "other_cpu": 100e-6, "core_cpu": 50e-6}
    found = served(LOAD, own, [3e-6, 4e-6], idle={"replica_cpu": 5e-3, "other_cpu": 75e-3, "frontend_cpu": 1.0})
    assert found.added_cpu == pytest.approx(40e-6), "of 120 us, 80 are those of a millisecond without calls"
    assert (found.frontend_cpu, found.worker_cpu) == (70e-6, 0.0)
    assert found.idle_cpu == pytest.approx(7e-6)
    assert found.tokens_per_s == 1000.0


def test_a_figure_that_the_reference_lacks_has_no_ratio() -> None:
    found = served(LOAD, {"replica_cpu": 2e-6, "frontend_cpu": 6e-6}, [], {})
    bare = served(LOAD, {"frontend_cpu": 3e-6}, [], {})
    rows = [_row([(found, bare)], figure, "us", 1e6) for figure in ("frontend_cpu", "replica_cpu")]
    assert [" ".join(row.split()[1:]) for row in rows] == ["6.0 3.0 2.00 [2.00, 2.00] us", "2.0 0.0 us"]
