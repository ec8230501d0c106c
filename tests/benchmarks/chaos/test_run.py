"""Runs and rounds against a fake server, whose faults they must find."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from app.client.errors import BadAnswer, ErrorAnswer
from app.client.sse import Event
from benchmarks.chaos import run as running
from benchmarks.chaos.answers import StreamVerdict
from benchmarks.chaos.faults import FaultKind, PlannedFault
from benchmarks.chaos.injector import NOTHING, FaultInjector, InjectedFault, OpenStreams
from benchmarks.chaos.offers import Offer, make_offers, undisturbed
from benchmarks.chaos.processes import memory_mb
from benchmarks.chaos.report import is_good
from benchmarks.chaos.run import ChaosResult, ChaosRun
from benchmarks.chaos.watch import ClusterWatch
from benchmarks.soak import __main__ as soak
from benchmarks.soak.forcing import Forcing, RoundShape, calculated
from benchmarks.soak.report import count_moves
from simulator.replay.trace import TraceRequest
from tests.virtual_time import VirtualLoop

OFFERS = make_offers([TraceRequest(i, 0.02 * i, 10 + i, 20) for i in range(4)], "made up")
LEAVE = PlannedFault(0.1, FaultKind.LEAVE, 0.0)
MOVE = PlannedFault(0.1, FaultKind.MOVE, 0.5)
VIRTUAL = pytest.mark.virtual_time


class MadeUp:
    """Two replicas, "a" and "b", both of which are this process, or `pid`. The knobs are faults."""

    def __init__(
        self,
        wrong: str = "",
        silent: str = "",
        slots: int = 0,
        stuck_moves: bool = False,
        pid: int | None = None,
        characters: int = 4,
    ) -> None:
        self.characters = characters
        self.pid = pid or os.getpid()
        self.wrong = wrong
        self.silent = silent
        self.slots = slots
        self.stuck_moves = stuck_moves
        self.hosts: dict[str, str] = {}
        self.ordered: list[tuple[str, str]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @contextlib.asynccontextmanager
    async def stream(self, body: Mapping[str, Any], label: str) -> AsyncIterator[AsyncIterator[Event]]:
        self.hosts[label] = "a"
        try:
            yield self._answer(undisturbed(tuple(body["prompt"]), body["max_tokens"]), body["max_tokens"], label)
        finally:
            del self.hosts[label]

    async def _answer(self, text: str, tokens: int, label: str) -> AsyncIterator[Event]:
        if label == self.wrong:
            text = text[:-1] + "~"
        for i in range(0, len(text), self.characters):
            await asyncio.sleep(0.02)
            finish = "length" if i + self.characters >= len(text) else None
            yield {"choices": [{"text": text[i : i + self.characters], "finish_reason": finish}]}
        if label == self.silent:
            raise BadAnswer("no [DONE]", "the stream ended without [DONE]")
        yield {"choices": [], "usage": {"completion_tokens": tokens}}

    async def state(self) -> dict[str, Any]:
        return {"as_of": time.time(), "replicas": [self._replica("a"), self._replica("b")]}

    def _replica(self, name: str) -> dict[str, Any]:
        requests = [{"label": label} for label, host in self.hosts.items() if host == name]
        held = {"used_tokens": 16 * len(requests), "staging_slots_in_use": self.slots}
        return {"id": name, "state": "RUNNING", "pids": [self.pid] * 3, "requests": requests, **held}

    async def move(self, request: str, path: str, target: str | None = None) -> str:
        if request not in self.hosts:
            raise ErrorAnswer(404, "Not Found", b"no such request")
        self.hosts[request] = target or "b"
        self.ordered.append((request, self.hosts[request]))
        return f"m{len(self.ordered)}"

    async def drain(self, replica: str) -> dict[str, Any]:
        raise NotImplementedError

    async def migrations(self) -> list[dict[str, Any]]:
        members = {"path": "kv", "error": None, "pause_s": 0.01, "blocks": 1, "bytes": 64}
        outcome = None if self.stuck_moves else "committed"
        return [{"id": f"m{i + 1}", "outcome": outcome, **members} for i in range(len(self.ordered))]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short time limits."""
    monkeypatch.setattr(running, "QUIET_S", 0.3)
    monkeypatch.setattr(running, "PATIENCE_S", 5.0)


async def run(server: MadeUp, *faults: PlannedFault) -> ChaosResult:
    return await ChaosRun(server).run(OFFERS, faults)


def verdicts(result: ChaosResult) -> dict[str, StreamVerdict]:
    return {judged.offer.label: judged.verdict for judged in result.judged}


@VIRTUAL
async def test_result_has_all_streams_faults_and_the_last_request() -> None:
    server = MadeUp()
    result = await run(server, LEAVE, MOVE)
    found = verdicts(result)
    assert found.pop(OFFERS[0].label) is StreamVerdict.LEFT
    assert set(found) == {offer.label for offer in OFFERS[1:]} | {"chaos-probe"}
    assert set(found.values()) == {StreamVerdict.EXACT}
    assert {injected.fault.kind: injected.outcome for injected in result.injected} == {
        FaultKind.LEAVE: "left",
        FaultKind.MOVE: "committed",
    }
    assert is_good(result)


@VIRTUAL
async def test_single_changed_character_is_wrong() -> None:
    result = await run(MadeUp(wrong=OFFERS[2].label))
    assert verdicts(result)[OFFERS[2].label] is StreamVerdict.WRONG
    assert not is_good(result)


@VIRTUAL
async def test_irregular_end_is_silent() -> None:
    result = await run(MadeUp(silent=OFFERS[1].label))
    assert verdicts(result)[OFFERS[1].label] is StreamVerdict.SILENT
    assert not is_good(result)


@VIRTUAL
async def test_stream_without_an_end_is_cancelled_and_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PATIENCE_S", 0.02)
    result = await run(MadeUp())
    assert StreamVerdict.SILENT in verdicts(result).values()
    assert not is_good(result)


@VIRTUAL
async def test_slot_that_stays_leased_is_a_leak() -> None:
    result = await run(MadeUp(slots=1))
    assert result.leaks == ["replica a holds 1 staging slots", "replica b holds 1 staging slots"]
    assert not is_good(result)


@VIRTUAL
async def test_fault_without_a_victim_is_not_injected() -> None:
    result = await run(MadeUp(), PlannedFault(2.0, FaultKind.MOVE, 0.5), PlannedFault(0.0, FaultKind.SCHEDULER, 0.5))
    assert [injected.outcome for injected in result.injected] == [NOTHING, NOTHING]


@contextlib.contextmanager
def child() -> Iterator[int]:
    """A child process, as an engine's is of its replica."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


async def inject_into_child(kind: FaultKind, pid: int, lasts_s: float = 0.0) -> InjectedFault:
    """A replica that is the process `pid`, with one request, is struck."""
    server = MadeUp(pid=pid)
    server.hosts["its request"] = "a"
    watch = ClusterWatch(server)
    await watch.look()
    return await FaultInjector(server, watch, OpenStreams()).inject(PlannedFault(0.0, kind, 0.0, lasts_s))


async def test_killed_replica_is_reported_with_its_streams() -> None:
    with child() as pid:
        injected = await inject_into_child(FaultKind.KILL, pid)
        assert (injected.victim, injected.hit, injected.outcome) == ("a", ("its request",), "SIGKILL")
        assert await asyncio.to_thread(psutil.Process(pid).wait) == -signal.SIGKILL


async def test_stalled_replica_stops_and_continues() -> None:
    with child() as pid:
        striking = asyncio.create_task(inject_into_child(FaultKind.STALL, pid, lasts_s=0.5))
        await eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        assert (await striking).outcome == "SIGSTOP, SIGCONT"
        await eventually(lambda: psutil.Process(pid).status() != psutil.STATUS_STOPPED)


async def test_hanging_replica_is_killed_in_the_end() -> None:
    with child() as pid:
        assert (await inject_into_child(FaultKind.HANG, pid, lasts_s=0.1)).outcome == "SIGSTOP, SIGKILL"
        assert await asyncio.to_thread(psutil.Process(pid).wait) == -signal.SIGKILL


async def test_dead_process_is_no_victim() -> None:
    server = MadeUp()
    watch = ClusterWatch(server)
    with child() as pid:
        server.pid = pid
        await watch.look()
    injected = await FaultInjector(server, watch, OpenStreams()).inject(PlannedFault(0.0, FaultKind.KILL, 0.0))
    assert (injected.victim, injected.outcome) == ("", NOTHING)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.02)


async def test_process_without_a_replica_is_a_leak() -> None:
    server = MadeUp()
    watch = ClusterWatch(server)
    with child() as left:
        await watch.look()
        assert await watch.leaks(within_s=0.2) == []
        state = await server.state()
        # The replicas are other processes now; the child is left over from the old ones.
        for replica in state["replicas"]:
            replica["pids"] = [os.getppid()] * 3
        watch.processes.tree = lambda pid: []  # type: ignore[method-assign]
        assert f"process {left} belongs to no replica" in await watch.leaks(within_s=0.0)
    assert f"process {left} belongs to no replica" not in await watch.leaks(within_s=0.0)


async def test_state_from_before_the_look_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    server = MadeUp()
    old = await server.state()

    async def stale() -> dict[str, Any]:
        return old

    monkeypatch.setattr(server, "state", stale)
    assert await ClusterWatch(server).leaks(within_s=0.1) == ["the scheduler does not answer with a new state"]


# --- forced moves -------------------------------------------------------------------------------------

SHAPE = RoundShape(streams=3, at_once=3, prompt=(10, 20), output=(60, 80))


@VIRTUAL
async def test_round_moves_requests_between_replicas_until_they_end() -> None:
    server = MadeUp()
    seen: list[None] = []
    done = await Forcing(server, ClusterWatch(server), SHAPE, 1, calculated).round(1, 6, lambda: seen.append(None))
    assert (done.verdicts, done.bad, done.leaks) == (["exact"] * 3, [], [])
    assert len(done.moves) == len(seen) == 6
    assert {target for _, target in server.ordered} == {"a", "b"}


@VIRTUAL
async def test_round_compares_answers_with_the_expected_ones() -> None:
    async def other(offer: Offer) -> list[str]:
        return ["~" + undisturbed(offer.prompt, offer.output)]

    server = MadeUp()
    done = await Forcing(server, ClusterWatch(server), SHAPE, 1, other).round(1, 2)
    assert done.verdicts == ["wrong tokens"] * 3
    assert len(done.bad) == 3


@VIRTUAL
async def test_move_without_an_outcome_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.soak.forcing.MOVE_S", 0.3)
    server = MadeUp(stuck_moves=True)
    done = await Forcing(server, ClusterWatch(server), SHAPE, 1, calculated).round(1, 2)
    assert len(done.bad) == 2 and all("has no outcome" in line for line in done.bad)


# --- the soak -----------------------------------------------------------------------------------------


@pytest.fixture
def soaked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Runs the soak or its control on a fake server; returns its exit status and the lines of its file."""

    def run_it(*options: str, slots: int = 0) -> tuple[int, list[str]]:
        monkeypatch.setattr("benchmarks.soak.forcing.QUIET_S", 0.1)
        monkeypatch.setattr("asyncio.events.new_event_loop", VirtualLoop)
        monkeypatch.setattr(soak, "_servers", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(soak, "connect", lambda url: MadeUp(slots=slots, characters=60))
        out = tmp_path / ("control.jsonl" if "--control-of" in options else "soak.jsonl")
        monkeypatch.setattr(sys, "argv", ["soak", "--engine", "paced", "--out", str(out), *options])
        monkeypatch.chdir(tmp_path)
        status = soak.main()
        return status, out.read_text().splitlines()

    return run_it


def test_soak_continues_its_file(soaked: Callable[..., tuple[int, list[str]]]) -> None:
    first_status, first = soaked("--moves", "3")
    again_status, again = soaked("--moves", "3")
    more_status, more = soaked("--moves", "5")
    assert (first_status, again_status, more_status) == (0, 0, 0)
    assert again == first
    assert more[: len(first)] == first and len(more) > len(first)
    assert count_moves([json.loads(line) for line in more]) == 5


def test_soak_stops_at_a_leak(soaked: Callable[..., tuple[int, list[str]]]) -> None:
    status, lines = soaked("--moves", "500", slots=1)
    assert (status, len(lines)) == (1, 2)


def test_file_of_another_soak_is_unchanged(soaked: Callable[..., tuple[int, list[str]]]) -> None:
    _, before = soaked("--moves", "1")
    assert soaked("--moves", "1", "--seed", "5") == (2, before)


def test_control_serves_the_rounds_of_the_soak_and_moves_nothing(
    soaked: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, lines = soaked("--moves", "2", "--seed", "3")
    soaked("--moves", "4", "--seed", "3")
    capsys.readouterr()
    status, control = soaked("--control-of", "soak.jsonl")
    assert status == 0 and len(control) == 3
    assert json.loads(control[0])["setting"] == json.loads(lines[0])["setting"] | {"at_once": 0}
    served = [[json.loads(line)[name] for name in ("number", "verdicts", "moves")] for line in control[1:]]
    assert served == [[number, ["exact"] * 12, []] for number in (1, 2)]
    assert "in brackets: of the control, of 2 rounds" in capsys.readouterr().out
    assert soaked("--control-of", "soak.jsonl") == (0, control)


GROWING = """
import mmap, os
print(flush=True), input()
shared = mmap.mmap(-1, 50 << 20)  # anonymous and shared: a memory file for the kernel
shared[:] = bytes(1) * len(shared)
private = bytearray(os.urandom(1 << 20) * 30)
print(flush=True), input()
"""


def test_memory_counts_by_kind() -> None:
    """Of a bare interpreter: the libraries of this process are shared with others, and count more when those end."""
    command = [sys.executable, "-I", "-S", "-c", GROWING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as growing:
        assert growing.stdin is not None and growing.stdout is not None
        growing.stdout.readline()
        before = memory_mb(growing.pid)
        growing.stdin.write(b"\n")
        growing.stdin.flush()
        growing.stdout.readline()
        grown = {kind: mb - before[kind] for kind, mb in memory_mb(growing.pid).items()}
        growing.communicate(b"\n")
    assert 0.9 * 30 * 1.048576 < grown["anonymous"] < 45 and grown["file"] < 10
    assert grown["shared"] == pytest.approx(50 * 1.048576, rel=0.05)
