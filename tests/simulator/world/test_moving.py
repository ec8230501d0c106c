"""Moves that take their time: by KV and by tokens, and what may happen meanwhile."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from policies.causes import Cause
from policies.cluster.cluster import Cluster
from policies.model import ReplicaId, RequestId, Tokens
from policies.plan import MoveReport, Path, Reason
from simulator.costs.costs import Costs, LinkCosts, PathChoice
from simulator.workload.workload import Job
from simulator.world.live import Live
from simulator.world.loop import Turn
from simulator.world.observer import Transfer
from simulator.world.pool import SimulatedPool
from simulator.world.setup import Setup
from simulator.world.world import simulate
from tests.simulator.physics import COMPUTE, MIGRATION, Log, Scripted, job, move, play, world

FLUID = Costs("fluid", slots=False)
COMPUTES = Costs("computes", slots=False, compute=COMPUTE)
MOVES = Costs("moves", slots=False, migration=MIGRATION)
SLOW = replace(MIGRATION, inter=LinkCosts(10.0))


def test_kv_is_copied_while_the_request_decodes_and_the_tail_is_recomputed() -> None:
    log = play([job("a", output=300)], {0: move("a", 1)}, MOVES, up=2)
    [moved] = log.transfers
    # At 1 s it has 110 tokens, of which ten blocks are full: 0.1 s. One more is full by then, which is not worth it.
    assert (moved.path, moved.outcome, moved.tokens, moved.sent, moved.same_node) == ("kv", "moved", 110, 100, True)
    assert (moved.began_s, moved.ended_s, moved.stall_s) == pytest.approx((1.0, 1.2, 0.1))
    life = log.lives["a"]
    assert (life.finished_s, life.stalled_s, life.longest_gap_s, life.moves) == pytest.approx((30.1, 0.1, 0.1, 1))


def test_blocks_that_fill_meanwhile_are_copied_in_further_rounds() -> None:
    log = play([job("a", prompt=500, output=300)], {0: move("a", 1)}, MOVES, up=2, nodes_of=1)
    [moved] = log.transfers
    # 50 blocks take 5 s, the five that filled meanwhile 0.5 s, and the next one is not worth it.
    assert (moved.sent, moved.same_node) == (550, False)
    assert (moved.ended_s, moved.stall_s) == pytest.approx((6.6, 0.1))


def test_of_a_copied_request_only_the_tail_is_prefilled() -> None:
    costs = replace(COMPUTES, migration=MIGRATION)
    [moved] = play([job("a", prompt=190, output=500)], {0: move("a", 1)}, costs, up=2).transfers
    # With steps of 10 ms 28 blocks are full at 1 s, and two more when these are copied.
    assert (moved.path, moved.sent) == ("kv", 300)
    assert moved.stall_s == pytest.approx(0.1 + 0.01)


def test_copied_blocks_are_loaded_in_a_step_of_the_target() -> None:
    [moved] = play(
        [job("a", prompt=190, output=500)], {0: move("a", 1)}, replace(COMPUTES, migration=MIGRATION), up=2
    ).transfers
    # 28 blocks take 0.28 s and a step of 10 ms; two more are full by then: 0.02 s and a step.
    assert moved.ended_s == pytest.approx(1.0 + 0.28 + 0.01 + 0.02 + 0.01 + 0.1)


NAMES = tuple(range(19))
"""Those of the full blocks of a prompt of 190 tokens."""


def to_a_target_with(names: Sequence[int], evicted_s: float | None = None) -> Transfer:
    """The move by KV of a request with `NAMES` to a target that has these blocks, until they are evicted."""

    def prepare(cluster: Cluster) -> None:
        cache = played.pools[0].replicas.engines[ReplicaId("gpu-1")].cache
        assert cache is not None
        cache.claim(RequestId("before"), names, 10 * len(names) + 1)
        cache.fill(RequestId("before"), 10 * len(names))
        cache.release(RequestId("before"))
        if evicted_s is not None:
            played.loop.at(evicted_s, Turn.ENGINE, lambda: cache.trim(0))
        move("a", 1)(cluster)

    costs = replace(COMPUTES, migration=MIGRATION)
    played, log = world(Scripted({0: prepare}), costs, up=2, block_tokens=10)
    played.run([replace(job("a", prompt=190, output=500), names=NAMES)])
    [moved] = log.transfers
    assert moved.path == "kv" and log.lives["a"].moves == 1
    return moved


def test_a_target_that_has_the_beginning_of_a_prompt_gets_the_rest() -> None:
    whole, half, none = (to_a_target_with(names) for names in (NAMES, NAMES[:9], range(50, 69)))
    # As above, 28 blocks are full at 1 s.
    assert none.sent == 300 and none.sent - half.sent >= 90 and half.sent - whole.sent >= 100
    assert whole.ended_s < half.ended_s < none.ended_s


def test_blocks_behind_evicted_ones_are_computed_again() -> None:
    kept, evicted = to_a_target_with(NAMES), to_a_target_with(NAMES, evicted_s=1.01)
    assert evicted.sent == kept.sent and evicted.stall_s > kept.stall_s + 0.1


@pytest.mark.parametrize(
    ("jobs", "epoch", "fell_back"),
    [
        ([job(name, prompt=480, output=400) for name in "ab"], 1, False),
        ([job("a", prompt=520, output=90), job("b", prompt=440, output=90)], 0, True),
    ],
    ids=["waits", "is preempted while it is copied"],
)
def test_a_request_whose_kv_is_not_there_moves_by_tokens(
    jobs: list[Job], epoch: int, fell_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    played, log = world(Scripted({epoch: move("b", 1)}), MOVES, up=2, nodes_of=1)
    reports = reported_moves(played.pools[0], monkeypatch)
    played.run(jobs)
    assert [each.path for each in log.transfers] == ["tokens"]
    assert {(each.moved, each.path, each.fell_back, each.cause) for each in reports} == {
        (True, Path.TOKENS, fell_back, Cause.BLOCKS_GONE)
    }


def reported_moves(pool: SimulatedPool, monkeypatch: pytest.MonkeyPatch) -> list[MoveReport]:
    """The reports of a pool's moves, as they come."""
    reports: list[MoveReport] = []

    def reported(live: Live, report: MoveReport) -> None:
        reports.append(report)
        SimulatedPool.reported(pool, live, report)

    monkeypatch.setattr(pool, "reported", reported)
    return reports


PREFILLS = replace(COMPUTES, migration=MIGRATION)
"""A prefill of 900 tokens takes five steps: four of 110 ms for 200 tokens each, and one of 10 ms."""


def test_a_prefill_is_followed_up_to_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    played, log = world(Scripted({0: move("a", 1)}), PREFILLS, up=2)
    reports = reported_moves(played.pools[0], monkeypatch)
    played.run([job("a", at=0.7, prompt=900)])
    [moved] = log.transfers
    # At 1 s, 400 tokens are computed, and copied in 0.4 s. The prefill ends at 1.15 s with a token, and 25 more follow.
    assert (moved.path, moved.outcome, moved.began_s) == ("kv", "moved", 1.0)
    # Then the rest is copied, 520 tokens in the pause, with a hand-over and a step.
    assert moved.sent == 920 and moved.stall_s == pytest.approx(0.52 + 0.1 + 0.02)
    assert {(each.moved, each.path, each.fell_back, each.cause) for each in reports} == {(True, Path.KV, False, None)}
    life = log.lives["a"]
    assert life.first_token_s == pytest.approx(1.15) and life.moves == 1


def test_the_wait_for_a_prefill_is_no_time_of_its_move(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = replace(PREFILLS, migration=replace(MIGRATION, intra=LinkCosts(100_000.0)))
    played, log = world(Scripted({0: move("a", 1)}), fast, up=2)
    reports = reported_moves(played.pools[0], monkeypatch)
    played.run([job("a", at=0.95, prompt=900)])
    [moved] = log.transfers
    took_s = {each.took_s for each in reports}
    # From 1 s to the first token at 1.4 s there is next to nothing to copy.
    assert moved.sent == 900 and moved.ended_s > 1.5 > 1.0 + 3 * max(s for s in took_s if s is not None)


def test_a_request_that_ends_with_its_first_token_is_not_moved() -> None:
    log = play([job("a", at=0.7, prompt=900, output=1)], {0: move("a", 1)}, PREFILLS, up=2)
    assert [(each.outcome, each.completed) for each in log.transfers] == [("ended", False)]


def test_without_precopy_the_request_stops_for_the_copy() -> None:
    costs = replace(MOVES, migration=replace(MIGRATION, precopy=False))
    [moved] = play([job("a", output=300)], {0: move("a", 1)}, costs, up=2).transfers
    assert (moved.sent, moved.ended_s, moved.stall_s) == pytest.approx((100, 1.2, 0.2))


def test_tokens_use_no_link_but_the_targets_prefill() -> None:
    costs = replace(COMPUTES, migration=replace(MIGRATION, path=PathChoice.TOKENS))
    log = play([job("a", prompt=190, output=500)], {0: move("a", 1)}, costs, up=2, nodes_of=1)
    [moved] = log.transfers
    assert (moved.path, moved.sent) == ("tokens", 0)
    # Its source is rid of it after the hand-over; the target prefills 290 tokens in two steps.
    assert moved.tokens == 281
    assert (moved.ended_s, moved.stall_s) == pytest.approx((1.1, 0.1 + 0.11 + 0.01))
    assert log.lives["a"].stalled_s == pytest.approx(moved.stall_s)


def test_the_pause_of_a_move_is_a_gap_between_two_tokens() -> None:
    costs = replace(COMPUTES, migration=replace(MIGRATION, path=PathChoice.TOKENS))
    log = play([job("a", prompt=190, output=500)], {0: move("a", 1)}, costs, up=2, nodes_of=1)
    [(gap_s, tokens)] = [(step_s, count) for step_s, count in log.steps.items() if step_s > 0.02]
    assert (gap_s, tokens) == pytest.approx((log.transfers[0].stall_s, 1.0))


def test_a_request_that_ends_with_its_step_is_not_moved() -> None:
    costs = replace(COMPUTES, migration=replace(MIGRATION, path=PathChoice.TOKENS))
    # The prefill ends at 0.105 s with a token, and the last of 90 more steps at 1.005 s.
    log = play([job("a", at=0.005, prompt=190, output=91)], {0: move("a", 1)}, costs, up=2)
    [ended] = log.transfers
    assert (ended.outcome, ended.completed) == ("ended", False)
    assert ended.ended_s == pytest.approx(1.005)
    assert log.lives["a"].finished_s == pytest.approx(1.005)


def test_an_eviction_that_leads_nowhere_does_not_happen() -> None:
    """An engine preempts by itself where it must; a request is on some replica from its placement on."""

    def evict(cluster: Cluster) -> None:
        cluster.decisions.evict(cluster.requests[RequestId("a")])

    log = play([job("a")], {3: evict}, MOVES, up=1)
    assert log.transfers == [] and log.lives["a"].preemptions == 0
    assert not any(plan.evicted or plan.placements for plan in log.plans)


@pytest.mark.parametrize("startup_s", [0.0, 5.0])
def test_an_eviction_that_leads_somewhere_is_a_move(startup_s: float) -> None:
    def elsewhere(cluster: Cluster) -> None:
        request = cluster.requests[RequestId("a")]
        cluster.decisions.evict(request)
        cluster.decisions.place(request, cluster.replicas[ReplicaId("gpu-1")])

    log = play([job("a", output=300)], {0: elsewhere}, replace(MOVES, startup_s=startup_s), up=2)
    [moved] = log.transfers
    assert (moved.completed, moved.reason) == (True, Reason.OVERLOAD)
    assert (log.lives["a"].moves, log.lives["a"].preemptions) == (1, 0)


@pytest.mark.parametrize("nodes_of", [8, 1], ids=["within a node", "between nodes"])
@pytest.mark.parametrize("precopy", [True, False])
def test_the_slower_the_link_the_longer_the_move(nodes_of: int, precopy: bool) -> None:
    took = []
    for factor in (8, 4, 2, 1):
        intra, inter = (
            replace(MIGRATION.intra, bytes_per_s=125.0 * factor),
            replace(MIGRATION.inter, bytes_per_s=12.5 * factor),
        )
        costs = replace(MOVES, migration=replace(MIGRATION, intra=intra, inter=inter, precopy=precopy))
        [moved] = play([job("a", output=900)], {0: move("a", 1)}, costs, up=2, nodes_of=nodes_of).transfers
        took.append(moved.ended_s - moved.began_s)
    assert took == sorted(took)
    assert len(set(took)) == 4


@pytest.mark.parametrize(("costs", "gpus"), [(MOVES, 3), (FLUID, 2)], ids=["moving takes time", "moves are instant"])
def test_blocks_held_at_the_source_prevent_a_placement(costs: Costs, gpus: int) -> None:
    jobs = [job("a", prompt=500, output=300), job("b", at=2.0, prompt=600, output=100)]
    assert max(count for _, count in play(jobs, {0: move("a", 1)}, costs, up=2, nodes_of=1).gpus) == gpus


def test_a_placement_takes_the_room_once_the_move_is_over() -> None:
    jobs = [job("a", prompt=500, output=300), job("b", at=8.0, prompt=600, output=100)]
    assert max(count for _, count in play(jobs, {0: move("a", 1)}, MOVES, up=2, nodes_of=1).gpus) == 2


def test_a_request_that_ends_while_it_is_copied_cancels_its_move() -> None:
    played, log = world(Scripted({0: move("a", 1)}), MOVES, up=2, nodes_of=1, until=9.0)
    played.run([job("a", prompt=500, output=30)])
    [moved] = log.transfers
    assert (moved.outcome, moved.completed, moved.sent, moved.ended_s) == ("ended", False, 200, 3.0)
    assert log.lives["a"].moves == 0
    assert [engine.free(9.0) for engine in played.pools[0].replicas.engines.values()] == [1000, 1000]


def test_a_request_that_is_preempted_while_it_is_copied_is_handed_over_at_once() -> None:
    jobs = [job("a", prompt=520, output=90), job("b", prompt=440, output=90)]
    log = play(jobs, {0: move("b", 1)}, MOVES, up=2, nodes_of=1)
    [moved] = log.transfers
    assert log.preempted_s == [2.0]
    assert (moved.outcome, moved.sent) == ("moved", 100)
    assert (moved.ended_s, moved.stall_s) == pytest.approx((2.1, 0.1))
    assert (log.lives["b"].preemptions, log.lives["b"].moves) == (1, 1)


def test_a_request_whose_target_fills_up_during_the_copy_queues_there() -> None:
    """As live: a block that does not fit there makes the copy fail, and a request by tokens is always taken."""
    jobs = [job("a", prompt=400, output=300), job("d", prompt=200), job("c", prompt=450, output=300)]
    played, log = world(Scripted({0: move("a", 1)}), replace(MOVES, migration=SLOW), up=2, nodes_of=1, until=60.0)
    played.run(jobs)
    there, back = log.transfers
    assert (there.path, there.completed, there.ended_s, there.resumed_s) == ("tokens", True, 14.1, None)
    # The next epoch finds it in the queue, and room where it came from.
    assert (back.reason, back.began_s, back.resumed_s) == (Reason.ADMIT, 15.0, 15.1)
    assert {str(name): (round(life.stalled_s, 6), life.moves) for name, life in log.lives.items()} == {
        "a": (1.1, 2),
        "c": (0.0, 0),
        "d": (0.0, 0),
    }


def test_a_request_that_waits_moves_without_a_link_and_without_a_stall_of_its_own() -> None:
    jobs = [job("a", prompt=480, output=400), job("b", prompt=480, output=400)]
    log = play(jobs, {1: move("b", 1)}, MOVES, up=2, nodes_of=1)
    [moved] = log.transfers
    assert log.preempted_s == [2.0]
    assert (moved.path, moved.sent, moved.stall_s, moved.began_s) == ("tokens", 0, 0.0, 2.0)
    assert log.lives["b"].stalled_s == pytest.approx(0.1)


def all_at_once(cluster: Cluster) -> None:
    """Move three requests to the other replica."""
    for name in "abc":
        move(name, 1)(cluster)


HEAVY = replace(MIGRATION, path=PathChoice.ADAPTIVE, kv_bytes=10**9)
"""KV that takes any link longer than the prefill, and more than a link is given in an epoch."""


def test_a_move_that_fits_neither_links_nor_prefill_budgets_waits() -> None:
    adaptive = Costs("adaptive", slots=False, compute=replace(COMPUTE, decode=False), migration=HEAVY)
    jobs = [job(name, prompt=prompt, output=500) for name, prompt in (("a", 200), ("b", 199), ("c", 198))]
    log = play(jobs, {0: all_at_once}, adaptive, up=2, nodes_of=1, capacity=2000, until=3.0)
    assert [(str(move.request), str(move.path)) for move in log.plans[0].moves] == [("a", "tokens"), ("b", "kv")]
    assert [str(move.request) for move in log.plans[0].deferred] == ["c"]
    assert [(str(each.outcome), each.began_s) for each in log.transfers if not each.completed] == [("deferred", 1.0)]


def test_without_consensus_sources_promise_the_same_prefill_budget() -> None:
    jobs = [job("a", prompt=600, output=500), job("b", prompt=600, output=500)]

    def both(cluster: Cluster) -> None:
        move("a", 2)(cluster)
        move("b", 2)(cluster)

    def chosen(consensus: bool) -> list[str]:
        costs = replace(COMPUTES, migration=replace(HEAVY, consensus=consensus))
        log = play(jobs, {0: both}, costs, up=3, nodes_of=1, capacity=1150, until=2.0)
        return sorted(str(each.path) for each in log.plans[0].moves)

    assert chosen(consensus=True) == ["kv", "tokens"]
    assert chosen(consensus=False) == ["tokens", "tokens"]


def test_the_next_move_is_predicted_by_the_duration_of_the_last() -> None:
    """The first one is believed to go over a link as fast as any; the second one knows better."""
    adaptive = replace(COMPUTES, migration=replace(MIGRATION, path=PathChoice.ADAPTIVE))
    jobs = [job(name, prompt=200, output=900) for name in "ab"]
    log = play(jobs, {0: move("a", 1), 6: move("b", 1)}, adaptive, up=2, nodes_of=1, capacity=3000, until=30.0)
    first, second = log.transfers
    took = [(each.resumed_s or 0.0) - each.began_s for each in (first, second)]
    assert first.predicted_s < took[0] / 5
    assert second.predicted_s == pytest.approx(took[1], rel=0.3)


@pytest.mark.parametrize(("at_once", "per_replica", "moves"), [(2, None, 2), (None, 1, 1), (None, None, 3)])
def test_the_number_of_moves_under_way_is_limited(at_once: int | None, per_replica: int | None, moves: int) -> None:
    setup = Setup(
        Tokens(3000),
        10.0,
        horizon_s=3.0,
        min_replicas=2,
        moves_at_once=at_once,
        moves_per_replica=per_replica,
    )
    log = Log()
    jobs = [job(name, prompt=500, output=500) for name in "abc"]
    costs = replace(MOVES, migration=SLOW)
    simulate(jobs, Scripted({0: all_at_once}).under(costs), setup, costs, log)
    assert [len(plan.moves) for plan in log.plans[:2]] == [moves, 0]
