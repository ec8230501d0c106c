"""Steps over made-up servers and commands: their rows, and the processes that they ask for."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Self

import pytest

from benchmarks.chaos.answers import StreamedAnswer
from benchmarks.chaos.offers import Offer
from benchmarks.gpu import checks, faults, nccl
from benchmarks.gpu.bench import Allotment, Bench
from benchmarks.gpu.checks import TESTS, CheckNccl, MeasureMemory, RunTests, by_owner, stage_rows
from benchmarks.gpu.equality import TimedAnswer, count_equal, draw_offers, is_whole, relabel
from benchmarks.gpu.faults import Strike
from benchmarks.gpu.moving import MovedCell
from benchmarks.gpu.record import (
    FaultRow,
    MemoryRow,
    NcclRow,
    ReplacementRow,
    RunRecord,
    Spread,
    StageRow,
    SuiteRow,
)
from benchmarks.instruments.moved import MoveSample
from benchmarks.servers import ROOT, Rig
from tests.benchmarks.gpu.rows import ORIGIN
from tests.migration import fake_cupy


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A step's surroundings, on one made-up GPU."""
    return Bench("part", Rig.on_gpus(1), RunRecord([ORIGIN]), tmp_path, Allotment(280), "on a GPU", "cuda_ipc", 256.0)


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, name: str = "nvidia-smi") -> None:
    """Put a program first in the path."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


# --- checks -------------------------------------------------------------------------------------------


def test_tests_for_gpus_exist() -> None:
    assert all((ROOT / path).exists() for path in TESTS)


@pytest.mark.slow
async def test_tests_are_run_and_their_summary_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    test = bench.folder / "test_made_up.py"
    test.write_text("import pytest\ndef test_a(): pass\n@pytest.mark.skip(reason='two GPUs')\ndef test_b(): pass\n")
    monkeypatch.setattr(checks, "TESTS", (str(test),))
    await RunTests().run(bench)
    (row,) = bench.record.of(SuiteRow)
    assert row.passed and row.summary.startswith("1 passed, 1 skipped")
    assert len(row.skipped) == 1 and row.skipped[0].endswith("two GPUs")
    assert "1 passed" in (bench.folder / "tests.log").read_text()


async def test_process_that_hangs_is_killed(bench: Bench) -> None:
    bench = Bench("part", None, bench.record, bench.folder, Allotment(0.3))
    with pytest.raises(TimeoutError):
        await checks.run_process(bench, "sleeping", [sys.executable, "-c", "import time; time.sleep(60)"])


def test_rates_of_stages() -> None:
    seconds = {"8": {"copy": [1.0], "open": [9.0], "move": [0.5, 1.0, 2.0]}}
    rows = stage_rows({"copy_1_gib_gb_s": 1433.0, "seconds": seconds})
    assert rows == [
        StageRow("copy", 0, Spread(1, 1433, 1433, 1433)),
        StageRow("copy", 8, Spread(1, *[0.008389] * 3)),
        StageRow("move", 8, Spread(3, 0.008389, 0.004194, 0.01678)),
    ]


class FakeState:
    """A server's state: two replicas with three processes each."""

    def __init__(self, *_: object) -> None:
        self.replicas = [{"pids": [10, 11, 12, 13]}, {"pids": [20, 21, 22]}]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def state(self) -> dict[str, Any]:
        return {"replicas": self.replicas}


async def test_memory_on_a_gpu_is_that_of_nvidia_smi(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'import sys\nprint("10, 700\\n12, 30000\\n13, 29000\\n99, 5" if "compute" in sys.argv[-1] else "61234")'
    program(bench.folder, text, monkeypatch)
    monkeypatch.setattr(checks, "ApiClient", FakeState)
    await MeasureMemory().run(bench)
    assert [(row.owner, row.mib, row.slots_mib) for row in bench.record.of(MemoryRow)] == [
        ("replica 0", 700.0, 256.0),
        ("worker 0", 30000.0, 0.0),
        ("worker 0", 29000.0, 0.0),
        ("unnamed process", 5.0, 0.0),
        ("GPU 0", 61234.0, 0.0),
    ]


def test_memory_that_is_not_available_is_left_out() -> None:
    assert by_owner("10, [N/A]\n12, 5\n\n", {10: "replica 0"}) == [("unnamed process", 5.0)]


async def test_nccls_lines_are_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ran(*_: object) -> tuple[int, str]:
        return 0, "noise: x\nNCCL single rank: made in 0.7 s: fine\n"

    monkeypatch.setattr(checks, "run_process", ran)
    await CheckNccl().run(bench)
    assert bench.record.of(NcclRow) == [NcclRow("single rank", "made in 0.7 s: fine")]


def test_nccl_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert nccl.main() == 2
    assert capsys.readouterr().err.startswith("no CUDA device: ")


def test_single_rank_is_made_and_aborted() -> None:
    with fake_cupy.installed() as cupy:
        assert nccl.single_rank().startswith("made in 0.00 s, aborted in 0.00 s")
        assert cupy.cuda.nccl.made[0].aborted


# --- moves --------------------------------------------------------------------------------------------


def test_figures_of_moves() -> None:
    record = {"pause_s": 0.004, "resume_s": None, "duration_s": 0.1, "copy_s": 0.05, "bytes": 1 << 30, "rounds": 2}
    by_tokens = record | {"bytes": 0, "copy_s": 0.0}
    made = [MoveSample("pre-copy", "kv", 512, 0.03, 0.006, 0.0, each) for each in (record, by_tokens)]
    figures = MovedCell(made, []).figures()
    assert figures["client_ms"] == Spread(2, 30.0, 30.0, 30.0) and figures["gaps"].median == 5.0
    assert figures["gb_s"] == Spread(1, 21.47, 21.47, 21.47) and figures["mib"].median == 1024.0
    assert "resume_ms" not in figures and "handed_ms" not in figures and MovedCell().figures() == {}


# --- texts --------------------------------------------------------------------------------------------


def answer(text: str, **others: Any) -> StreamedAnswer:
    usual: dict[str, Any] = {"text": text, "done": True, "finish": "length", "tokens": 4}
    return StreamedAnswer(**(usual | others))


def test_answers_are_equal_if_both_ended_well() -> None:
    ours = [answer("a"), answer("b"), answer("c", error="no"), answer("d", done=False)]
    theirs = [answer("a"), answer("x"), answer("c"), answer("d")]
    assert count_equal(ours, theirs) == 1 and count_equal(theirs, ours) == 1


def test_whole_answers() -> None:
    offer = Offer(0.0, "label", (1, 2), 4)
    assert is_whole(answer("a"), offer)
    assert not is_whole(answer("a", tokens=3), offer) and not is_whole(answer("a", finish=None), offer)


def test_rounds_have_prompts_of_their_own_and_runs_labels() -> None:
    first, other = (draw_offers(name, 3, 40, 5, seeded=True) for name in ("a", "b"))
    assert {offer.prompt for offer in first}.isdisjoint({offer.prompt for offer in other})
    assert first == draw_offers("a", 3, 40, 5, seeded=True) and all(offer.seeded for offer in first)
    again = relabel(first[0], "again")
    assert again.label == "a/0/again" and again.prompt == first[0].prompt and again.seeded


async def test_times_of_chunks_are_kept() -> None:
    timed = TimedAnswer()
    for _ in range(2):
        timed.take({"choices": [{"text": "a", "finish_reason": None}]})
        await asyncio.sleep(0.01)
    assert timed.text == "aa" and 0.01 <= timed.longest_gap_s < 5


# --- faults -------------------------------------------------------------------------------------------


class FakeCluster:
    """Two replicas, of which one ends; streams of 20 chunks that go on elsewhere, or break."""

    def __init__(self, breaks: bool) -> None:
        self.lost = asyncio.Event()
        self.drained: list[str] = []
        self.labels: list[str] = []
        self._breaks = breaks

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @asynccontextmanager
    async def stream(self, body: Mapping[str, Any], label: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        self.labels.append(label)

        async def events() -> AsyncIterator[dict[str, Any]]:
            for i in range(20):
                if i == 10:
                    await self.lost.wait()
                    if self._breaks:
                        yield {"error": {"message": "the replica is gone", "type": "x"}}
                        return
                await asyncio.sleep(0.001)
                yield {"choices": [{"text": "a", "finish_reason": "length" if i == 19 else None}]}
            yield {"choices": [], "usage": {"completion_tokens": 20}}

        yield events()

    async def state(self) -> dict[str, Any]:
        few = {"id": "few", "state": "RUNNING", "pids": [1, 2], "requests": [{}]}
        many = {"id": "many", "state": "RUNNING", "pids": [3, 4], "requests": [{}, {}]}
        return {"replicas": [few] if self.lost.is_set() else [few, many]}

    async def drain(self, replica: str) -> dict[str, Any]:
        self.drained.append(replica)
        self.lost.set()
        return {}

    async def migrations(self) -> list[dict[str, Any]]:
        committed = {"outcome": "committed", "path": "kv"}
        return [committed | {"label": label} for label in self.labels] + [committed | {"label": "another"}]


@pytest.mark.parametrize("fault", ["drain", "kill"])
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
async def test_fault_hits_the_fullest_replica(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: Literal["drain", "kill"], breaks: bool
) -> None:
    cluster, killed = FakeCluster(breaks), []
    monkeypatch.setattr(faults, "connect", lambda url: cluster)

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        cluster.lost.set()

    def wait(condition: object, began: float, limit_s: float) -> Awaitable[float | None]:
        if limit_s == 80:
            assert bench.record.of(FaultRow), "the row is there before the wait for the replacement"
        return until(condition, began, 0.1)  # type: ignore[arg-type]

    until = faults._until
    monkeypatch.setattr(faults, "_until", wait)
    await Strike(fault, streams=3, prompt=20, output=20, back_s=80, kill=kill).run(bench)
    assert cluster.drained == (["many"] if fault == "drain" else [])
    assert killed == ([(3, signal.SIGKILL)] if fault == "kill" else [])
    (row,) = bench.record.of(FaultRow)
    assert (row.fault, row.streams, row.held) == (fault, 3, 2)
    assert bench.record.of(ReplacementRow) == [ReplacementRow(bench.conditions, fault, None)]
    assert row.empty_s is not None and row.outcomes == {"committed by kv": 3}
    assert row.broken == (["the replica is gone"] * 3 if breaks else [])
    json.dumps(row.outcomes)
