"""The shadow: what would be, had everything been done that was decided."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.bounds import martello_toth_l2
from policies.cluster.cluster import Cluster
from policies.decision.deciding import decide_pool
from policies.decision.limits import Limits, LiveLimits, Mode, Sizes, Terms, as_given
from policies.decision.memory import PoolMemory
from policies.decision.shadow import DryRun, Shadow
from policies.model import RequestId, Tokens
from policies.plan import Plan
from tests.policies.decision.observed import C, Drawn, Watcher, observed
from tests.policies.history import SPECS
from tests.policies.settings import few

NO_NAMES: Mapping[str, Sequence[int]] = {}
NO_GROWTH = "pack:headroom_s=0,comfort=0,rest=0"


class Rehearsed:
    """A shadow beside a memory that watches the same drawn clusters."""

    def __init__(self, terms: Terms, least: int = 0, names: Mapping[str, Sequence[int]] = NO_NAMES) -> None:
        self.watcher = Watcher(PoolMemory(terms), least)
        self.shadow = Shadow(terms, self.watcher.memory.experience, names=lambda request: names.get(request, ()))

    @property
    def cluster(self) -> Cluster:
        return self.shadow.cluster

    def observe(self, drawn: Drawn) -> Plan:
        report = self.watcher.report(drawn)
        decide_pool(self.watcher.memory, report, drawn.now)
        return self.shadow.observe(report, drawn.now)


def shadow(
    spec: str = NO_GROWTH,
    limits: Limits | None = None,
    linger_s: float = 0.0,
    foresight_s: float = 0.0,
    least: int = 0,
) -> Rehearsed:
    limits = limits or Limits()
    return Rehearsed(Terms(spec, LiveLimits(limits, linger_s, foresight_s), epoch_s=0.0, mode=Mode.OBSERVE), least)


def live(made: Rehearsed, *history: Drawn) -> list[Plan]:
    return [made.observe(seen) for seen in history]


def so_far(made: Rehearsed) -> DryRun:
    assert made.shadow.so_far is not None
    return made.shadow.so_far


def where(made: Rehearsed) -> list[list[str]]:
    """The requests of each replica."""
    return sorted(sorted(replica.requests) for replica in made.cluster.replicas.values())


def some(seen: Drawn, **changes: Any) -> Drawn:
    """The drawing with replicas that report something else of themselves."""
    return replace(seen, loads=tuple(replace(load, **changes) for load in seen.loads))


# --- what is decided is done ------------------------------------------------------------------------------


def test_a_move_that_is_not_made_is_decided_once() -> None:
    made = shadow()
    plans = live(made, *(observed("a: p40 q20 | b: r15", float(at)) for at in range(3)))
    assert [len(plan.moves) for plan in plans] == [1, 0, 0]
    assert where(made) == [["p", "q", "r"]]
    assert (so_far(made).moves, so_far(made).moved_tokens) == (1, 15)


def test_it_begins_as_the_cluster_is_found() -> None:
    made = shadow()
    live(made, observed("a: p60 q20 | b: r50 s30"))
    assert (where(made), so_far(made).moves) == ([["p", "q"], ["r", "s"]], 0)


def test_gpu_seconds_are_of_what_each_epoch_left() -> None:
    made = shadow(linger_s=2.0)
    live(made, *(observed("a: p40 | b: r15", at) for at in (10.0, 11.5, 12.5, 20.0)))
    told = so_far(made)
    assert (told.since_s, told.replicas_now, told.replicas_needed) == (10.0, 2, 1)
    assert (told.gpu_seconds_real, told.gpu_seconds_needed) == (20.0, 2 * 2.5 + 7.5)
    assert told.gpu_seconds_saved == 7.5


def test_it_opens_what_the_real_one_lacks() -> None:
    made = shadow()
    live(made, *(observed("a: p90 q40?", float(at), most=3) for at in range(3)))
    told = so_far(made)
    assert (told.replicas_needed, told.requests_waiting, told.gpu_seconds_saved) == (2, 0, -2.0)


@pytest.mark.parametrize(
    ("sizes", "known", "needed"),
    [(Sizes.MARGINAL, "pq", 1), (Sizes.MARGINAL, "p", 2), (Sizes.MARGINAL, "", 2), (Sizes.BLIND, "pq", 2)],
    ids=["shared", "one prompt is not known", "no prompt is known", "blind"],
)
def test_requests_share_blocks_as_far_as_their_prompts_are_known(sizes: Sizes, known: str, needed: int) -> None:
    names = {name: range(50) for name in known}
    terms = Terms(NO_GROWTH, as_given(Limits()), epoch_s=0.0, mode=Mode.OBSERVE, sizes=sizes)
    made = Rehearsed(terms, names=names)
    live(made, *(observed("a: p70 | b: q70", float(at)) for at in range(2)))
    assert so_far(made).replicas_needed == needed
    made.cluster.check_integrity()


def test_what_no_replica_may_be_opened_for_waits() -> None:
    made = shadow()
    live(made, observed("a: p90 q40?"))
    assert (so_far(made).replicas_needed, so_far(made).requests_waiting) == (1, 1)


def test_an_eviction_counts_as_a_move() -> None:
    made = shadow("best_fit")
    live(made, observed("a: p60 q30 | b: r90"), observed("a: p80 q30 | b:", 1.0))
    assert (so_far(made).moves, so_far(made).moved_tokens) == (1, 30)


# --- requests ---------------------------------------------------------------------------------------------


def test_requests_come_grow_and_go_as_they_really_do() -> None:
    made = shadow()
    live(made, observed("a: p40 | b: q30"), observed("a: p45 | b: q30 r20", 1.0))
    assert {name: q.tokens for name, q in made.cluster.requests.items()} == {"p": 45, "q": 30, "r": 20}
    live(made, observed("a: | b: r25", 2.0))
    assert {name: q.tokens for name, q in made.cluster.requests.items()} == {"r": 25}
    made.cluster.check_integrity()


def test_where_a_request_really_is_does_not_matter_after_the_beginning() -> None:
    one, other = shadow(), shadow()
    live(one, observed("a: p40 | b: q30"), observed("a: p45 | b: q35 r20", 1.0))
    live(other, observed("a: p40 | b: q30"), observed("a: q35 | c: r20 p45", 1.0))
    assert where(one) == where(other) == [["p", "q", "r"]]


def test_what_must_stay_stays() -> None:
    made = shadow()
    live(made, observed("a: p40! | b: q50!"))
    assert where(made) == [["p"], ["q"]]
    live(made, observed("a: p40! | b: q50", 1.0))
    assert where(made) == [["p", "q"]], "q may move by now"


def test_a_request_fills_whole_blocks() -> None:
    made = shadow()
    live(made, some(observed("a: p41 q41"), block_size=25))
    assert [q.tokens for q in made.cluster.requests.values()] == [50, 50]


def test_a_request_is_no_larger_than_the_smallest_replica() -> None:
    seen = observed("a: p90 | b: q10")
    small = replace(seen.loads[1], capacity_tokens=Tokens(60))
    made = shadow()
    live(made, replace(seen, loads=(seen.loads[0], small)))
    assert made.cluster.capacity == made.cluster.requests[RequestId("p")].tokens == 60


def test_one_that_is_on_two_replicas_counts_once() -> None:
    made = shadow()
    live(made, observed("a: p40 | b: p45"))
    assert len(made.cluster.requests) == 1


# --- replicas ---------------------------------------------------------------------------------------------


def test_a_replica_runs_no_more_requests_than_its_engine_does() -> None:
    made = shadow()
    live(
        made,
        some(observed("a: p10 q10 | b: r10"), max_requests=2),
        some(observed("a: p10 q10 r10 s10"), max_requests=2),
    )
    assert [len(names) for names in where(made)] == [2, 2]


def test_the_fewest_replicas_stay() -> None:
    for found in "a: p10 | b: | c:", "a: p10":
        made = shadow(least=2)
        live(made, observed(found, most=3))
        assert so_far(made).replicas_needed == 2


def test_replicas_that_are_lost_or_come_change_nothing() -> None:
    made = shadow()
    live(made, observed("a: p60 | b: q60"), observed("b: q60 p60?", 1.0), observed("b: q60 p60 | c: | d*:", 2.0))
    assert where(made) == [["p"], ["q"]]
    assert (so_far(made).replicas_now, so_far(made).moves) == (3, 0)


def test_requests_of_a_replica_that_is_to_be_gone_wait_for_a_place() -> None:
    made = shadow()
    live(made, observed("a^: p40 | b: q30"))
    assert (where(made), so_far(made).moves) == ([["p", "q"]], 0)


@pytest.mark.parametrize("drawing", ["", "a*:", "a: p40 | b^:"], ids=["none", "starting", "one is silent"])
def test_it_does_not_begin_before_all_that_run_are_known(drawing: str) -> None:
    made, seen = shadow(), observed(drawing)
    silent = tuple(replace(r, capacity_tokens=Tokens(0)) if r.id == "b" else r for r in seen.loads)
    assert live(made, replace(seen, loads=silent)) == [Plan()]
    assert made.shadow.so_far is None
    live(made, observed("a: p40 | b: q30", 5.0))
    assert (so_far(made).since_s, so_far(made).replicas_now) == (0.0, 2)


def test_replicas_of_one_node_are_on_one_node() -> None:
    made, seen = shadow(), observed("a: p60 | b: q60 | c: r60")
    nodes = dict(zip("abc", "xyx", strict=True))
    live(made, replace(seen, loads=tuple(replace(r, node=nodes[r.id]) for r in seen.loads)))
    node: dict[str, str] = {
        name: replica.node for replica in made.cluster.replicas.values() for name in replica.requests
    }
    assert node["p"] == node["r"] != node["q"]


# --- everything -------------------------------------------------------------------------------------------


def drawing(dice: random.Random, sizes: dict[str, int]) -> str:
    """Those requests, each on some replica or queued there, whether they fit or not."""
    replicas = [f"{name}:" for name in "abcde"[: dice.randrange(1, 6)]]
    for name, tokens in sizes.items():
        index = dice.randrange(len(replicas))
        replicas[index] += f" {name}{tokens}{dice.choice(['', '', '?', '~'])}"
    return " | ".join(replicas)


@st.composite
def histories(draw: st.DrawFn) -> list[Drawn]:
    """Requests that come, grow and go, on replicas that do as they like."""
    dice = draw(st.randoms(use_true_random=False))
    sizes: dict[str, int] = {}
    history = []
    for at in range(draw(st.integers(1, 8))):
        for name in [name for name in sizes if dice.random() < 0.2]:
            del sizes[name]
        sizes = {name: min(tokens + dice.randrange(0, 12), C) for name, tokens in sizes.items()}
        for _ in range(dice.randrange(0, 6)):
            sizes["q" + "".join(dice.choices("abcdefgh", k=6))] = dice.randrange(1, dice.choice([15, 40, C]))
        history.append(observed(drawing(dice, sizes), float(at), most=60))
    return history


limits = st.sampled_from([Limits(), Limits(slack=0.5), Limits(cooldown_s=0.5), Limits(headroom_s=0.1)])


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "stall" not in spec])
@few
@given(histories(), limits, st.sampled_from([0, 2]), st.sampled_from([0.0, 2.0]))
def test_no_request_is_lost_and_no_replica_too_full(
    spec: str, history: Sequence[Drawn], limits: Limits, least: int, linger_s: float
) -> None:
    made, again = (shadow(spec, limits, linger_s, least=least) for _ in range(2))
    for seen in history:
        assert made.observe(seen) == again.observe(seen), "equal observations, other decisions"
        made.cluster.check_integrity()
        sizes = {q.id: q.tokens for load in seen.loads for q in load.requests}
        assert {q.id: q.tokens for q in made.cluster.requests.values()} == sizes
        assert not made.cluster.waiting and not made.cluster.overloaded()
        assert so_far(made).replicas_needed >= max(martello_toth_l2(sizes.values(), C), least)
        assert so_far(made) == so_far(again)
