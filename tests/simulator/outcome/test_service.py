"""The level of service of a run, from recorded events."""

from dataclasses import replace

import pytest

from policies.cost.service import ServiceLevel
from policies.model import RequestId, Tokens
from policies.plan import Reason
from simulator.outcome.metrics import Window
from simulator.outcome.service import PlannedLevels, ServiceRecorder, parts, served, within
from simulator.workload.workload import Job

WINDOW = Window(100.0, 200.0)


def jobs(*arrivals_s: float) -> list[Job]:
    return [Job(RequestId(f"q{n}"), at_s, Tokens(10), Tokens(10)) for n, at_s in enumerate(arrivals_s)]


def recorder(firsts: dict[str, float] | None = None) -> ServiceRecorder:
    made = ServiceRecorder(lambda now: None, firsts={RequestId(q): at for q, at in (firsts or {}).items()})
    made.counted(0.0, 1)
    return made


def test_gpu_seconds_are_those_of_the_window() -> None:
    made = recorder()
    for now, gpus in ((90.0, 2), (150.0, 4), (190.0, 3), (250.0, 9)):
        made.counted(now, gpus)
    found = served(made, [], WINDOW, 300.0)
    assert found.gpu_seconds == 50 * 2 + 40 * 4 + 10 * 3
    assert (found.gpus_mean, found.gpus_peak) == (2.9, 4)
    assert list(within([(0.0, 1)], 5.0, 7.0)) == [(5.0, 7.0, 1)]


def test_machine_seconds_are_those_of_the_window_if_machines_are_counted() -> None:
    made = ServiceRecorder(lambda now: None)
    for now, gpus, machines in ((0.0, 8, 1), (150.0, 9, 2), (190.0, 8, 1)):
        made.counted(now, gpus, machines)
    assert served(made, [], WINDOW, 300.0).machine_seconds == 50 * 1 + 40 * 2 + 10 * 1
    assert served(recorder(), [], WINDOW, 300.0).machine_seconds is None


def test_first_tokens_count_by_the_arrival() -> None:
    arrivals = jobs(50.0, 100.0, 199.0, 200.0)
    found = served(recorder({"q0": 150.0, "q1": 101.0, "q2": 204.0, "q3": 290.0}), arrivals, WINDOW, 300.0)
    assert found.ttft_p50_s == 3.0
    assert found.ttft_p99_s == pytest.approx(4.96)
    assert found.unfinished == 0


def test_a_request_without_an_end_counts_with_its_wait() -> None:
    found = served(recorder({"q0": 120.0}), jobs(119.0, 150.0), WINDOW, 500.0)
    assert found.unfinished == 1
    assert found.ttft_p99_s == pytest.approx(0.99 * 350 + 0.01 * 1)


def test_the_times_between_tokens_are_weighted_with_the_tokens() -> None:
    made = recorder()
    for now, step_s, tokens in ((110.0, 0.02, 989.0), (120.0, 0.5, 11.0), (90.0, 9.0, 1e6), (205.0, 9.0, 1e6)):
        made.stepped(now, step_s, tokens)
    assert served(made, [], WINDOW, 300.0).itl_p99_s == pytest.approx(0.5)
    made.stepped(130.0, 0.02, 200.0)
    assert served(made, [], WINDOW, 300.0).itl_p99_s == pytest.approx(0.02)


def test_moves_of_the_window_count_by_reason() -> None:
    made = recorder()
    for now, reason in ((90.0, Reason.DRAIN), (110.0, Reason.DRAIN), (120.0, Reason.OVERLOAD), (130.0, Reason.DRAIN)):
        made.moves.append((now, reason))
    found = served(made, [], WINDOW, 300.0)
    assert (found.moves, found.moves_by_reason) == (3, {Reason.DRAIN: 2, Reason.OVERLOAD: 1})


def test_first_tokens_are_judged_by_the_level_of_their_class() -> None:
    arrivals = [
        replace(job, service_class=name) for job, name in zip(jobs(100.0, 110.0), ("chat", "batch"), strict=True)
    ]
    found = served(recorder({"q0": 101.0, "q1": 150.0}), arrivals, WINDOW, 300.0)
    assert found.ttft_p99_by_class_s == {"batch": 40.0, "chat": 1.0} and found.ttft_p99_s == pytest.approx(39.61)
    for levels, kept in (
        (PlannedLevels(ServiceLevel(2.0)), {"batch": False, "chat": True}),
        (PlannedLevels(ServiceLevel(2.0), {"batch": ServiceLevel(60.0)}), {"batch": True, "chat": True}),
        (PlannedLevels(ServiceLevel(60.0), {"chat": ServiceLevel(0.5)}), {"batch": True, "chat": False}),
    ):
        assert found.kept_by_class(levels) == kept and found.keeps(levels) is all(kept.values())
    one = served(recorder({"q0": 101.0}), jobs(100.0), WINDOW, 300.0)
    assert one.ttft_p99_by_class_s == {} and one.kept_by_class(PlannedLevels(ServiceLevel(2.0))) == {"default": True}


def test_times_between_tokens_are_those_of_the_strictest_class() -> None:
    made = recorder({"q0": 104.0})
    made.stepped(110.0, 0.5, 1.0)
    found, whole = served(made, jobs(100.0), WINDOW, 300.0), ServiceLevel(4.0, 0.6)
    assert [found.keeps(PlannedLevels(whole, {"chat": ServiceLevel(9.0, itl_s)})) for itl_s in (0.5, 0.4)] == [
        True,
        False,
    ]


def test_a_window_is_divided_into_parts_of_five_minutes() -> None:
    assert parts(Window(100.0, 200.0)) == [Window(100.0, 200.0)]
    assert parts(Window(60.0, 800.0)) == [Window(60.0, 360.0), Window(360.0, 800.0)]


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        (ServiceLevel(4.0, 0.5), True),
        (ServiceLevel(3.9, 0.5), False),
        (ServiceLevel(4.0, 0.49), False),
        (ServiceLevel(itl_p99_s=0.5), True),
    ],
)
def test_both_times_decide_whether_the_level_is_kept(level: ServiceLevel, kept: bool) -> None:
    made = recorder({"q0": 104.0})
    made.stepped(110.0, 0.5, 1.0)
    found = served(made, jobs(100.0), WINDOW, 300.0)
    assert found.keeps(PlannedLevels(level)) is kept
    empty = served(recorder(), [], WINDOW, 300.0)
    assert (empty.ttft_p99_s, empty.itl_p99_s) == (None, None)
