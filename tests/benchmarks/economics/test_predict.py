"""The simulator on measured runs."""

import pytest

from benchmarks.economics.case import Conditions, default_pace
from benchmarks.economics.predict import (
    GONE_S,
    LISTED_S,
    compute_costs,
    costs_of,
    listed,
    predict,
    predictable,
    setup_of,
)
from policies.cost.steps import PrefillChunk
from policies.model import Bytes, Tokens
from policies.plan import Path
from simulator.costs.steps import StepTimes
from simulator.outcome.recorder import EpochSample, EventRecorder
from simulator.world.observer import Transfer, TransferOutcome
from tests.benchmarks.economics.made_up import CONDITIONS, case, looks, migration, run, served

PACE = default_pace()


@pytest.mark.parametrize(("decodes", "prefill"), [(1, 0), (16, 0), (64, 0), (0, 700), (10, 1000), (48, 2000)])
@pytest.mark.parametrize("dear", [{}, {"decode_s_per_seq": 0.001, "context_s": 1e-6, "attention_s": 1e-8}])
def test_step_times_equal_the_engines(decodes: int, prefill: int, dear: dict[str, float]) -> None:
    pace = PACE.model_copy(update=dear)
    times, chunks = StepTimes(compute_costs(pace), 1.0), [PrefillChunk(prefill, 0)] if prefill else []
    found = times.prefill(decodes, 5000.0, chunks) if prefill else times.decode(decodes, 5000.0).step_s
    assert found == pytest.approx(pace.costs.step_s(decodes, 5000.0, chunks))


def test_startups_and_moves_are_calibrated_by_the_runs() -> None:
    starting = looks({"a": "RUNNING", "b": "STARTING"}, {"a": "RUNNING", "b": "STARTING"}, {"b": "RUNNING"})
    moves = [migration(1.0), migration(2.0, "aborted", 9.0), migration(3.0, pause_s=0.0, path="tokens")]
    seen = [run(seen=starting, migrations=moves), run(case(repeat=1))]
    costs = costs_of(PACE, seen)
    assert costs.startup_s == 20.0 + LISTED_S
    assert costs.migration is not None
    assert costs.migration.handover_s == pytest.approx(0.02)
    # 0.18 s without the pause and three steps of 0.05 s, over two rounds and one
    assert costs.migration.intra.latency_s == pytest.approx(0.01)


def test_steps_of_the_target_are_no_costs_of_a_link() -> None:
    costs = costs_of(PACE, [run(migrations=[migration(1.0, duration_s=0.1)])])
    assert costs.migration is not None and costs.migration.intra.latency_s == 0.0


def test_replicas_are_counted_as_serve_lists_them() -> None:
    def epoch(now_s: float, gpus: int, opened: int = 0, closed: int = 0) -> EpochSample:
        return EpochSample(now_s, gpus, 0, 0, 0, 0, 0, 0, 0, opened=opened, closed=closed)

    counts = listed([epoch(1.0, 3, opened=2), epoch(2.0, 3), epoch(3.0, 2, closed=1)])
    assert counts == [(0.0, 1), (1.0 + LISTED_S, 3), (3.0 + GONE_S, 2)]


def test_a_move_that_was_put_off_is_none_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    def put_off(jobs: object, policy: object, setup: object, costs: object, recorder: EventRecorder) -> None:
        for outcome in (TransferOutcome.DEFERRED, TransferOutcome.REFUSED):
            recorder.transferred(40.0, transfer(outcome))
        recorder.epochs.append(EpochSample(0.0, 1, 0, 0, 0, 0, 0, 0, 0))

    monkeypatch.setattr("benchmarks.economics.predict.simulate", put_off)
    found = predict(run(), costs_of(PACE, [run()]))
    assert (found["migrations"], found["migrations_void"]) == (0, 1)


def transfer(outcome: TransferOutcome) -> Transfer:
    """A migration at 40 s that came to nothing."""
    return Transfer(Path.KV, Tokens(10), Bytes(0), 40.0, 40.0, 0.0, True, completed=False, outcome=outcome)


def test_startup_without_measurement_is_the_engines_setting() -> None:
    costs = costs_of(PACE, [run()])
    assert costs.startup_s == PACE.startup_s
    assert costs.migration is not None and costs.migration.handover_s == 0.0


def test_serve_is_not_predicted() -> None:
    runs = [run(case(variant)) for variant in ("mell", "serve", "worst_fit", "serve_quick")]
    assert [one.case.variant for one in predictable(runs)] == ["mell", "worst_fit"]


def test_the_way_to_the_engine_is_calibrated_by_the_quickest_first_tokens() -> None:
    alone_s = 0.05 + 800 / 8000
    requests = [served(20.0 + i, prompt=800, first_s=20.0 + i + alone_s + late) for i, late in enumerate((0.02, 0.05))]
    costs = costs_of(PACE, [run(requests=requests)])
    assert costs.ingress_s == pytest.approx(0.02, abs=1e-3)


def test_a_level_takes_the_place_of_slack_and_foresight() -> None:
    conditions = Conditions(slack=0.75, foresight_s=4.0, ttft_p99_s=2.0)
    setup = setup_of(case("mell_slo", conditions=conditions), costs_of(PACE, [run()]))
    assert setup.service == conditions.level
    assert (setup.limits.slack, setup.limits.foresight_s, setup.limits.linger_s) == (0.0, 0.0, 0.0)
    assert setup_of(case("mell", conditions=conditions), costs_of(PACE, [run()])).service is None


def test_setup_has_the_limits_of_the_case() -> None:
    conditions = Conditions(max_replicas=3, slack=0.75, foresight_s=4.0)
    costs = costs_of(PACE, [run()])
    unmoved = setup_of(case("worst_fit", conditions=conditions), costs)
    assert (unmoved.max_gpus, unmoved.limits.slack, unmoved.limits.foresight_s) == (3, 0.75, 4.0)
    assert unmoved.limits.moves_per_epoch == 0
    assert setup_of(case("mell"), costs).limits.moves_per_epoch is None
    assert unmoved.capacity == PACE.num_gpu_blocks_override * PACE.block_size


def test_single_request_is_predicted_exactly() -> None:
    lone = run(requests=[served(20.0, prompt=800, output=101, first_s=20.0 + 0.05 + 800 / 8000)])
    found = predict(lone, costs_of(PACE, [lone]))
    assert found["gpu_seconds"] == pytest.approx(CONDITIONS.seconds)
    assert found["ttft_p50"] == pytest.approx(0.050 + 800 / 8000)
    assert found["tpot_p50"] == pytest.approx(0.050 + 1 / 8000)
    assert found["gap_p99"] == pytest.approx(0.050 + 1 / 8000, abs=1e-4)
    assert (found["requests"], found["preemptions"], found["migrations"]) == (1, 0, 0)


def test_migration_needs_fewer_replicas_after_a_peak() -> None:
    due = [*range(30), *range(30, 110, 3)]
    requests = [served(float(at_s), prompt=2000, output=200 + 150 * (at_s % 5)) for at_s in due]
    found = {}
    for variant in ("mell", "worst_fit"):
        one = run(case(variant), requests=requests)
        found[variant] = predict(one, costs_of(PACE, [one]))
    assert 1 < (found["mell"]["replicas"] or 0) < 0.9 * (found["worst_fit"]["replicas"] or 0)
    # As live, a request that is queued is placed anew by a move of its tokens, whatever the budget.
    by_kv = {name: (one["migrations"] or 0) - (one["migrations_tokens"] or 0) for name, one in found.items()}
    assert by_kv["mell"] > 0 == by_kv["worst_fit"]


def test_requests_of_the_warm_up_are_simulated_and_not_counted() -> None:
    one = run(requests=[served(1.0), served(20.0), served(109.0), served(110.0)])
    assert predict(one, costs_of(PACE, [one]))["requests"] == 2
