"""What is learned from one observation after another."""

from dataclasses import replace
from math import inf

import pytest

from policies.cost.fit import LEAST_PREFILLED, StepTotals
from policies.cost.steps import PrefillChunk, StepCosts, proportional
from policies.decision.deciding import SchedulerMemory, decide
from policies.decision.experience import (
    FIRST_GUESS_STARTUP_S,
    FIRST_GUESS_TOKENS_PER_S,
    FIRST_GUESS_WAKE_S,
    REMEMBERED,
    Experience,
    Lead,
)
from policies.decision.limits import Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Observation
from policies.model import SOLE_POOL, ReplicaId
from tests.policies.decision.observed import Drawn, Watcher, observed


def experience(*seen: Drawn) -> Experience:
    made = Watcher(PoolMemory(Terms(mode=Mode.OFF)))
    for drawn in seen:
        made.observe(drawn)
    return made.memory.learned.experience


def test_before_anything_was_seen_it_guesses() -> None:
    made = experience()
    assert (made.decode_rate, made.startup_s, made.lead_s) == (FIRST_GUESS_TOKENS_PER_S, FIRST_GUESS_STARTUP_S, 2.0)


def test_growth_is_what_decoding_requests_have_gained() -> None:
    made = experience(observed("a: p10 q20 r30?"), observed("a: p18 q32 r30?", 2.0))
    assert made.decode_rate == 5.0


def test_growth_follows_slowly() -> None:
    made = experience(observed("a: p10"), observed("a: p20", 1.0), observed("a: p50", 2.0))
    assert made.decode_rate == pytest.approx(0.8 * 10 + 0.2 * 30)


@pytest.mark.parametrize("second", ["a: q50", "a:", "a: p50?"], ids=["another request", "none", "queued"])
def test_what_does_not_decode_in_both_says_nothing(second: str) -> None:
    assert experience(observed("a: p10"), observed(second, 1.0)).decode_rate == FIRST_GUESS_TOKENS_PER_S


def test_a_start_lasts_until_the_replica_runs() -> None:
    made = experience(observed("a*:"), observed("a*:", 5.0), observed("a:", 12.0), observed("a:", 20.0))
    assert made.startup_s == 12.0


def test_the_wait_for_memory_is_no_part_of_a_start() -> None:
    memory = SchedulerMemory(Terms(mode=Mode.OFF))
    watcher, a = Watcher(memory.pool(SOLE_POOL)), ReplicaId("a")
    for now, drawing, waiting in ((0.0, "a*:", (a,)), (4.0, "a*:", (a,)), (5.0, "a*:", ()), (12.0, "a:", ())):
        report = watcher.report(observed(drawing, now))
        report = replace(report, pool=replace(report.pool, deployment=SOLE_POOL))
        decide(memory, Observation(now, (report,), waiting=waiting))
    assert memory.pool(SOLE_POOL).learned.experience.startup_s == 12.0 - 4.0


def test_of_several_starts_the_median_counts() -> None:
    made = experience(
        observed("a*: | b*: | c*:"),
        observed("a: | b*: | c*:", 10.0),
        observed("a: | b: | c*:", 11.0),
        observed("c:", 99.0),
    )
    assert made.startup_s == 11.0


def test_a_start_that_came_to_nothing_is_none() -> None:
    assert experience(observed("a*:"), observed("", 1.0), observed("a:", 2.0)).startup_s == FIRST_GUESS_STARTUP_S


def test_wakes_are_learned_apart_from_starts() -> None:
    made = experience(observed("a*: | b%:"), observed("a*: | b&:", 5.0), observed("a: | b:", 7.0))
    assert (made.startup_s, made.wake_s) == (7.0, 2.0)
    waking = experience(observed("a%:"), observed("a&:", 1.0))
    assert waking.wake_s == FIRST_GUESS_WAKE_S and waking.awaits_start(1.5) and not waking.awaits_start(20.0)


def test_before_any_move_the_lead_is_two_epochs() -> None:
    assert Lead(2.0).seconds == 4.0


def test_nine_of_ten_moves_are_within_the_lead() -> None:
    lead = Lead(1.0)
    for took in (5, 1, 2, 3, 4, 6, 7, 8, 9, 100):
        lead.observe(took)
    assert lead.seconds == 2.0 + 9


def test_old_moves_are_forgotten() -> None:
    lead = Lead(1.0)
    for took in [50.0] * REMEMBERED + [0.5] * REMEMBERED:
        lead.observe(took)
    assert lead.seconds == 2.5


PROMPT = [PrefillChunk(LEAST_PREFILLED, 0)]


def test_engine_steps_are_fitted_from_one_report_to_the_next() -> None:
    costs, totals = StepCosts(proportional(1e-4), 0.02), StepTotals()
    seen = []
    for now in range(9):
        totals = totals.add(costs.step_s(now + 1, 100), now + 1, 100, steps=30)
        if now == 1:
            totals = totals.add(costs.step_s(0, 0, PROMPT), 0, 0, PROMPT)
        drawn = observed("a: p10 | b: q10", float(now))
        a, b = drawn.loads
        seen.append(replace(drawn, loads=(replace(a, steps=totals), b)))
    fitted = experience(*seen).steps.fitted
    assert fitted is not None and fitted.costs.step_s(20, 100) == pytest.approx(0.022, rel=1e-3)
    assert fitted.observations == 7, "of nine reports, seven epochs could be predicted"


def arriving(per_second: int, running: int, until: int = 600, tokens: int = 100) -> Experience:
    """So many requests of `tokens` tokens arrive in every second, and so many run."""
    made = Experience(1.0)
    for now in range(until):
        made.observe_running(running, float(now))
        for _ in range(per_second):
            made.observe_arrival(tokens, float(now))
    return made


def test_arrivals_count_over_five_minutes_and_at_first_over_one() -> None:
    assert arriving(2, 0, 600).arrival_rate(599.0) == pytest.approx(2.0)
    assert arriving(2, 0, 30).arrival_rate(30.0) == pytest.approx(1.0)
    assert arriving(2, 0, 300).arrival_rate(450.0) == pytest.approx(1.0, rel=0.01)
    assert Experience(1.0).arrival_rate(9.0) == 0.0


@pytest.mark.parametrize(
    ("running", "tokens", "share"),
    [
        (2, 400, 1 / 3),  # a second on a replica, and two before it: three times the room is served in time
        (20, 400, 10 / 12),
        (2, 1200, 1 / 3 * 800 / 1200),  # of the twelve in the queue, eight came in the last three seconds
        (2, 0, 1.0),
    ],
    ids=["short answers", "long answers", "a long queue", "no queue"],
)
def test_a_queue_needs_as_much_room_at_a_time_as_serves_it_within_the_wait(
    running: int, tokens: int, share: float
) -> None:
    assert arriving(2, running).queue_share(tokens, 2.0, 599.0) == pytest.approx(share, rel=0.02)


def test_a_queue_that_may_wait_for_ever_counts_as_a_whole() -> None:
    assert arriving(2, 2).queue_share(400, inf, 599.0) == 1.0
    assert Experience(1.0).queue_share(400, 2.0, 9.0) == 1.0
