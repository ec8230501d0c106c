"""Carrying out runs, here and in other processes."""

import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from policies.model import RequestId, Tokens
from simulator.command.runs import SimulationRun, perform_all
from simulator.outcome.metrics import Window
from simulator.workload.workload import Job
from simulator.world.setup import Setup

JOBS = tuple(Job(RequestId(f"r{n}"), n / 2, Tokens(100 + 37 * n % 300), Tokens(50 + 91 * n % 250)) for n in range(40))
SETUP = Setup(Tokens(700), horizon_s=30.0)
RUN = SimulationRun("best_fit", 0, JOBS, SETUP, Window(5.0, 30.0))
RUNS = [replace(RUN, policy=policy) for policy in (None, "best_fit", "worst_fit", "load_balance:threshold=0.1")]


def ignore(now: float) -> None:
    """Nobody watches."""


def test_a_run_gives_the_same_every_time() -> None:
    assert RUN.perform(ignore) == RUN.perform(ignore)


def test_a_run_without_a_policy_finds_the_bound_that_every_policy_meets() -> None:
    bound, *runs = (run.perform(ignore) for run in RUNS)
    assert bound["mean"] > 2
    for run in runs:
        assert (run["bound_mean"], run["bound_peak"]) == (bound["mean"], bound["peak"])
        assert run["gpus_mean"] >= bound["mean"]


def test_the_bound_is_that_of_the_workload_whatever_the_cluster_is_limited_to() -> None:
    limited = replace(RUNS[0], setup=replace(SETUP, max_gpus=1, batched=False))
    assert limited.perform(ignore) == RUNS[0].perform(ignore)


def test_a_series_is_optional() -> None:
    assert "series" not in RUN.perform(ignore)
    assert len(replace(RUN, with_series=True).perform(ignore)["series"]) == 30


@pytest.mark.slow
def test_parallel_runs_give_the_metrics_of_serial_ones() -> None:
    shown: list[float] = []
    assert perform_all(RUNS, 2, shown.append) == perform_all(RUNS, 1, ignore)
    assert shown == sorted(shown)
    assert shown[-1] == len(RUNS) * 30.0


def test_progress_of_serial_runs_adds_up() -> None:
    shown: list[float] = []
    perform_all(RUNS[:2], 1, shown.append)
    assert shown == sorted(shown)
    assert (shown[0], shown[-1]) == (0.0, 60.0)


@pytest.mark.slow
def test_a_run_that_fails_ends_the_others_and_raises() -> None:
    endless = replace(RUN, setup=replace(SETUP, horizon_s=1e9), window=Window(0.0, 1e9))
    with pytest.raises(ValueError, match="there is no policy 'none'"):
        perform_all([endless, replace(RUN, policy="none")], 2, ignore)


@pytest.mark.slow
@pytest.mark.parametrize("killed_by", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(killed_by: signal.Signals) -> None:
    code = (
        "from dataclasses import replace\n"
        "from simulator.command.runs import perform_all\n"
        "from tests.simulator.command.test_runs import RUN, Window\n"
        "if __name__ == '__main__':\n"
        "    endless = replace(RUN, setup=replace(RUN.setup, horizon_s=1e9), window=Window(0.0, 1e9))\n"
        "    perform_all([endless] * 2, 2, lambda now: print(now, flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        # Both of them compute before the command is killed.
        while float(command.stdout.readline()) < 2.0:
            pass
        children = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(killed_by)
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=20)
    for child in alive:
        child.kill()
    assert not alive
