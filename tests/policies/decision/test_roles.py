"""Prefill and decoding on replicas of their own: who has which role, where arrivals go, and who moves on."""

from dataclasses import replace

import pytest

from policies.cluster.changes import Arrival
from policies.cost.lines import Line
from policies.decision.deciding import match_prompt, place, preview
from policies.decision.limits import Limits, LiveLimits, Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.placement import Place, Queue
from policies.decision.roles import awaits_prefills
from policies.model import ReplicaId, RequestId, Role, Tokens
from policies.paths.beliefs import Profile
from policies.plan import Path, Plan
from policies.rules.registry import POLICIES
from tests.policies.decision.observed import Watcher, observed

PROFILE = Profile("n", "cache", 1.0, Line.of(1000.0))


def watcher(
    prefills: int = 1, spec: str = "pack:headroom_s=0,comfort=0,rest=0", mode: Mode = Mode.ACT, caches: str = "abcd"
) -> Watcher:
    """A watcher of replicas, of which those in `caches` exchange KV."""
    limits = LiveLimits(Limits(), 0.0, 0.0, 60.0, 0.0)
    memory = PoolMemory(Terms(spec, limits, mode=mode, prefill_replicas=prefills))
    for name in caches:
        memory.estimates.profile(ReplicaId(name), PROFILE)
    return Watcher(memory, least=4)


def roles(made: Watcher) -> str:
    """The replicas, those for prefills in capitals, those for both with a star."""
    running = made.memory.cluster.running()
    shown = {r.id: {Role.PREFILL: r.id.upper(), Role.DECODE: r.id}.get(r.role, f"{r.id}*") for r in running}
    return " ".join(shown.values())


def moves(plan: Plan) -> list[str]:
    return sorted(f"{m.request}:{m.source}>{m.target} {m.reason} {m.path}" for m in plan.moves)


def arrive(made: Watcher, tokens: int = 10, name: str = "n") -> str:
    """The replica on which an arrival is placed."""
    placed = place(made.memory, Arrival(RequestId(name), Tokens(tokens)), 0.5)
    assert isinstance(placed, Place | Queue)
    return placed.replica


# --- roles --------------------------------------------------------------------------------------------


def test_without_disaggregation_every_replica_does_both() -> None:
    made = watcher(prefills=0)
    made.decide(observed("a: p40 | b: q50~"))
    assert roles(made) == "a* b*" and not awaits_prefills(made.memory)


def test_the_emptiest_replicas_are_for_prefills_and_stay_so() -> None:
    made = watcher(prefills=2)
    made.decide(observed("a: p40 | b: q50 | c: r10 | d:"))
    assert roles(made) == "a b C D"
    made.decide(observed("a: p40 | b: q50 | c: r90 | d: s90~", 1.0))
    assert roles(made) == "a b C D"


def test_another_replica_takes_the_place_of_one_that_is_gone() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50 | c: q40"))
    assert roles(made) == "A b c"
    made.decide(observed("b: p50 | c: q40", 1.0))
    assert roles(made) == "b C"
    made.memory.estimates.profile(ReplicaId("a"), PROFILE)
    made.decide(observed("a: | b: p50 | c: q40", 2.0))
    assert sorted(roles(made).split()) == ["C", "a", "b"]


@pytest.mark.parametrize("left", ["a:", "b: p50"], ids=["for prefills", "for decoding"])
def test_the_last_replica_does_both(left: str) -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    assert roles(made) == "A b"
    made.decide(observed(left, 1.0))
    assert roles(made) == f"{left[0]}*"
    assert arrive(made) == left[0]


@pytest.mark.parametrize("drawing", ["a: | b*: | c^: p50", "a: p90 |"])
def test_replicas_that_do_not_run_have_no_part(drawing: str) -> None:
    made = watcher()
    made.decide(observed(drawing))
    assert roles(made) == "a*"


def test_replicas_that_cannot_exchange_kv_do_both() -> None:
    made = watcher(caches="ab")
    made.decide(observed("a: | b: p50 | c:"))
    assert roles(made) == "a* b* c*"


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_without_moves_every_replica_does_both(mode: Mode) -> None:
    made = watcher(mode=mode)
    made.decide(observed("a: | b: p50"))
    assert roles(made) == "a* b*"


# --- arrivals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", sorted(POLICIES))
def test_arrivals_go_to_prefill_replicas_whoever_has_room(spec: str) -> None:
    made = watcher(spec=spec)
    made.decide(observed("a: | b: p50 | c:"))
    assert roles(made) == "A b c"
    arrival = Arrival(RequestId("n"), Tokens(10))
    for size in (10, 60, 80):
        matched = match_prompt(made.memory, arrival, 0.5).routed
        assert preview(made.memory, arrival).replica == "a"  # type: ignore[union-attr]
        assert matched is not None and matched.placing.replica == "a"
        assert arrive(made, size, f"n{size}") == "a", "what does not fit queues there"


def test_arrivals_go_where_their_prefill_begins_soonest() -> None:
    """Best fit would pack all but the last onto the replica of the first."""
    made = watcher(prefills=2, spec="best_fit")
    made.decide(observed("a: | b: | c: p50 | d: q60"))
    assert roles(made) == "A B c d"
    prompts = (("k", 40), ("l", 20), ("m", 10), ("n", 30), ("o", 10))
    first, *others = [arrive(made, tokens, name) for name, tokens in prompts]
    assert [other == first for other in others] == [False, False, False, True]


def test_request_that_no_prefill_replica_may_take_goes_elsewhere() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    placed = place(made.memory, Arrival(RequestId("n"), Tokens(10)), 0.5, exclude=[ReplicaId("a")])
    assert isinstance(placed, Place) and placed.replica == "b"


# --- moves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", sorted(POLICIES))
def test_prefills_that_have_begun_move_on_and_nothing_moves_to_their_replica(spec: str) -> None:
    made = watcher(spec=spec)
    made.decide(observed("a: | b: p50 | c: r20"))
    arrive(made)
    decided = made.decide(observed("a: n10~ m5 w8? | b: p50 | c: r20", 1.0))
    targets = {m.request: m.target for m in decided.moves if m.source == "a"}
    assert targets.keys() == {"n", "m"} and "a" not in targets.values()
    assert {m.reason for m in decided.moves if m.source == "a"} == {"disaggregate"}
    assert {m.path for m in decided.moves if m.source == "a"} == {Path.KV}
    assert not [m for m in decided.moves if m.target == "a"]
    made.memory.cluster.check_integrity()


def test_prefill_goes_by_kv_though_its_target_would_compute_it_sooner() -> None:
    made = watcher()
    for name in "ab":
        made.memory.estimates.profile(ReplicaId(name), replace(PROFILE, staging_bytes_per_s=1.0))
    made.decide(observed("a: | b: p50"))
    (move,) = made.decide(observed("a: n10~ | b: p50", 1.0)).moves
    assert move.path is Path.KV and move.kv_s is not None and move.tokens_s is not None
    assert move.kv_s > 10 * move.tokens_s


def test_request_moves_to_a_replica_that_need_not_wait_for_its_adapter() -> None:
    made = watcher(spec="best_fit")
    made.decide(observed("a: | b: p50+1 q20+2 | c: r10"))
    decided = made.decide(observed("a: n10+3~ | b: p50+1 q20+2 | c: r10", 1.0))
    assert moves(decided) == ["n:a>c disaggregate kv"]


def test_request_without_room_elsewhere_decodes_where_it_is() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    assert moves(made.decide(observed("a: n60~ | b: p50", 1.0, most=2))) == []
    assert moves(made.decide(observed("a: n60 | b: p50", 2.0, most=2))) == []
    assert moves(made.decide(observed("a: n60 | b: p20", 3.0, most=2))) == ["n:a>b disaggregate kv"]


def test_any_number_of_prefills_is_followed_at_a_time() -> None:
    made = watcher()
    made.decide(observed("a: | b: | c:"))
    prefills = " ".join(f"{name}5~" for name in "hijklmn")
    assert len(made.decide(observed(f"a: {prefills} | b: | c:", 1.0)).moves) == 7


def test_move_that_failed_is_ordered_again_after_its_rest() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    assert moves(made.decide(observed("a: n10~ | b: p50", 1.0))) == ["n:a>b disaggregate kv"]
    assert moves(made.decide(observed("a: n10~ | b: p50", 1.1, moves="n:a>b"))) == []
    assert moves(made.decide(observed("a: n11 | b: p50", 2.0))) == ["n:a>b disaggregate kv"]


@pytest.mark.parametrize("spec", sorted(POLICIES))
def test_prefill_replica_is_neither_filled_nor_closed(spec: str) -> None:
    made = watcher(spec=spec)
    made.least = 1
    made.decide(observed("a: | b: p10 | c: r20"))
    for now in range(1, 12):
        decided = made.decide(observed("a: | b: p10 | c: r20", float(now)))
        assert "a" not in decided.closed and not [m for m in decided.moves if m.target == "a"]
    assert roles(made)[0] == "A"


def test_room_for_prefills_is_no_room_for_what_decodes() -> None:
    made = watcher()
    made.least = 2
    made.decide(observed("a: | b: p50", most=9))
    assert made.memory.cluster.spare() == 50


def test_early_epoch_is_wanted_until_a_prefill_has_its_order() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    assert not awaits_prefills(made.memory)
    arrive(made)
    assert awaits_prefills(made.memory), "it may begin any moment"
    made.decide(observed("a: n10? | b: p50", 1.0))
    assert awaits_prefills(made.memory)
    made.decide(observed("a: n10~ | b: p50", 1.1))
    assert not awaits_prefills(made.memory)
    made.decide(observed("a: n10~ | b: p50", 1.2, moves="n:a>b"))
    assert not awaits_prefills(made.memory)
