"""Statistics of records and samples."""

from app.client.documents import ReplicaDocument, RequestDocument, StateDocument
from simulator.replay.measurements import (
    ReplayMeasurements,
    ReplaySample,
    ReplicaSample,
    movable_in,
    moved_between,
    sample_replica,
)
from simulator.replay.report import ReplaySetup, document
from simulator.replay.stream import Record, StreamFault, StreamOutcome
from simulator.replay.summary import Distribution, Tally, group_migrations, quantiles, summarize, tally
from simulator.replay.text import render
from simulator.replay.trace import LengthScaling, TraceRequest, TraceWindow

ARRIVAL = TraceRequest(0, 0.0, 10, 4)


def record(outcome: StreamOutcome = StreamOutcome.OK, *chunks_s: float, tokens: int | None = None) -> Record:
    """A request sent after 1 s that ended after 5 s."""
    return Record(ARRIVAL, 1.0, 5.0, chunks_s, tokens, outcome)


def state(*requests: RequestDocument) -> StateDocument:
    """One replica."""
    replica = ReplicaDocument("a", "RUNNING", "n", 50, 200, 0, requests)
    return StateDocument(0.0, "act", None, None, None, (), (replica,))


def request(name: str, hop: int = 0, movable: bool = True, phase: str = "decode") -> RequestDocument:
    return RequestDocument(name, "", 10, phase, hop, movable)


def test_quantiles_are_interpolated() -> None:
    assert quantiles([5.0, 1.0, 2.0, 3.0]) == Distribution(4, 2.75, 2.5, 3.0 + 2.0 * 0.97, 5.0)


def test_no_values_have_no_distribution() -> None:
    assert quantiles([]) is None


def test_requests_are_counted_by_outcome_and_rates_taken_over_the_whole_span() -> None:
    summary = summarize([record(outcome, tokens=6) for outcome in StreamOutcome], [])
    assert (summary.ok, summary.broken, summary.failed, summary.cancelled) == (1, 1, 1, 1)
    assert (summary.duration_s, summary.requests_per_s, summary.output_tokens_per_s) == (4.0, 0.25, 6.0)


def test_latencies_are_counted_from_sending_and_gaps_are_not_divided_by_tokens() -> None:
    summary = summarize([record(StreamOutcome.OK, 1.5, 3.5, tokens=8)], [])
    assert summary.ttft_s == Distribution(1, 0.5, 0.5, 0.5, 0.5)
    assert summary.gap_s == Distribution(1, 2.0, 2.0, 2.0, 2.0)
    assert summary.tokens_per_chunk == 4.0
    assert summary.send_lag_s == Distribution(1, 1.0, 1.0, 1.0, 1.0)


def test_only_whole_answers_have_an_end_to_end_time() -> None:
    assert summarize([record(StreamOutcome.BROKEN, 2.0)], []).total_s is None


def test_without_a_count_of_tokens_chunks_are_counted() -> None:
    summary = summarize([record(StreamOutcome.OK, 2.0, 3.0)], [])
    assert (summary.output_tokens, summary.tokens_per_chunk) == (2, None)


def test_a_replay_without_requests_has_a_summary() -> None:
    assert summarize([], []).requests_per_s == 0.0


def test_only_running_replicas_count_for_kv_use() -> None:
    replicas = (ReplicaSample("a", "RUNNING", 50, 200, 1), ReplicaSample("b", "STARTING", 0, 0, 0))
    summary = summarize([], [ReplaySample(0.0, 1, 0, 0, replicas=replicas), ReplaySample(1.0, 1, 0, 0)])
    assert summary.kv_used_percent == Distribution(1, 25.0, 25.0, 25.0, 25.0)
    assert summary.running_replicas == Distribution(1, 1.0, 1, 1, 1)


def test_faults_are_tallied_with_the_first_message_of_each_kind() -> None:
    faults = [StreamFault("a", "1"), StreamFault("b", "2"), StreamFault("b", "3")]
    assert tally(faults) == (Tally("b", 2, "2"), Tally("a", 1, "1"))


def test_migrations_are_grouped_by_path_and_outcome() -> None:
    done = {"path": "kv", "outcome": "committed", "bytes": 5, "pause_s": 0.5}
    groups = group_migrations([done, done, {"path": "kv", "outcome": None, "state": "COPY", "pause_s": None}])
    assert [(one.outcome, one.count, one.bytes) for one in groups] == [("COPY", 1, 0), ("committed", 2, 10)]
    assert groups[0].pause_s is None
    assert groups[1].pause_s == Distribution(2, 0.5, 0.5, 0.5, 0.5)


def test_waiting_moving_and_immovable_requests_are_not_movable() -> None:
    seen = state(
        request("r1"), request("r2", movable=False), request("r3", phase="waiting"), request("r4", phase="moving")
    )
    assert movable_in(seen) == ("r1",)
    assert sample_replica(seen.replicas[0]) == ReplicaSample("a", "RUNNING", 50, 200, 4)


def test_a_higher_hop_is_a_move_but_a_new_request_is_not() -> None:
    before = state(request("r1", hop=1), request("r2"))
    after = state(request("r1", hop=2), request("r2"), request("r3", hop=1))
    assert moved_between(before, after) == 1


def test_an_empty_report_can_be_printed() -> None:
    setup = ReplaySetup("t", "u", "m", TraceWindow(1), LengthScaling())
    text = render(document(setup, [ARRIVAL], ReplayMeasurements((), interrupted=True)))
    assert "Interrupted after 0 of 1 requests." in text
