"""The live burst: simulated step times, the same bytes for all, and rows of what was seen."""

from dataclasses import replace

import pytest

from app.settings import Settings
from benchmarks.burst import CONTENDERS, HEAD, _live, pace_of, settings_of, simulated
from benchmarks.economics.predict import compute_costs
from benchmarks.kunserve.case import BLOCK, PairCase, PairContender
from benchmarks.kunserve.windows import PairWindow
from benchmarks.load import TimedStream
from benchmarks.servers import Rig, mell_config
from benchmarks.sharing.live import PlayedModels
from deployments.engine.pace import Pace
from policies.cost.steps import PrefillChunk

CASE = PairCase(PairContender.PAIRS, PairWindow("spikes", 1.25), count=2)


def test_engines_have_the_times_and_the_memory_of_the_simulated_model() -> None:
    pace, costs = Pace.model_validate(pace_of(CASE)), CASE.costs()
    assert costs.compute is not None and costs.migration is not None
    for batch, chunks in ((1, ()), (128, ()), (32, (PrefillChunk(480, 0),)), (0, (PrefillChunk(2000, 0),))):
        ours, theirs = (each.step_s(batch, 300 * batch, chunks) for each in (pace.costs, costs.compute.steps))
        assert ours == pytest.approx(theirs, rel=0.25)
    assert pace.num_gpu_blocks_override * BLOCK == CASE.capacity()
    gained = 2 * (pace.num_layers // 2) * pace.layer_mib / pace.block_mib
    assert gained * BLOCK == pytest.approx(CASE.gain(), rel=0.01)


def test_all_contenders_have_the_same_bytes() -> None:
    budgets = set()
    for contender in CONTENDERS:
        args = settings_of(replace(CASE, contender=contender))
        config = mell_config(7, 2, Rig(), (), {"engine": "paced", **args})
        settings = Settings.model_validate(config["applications"][0]["args"])
        budgets.add((settings.memory.budget_mib, settings.engine_kwargs["num_gpu_blocks_override"]))
        assert settings.pairing.mode == ("act" if contender is PairContender.PAIRS else "off")
    assert len(budgets) == 1


def test_rows_have_the_figures_of_a_run() -> None:
    streams = [TimedStream(sent=0.0, arrivals=[1.0 + number, 2.0 + number, 3.0 + number]) for number in range(4)]
    row = _live(CASE, PlayedModels("pairs", streams, 1), moves=2, preemptions=3, pairs=1)
    assert (row.ttft[0], row.tpot[0], row.requests, row.lost) == (3.0, 1000.0, 5, 1)
    assert row.text().split()[-4:] == ["1", "2", "3", "1"] and len(HEAD) == len(row.text())


def test_the_simulated_burst_is_one_of_kunserves() -> None:
    case = replace(CASE, window=PairWindow("spikes", 0.2), compute=compute_costs(Pace.model_validate(pace_of(CASE))))
    row = simulated(case)
    assert row.where == "simulated" and row.requests > 50 and row.lost == 0 and row.ttft == sorted(row.ttft)
