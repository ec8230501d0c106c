"""One engine: lockstep, chunked prefill, memory, preemption."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.world.engine import Memory, SimulatedEngine
from simulator.world.live import Live, Stage
from tests.counts import scaled
from tests.simulator.physics import COMPUTE, engine, live, run


def over(machine: SimulatedEngine, now: float = 0.0) -> dict[str, float]:
    """When each request ends."""
    return {str(each.id): time for time, happened in run(machine, now=now) for each in happened.over}


def test_a_request_decodes_at_the_set_rate() -> None:
    machine, one = engine(rate=10.0), live("a", output=50)
    machine.add(one)
    assert over(machine) == {"a": 5.0}
    assert (one.first_token_s, one.longest_gap_s) == pytest.approx((0.1, 0.1))


def test_requests_end_when_each_has_its_tokens() -> None:
    machine = engine()
    for name, output in ("a", 30), ("b", 10), ("c", 20):
        machine.add(live(name, output=output))
    assert over(machine) == {"a": 3.0, "b": 1.0, "c": 2.0}


def test_a_request_that_joins_later_counts_from_then() -> None:
    machine, late = engine(), live("late", output=20)
    machine.add(live("early", output=20))
    machine.settle(0.0)
    machine.add(late)
    machine.settle(0.55)
    assert late.tokens(1.05) == pytest.approx(105)
    assert over(machine, 1.05) == {"early": 2.0, "late": 2.55}


@pytest.mark.parametrize("batch", [1, 99, 150, 190])
def test_a_larger_batch_ends_later_as_its_steps_take_longer(batch: int) -> None:
    machine = engine(capacity=10**6, compute=replace(COMPUTE, prefill=False))
    for number in range(batch):
        machine.add(live(f"r{number}", output=100))
    step_s = 0.01 + 0.001 * max(0, batch - 100)
    assert list(over(machine).values()) == pytest.approx([100 * step_s] * batch)


def test_context_slows_decoding_down_as_it_grows() -> None:
    machine = engine(capacity=10**6, compute=replace(COMPUTE, prefill=False, context_s=1e-5))
    machine.add(live("a", prompt=1000, output=1000))
    # The steps take 10 ms and 10 us for each of 1,000 to 2,000 tokens.
    assert over(machine) == {"a": pytest.approx(10.0 + 15.0)}


def test_a_prompt_is_prefilled_in_chunks_and_ends_with_a_token() -> None:
    machine, one = engine(compute=COMPUTE), live("a", prompt=500, output=2)
    machine.add(one)
    assert over(machine) == {"a": pytest.approx(0.11 + 0.11 + 0.01 + 0.01)}
    assert one.first_token_s == pytest.approx(0.23)


def test_prefills_queue_and_share_the_last_step_of_the_first() -> None:
    machine, first, second = engine(compute=COMPUTE), live("a", prompt=300, output=1), live("b", prompt=100, output=1)
    machine.add(first)
    machine.add(second)
    assert over(machine) == {"a": pytest.approx(0.22), "b": pytest.approx(0.22)}


def test_a_prefill_slows_down_those_that_decode() -> None:
    machine, decoding = engine(compute=COMPUTE), live("a", prompt=50, output=21)
    machine.add(decoding)
    machine.settle(0.0)
    machine.settle(0.01)
    machine.add(live("b", prompt=398, output=1))
    # A token from the prefill, one from each of two long steps, eighteen more.
    ended = over(machine, 0.01)
    assert ended == {"b": pytest.approx(0.01 + 2 * 0.11), "a": pytest.approx(0.01 + 2 * 0.11 + 18 * 0.01)}
    assert decoding.longest_gap_s == pytest.approx(0.11)


def test_without_interference_they_do_not_notice() -> None:
    machine, decoding = engine(compute=replace(COMPUTE, interference=False)), live("a", prompt=50, output=21)
    machine.add(decoding)
    machine.settle(0.0)
    machine.settle(0.01)
    machine.add(live("b", prompt=398, output=1))
    ended = over(machine, 0.01)
    assert ended == {"a": pytest.approx(0.21), "b": pytest.approx(0.01 + 2 * 0.109)}
    assert decoding.longest_gap_s == pytest.approx(0.01)


def test_an_arrival_waits_for_the_end_of_the_step_under_way() -> None:
    machine = engine(compute=COMPUTE)
    machine.add(live("a", prompt=50, output=21))
    machine.settle(0.0)
    machine.settle(0.01)
    machine.add(live("b", prompt=90, output=1))
    # 91 tokens take a step of 10 ms, which begins when the second step of "a" has ended.
    assert over(machine, 0.013) == {"b": pytest.approx(0.02 + 0.01), "a": pytest.approx(0.21)}


def test_a_request_that_does_not_fit_is_no_reason_to_stop_after_every_step() -> None:
    machine = engine(capacity=200, compute=COMPUTE)
    machine.add(live("a", prompt=50, output=21))
    machine.add(live("b", prompt=180, output=1))
    assert [round(time, 9) for time, _ in run(machine, until=0.2)] == [0.0, 0.01]


def test_the_step_under_way_yields_a_token_of_a_frozen_request() -> None:
    machine, one = engine(compute=COMPUTE), live("a", prompt=50, output=21)
    machine.add(one)
    machine.settle(0.0)
    machine.settle(0.01)
    machine.freeze(one, 0.013)
    assert one.held == 52
    assert one.stopped_s == pytest.approx(0.02)


@pytest.mark.parametrize(("now", "ends"), [(0.205, True), (0.195, False)])
def test_a_request_may_end_with_the_step_under_way(now: float, ends: bool) -> None:
    machine, one = engine(compute=COMPUTE), live("a", prompt=50, output=21)
    machine.add(one)
    machine.settle(0.0)
    machine.settle(0.01)
    assert machine.ends_with_step(one, now) is ends


# --- memory ---------------------------------------------------------------------------------------------


def test_preemptions_are_between_two_steps_and_leave_whole_tokens() -> None:
    machine = engine(capacity=111, compute=COMPUTE)
    old, young = live("old", prompt=50, output=40), live("young", prompt=40, output=20)
    for each in old, young:
        machine.add(each)
    # After the prefill 92 tokens; nine steps later a token is free, and the next step needs two.
    history = run(machine, until=0.1)
    assert [(round(time, 9), [each.id for each in h.preempted]) for time, h in history][-1] == (0.1, ["young"])
    assert young.held == 50


def test_the_youngest_is_preempted_when_memory_is_full() -> None:
    machine = engine(capacity=1000)
    old, young = live("old", prompt=500, output=400), live("young", prompt=400, output=100)
    for each in old, young:
        machine.add(each)
    happened = dict(run(machine, until=5.0))
    # Two requests grow by 20 tokens per second together, from 900.
    assert [each.id for each in happened[5.0].preempted] == ["young"]
    assert (young.stage, young.held, young.preemptions) == (Stage.WAITING, 450, 1)
    assert old.tokens(6.0) == 560


def test_a_preempted_request_is_prefilled_again_with_all_that_it_had() -> None:
    machine = engine(capacity=1000, compute=replace(COMPUTE, decode=False), rate=10.0)
    old, young = live("old", prompt=500, output=100), live("young", prompt=440, output=100)
    for each in old, young:
        machine.add(each)
    run(machine, until=5.0)
    had = young.held
    history = run(machine, now=5.0)
    [again] = [time for time, happened in history for each in happened.decoding if each is young]
    [freed] = [time for time, happened in history for each in happened.over if each is old]
    # It waits for the other one to end; its prompt and what it had produced are then computed in three steps.
    assert 440 < had < 500
    assert again == pytest.approx(freed + 2 * 0.11 + 0.01)
    assert (young.preemptions, young.stage) == (1, Stage.OVER)


def test_preemption_costs_only_the_wait_where_prefill_is_for_nothing() -> None:
    machine = engine(capacity=100, rate=10.0)
    old, young = live("old", prompt=50, output=40), live("young", prompt=30, output=20)
    machine.add(old)
    machine.add(young)
    ends = over(machine)
    assert ends == {"old": 4.0, "young": 5.0}
    assert young.stalled_s == young.longest_gap_s == 3.0


def test_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    machine = engine(capacity=100)
    for name, prompt in ("running", 60), ("large", 50), ("small", 10):
        machine.add(live(name, prompt=prompt, output=10))
    decoding = {str(each.id): time for time, happened in run(machine) for each in happened.decoding}
    assert decoding == {"running": 0.0, "large": 1.0, "small": 1.0}


def test_a_preempted_request_waits_before_those_that_never_ran() -> None:
    machine = engine(capacity=100)
    for name, prompt in ("old", 50), ("young", 30), ("never ran", 30):
        machine.add(live(name, prompt=prompt, output=40))
    run(machine, until=1.0)
    assert [str(each.id) for each in machine.scheduler.waiting] == ["young", "never ran"]


def test_a_request_is_admitted_only_if_all_get_on() -> None:
    machine = engine(capacity=100)
    machine.add(live("a", prompt=50, output=10))
    machine.add(live("b", prompt=49, output=10))
    machine.settle(0.0)
    assert [str(each) for each in machine.scheduler.running] == ["a"]


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, True), (0.2, False)])
def test_the_watermark_stays_free_when_one_is_admitted(watermark: float, admitted: bool) -> None:
    machine = engine(capacity=100, compute=replace(COMPUTE, watermark=watermark, prefill=False))
    machine.add(live("a", prompt=50, output=1))
    machine.add(live("b", prompt=40, output=1))
    machine.settle(0.0)
    assert (len(machine.scheduler.running) == 2) is admitted


def test_promised_room_goes_before_anyone_is_preempted() -> None:
    machine, one = engine(capacity=100), live("a", prompt=50, output=50)
    machine.add(one)
    machine.settle(0.0)
    assert machine.reserve(live("coming").id, 40.0, 0.0)
    assert not machine.reserve(live("more").id, 11.0, 0.0)
    machine.settle(0.0)
    history = dict(run(machine))
    assert [str(each) for each in history[1.0].refused] == ["coming"]
    assert one.preemptions == 0


def test_room_that_is_secured_is_not_withdrawn() -> None:
    machine, one = engine(capacity=100), live("a", prompt=50, output=50)
    machine.add(one)
    machine.settle(0.0)
    machine.reserve(live("coming").id, 40.0, 0.0)
    machine.secure(live("coming").id)
    assert dict(run(machine, until=1.0))[1.0].preempted == [one]


def test_a_frozen_request_holds_its_blocks_until_they_are_released() -> None:
    machine, one = engine(capacity=100), live("a", prompt=50, output=50)
    machine.add(one)
    machine.settle(0.0)
    machine.freeze(one, 1.0)
    assert (one.stage, one.held, machine.free(9.0)) == (Stage.FROZEN, 60, 40)
    machine.release(one.id)
    assert machine.free(9.0) == 100


def test_a_request_arrives_with_its_kv_and_prefills_the_rest() -> None:
    machine, one = engine(capacity=1000, compute=COMPUTE), live("a", prompt=500, output=100)
    one.held = 550.0
    machine.reserve(one.id, 540.0, 0.0)
    machine.adopt(one, 10, 0.0)
    assert machine.free(0.0) == 450
    assert over(machine) == {"a": pytest.approx(0.01 + 49 * 0.01)}


def test_a_request_taken_over_goes_on_where_it_was() -> None:
    source, target, one = engine(compute=COMPUTE), engine(compute=COMPUTE), live("a", prompt=500, output=2)
    source.add(one)
    source.settle(0.0)
    source.settle(0.11)
    target.take_over(one, source, 0.11)
    assert (source.free(0.11), one.todo) == (1000, 300)
    assert over(target, 0.11) == {"a": pytest.approx(0.11 + 0.11 + 0.01 + 0.01)}


@pytest.mark.parametrize(
    ("memory", "first", "then"), [(Memory.STRICT, 1, 1), (Memory.SLOTS, 0, 1), (Memory.UNBOUNDED, 0, 0)]
)
def test_when_memory_is_enforced(memory: Memory, first: int, then: int) -> None:
    machine = engine(capacity=100, memory=memory)
    young = live("young", prompt=30, output=50)
    machine.add(live("old", prompt=40, output=50))
    machine.add(young)
    run(machine, until=3.0)
    machine.settle(3.0)
    assert young.preemptions == first
    machine.settle(3.0, decided=True)
    assert young.preemptions == then


def test_in_slots_a_full_replica_is_well() -> None:
    machine, one = engine(capacity=100, memory=Memory.SLOTS), live("a", prompt=50, output=70)
    machine.add(one)
    machine.settle(0.0)
    machine.settle(5.0, decided=True)
    assert (machine.free(5.0), one.preemptions) == (0, 0)


Requests = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 100)), min_size=1, max_size=12)


@settings(max_examples=scaled(120), deadline=None)
@given(Requests, st.booleans())
def test_every_request_ends_once_with_all_its_tokens_within_memory(sizes: list[tuple[int, int]], costs: bool) -> None:
    machine = engine(capacity=500, compute=replace(COMPUTE, context_s=1e-5) if costs else None)
    lives: list[Live] = [live(f"r{n}", prompt, output, n) for n, (prompt, output) in enumerate(sizes)]
    for each in lives:
        machine.add(each)
    ended = []
    for time, happened in run(machine):
        ended += happened.over
        assert machine.free(time) >= -len(lives)
    assert sorted(each.order for each in ended) == [each.order for each in lives]
    assert all(each.held == each.job.prompt + each.job.output for each in ended)
    assert machine.free(1e6) == pytest.approx(500)


# --- what migrations bring --------------------------------------------------------------------------------


def test_arriving_blocks_are_loaded_in_the_next_whole_step() -> None:
    machine = engine(compute=COMPUTE)
    assert machine.load_s(0.0) == pytest.approx(0.01)
    machine.add(live("a", prompt=200))
    machine.settle(0.0)
    assert machine.load_s(0.03) == pytest.approx(0.08 + 0.01), "the prefill's step ends at 0.11 s"
    machine.settle(0.11)
    assert machine.load_s(0.133) == pytest.approx(0.007 + 0.01, abs=1e-6)
    assert machine.load_s(0.13) == pytest.approx(0.01, abs=1e-6), "between two steps"


def test_where_steps_are_not_modelled_loads_take_none() -> None:
    machine = engine()
    machine.add(live("a"))
    machine.settle(0.0)
    assert machine.load_s(0.05) == 0.0


def test_a_request_that_was_moved_joins_the_end_of_the_queue() -> None:
    machine, moved = engine(compute=COMPUTE), live("moved", prompt=100, output=50)
    machine.add(live("runs", prompt=500, output=100))
    machine.add(live("waits", prompt=600, output=10))
    machine.settle(0.0)
    assert machine.reserve(moved.id, 100.0, 0.0)
    machine.secure(moved.id)
    machine.receive(moved, 5)
    machine.settle(0.0)
    assert [each.id for each in machine.scheduler.waiting] == ["waits", "moved"]
    assert machine.free(0.0) == 500, "its promise has been kept"
    happened = [[each.id for each in settled.prefilling] for _, settled in run(machine)]
    assert ["waits", "moved"] in happened


def test_waiting_requests_are_admitted_in_the_order_of_their_turns() -> None:
    machine = engine(capacity=201)
    for name, turn in ("first", -1.0), ("late", 5.0), ("early", 2.0), ("later", 5.0):
        machine.add(replace(live(name, output=10), turn=turn))
    order = sorted(over(machine).items(), key=lambda item: item[1])
    assert [name for name, _ in order] == ["first", "early", "late", "later"]


@pytest.mark.parametrize(("turns", "preempted"), [((0.0, 0.0), "young"), ((9.0, 3.0), "old"), ((3.0, 9.0), "young")])
def test_the_last_in_turn_is_preempted_and_of_equals_the_youngest(turns: tuple[float, float], preempted: str) -> None:
    machine = engine(capacity=260)
    for name, turn in zip(("old", "young"), turns, strict=True):
        machine.add(replace(live(name, output=100), turn=turn))
        machine.settle(0.0)
    happened = [each for _, settled in run(machine) for each in settled.preempted]
    assert {each.id for each in happened} == {preempted}
