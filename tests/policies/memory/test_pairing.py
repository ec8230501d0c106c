"""Pairs of replicas: the memory that they share, when they form, when they end."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import HopCosts, StepCosts
from policies.memory.pairing import (
    HeldRequestSize,
    LayeredMemory,
    MemberLoad,
    Outlook,
    PairingTerms,
    PairSpeed,
    RecentDemand,
    even_layers,
    excess_moves,
    form,
    level_members,
    undo,
)
from policies.memory.plan import ModelMemory
from policies.model import Blocks, Bytes, ReplicaId, RequestId, Tokens

MODEL = LayeredMemory(ModelMemory(Bytes(4_000), Bytes(500), Bytes(0), Bytes(40), Blocks(1)), 10, Bytes(1_000))
"""Ten layers of 300 bytes, 1,000 bytes beside them, and blocks of 4 bytes per layer."""
SPEED = PairSpeed(ReplicaSpeed(StepCosts(((1, 0.02),), context_s=1e-5), 0.0, 1000), HopCosts(), Line(0.0, 1e-4))
TERMS = PairingTerms()
CALM = Outlook(0.0, 1.0, Tokens(100), 0.5)
GAIN = Tokens(500)


def load(number: int, used: float = 900.0, waiting: int = 200, node: str = "n", free: bool = True) -> MemberLoad:
    name = ReplicaId(f"r{number}")
    return MemberLoad(name, node, Tokens(1000), used, waiting, min(waiting, 100), waiting, 9, used, free_to_pair=free)


def running(number: int, *tokens: int) -> MemberLoad:
    held = tuple(HeldRequestSize(RequestId(f"r{number}-{i}"), Tokens(each)) for i, each in enumerate(tokens))
    own = load(number, sum(tokens), 0, free=False)
    return replace(own, movable=held, batch=len(tokens), context=float(sum(tokens)))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_pair_holds_the_blocks_of_both_in_half_of_the_layers() -> None:
    # Alone: (10,000 - 500 - 4,000) / 40 each. Paired: each has 10,000 - 500 - 2,500 bytes for blocks of 20 bytes.
    assert MODEL.blocks([Bytes(10_000)], [10]) == 137
    assert MODEL.blocks([Bytes(10_000)] * 2, [5, 5]) == 350


def test_the_member_with_the_least_room_for_its_layers_bounds_the_sum() -> None:
    assert MODEL.blocks([Bytes(10_000), Bytes(6_000)], [5, 5]) == (6_000 - 500 - 2_500) // 20
    assert MODEL.blocks([Bytes(10_000), Bytes(6_000)], [7, 3]) == min(6_400 // 28, 3_600 // 12)


@pytest.mark.parametrize("layers", [[5, 4], [10, 0], [6, 5]])
def test_every_layer_is_held_once(layers: list[int]) -> None:
    with pytest.raises(ValueError, match="10 layers"):
        MODEL.blocks([Bytes(10_000)] * 2, layers)


@given(st.sampled_from([2, 5, 10]), st.integers(6_000, 10**7), st.integers(0, 10**6))
def test_k_equal_members_have_their_sum_and_the_layers_of_all_but_one(size: int, budget: int, more: int) -> None:
    alone = MODEL.blocks([Bytes(budget)], [10])
    shared = MODEL.blocks([Bytes(budget)] * size, even_layers(10, size))
    dropped = (size - 1) * 3_000
    assert abs(shared - (size * (budget - 500 - 4_000) + dropped) // 40) <= 1
    assert shared >= size * alone
    assert MODEL.blocks([Bytes(budget + more)] * size, even_layers(10, size)) >= shared


@given(st.integers(1, 100), st.integers(1, 16))
def test_layers_are_divided_evenly(layers: int, size: int) -> None:
    found = even_layers(layers, size)
    assert sum(found) == layers and max(found) - min(found) <= 1


# --- forming ----------------------------------------------------------------------------------------------------------


def test_replicas_pair_when_demand_exceeds_all_pools() -> None:
    (pair,) = form([load(0), load(1)], GAIN, SPEED, CALM, TERMS)
    assert pair.members == ("r0", "r1")
    assert pair.paired_s < pair.whole_s


@pytest.mark.parametrize(
    ("pool", "outlook"),
    [
        ([load(0, waiting=50), load(1, waiting=50)], CALM),  # all of it fits
        ([load(0), load(1, used=500, waiting=0)], CALM),  # a move would do
        ([load(0), load(1)], replace(CALM, start_s=0.0)),  # a start is faster
        ([load(0), load(1, node="m")], CALM),  # no partner on the node
        ([load(0), load(1, free=False)], CALM),  # no partner without a group
    ],
)
def test_a_pair_is_the_last_rung(pool: list[MemberLoad], outlook: Outlook) -> None:
    assert form(pool, GAIN, SPEED, outlook, TERMS) == ()


def test_while_no_request_ends_the_queue_waits_for_a_start_or_for_a_pair() -> None:
    unending = replace(CALM, ends_per_s=0.0)
    assert form([load(0), load(1)], GAIN, SPEED, unending, TERMS)
    assert form([load(0), load(1)], GAIN, SPEED, replace(unending, start_s=30.0), TERMS) == ()
    assert form([load(0), load(1)], Tokens(0), SPEED, unending, TERMS) == ()


def test_the_outlook_is_that_of_the_last_seconds() -> None:
    demand = RecentDemand()
    for number in range(10):
        demand.arrived(RequestId(f"r{number}"), 100 + number, 0.0)
        demand.arrived(RequestId(f"r{number}"), 500, 0.1)
    assert demand.outlook([load(0, 500, 0), load(1, 500, 0)], 0.5).ends_per_s == 0.0
    demand.ended(RequestId("r0"), 1.0)
    demand.ended(RequestId("unknown"), 1.0)
    pool = [load(0, 1000, 0), load(1, 1000, 0)]
    found = demand.outlook(pool, 2.0, start_s=3.0)
    assert found.rising_per_s == pytest.approx(1000 / 1.5)
    assert (found.prompts_per_s, found.prompt) == (2.5, Tokens(104))
    assert found.ends_per_s == pytest.approx(1 / (1.5 * 18)) and found.start_s == 3.0
    demand.arrived(RequestId("late"), 100, 40.0)
    assert len(demand._prompts) == 1, "nothing grows while nobody asks"
    demand.outlook(pool, 60.0)
    later = demand.outlook(pool, 61.0)
    assert (later.rising_per_s, later.prompts_per_s, later.ends_per_s) == (0.0, 0.0, 0.0)


def test_the_first_ends_of_a_burst_do_not_stand_for_the_rest() -> None:
    # Every request decodes for 10 s, but for a tenth of them, which end after a second.
    demand = RecentDemand()
    for number in range(100):
        demand.arrived(RequestId(f"r{number}"), 10, 0.0)
    running = replace(load(0, 1000, 0), batch=100)
    demand.outlook([running], 0.0)
    for number in range(10):
        demand.ended(RequestId(f"r{number}"), 1.0)
    assert demand.outlook([running], 1.0).ends_per_s == pytest.approx(0.1)


def test_slower_pairs_that_do_not_hold_the_queue_do_not_form() -> None:
    # 300 tokens are missing, and 100 more a second later.
    pool, calm = [load(0, waiting=250), load(1, waiting=250)], replace(CALM, ends_per_s=0.05)
    rising, slow = replace(calm, rising_per_s=100.0), replace(SPEED, hop=HopCosts(0.02))
    assert form(pool, Tokens(300), slow, calm, TERMS) and form(pool, Tokens(400), slow, rising, TERMS)
    assert form(pool, Tokens(299), slow, calm, TERMS) == form(pool, Tokens(399), slow, rising, TERMS) == ()
    assert form(pool, Tokens(299), slow, calm, replace(TERMS, predicts=False))
    assert form(pool, Tokens(299), SPEED, calm, TERMS), "without hops, steps of a pair take as long, for more requests"


def test_an_exchange_that_takes_longer_than_the_queue_does_not_pay() -> None:
    slow = replace(SPEED, exchange=Line(0.0, 1e-2))
    assert form([load(0), load(1)], GAIN, slow, CALM, TERMS) == ()
    (pair,) = form([load(0), load(1)], GAIN, slow, CALM, replace(TERMS, predicts=False))
    assert pair.paired_s > pair.whole_s
    together = replace(SPEED, together=True)
    assert together.exchange_s([load(0), load(1)]) == SPEED.exchange_s([load(0), load(1)]) / 2 == pytest.approx(0.045)


def test_demand_counts_with_its_rise() -> None:
    pool = [load(0, waiting=50), load(1, waiting=50)]
    assert form(pool, GAIN, SPEED, CALM, TERMS) == ()
    assert form(pool, GAIN, SPEED, replace(CALM, rising_per_s=5_000.0), TERMS)


def test_as_few_pairs_form_as_cover_the_lack_those_with_the_least_kv_first() -> None:
    pool = [load(i, used, 100) for i, used in enumerate((990, 980, 970, 960))]
    (pair,) = form(pool, GAIN, SPEED, CALM, TERMS)
    assert pair.members == ("r3", "r2")
    assert len(form(pool, Tokens(200), SPEED, CALM, TERMS)) == 2


def test_a_request_longer_than_a_pool_gets_a_pair_at_once() -> None:
    long = replace(load(0, 10.0, 0), waiting=1_500, largest=1_500)
    empty = replace(load(1, 0.0, 0), batch=0)
    (pair,) = form([long, empty], GAIN, SPEED, CALM, TERMS)
    assert set(pair.members) == {"r0", "r1"} and pair.paired_s == inf


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 2000), st.sampled_from("nm"), st.booleans()), max_size=9),
    st.integers(2, 4),
)
def test_no_replica_is_in_two_groups(drawn: list[tuple[float, int, str, bool]], size: int) -> None:
    pool = [load(i, *each) for i, each in enumerate(drawn)]
    pairs = form(pool, GAIN, SPEED, CALM, replace(TERMS, size=size)) if pool else ()
    members = [name for pair in pairs for name in pair.members]
    assert len(set(members)) == len(members)
    by_name = {each.replica: each for each in pool}
    for pair in pairs:
        assert len(pair.members) == size
        assert len({by_name[name].node for name in pair.members}) == 1
        assert all(by_name[name].free_to_pair for name in pair.members)


# --- undoing ----------------------------------------------------------------------------------------------------------

PAIR = (ReplicaId("r0"), ReplicaId("r1"))


def test_a_pair_ends_under_load_once_demand_has_fitted_for_a_while() -> None:
    pool = [running(0, 400, 350), running(1, 400, 350)]
    first = undo(pool, [PAIR], {}, 10.0, TERMS)
    assert first.groups == () and first.fits_since == {PAIR: 10.0}
    assert undo(pool, [PAIR], first.fits_since, 14.9, TERMS).groups == ()
    assert undo(pool, [PAIR], first.fits_since, 15.0, TERMS).groups == (PAIR,)
    high = undo([running(0, 450, 400), running(1, 450, 400)], [PAIR], first.fits_since, 15.0, TERMS)
    assert high.groups == () and high.fits_since == {}


def test_excess_moves_before_a_pair_ends() -> None:
    pool = [running(0, 500, 400, 300), running(1, 200)]
    found = undo(pool, [PAIR], {PAIR: 0.0}, 10.0, TERMS)
    assert found.groups == ()
    assert [(move.request, move.source, move.target) for move in found.moves] == [("r0-0", "r0", "r1")]


def test_a_request_longer_than_a_replica_keeps_its_pair() -> None:
    assert undo([running(0, 1_100), running(1, 10)], [PAIR], {PAIR: 0.0}, 10.0, TERMS).groups == ()


@given(st.lists(st.integers(1, 300), max_size=12), st.lists(st.integers(1, 300), max_size=12))
def test_what_is_undone_fits(first: list[int], second: list[int]) -> None:
    members = [running(0, *first), running(1, *second)]
    held = {member.replica: member.used for member in members}
    sizes = {each.id: each.tokens for member in members for each in member.movable}
    for move in excess_moves(members):
        held[move.source] -= sizes[move.request]
        held[move.target] += sizes[move.request]
    if sum(held.values()) <= TERMS.restore_below * 2_000:
        assert max(held.values()) <= 1_000
    if undo(members, [PAIR], {PAIR: 0.0}, 10.0, TERMS).groups:
        assert all(member.used <= member.capacity for member in members)


def test_members_are_kept_even_by_step_time() -> None:
    slow, fast = running(0, 400, 300, 200), running(1, 100)
    move = level_members([slow, fast], SPEED.replica)
    assert move is not None and (move.request, move.target) == ("r0-0", "r1")
    assert level_members([running(0, 400), running(1, 400)], SPEED.replica) is None
