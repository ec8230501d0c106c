"""A standby process: one listens per node, it ends if nobody wants it, and a replica keeps one."""

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from deployments.replica import standby
from deployments.replica.standby import LOOK_S, STARTING_S, Standby, keep_standby
from tests.virtual_time import now

_NUMBERS = iter(range(1_000))

PROCESS = """
import sys, time
from deployments.replica import standby
standby.ABANDONED_S, standby.SURPLUS_S = float(sys.argv[2]), float(sys.argv[3])
process = standby.Standby(chr(0) + sys.argv[1])
process.wait()
print("ready", flush=True)
if sys.argv[4] == "taken":
    sys.stdin.readline()
    process.take()
    print("taken", flush=True)
time.sleep(60)
"""


@pytest.fixture
def address() -> str:
    return f"mell-test-{os.getpid()}-{next(_NUMBERS)}"


class StandbyProcess:
    """A process that is a standby, with short time limits."""

    def __init__(self, address: str, abandoned_s: float, surplus_s: float, way: str = "idle") -> None:
        arguments = [address, str(abandoned_s), str(surplus_s), way]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.says("ready")

    def says(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def take(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.says("taken")

    def runs_for(self, seconds: float) -> bool:
        """True if it runs for so long."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    def __enter__(self) -> "StandbyProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def listens(address: str) -> bool:
    return standby._listens("\0" + address)


@pytest.mark.slow
def test_a_standby_listens_until_it_is_taken_and_then_outlives_its_time(address: str) -> None:
    with StandbyProcess(address, 2.0, 2.0, "taken") as process:
        assert listens(address)
        process.take()
        assert not listens(address)
        assert process.runs_for(2.5)


@pytest.mark.slow
def test_an_abandoned_standby_ends(address: str) -> None:
    with StandbyProcess(address, 0.5, 60.0) as process:
        assert process.process.wait(10) == 0
        assert not listens(address)


@pytest.mark.slow
def test_a_standby_that_replicas_look_after_stays(address: str) -> None:
    with StandbyProcess(address, 2.0, 60.0) as process:
        for _ in range(10):
            assert listens(address)
            time.sleep(0.25)
        assert process.process.poll() is None


@pytest.mark.slow
def test_a_second_standby_of_a_node_ends(address: str) -> None:
    with StandbyProcess(address, 60.0, 60.0) as first, StandbyProcess(address, 60.0, 0.5) as second:
        assert second.process.wait(10) == 0
        assert first.process.poll() is None
        assert listens(address)


@pytest.mark.slow
def test_a_killed_standby_leaves_its_place_to_the_next(address: str) -> None:
    with StandbyProcess(address, 60.0, 0.5) as first:
        first.process.kill()
        first.process.wait()
        assert not listens(address)
    with StandbyProcess(address, 60.0, 0.5) as second:
        assert listens(address)
        assert second.runs_for(1.0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, address: str) -> list[float]:
    """When `keep_standby` had Ray start a worker, which never begins to listen."""
    times: list[float] = []

    async def prestart() -> bool:
        times.append(now())
        return True

    monkeypatch.setattr(standby, "prestart_worker", prestart)
    monkeypatch.setattr(standby, "_address", lambda: "\0" + address)
    return times


async def keep_for(seconds: float) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(keep_standby(), seconds)


@pytest.mark.virtual_time
async def test_a_replica_has_one_worker_started_at_a_time(started: list[float]) -> None:
    await keep_for(2 * STARTING_S + 2 * LOOK_S)
    assert started == [LOOK_S, LOOK_S + STARTING_S, LOOK_S + 2 * STARTING_S]


@pytest.mark.virtual_time
async def test_no_worker_is_started_beside_a_standby_and_one_at_once_after_its_end(
    started: list[float], address: str
) -> None:
    there = Standby("\0" + address)
    await keep_for(STARTING_S)
    assert not started
    there.take()
    await keep_for(2 * LOOK_S)
    assert len(started) == 1


def test_a_failed_preparation_leaves_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no processes left")

    monkeypatch.setattr(standby, "_standby", None)
    monkeypatch.setattr(standby, "start_guard", fail)
    standby.prepare()
    assert not standby.take()
