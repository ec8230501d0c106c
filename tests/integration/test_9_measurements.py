"""The measurements for GPUs, in their short form on the CPU build: every step with servers yields its rows."""

from pathlib import Path

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.record import (
    EqualityRow,
    FailureRow,
    FaultRow,
    MemoryRow,
    MovesRow,
    NeighbourRow,
    PartRow,
    RunRecord,
    ServingRow,
    StartRow,
)
from tests.counts import LONG_ONLY
from tests.integration.conftest import Stage


@LONG_ONLY
def test_measurements_for_gpus_play_on_the_cpu(stage: Stage, tmp_path: Path) -> None:
    stage.clear()
    state, out = tmp_path / "state", tmp_path / "out"
    assert main(["--device", "cpu", "--short", "--state", str(state), "--out", str(out)]) == 0
    record = RunRecord.read(out / "results.jsonl")
    assert record.of(FailureRow) == [] and [row.outcome for row in record.of(PartRow)] == ["whole"]

    assert [(row.mode, row.figures["gaps"].n, row.failures) for row in record.of(MovesRow)] == [
        ("pre-copy", 1, []),
        ("tokens", 1, []),
    ]
    assert {(row.mode, row.role) for row in record.of(NeighbourRow)} <= {
        (mode, role) for mode in ("pre-copy", "tokens") for role in ("source", "target")
    }
    assert {row.figure for row in record.of(ServingRow)} >= {"tokens_per_s", "ttft_p50", "itl_p99"}
    compared = {(row.server, row.first, row.second): row for row in record.of(EqualityRow)}
    assert all(row.equal == row.streams for row in compared.values()), "float32 on a CPU repeats its texts"
    assert compared["Mell, shared", "cached", "moved by kv"].moved == 2
    assert ("vLLM's own", "cached", "resent") in compared
    (drain,) = record.of(FaultRow)
    assert drain.fault == "drain" and drain.broken == [] and drain.empty_s is not None
    assert {row.owner for row in record.of(MemoryRow)} >= {"replica 0", "engine core 0", "replica 1"}
    assert len(record.of(StartRow)) == 1

    assert len(list(out.iterdir())) <= 8
    assert "## Equality of text" in (out / "page.md").read_text()
