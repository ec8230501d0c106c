"""Costs corrected by what a live system measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from policies.cost.steps import PrefillChunk
from policies.model import Tokens
from simulator.costs.costs import IDEAL, Costs
from simulator.costs.measurements import DecodeTime, Measurements, PrefillTime, TransferTime, calibrated, overlay
from simulator.costs.steps import StepTimes
from simulator.errors import BadInput
from tests.simulator.physics import COMPUTE, MIGRATION

COSTS = Costs("before", slots=False, compute=replace(COMPUTE, overhead_s=0.001), migration=MIGRATION)


def test_nothing_measured_changes_nothing() -> None:
    assert overlay(COSTS, Measurements()) == COSTS


def test_the_start_up_time_is_the_median() -> None:
    assert overlay(IDEAL, Measurements(startup_s=(29.0, 90.0, 31.0))).startup_s == 31.0


def test_links_are_corrected_where_they_were_measured() -> None:
    sizes = (1024, 10**6, 10**7)
    timings = tuple(TransferTime("inter", size, 0.001 + size / 5e6) for size in sizes)
    migration = overlay(COSTS, Measurements(links=timings)).migration
    assert migration
    assert migration.intra == MIGRATION.intra
    assert (migration.inter.bytes_per_s, migration.inter.latency_s) == pytest.approx((5e6, 0.001), rel=0.01)


def test_step_times_agree_with_measurements() -> None:
    decode = tuple(DecodeTime(b, t, 0.005 + 0.001 * b + 1e-6 * t) for b in (1, 4, 16) for t in (1000, 5000, 9000))
    prefill = tuple(PrefillTime(n, 0.03 + 0.002 * n) for n in (50, 150, 5000))
    compute = overlay(COSTS, Measurements(prefill, decode)).compute
    assert compute
    times = StepTimes(compute, 1.0)
    assert compute.context_s == pytest.approx(1e-6)
    assert times.decode(4, 7000).step_s == pytest.approx(0.005 + 0.004 + 0.007, rel=1e-3)
    assert times.alone(Tokens(150), Tokens(1))[0] == pytest.approx(0.33, rel=1e-3)
    assert max(tokens for tokens, _ in compute.linear) == 150


def test_decodes_alone_leave_the_prefills_as_they_were() -> None:
    decode = (DecodeTime(1, 100, 0.006), DecodeTime(8, 100, 0.007))
    compute = overlay(COSTS, Measurements(decode=decode)).compute
    assert compute
    before, after = StepTimes(COSTS.compute, 1.0), StepTimes(compute, 1.0)
    assert after.decode(8, 0.0).step_s == pytest.approx(0.007)
    assert after.prefill(0, 0.0, [PrefillChunk(180, 0)]) == pytest.approx(
        before.prefill(0, 0.0, [PrefillChunk(180, 0)])
    )


@pytest.mark.parametrize(
    ("measured", "complaint"),
    [
        (Measurements(decode=(DecodeTime(1, 1, 0.1),)), "no step times"),
        (Measurements(links=(TransferTime("intra", 1, 1.0),)), "no links"),
    ],
)
def test_a_part_that_the_costs_lack_cannot_be_corrected(measured: Measurements, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        overlay(IDEAL, measured)


@pytest.mark.parametrize(
    ("measured", "complaint"),
    [
        (Measurements(prefill=(PrefillTime(5000, 1.0),)), "no prompt of at most 200 tokens"),
        (Measurements(decode=(DecodeTime(1, 1, 0.0001),)), "less than their overhead"),
        (Measurements(links=(TransferTime("intra", 1000, 1.0),)), "no transfer of more than 65536 bytes"),
    ],
)
def test_useless_measurements_are_refused(measured: Measurements, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        overlay(COSTS, measured)


def test_a_file_of_measurements(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(
        json.dumps({"startup_s": [12.0], "decode": [{"requests": 1, "context_tokens": 9, "seconds": 0.02}]})
    )
    assert calibrated(COSTS, path).startup_s == 12.0


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"startup": [1]}, "startup: Unexpected"),
        ({"links": [{"scope": "outer", "bytes": 1, "seconds": 1.0}]}, "links.0.scope"),
        ({"decode": [{"requests": 0, "context_tokens": 1, "seconds": 1.0}]}, "decode.0.requests"),
        ({"prefill": [{"tokens": 5000, "seconds": 1.0}]}, "cannot be used"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: object, complaint: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=complaint):
        calibrated(COSTS, path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Cannot read the measurements"):
        calibrated(COSTS, tmp_path / "none.json")
