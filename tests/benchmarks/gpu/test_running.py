"""Parts end in time and leave a record, whatever their servers and steps do."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.gpu import running
from benchmarks.gpu.bench import Allotment, Bench
from benchmarks.gpu.plan import RunPart, ServerSet
from benchmarks.gpu.record import FailureRow, NoteRow, PartRow, RunRecord, StartRow
from benchmarks.gpu.running import play, share
from benchmarks.servers import Rig, StartLimit
from tests.benchmarks.gpu.rows import ORIGIN


@dataclass
class Clock:
    """Seconds that pass only when added."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_turns_end_when_another_one_would_not_fit() -> None:
    clock = Clock()
    allotment = Allotment(9.5, clock)
    done = []
    for turn in allotment.turns(9):
        done.append(turn)
        clock.now += 2 if turn else 3
    assert done == [0, 1, 2] and allotment.cut, "3 + 2 + 2 passed, and the longest turn took 3"
    assert allotment.left_s == 2.5
    clock.now += 9
    assert allotment.left_s == 0
    assert list(Allotment(0, clock).turns(3)) == [0, 1, 2], "turns that take no time fit"


def test_first_turn_is_always_tried() -> None:
    clock = Clock()
    allotment = Allotment(0, clock)
    for _ in allotment.turns(2):
        clock.now += 1
    assert allotment.cut and clock.now == 101


@dataclass
class FakeStep:
    """A step that does what it is given."""

    act: Callable[[Bench], object] = lambda bench: None
    weight: float = 1.0
    seen: list[Bench] = field(default_factory=list)

    async def run(self, bench: Bench) -> None:
        self.seen.append(bench)
        found = self.act(bench)
        if asyncio.iscoroutine(found):
            await found


def fail(bench: Bench) -> None:
    raise RuntimeError("a broken stream")


def test_shares_follow_weights() -> None:
    steps = [FakeStep(weight=3), FakeStep(weight=1)]
    assert share(steps, 100) == 75 and share(steps[1:], 40) == 40 and share(steps, -5) == 0


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces a part's servers; has their starts and ends."""
    events: list[str] = []

    @contextlib.contextmanager
    def server(name: str, starts: bool) -> Iterator[int]:
        if not starts:
            raise RuntimeError(f"{name} did not start")
        events.append(f"{name} up")
        yield 1
        events.append(f"{name} down")

    def both(servers: ServerSet, name: str, folder: Path, limit: StartLimit) -> Sequence[AbstractContextManager[int]]:
        return [server("mell", True), server("vllm", servers.bare)]

    monkeypatch.setattr(running, "_servers", both)
    return events


def part(*steps: FakeStep, bare: bool = True, limit_s: float = 100) -> RunPart:
    return RunPart("a part", "", limit_s, steps, ServerSet(Rig(), 2, bare=bare))


def test_steps_run_between_the_start_and_the_end_of_servers(servers: list[str], tmp_path: Path) -> None:
    record = RunRecord([ORIGIN])
    step = FakeStep(lambda bench: servers.append("step"))
    assert play(part(step, step), record, tmp_path).outcome == "whole"
    assert sorted(servers[:2]) == ["mell up", "vllm up"] and servers[2:4] == ["step", "step"]
    assert sorted(servers[4:]) == ["mell down", "vllm down"]
    (bench, _) = step.seen
    assert (
        30 < bench.time.left_s <= 42.5
        and bench.transport == "shared"
        and bench.conditions.endswith("; shared, 4 slots of 8 MiB")
    )
    (started,) = record.of(StartRow)
    assert started.servers == "Mell and vLLM's server, 2 replica(s)"


def test_failed_step_does_not_end_the_part(servers: list[str], tmp_path: Path) -> None:
    record = RunRecord([ORIGIN])
    last = FakeStep()
    assert play(part(FakeStep(fail), last), record, tmp_path).outcome == "cut"
    assert [(row.step, row.error) for row in record.of(FailureRow)] == [("FakeStep", "RuntimeError: a broken stream")]
    assert last.seen and record.done == {"a part"}


def test_step_that_hangs_is_ended(servers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE_S", 0.05)
    record = RunRecord([ORIGIN])

    async def hang(bench: Bench) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            record.add(NoteRow("", "its rows so far"))

    assert play(part(FakeStep(hang), limit_s=running.END_S), record, tmp_path).outcome == "cut"
    assert record.of(FailureRow)[0].error.startswith("TimeoutError") and record.of(NoteRow)


def test_step_without_time_for_all_turns_is_cut(servers: list[str], tmp_path: Path) -> None:
    def cut(bench: Bench) -> None:
        bench.time.cut = True

    assert play(part(FakeStep(cut)), RunRecord([ORIGIN]), tmp_path).outcome == "cut"


def test_servers_that_do_not_start_fail_the_part_and_end_the_others(servers: list[str], tmp_path: Path) -> None:
    record = RunRecord([ORIGIN])
    step = FakeStep()
    assert play(part(step, bare=False), record, tmp_path).outcome == "failed"
    assert not step.seen and servers == ["mell up", "mell down"] and record.done == set()
    assert record.of(FailureRow)[0].error == "RuntimeError: vllm did not start"
    assert record.of(PartRow)[0].outcome == "failed"


@pytest.mark.parametrize("ended", ["by an error", "by an interrupt"])
def test_start_that_ends_early_ends_the_others_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    limits: list[StartLimit] = []
    begun = threading.Event()

    @contextlib.contextmanager
    def hanging(limit: StartLimit) -> Iterator[int]:
        begun.set()
        while not record.of(PartRow):
            limit.wait(time.monotonic())
        yield 1

    @contextlib.contextmanager
    def failing() -> Iterator[int]:
        begun.wait()
        if ended == "by an error":
            raise RuntimeError("no such argument")
        os.kill(os.getpid(), signal.SIGINT)
        yield 1

    def both(servers: ServerSet, name: str, folder: Path, limit: StartLimit) -> Sequence[AbstractContextManager[int]]:
        limits.append(limit)
        return [hanging(limit), failing()]

    monkeypatch.setattr(running, "_servers", both)
    record, whole = RunRecord([ORIGIN]), part(FakeStep(), limit_s=600)
    if ended == "by an error":
        assert play(whole, record, tmp_path).outcome == "failed"
    else:
        with pytest.raises(KeyboardInterrupt):
            play(whole, record, tmp_path)
    assert limits[0].seconds == 600 - running.END_S - running.STEPS_S
    (failure,) = record.of(FailureRow)
    assert failure.error.startswith("RuntimeError: no such" if ended == "by an error" else "KeyboardInterrupt")
    assert record.of(PartRow)[0].outcome == "failed" and record.done == set()


def test_interrupt_within_a_step_ends_the_servers(servers: list[str], tmp_path: Path) -> None:
    def interrupt(bench: Bench) -> None:
        record.add(NoteRow("", "its rows so far"))
        signal.raise_signal(signal.SIGINT)

    record, last = RunRecord([ORIGIN]), FakeStep()
    with pytest.raises(KeyboardInterrupt):
        play(part(FakeStep(interrupt), last), record, tmp_path)
    assert sorted(servers[2:]) == ["mell down", "vllm down"] and not last.seen and record.of(NoteRow)
    assert record.of(PartRow)[0].outcome == "failed"


def test_rows_are_brought_out_after_each_step(servers: list[str], tmp_path: Path) -> None:
    seen: list[int] = []
    record = RunRecord([ORIGIN])
    play(part(FakeStep(), FakeStep(fail)), record, tmp_path, lambda: seen.append(len(record.rows)))
    assert seen == [2, 3]


def test_part_without_servers_has_no_rig(tmp_path: Path) -> None:
    step = FakeStep()
    assert play(RunPart("checks", "", 60, [step]), RunRecord([ORIGIN]), tmp_path).outcome == "whole"
    assert step.seen[0].rig is None
    step.seen[0].keep("kind", {"a": 1})
    assert (tmp_path / "samples.jsonl").read_text() == '{"part": "checks", "kind": "kind", "sample": {"a": 1}}\n'
