"""Worlds with prefix caches: hits, routing and evictions."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from policies.decision.limits import Sizes
from policies.model import RequestId, Tokens
from policies.prefix.change import CacheChange, Tier
from policies.prefix.routing import Matched, Routing
from policies.prefix.tree import HeldPrefix
from policies.rules.registry import policy
from simulator.caches.cache import SimulatedCache
from simulator.costs.costs import Costs, LinkCosts, MigrationCosts
from simulator.outcome.metrics import Window, measure
from simulator.outcome.recorder import EventRecorder
from simulator.workload.workload import Job
from simulator.world.engine import SimulatedEngine
from simulator.world.observer import Life
from simulator.world.setup import Setup
from simulator.world.world import World, one_pool
from tests.simulator.physics import COMPUTE

COSTS = Costs("computes", slots=False, compute=COMPUTE)
BLOCK = 10


def job(name: str, at: float, names: Sequence[int], output: int = 5) -> Job:
    """A request whose prompt has full blocks of these names, and five more tokens."""
    return Job(RequestId(name), at, Tokens(BLOCK * len(names) + 5), Tokens(output), tuple(names))


def lives(
    jobs: list[Job],
    replicas: int = 1,
    capacity: int = 1000,
    routing: Routing = Routing.TREE,
    migration: MigrationCosts | None = None,
    sizes: Sizes = Sizes.MARGINAL,
) -> dict[str, Life]:
    """The requests of a world. With costs of migrations, replicas copy prefixes."""
    recorder = EventRecorder(lambda now: None)
    setup = Setup(
        Tokens(capacity),
        horizon_s=60.0,
        min_replicas=replicas,
        max_gpus=replicas,
        block_tokens=BLOCK,
        routing=routing,
        copies=migration is not None,
        sizes=sizes,
    )
    world = one_pool(policy("worst_fit"), setup, replace(COSTS, migration=migration), recorder)
    world.run(jobs)
    for replica, engine in world.pools[0].replicas.engines.items():
        assert engine.cache is not None
        assert len(engine.cache.blocks.idle) == len(engine.cache.blocks.named), (
            f"{replica} has blocks in use without requests"
        )
        assert len(engine.cache.blocks.idle) * BLOCK <= capacity
    return {life.job.id: life for life in recorder.lives}


LONG = tuple(range(30))
OTHER = tuple(range(100, 130))


@pytest.mark.parametrize("sizes", Sizes)
def test_requests_that_share_a_document_run_together(sizes: Sizes) -> None:
    """Beside the document's replica there is one with more room, though not enough for the whole prompt either."""
    documents = [job("first", 0.0, LONG, output=150), job("other", 0.1, OTHER[:28], output=150)]
    second = lives([*documents, job("second", 0.6, (*LONG, 30))], 2, 500, sizes=sizes)["second"]
    assert second.cached == (300 if sizes is Sizes.MARGINAL else 0)
    assert (second.first_token_s - second.job.arrival_s < 0.1) == (sizes is Sizes.MARGINAL)


def test_a_second_turn_computes_only_what_is_new() -> None:
    found = lives([job("first", 0.0, LONG), job("second", 5.0, (*LONG, 30, 31))])
    assert [found[name].cached for name in ("first", "second")] == [0, 300]
    assert found["second"].matched == Matched(Tokens(300), Tokens(300))
    ttft = {name: life.first_token_s - life.job.arrival_s for name, life in found.items()}
    assert ttft["second"] < 0.2 * ttft["first"]


def test_prompts_of_one_moment_share_a_prefill() -> None:
    found = lives([job("p", 0.0, LONG), job("q", 0.0, LONG)])
    assert sorted(life.cached for life in found.values()) == [0, 300]
    assert sorted(life.matched.predicted for life in found.values()) == [0, 300]


@pytest.mark.parametrize(("routing", "cached"), [(Routing.TREE, 300), (Routing.LEAST_LOAD, 0)])
def test_a_conversation_returns_to_its_replica_by_content_alone(routing: Routing, cached: int) -> None:
    # The policy would choose the empty replica.
    busy = [job("first", 0.0, LONG, 600), job("second", 3.0, LONG)]
    assert lives(busy, 2, 2000, routing)["second"].cached == cached


def test_blocks_are_dropped_for_running_requests() -> None:
    found = lives([job("first", 0.0, LONG), job("large", 5.0, OTHER, 300), job("second", 20.0, LONG)], capacity=700)
    assert 0 < found["second"].cached < 300
    assert found["second"].matched.predicted == found["second"].cached


def test_the_decision_knows_the_caches() -> None:
    setup = Setup(Tokens(1000), horizon_s=20.0, min_replicas=1, max_gpus=1, block_tokens=BLOCK)
    world = one_pool(policy("pack"), setup, COSTS, EventRecorder(lambda now: None))
    world.run([job("first", 0.0, LONG)])
    tree = world.pools[0].memory.router.tree
    tree.check_integrity()
    (replica,) = tree.replicas
    assert tree.match((*LONG, 500)) == {replica: HeldPrefix(30)}


def test_shares_of_prompt_tokens_are_metrics() -> None:
    recorder = EventRecorder(lambda now: None)
    setup = Setup(Tokens(1000), horizon_s=20.0, min_replicas=1, max_gpus=1, block_tokens=BLOCK)
    jobs = [job("first", 0.0, LONG), job("second", 5.0, LONG)]
    one_pool(policy("pack"), setup, COSTS, recorder).run(jobs)
    found = measure(recorder, jobs, Window(0.0, 20.0))
    shares = {name: found[f"cache_{name}"] for name in ("available", "predicted", "delivered", "not_delivered")}
    assert shares == pytest.approx(
        {"available": 300 / 610, "predicted": 300 / 610, "delivered": 300 / 610, "not_delivered": 0.0}
    )


def conversation(*names: Sequence[int], busy_s: float = 0.0) -> list[Job]:
    """A session of these prompts. Each has blocks of the answer before it; a turn thinks for `busy_s` seconds."""
    turns = [replace(job(f"turn-{n}", 0.0, each, 25), session="s") for n, each in enumerate(names)]
    following = [replace(turn, after=before.id, think_s=busy_s) for before, turn in pairwise(turns)]
    turns = [turns[0], *following]
    # Of 25 tokens behind 5 of a block, with the newest not computed, two blocks are filled.
    outputs = [each[len(turn.names) : len(turn.names) + 2] for turn, each in zip(turns, names[1:], strict=False)]
    return [replace(turn, outputs=tuple(each)) for turn, each in zip(turns, [*outputs, ()], strict=True)]


def test_a_turn_comes_after_the_answer_before_and_finds_its_blocks() -> None:
    found = lives(conversation(LONG, range(33), range(40), busy_s=2.0))
    first, second, third = (found[f"turn-{n}"] for n in range(3))
    assert second.job.arrival_s == pytest.approx(first.finished_s + 2.0)
    assert third.job.arrival_s == pytest.approx(second.finished_s + 2.0)
    assert [life.cached for life in (first, second, third)] == [0, 320, 350]


def test_a_session_returns_to_its_replica() -> None:
    # The policy would choose the emptier replica.
    turns = [*conversation(LONG, OTHER, LONG), job("large", 0.1, range(200, 240), 600)]
    found = {routing: lives(turns, 2, 2000, routing) for routing in Routing}
    cached = {routing: each["turn-2"].cached for routing, each in found.items()}
    assert cached[Routing.SESSION] == cached[Routing.TREE] == 300
    beside = [replace(turn, session=f"s{n}") for n, turn in enumerate(turns[:3])]
    apart = lives([*beside, turns[3]], 2, 2000, Routing.SESSION)
    assert apart["turn-2"].matched.predicted <= cached[Routing.SESSION]


FAST = MigrationCosts(LinkCosts(1e9), LinkCosts(1e9), kv_bytes=1000)
SLOW = replace(FAST, intra=LinkCosts(1e4), inter=LinkCosts(1e4))


def follower(migration: MigrationCosts | None) -> Life:
    """A request whose prompt begins like one that runs on a replica without room for all of its tokens."""
    holder = job("holder", 5.0, LONG, output=200)
    jobs = [job("first", 0.0, LONG), holder, job("follower", 6.0, (*LONG, 30, 31))]
    return lives(jobs, 2, 600, migration=migration, sizes=Sizes.BLIND)["follower"]


def test_a_prefix_is_copied_to_where_there_is_room() -> None:
    alone, copied = follower(None), follower(FAST)
    assert (alone.matched, alone.cached) == (Matched(Tokens(300), Tokens(0)), 0)
    assert (copied.matched, copied.cached) == (Matched(Tokens(300), Tokens(300)), 300)
    assert copied.first_token_s is not None and alone.first_token_s is not None
    assert copied.first_token_s < alone.first_token_s


def test_a_copy_that_is_late_is_given_up() -> None:
    """The belief of links, without evidence, is faster than this link."""
    alone, copied = follower(None), follower(SLOW)
    assert copied.matched.predicted == 300 and copied.cached == 0
    assert copied.first_token_s is not None and alone.first_token_s is not None
    computed_s = alone.first_token_s - alone.job.arrival_s
    assert copied.first_token_s - copied.job.arrival_s < 2.1 * computed_s


def closed(link: MigrationCosts, capacity: int = 1000) -> tuple[World, SimulatedEngine, SimulatedEngine]:
    """A world in which a GPU with the blocks of `LONG` has just closed; that GPU, and the one that stays."""
    setup = Setup(
        Tokens(capacity),
        horizon_s=20.0,
        min_replicas=2,
        max_gpus=2,
        block_tokens=BLOCK,
        copies=True,
        sizes=Sizes.MARGINAL,
    )
    world = one_pool(policy("worst_fit"), setup, replace(COSTS, migration=link), EventRecorder(lambda now: None))
    world.run([job("first", 0.0, LONG), job("other", 0.1, OTHER)])
    donor, other = sorted(world.pools[0].replicas.engines.values(), key=lambda engine: -engine.cache.leading(LONG))  # type: ignore[union-attr]
    world.pools[0]._close(donor.replica)
    return world, donor, other


def test_gpu_that_closes_copies_its_contexts_to_those_that_stay() -> None:
    world, _, other = closed(FAST)
    copies = world.pools[0]._closing_copies
    assert other.cache is not None and copies is not None
    assert (other.cache.leading(LONG), len(copies.donors)) == (0, 1), "it stays for the copies"
    world.loop.run(21.0)
    assert (other.cache.leading(LONG), other.cache.leading(OTHER), len(copies.donors)) == (30, 30, 0)
    assert [list(context.names) for context in other.cache.contexts(21.0)] == [list(LONG), list(OTHER)]


def test_gpu_that_closes_stays_for_ten_seconds_at_most() -> None:
    world, _, other = closed(SLOW)
    copies = world.pools[0]._closing_copies
    assert other.cache is not None and copies is not None
    world.loop.run(29.0)
    assert len(copies.donors) == 1
    world.loop.run(31.0)
    assert (other.cache.leading(LONG), len(copies.donors)) == (0, 0)


def test_gpu_that_closes_leaves_hotter_contexts_of_others_alone() -> None:
    world, _, other = closed(FAST, capacity=400)
    world.loop.run(21.0)
    assert other.cache is not None
    assert (other.cache.leading(LONG), other.cache.leading(OTHER)) == (0, 30)


def test_copied_blocks_are_found_and_reported_and_may_be_dropped() -> None:
    cache = SimulatedCache(BLOCK)
    cache.take_in([1, 2, 3, 4])
    cache.take_in([3])
    assert cache.change() == CacheChange({Tier.HBM: (4, 3, 2, 1)}, {}, True)
    cache.trim(30)
    assert cache.leading([1, 2, 3, 4]) == 3, "the last block has been dropped, and the prefix is still of use"
    assert cache.claim(RequestId("r"), (1, 2, 3), 31) == 30
    cache.release(RequestId("r"))
    cache.trim(10)
    assert cache.leading([1, 2, 3]) == 1
