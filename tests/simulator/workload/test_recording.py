"""Requests and replicas out of the recording of a live scheduler."""

from pathlib import Path

import pytest

from deployments.scheduler.recorder import FileRecorder
from policies.cluster.changes import Arrival
from policies.cost.fit import StepTotals
from policies.cost.service import ServiceLevel
from policies.cost.steps import PrefillChunk
from policies.decision.limits import Terms
from policies.decision.observation import Observation, Pool, PoolReport, Resident, Status
from policies.decision.recording import Epoch, PlacedCall
from policies.model import SOLE_POOL, Phase, ReplicaId, ReplicaState, RequestId, RequestLoad, Tokens
from policies.paths.prices import Profile
from policies.precedence import Precedence, ServiceClass, ServiceClasses
from simulator.errors import BadInput
from simulator.workload.recording import is_recording, read_traffic
from simulator.workload.workload import Recorded

CHAT, CLASSES = Precedence("chat", 103.5), ServiceClasses({"chat": ServiceClass(1, ServiceLevel(2.0))})
A, OLD, NEW, LATE = ReplicaId("a"), RequestId("old"), RequestId("new"), RequestId("late")


def status(state: ReplicaState, steps: StepTotals) -> Status:
    return Status(A, state, "node", Tokens(1000), steps=steps, step_tokens=512)


def resident(request: RequestId, tokens: int) -> Resident:
    return Resident(A, RequestLoad(request, "", Tokens(tokens), Phase.DECODE, 1.0, 0))


def reports() -> list[PoolReport]:
    """An epoch per second. Steps take 10 ms, 1 ms per request, and 1 ms for ten prefilled tokens in every third."""
    totals = [StepTotals()]
    for decodes in range(1, 40):
        chunks = [PrefillChunk(Tokens(10), Tokens(0))] if decodes % 3 == 0 else []
        totals.append(totals[-1].add(0.01 + 0.001 * (decodes + len(chunks)), decodes, 0.0, chunks, steps=30))
    made = [
        PoolReport(Pool(SOLE_POOL), (status(ReplicaState.STARTING, totals[0]),)),
        PoolReport(Pool(SOLE_POOL), profiles={A: Profile("node", "c", 256.0)}),
        *(PoolReport(Pool(SOLE_POOL), (status(ReplicaState.RUNNING, total),)) for total in totals[1:]),
    ]
    made[4] = PoolReport(Pool(SOLE_POOL), made[4].replicas, requests=(resident(OLD, 70), resident(NEW, 110)))
    made[5] = PoolReport(Pool(SOLE_POOL), made[5].replicas, sizes={OLD: Tokens(90), NEW: Tokens(130)})
    made[6] = PoolReport(Pool(SOLE_POOL), made[6].replicas, gone=(NEW,), requests=(resident(LATE, 60),))
    return made


def recording(path: Path, waiting: tuple[ReplicaId, ...] = ()) -> Path:
    recorder = FileRecorder(path, Terms(classes=CLASSES))
    for number, report in enumerate(reports()):
        calls = {
            4: (
                PlacedCall(103.5, Arrival(NEW, Tokens(100), precedence=CHAT)),
                PlacedCall(103.6, Arrival(NEW, Tokens(100), precedence=CHAT), (A,)),
            ),
            6: (PlacedCall(105.5, Arrival(LATE, Tokens(50))),),
            7: (PlacedCall(106.5, Arrival(RequestId("short"), Tokens(8))),),
        }
        recorder.record(
            Epoch(calls.get(number, ()), Observation(100.0 + number, (report,), (), waiting if number == 1 else ()), {})
        )
    recorder.close()
    return path


def test_requests_have_their_arrivals_prompts_and_outputs(tmp_path: Path) -> None:
    traffic = read_traffic(recording(tmp_path / "epochs.jsonl"))
    # 30 tokens in the second between two reports, of two seconds in all, and half an epoch at 15 tokens per second.
    assert traffic.trace.rows == (
        Recorded(0.0, 100, 37.5, service_class="chat"),
        Recorded(2.0, 50, 10, service_class="default"),
        Recorded(3.0, 8, 1.0, service_class="default"),
    )
    assert traffic.trace.account is not None
    assert [(change.what, change.requests) for change in traffic.trace.account.changes] == [
        ("older than the recording: left out", 1),
        ("without a recorded end: counted as ended", 2),
    ]


def test_replicas_have_their_measurements(tmp_path: Path) -> None:
    found = read_traffic(recording(tmp_path / "epochs.jsonl")).replicas
    assert (found.capacity, found.startup_s, found.step_tokens, found.token_bytes) == (1000, 2.0, 512, 256.0)
    assert found.steps is not None and found.classes == CLASSES
    assert found.steps.step_s(10, 0.0) == pytest.approx(0.02, rel=0.05)


def test_the_wait_for_memory_is_no_part_of_a_start(tmp_path: Path) -> None:
    assert read_traffic(recording(tmp_path / "epochs.jsonl", (A,))).replicas.startup_s == 1.0


def test_a_recording_differs_from_a_trace_in_its_beginning(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n")
    lines = tmp_path / "trace.jsonl"
    lines.write_text('{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 3}\n')
    assert is_recording(recording(tmp_path / "e"))
    assert not any(is_recording(path) for path in (trace, lines, tmp_path / "none", tmp_path))


def test_a_recording_without_arrivals_is_refused(tmp_path: Path) -> None:
    recorder = FileRecorder(path := tmp_path / "epochs.jsonl", Terms())
    recorder.close()
    with pytest.raises(BadInput, match="contains no arrival of a request"):
        read_traffic(path)
    path.write_text("{}\n{broken\n")
    with pytest.raises(BadInput, match=r"cannot be read: .* line 2"):
        read_traffic(path)
