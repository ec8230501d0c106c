"""Prefill and decoding on replicas of their own: who has which role, where arrivals go, and who moves on."""

from dataclasses import replace

import pytest

from policies.cluster.capacity import spare_capacity
from policies.cluster.changes import Arrival
from policies.cost.service import ReplicaSpeed, ServiceLevel
from policies.cost.steps import StepCosts, proportional
from policies.decision.deciding import match_prompt, place, preview
from policies.decision.disaggregation.roles import awaits_prefills, set_role
from policies.decision.limits import Limits, LiveLimits, Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.placement import Place, Queue
from policies.model import ReplicaId, RequestId, Role, Tokens
from policies.paths.prices import Profile
from policies.plan import MoveReport, Path, Plan, Reason
from policies.precedence import Precedence, ServiceClass, ServiceClasses
from policies.rules.registry import POLICIES
from tests.policies.decision.observed import Watcher, observed

PROFILE = Profile("n", "cache", 1.0)
SPEED = ReplicaSpeed(StepCosts(proportional(1e-3)))
LIMITS, TERMS = Limits(), Terms()


def watcher(
    prefills: int = 1,
    spec: str = "pack:headroom_s=0,comfort=0,rest=0",
    mode: Mode = Mode.ACT,
    caches: str = "abcd",
    limits: Limits = LIMITS,
    at_once: int = 32,
    terms: Terms = TERMS,
) -> Watcher:
    """A watcher of replicas, of which those in `caches` exchange KV."""
    live = LiveLimits(limits, 0.0, 0.0, 60.0, 0.0)
    memory = PoolMemory(
        replace(terms, policy=spec, limits=live, mode=mode, prefill_replicas=prefills, moves_at_once=at_once)
    )
    for name in caches:
        memory.learned.estimates.profile(ReplicaId(name), PROFILE)
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
    made.memory.learned.estimates.profile(ReplicaId("a"), PROFILE)
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


# --- roles by hand ------------------------------------------------------------------------------------


def by_hand(made: Watcher, given: str) -> None:
    """Set roles: `A` for prefills, `a` for decoding, `a*` for both; `-a` takes a role back."""
    for word in given.split():
        role = Role.BOTH if word.endswith("*") else Role.PREFILL if word.isupper() else Role.DECODE
        set_role(made.memory, ReplicaId(word.strip("-*").lower()), None if word.startswith("-") else role)


@pytest.mark.parametrize(
    ("prefills", "given", "expected"),
    [
        (0, "B", "a* B c*"),
        (0, "b", "a* b c*"),
        (0, "B c", "a* B c"),
        (0, "b*", "a* b* c*"),
        (1, "B", "a B c"),
        (1, "a", "a b C"),
        (1, "a*", "a* b C"),
        (1, "B C", "a B C"),
        (2, "b", "A b C"),
        (0, "A B C", "a* b* c*"),
        (0, "a b c", "a* b* c*"),
        (1, "a b c", "a* b* c*"),
        (2, "A B C", "a* b* c*"),
        (1, "a b", "a b C"),
    ],
)
def test_an_operators_roles_come_first_and_no_part_is_without_a_replica(
    prefills: int, given: str, expected: str
) -> None:
    made = watcher(prefills)
    by_hand(made, given)
    made.decide(observed("a: p10 | b: q50 | c: r40"))
    assert roles(made) == expected


def test_an_operators_role_holds_until_it_is_taken_back() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50 | c: q40"))
    assert roles(made) == "A b c"
    by_hand(made, "B")
    made.decide(observed("a: | b: p50 | c: q40", 1.0))
    assert roles(made) == "a B c"
    by_hand(made, "-b")
    made.decide(observed("a: | b: p50 | c: q40", 2.0))
    assert roles(made) == "a B c", "it has the role already, so it keeps it"
    by_hand(made, "b -b")
    made.decide(observed("a: | b: p50 | c: q40", 3.0))
    assert roles(made) == "a B c"


def test_an_operators_role_ends_with_its_replica_and_outlives_its_other_part() -> None:
    made = watcher(0)
    by_hand(made, "A")
    made.decide(observed("a: p10 | b:"))
    assert roles(made) == "A b*"
    made.decide(observed("a: p10", 1.0))
    assert roles(made) == "a*" and arrive(made) == "a"
    made.memory.learned.estimates.profile(ReplicaId("b"), PROFILE)
    made.decide(observed("a: p10 n10 | b:", 2.0))
    assert roles(made) == "A b*"
    made.decide(observed("b:", 3.0))
    made.memory.learned.estimates.profile(ReplicaId("a"), PROFILE)
    made.decide(observed("a: p10 | b:", 4.0))
    assert roles(made) == "b* a*"


def test_without_disaggregation_an_operators_prefill_replica_hands_its_requests_over() -> None:
    made = watcher(0, "best_fit")
    by_hand(made, "B")
    made.decide(observed("a: p60 | b: | c: q50"))
    assert arrive(made) == "b"
    assert not awaits_prefills(made.memory), "its move has come with its placement"
    assert moves(made.decide(observed("a: p60 | b: n10~ | c: q50", 1.0))) == ["n:b>a disaggregate kv"]
    assert arrive(made, 95, "m") == "b", "what fits nowhere queues where others do"


@pytest.mark.parametrize("spec", sorted(POLICIES))
def test_arrivals_avoid_an_operators_decode_replica(spec: str) -> None:
    made = watcher(0, spec)
    by_hand(made, "a")
    made.decide(observed("a: | b: p50 | c: q60"))
    assert [arrive(made, 20, f"n{number}") in "bc" for number in range(4)] == [True] * 4
    made.memory.cluster.check_integrity()


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
        made.memory.learned.estimates.profile(ReplicaId(name), replace(PROFILE, staging_bytes_per_s=1.0))
    made.memory.learned.follow_speed(SPEED)
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
    assert spare_capacity(made.memory.cluster) == 50


# --- moves with placements ----------------------------------------------------------------------------


def placed(made: Watcher, tokens: int = 10, name: str = "n", at: float = 0.5) -> Place:
    """The placement of an arrival."""
    found = place(made.memory, Arrival(RequestId(name), Tokens(tokens)), at)
    assert isinstance(found, Place)
    made.memory.cluster.check_integrity()
    return found


def onward(made: Watcher, tokens: int = 10, name: str = "n", at: float = 0.5) -> str | None:
    """The replica to which an arrival moves on from that of its prefill."""
    then = placed(made, tokens, name, at).then
    return None if then is None else then.target


@pytest.mark.parametrize("spec", sorted(POLICIES))
def test_arrival_is_placed_with_its_move_to_a_decode_replica(spec: str) -> None:
    made = watcher(spec=spec, terms=Terms(decode_rate=0.01))
    made.decide(observed("a: | b: p50 | c: q50"))
    found = placed(made)
    assert found.replica == "a" and found.then is not None
    assert found.then.target in "bc" and found.then.source == "a" and found.then.request == "n"
    assert (found.then.reason, found.then.path) == ("disaggregate", Path.KV)
    assert not awaits_prefills(made.memory), "no epoch has to order anything"
    request = made.memory.cluster.requests[RequestId("n")]
    assert request.replica is not None and request.replica.id == found.then.target
    assert request.source is not None and request.source.id == "a"


def test_room_of_a_move_with_a_placement_is_promised_once() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    assert [onward(made, 30, name) for name in "klm"] == ["b", None, None]
    made.decide(observed("a: k30~ l30? m30? | b: p50", 1.0, moves="k:a>b"))
    assert made.memory.cluster.replicas[ReplicaId("b")].free == 20


def test_moves_with_placements_last_until_they_are_over() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    assert onward(made) == "b"
    for now, phase in ((1.0, "?"), (2.0, "~"), (3.0, ">")):
        assert moves(made.decide(observed(f"a: n10{phase} | b: p50", now, moves="n:a>b"))) == []
        assert made.memory.cluster.requests[RequestId("n")].source is not None
        made.memory.cluster.check_integrity()
    made.decide(observed("a: | b: p50 n11", 4.0))
    request = made.memory.cluster.requests[RequestId("n")]
    assert request.source is None and not made.memory.locations.under_way


def test_request_that_has_moved_on_before_its_first_report_is_at_its_target() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    assert onward(made) == "b"
    made.decide(observed("a: | b: p50 n12", 1.0))
    request = made.memory.cluster.requests[RequestId("n")]
    assert request.replica is not None and (request.replica.id, request.source) == ("b", None)
    assert not made.memory.locations.placed and not made.memory.locations.under_way


def test_request_that_its_target_has_not_reported_yet_is_expected_there() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    assert onward(made) == "b"
    over = MoveReport(RequestId("n"), ReplicaId("a"), ReplicaId("b"), moved=True, path=Path.KV)
    made.observe_moves(observed("a: | b: p50", 1.0), over)
    assert made.memory.cluster.requests[RequestId("n")].replica is made.memory.cluster.replicas[ReplicaId("b")]


def test_move_that_failed_is_left_to_a_later_epoch() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    assert onward(made) == "b"
    assert moves(made.decide(observed("a: n10~ | b: p50", 1.0))) == ["n:a>b disaggregate kv"]


def test_move_that_did_not_begin_is_left_to_a_later_epoch() -> None:
    """The replica of the prefill reports the request, and no move of it."""
    made = watcher()
    made.decide(observed("a: | b: p50"))
    assert onward(made) == "b"
    made.observe_moves(observed("a: n10~ | b: p50", 1.0))
    assert not made.memory.locations.under_way and awaits_prefills(made.memory)
    assert moves(made.decide(observed("a: n10~ | b: p50", 1.1))) == ["n:a>b disaggregate kv"]


def test_move_that_another_scheduler_has_ordered_is_known_for_what_it_is() -> None:
    """The request is prefilled at its source, and the move takes no part of what each replica may have."""
    made = watcher(terms=Terms(service=ServiceLevel(2.0, None)))
    under_way = MoveReport(RequestId("n"), ReplicaId("a"), ReplicaId("b"), reason=Reason.DISAGGREGATE)
    made.observe_moves(observed("a: n10~ | b: p50"), under_way)
    assert [made.memory.cluster.replicas[ReplicaId(r)].backlog for r in "ab"] == [10, 0]


def test_move_rests_as_one_of_an_epoch_does() -> None:
    made = watcher(limits=Limits(cooldown_s=5.0))
    made.decide(observed("a: | b: p50"))
    assert onward(made) == "b"
    assert moves(made.decide(observed("a: n10~ | b: p50", 1.0))) == []
    assert moves(made.decide(observed("a: n10 | b: p50", 5.6))) == ["n:a>b disaggregate kv"]


def test_request_that_is_never_reported_leaves_nothing_behind() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    assert onward(made) == "b"
    made.observe_moves(observed("a: | b: p50", 3.0))
    assert not made.memory.locations.under_way and not made.memory.cluster.held and not made.memory.locations.placed


@pytest.mark.parametrize("left", ["a: | c: q95", "b: p50 | c: q95"], ids=["its target", "that of its prefill"])
def test_move_ends_with_either_replica(left: str) -> None:
    made = watcher()
    made.decide(observed("a: | b: p50 | c: q95"))
    assert onward(made) == "b"
    made.observe_moves(observed(left, 1.0))
    there = made.memory.cluster.requests.get(RequestId("n"))
    assert there is None or (there.replica is not None and (there.replica.id, there.source) == ("a", None))
    made.memory.cluster.check_integrity()


def test_request_that_is_placed_anew_has_a_new_move() -> None:
    """Its reader has lost the replica of its prefill, which the scheduler still lists."""
    made = watcher(prefills=2)
    made.decide(observed("a: | b: | c: p50 | d: q60"))
    first = placed(made)
    again = place(made.memory, Arrival(RequestId("n"), Tokens(10)), 0.6, exclude=[first.replica])
    assert isinstance(again, Place) and again.then is not None and again.then.source == again.replica != first.replica
    assert [underway.move for underway in made.memory.locations.under_way.values()] == [again.then]
    made.memory.cluster.check_integrity()


def test_pair_whose_moves_keep_failing_gets_none() -> None:
    made = watcher()
    made.decide(observed("a: | b: p50"))
    for _ in range(3):
        made.memory.learned.breaker.failed((ReplicaId("a"), ReplicaId("b")), 0.4)
    assert onward(made) is None


def test_moves_that_wait_for_prefills_leave_half_of_all_to_epochs() -> None:
    made = watcher(at_once=6)
    made.decide(observed("a: | b: p50"))
    assert [onward(made, 5, name) for name in "hijk"] == ["b", "b", "b", None]


def test_move_waits_for_its_epoch_if_that_has_none_left() -> None:
    made = watcher(limits=Limits(moves_per_epoch=1))
    made.decide(observed("a: | b: p50"))
    assert [onward(made, 5, name) for name in "hi"] == ["b", None]


def test_full_link_leaves_the_move_to_an_epoch() -> None:
    made = watcher()
    for name in "ab":
        made.memory.learned.estimates.profile(ReplicaId(name), replace(PROFILE, staging_bytes_per_s=1.0))
    made.decide(observed("a: | b: p10"))
    assert [onward(made, 20, name) for name in "kl"] == ["b", None], "an empty link takes any one move"


def test_move_takes_no_room_from_a_request_of_an_earlier_turn() -> None:
    made = watcher(terms=Terms(classes=ServiceClasses({"first": ServiceClass(5)})))
    made.decide(observed("a: | b: p50 | c: q90"))
    first = {"w": Precedence(service_class="first")}
    made.observe_moves(observed("a: z70~ | b: p50 | c: q90 w40?", 0.4, classed=first))
    assert onward(made, 20) is None


def test_backlog_of_a_request_with_its_move_is_where_it_is_prefilled() -> None:
    made = watcher(terms=Terms(service=ServiceLevel(2.0, None)))
    made.decide(observed("a: | b: p50"))
    assert onward(made) == "b"
    for phase, backlog in (("?", 10), ("~", 10), (">", 0)):
        made.decide(observed(f"a: n10{phase} | b: p50", 1.0, moves="n:a>b"))
        assert [made.memory.cluster.replicas[ReplicaId(r)].backlog for r in "ab"] == [backlog, 0]


def test_replica_keeps_room_for_a_prompt_that_it_has_yet_to_compute() -> None:
    made = watcher()
    made.decide(observed("a: | b: p20"))
    assert onward(made, 40) == "b"
    made.decide(observed("a: n40? | b: p20", 1.0, moves="n:a>b"))
    replicas = made.memory.cluster.replicas
    assert [replicas[ReplicaId(name)].free for name in "ab"] == [60, 40]


def test_context_returns_where_its_continuation_is_likely() -> None:
    made = watcher(terms=Terms(returns=True))
    for name in "ab":  # 256 tokens take 26 ms on the link, and 256 ms of prefill.
        made.memory.learned.estimates.profile(ReplicaId(name), replace(PROFILE, token_bytes=100_000.0))
    made.memory.learned.follow_speed(SPEED)
    made.decide(observed("a: | b: p50"))
    names = iter(range(1, 1000))

    def arrives(name: str, at: float, blocks: int = 1, session: str = "") -> bool:
        prompt = tuple(next(names) for _ in range(blocks))
        found = place(made.memory, Arrival(RequestId(name), Tokens(1), prompt, session), at)
        assert isinstance(found, Place) and found.replica == "a" and found.then is not None
        return found.returns

    assert arrives("h", 0.5), "as likely as not"
    assert not arrives("i", 0.5, blocks=0), "nobody would find it"
    for number in range(12):
        made.decide(observed("a: | b: p50", 1.0 + 3 * number))
        arrives("j", 1.0 + 3 * number)
    made.decide(observed("a: | b: p50", 200.0))
    assert not arrives("k", 200.0), "nothing was continued"


def test_nothing_returns_unless_it_may_or_without_a_move() -> None:
    made = watcher(terms=Terms(returns=False))
    made.decide(observed("a: | b: p50"))
    assert not placed(made).returns
    made = watcher(terms=Terms(returns=True), at_once=1)
    made.decide(observed("a: | b: p50"))
    found = place(made.memory, Arrival(RequestId("n"), Tokens(1), (1,)), 0.5)
    assert isinstance(found, Place) and found.then is None and not found.returns


def test_early_epoch_is_wanted_until_a_prefill_has_its_order() -> None:
    made = watcher(at_once=1)
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
