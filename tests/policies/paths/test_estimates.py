"""Predicted durations of moves, learning from ended moves, and the choice of paths."""

import json
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts, proportional
from policies.model import Bytes, ReplicaId, RequestId, Tokens
from policies.paths.choice import PATIENCE, URGENCY, Choice
from policies.paths.estimates import Boundaries, Errors, Estimates
from policies.paths.prices import FIRST_HANDOVER_S, HALF_LIFE_S, Prices, Profile, TargetWork
from policies.plan import Move, MoveReport, Path, Reason
from policies.prefix.copies import CopyReport

A, B, C, D = (ReplicaId(name) for name in "abcd")
KV_BYTES = 1000
"""Of one token."""
LINE = Line.of(1e6, 0.1)
"""Of a link without transfers."""
HANDOVER_S = FIRST_HANDOVER_S


def profile(node: str = "one", staging: float | None = None, cache: str = "cache") -> Profile:
    return Profile(node, cache, KV_BYTES, staging)


def speed(rate: float = 1000.0) -> ReplicaSpeed:
    """Prefills of that many tokens per second."""
    return ReplicaSpeed(StepCosts(proportional(1 / rate)))


def make(line: Line = LINE, rate: float = 1000.0, boundaries: Boundaries | None = None, **others: Profile) -> Estimates:
    """Estimates of replicas a to d on one node; `others` replace or add some. Boundaries are out of the way."""
    estimates = Estimates(boundaries or Boundaries(time_limit_s=1e6, slowdown=1e6), 1.0, Prices(line))
    estimates.follow(speed(rate))
    for name, found in ({name: profile() for name in "abcd"} | others).items():
        estimates.profile(ReplicaId(name), found)
    return estimates


def move(
    name: str = "r", tokens: int = 1000, source: str = "a", target: str = "b", reason: Reason = Reason.DRAIN
) -> Move:
    return Move(RequestId(name), ReplicaId(source), ReplicaId(target), Tokens(tokens), reason, 0)


def record(
    path: Path = Path.KV,
    tokens: int = 1000,
    whole_s: float | None = 1.0,
    *,
    source: str = "a",
    target: str = "b",
    request: str = "r",
    moved: bool = True,
    copy_s: float | None = None,
    sent: int | None = None,
    predicted: float | None = None,
) -> MoveReport:
    """A move that took `whole_s`; without it, its target has not reported when the request went on.

    By KV, all of it but the hand-over is copying.
    """
    kv = path is Path.KV
    copying_s = (whole_s or 1.0) - HANDOVER_S if kv else 0.0
    return MoveReport(
        RequestId(request),
        ReplicaId(source),
        ReplicaId(target),
        moved,
        path,
        took_s=(whole_s or 1.0) / 2,
        whole_s=whole_s if moved else None,
        tokens=Tokens(tokens),
        sent=Bytes(sent if sent is not None else KV_BYTES * tokens * kv),
        copy_s=copying_s if copy_s is None else copy_s,
        fell_back=not kv and copy_s is not None and copy_s > 0,
        predicted_s=predicted,
    )


def predicted(estimates: Estimates, tokens: int = 1000, source: str = "a", target: str = "b") -> Choice:
    """The prediction for a move that shares nothing."""
    return estimates.decide(move(tokens=tokens, source=source, target=target), (), 0.0)


def takes(choice: Choice, kv_s: float, tokens_s: float) -> bool:
    """True if that was the prediction, beside the hand-overs."""
    found = choice.kv_s - HANDOVER_S, choice.tokens_s - HANDOVER_S
    return found == pytest.approx((kv_s, tokens_s))


def path_of(estimates: Estimates, tokens: int = 1000, source: str = "a", target: str = "b") -> Path:
    path = predicted(estimates, tokens, source, target).path
    assert path is not None
    return path


# --- what is believed ------------------------------------------------------------------------------------


def test_without_evidence_links_and_hand_overs_are_as_the_first_ones_and_prefills_by_the_formula() -> None:
    estimates = make(d=profile("two"))
    assert takes(predicted(estimates), 0.1 + 1.0, 1.0) and takes(predicted(estimates, target="d"), 0.1 + 1.0, 1.0)
    estimates.follow(speed(4000.0))
    assert takes(predicted(estimates), 0.1 + 1.0, 0.25)


def test_a_link_is_no_faster_than_its_ends_stage_blocks() -> None:
    assert takes(predicted(make(a=profile(staging=1e5))), 10.1, 1.0)
    assert takes(predicted(make(b=profile(staging=1e5))), 10.1, 1.0)
    assert takes(predicted(make(b=profile(staging=1e9))), 1.1, 1.0)


def test_a_prefill_beside_decoding_requests_and_behind_others_takes_longer() -> None:
    estimates, costs = make(), StepCosts(proportional(1e-3), overhead_s=0.02, sequence_s=1e-3, context_s=1e-6)
    estimates.follow(ReplicaSpeed(costs, chunk_tokens=250))
    work = {B: TargetWork(8, 10_000, 0.5)}
    choice = estimates.decide(move(), (), 0.0, work_of=lambda replica, now: work.get(replica, TargetWork()))
    assert choice.tokens_s == pytest.approx(HANDOVER_S + 0.5 + costs.prefill_s(1000, 0, 250, 8, 10_000))
    assert takes(predicted(estimates, target="c"), 1.1, costs.prefill_s(1000, 0, 250))


def test_before_step_times_are_known_moves_go_by_kv_and_nothing_is_copied() -> None:
    estimates = Estimates(Boundaries(), 1.0, Prices(Line.of(1.0, 0.1)))
    for name in "abc":
        estimates.profile(ReplicaId(name), profile(cache="other" if name == "c" else "cache"))
    assert (predicted(estimates).path, predicted(estimates).tokens_s) == (Path.KV, inf)
    assert predicted(estimates, target="c").path is Path.TOKENS
    assert estimates.copying(A, B, 0.0) is None
    estimates.follow(speed())
    assert path_of(estimates) is Path.TOKENS and estimates.copying(A, B, 0.0) is not None


def test_small_moves_do_not_make_a_link_faster_than_its_ends_stage_blocks() -> None:
    """Between sizes that hardly differ, durations are noise: without a bound, the rate would be a thousand times it."""
    estimates = make(a=profile(staging=1e6), b=profile(staging=1e9))
    for n in range(16):
        estimates.learn(record(tokens=10 + n, whole_s=0.05 - 1e-4 * n), 0.0)
    [link] = estimates.to_json(0.0)["links"]
    assert link["bytes_per_s"] == pytest.approx(1e6)
    assert predicted(estimates, tokens=100_000).kv_s >= KV_BYTES * 100_000 / 1e6


def test_evidence_of_a_link_counts_for_others_of_its_kind_only() -> None:
    estimates = make(c=profile("two"), d=profile("two"))
    before = predicted(estimates, source="b", target="c").kv_s
    estimates.learn(record(whole_s=5.0), 0.0)
    assert predicted(estimates).kv_s == pytest.approx(5.0)
    assert predicted(estimates, source="c", target="d").kv_s == pytest.approx(5.0)
    assert predicted(estimates, source="b", target="c").kv_s == pytest.approx(before)


def test_a_link_is_believed_before_its_kind() -> None:
    estimates = make()
    estimates.learn(record(whole_s=5.0), 0.0)
    for _ in range(5):
        estimates.learn(record(whole_s=20.0, source="c", target="d"), 0.0)
    assert predicted(estimates).kv_s == pytest.approx(5.0)
    assert predicted(estimates, source="d", target="c").kv_s == pytest.approx(20.0)


def test_directions_of_a_link_are_learned_apart() -> None:
    estimates = make()
    estimates.learn(record(whole_s=2.0), 0.0)
    estimates.learn(record(whole_s=8.0, source="b", target="a"), 0.0)
    assert predicted(estimates).kv_s == pytest.approx(2.0)
    assert predicted(estimates, source="b", target="a").kv_s == pytest.approx(8.0)


@pytest.mark.parametrize("path", Path)
def test_a_hand_over_is_what_moves_take_beyond_their_transfer_or_prefill(path: Path) -> None:
    estimates = make()
    before = predicted(estimates)
    for n, tokens in enumerate((500, 1000, 2000, 1000, 500)):
        beside_s = 0.4 if n != 2 else 60.0
        copy_s = 0.1 + tokens / 1000 if path is Path.KV else 0.0
        priced_s = copy_s or tokens / 1000
        estimates.learn(record(path, tokens, priced_s + beside_s, copy_s=copy_s), 0.0)
    after = predicted(estimates, target="d")
    changes = after.kv_s - before.kv_s, after.tokens_s - before.tokens_s
    learned = 0.4 - HANDOVER_S
    assert changes == pytest.approx((learned, 0.0) if path is Path.KV else (0.0, learned), abs=1e-6)
    queued = estimates.decide(move(reason=Reason.ADMIT), (), 0.0)
    assert queued.tokens_s == pytest.approx(before.tokens_s), "a queued request is not frozen"


@pytest.mark.parametrize(
    "useless",
    [
        record(whole_s=9.0, moved=False),
        record(whole_s=None),
        record(Path.TOKENS, whole_s=None),
        replace(record(whole_s=9.0), tokens=None),
        replace(record(whole_s=9.0), moved=None),
    ],
    ids=["without effect", "kv, nothing reported", "tokens, nothing reported", "never frozen", "under way"],
)
def test_failed_and_unreported_moves_are_no_evidence(useless: MoveReport) -> None:
    estimates, before = make(), make().to_json(0.0)
    estimates.learn(useless, 0.0)
    assert estimates.to_json(0.0) == before


def test_a_copy_that_was_given_up_makes_the_link_slower_and_leaves_the_prefill() -> None:
    estimates = make()
    estimates.learn(record(Path.TOKENS, whole_s=11.0, copy_s=10.0, sent=250_000), 0.0)
    choice = predicted(estimates)
    assert takes(choice, 40.0 * PATIENCE, 1.0)


def test_a_copy_that_failed_at_once_makes_the_link_slower_too() -> None:
    estimates = make()
    estimates.learn(record(Path.TOKENS, copy_s=0.001, sent=0), 0.0)
    assert takes(predicted(estimates), 1.1 * PATIENCE, 1.0)


def test_one_failed_copy_does_not_outweigh_much_evidence() -> None:
    estimates = make()
    for tokens in (500, 1000, 2000, 1000, 500, 1000):
        estimates.learn(record(Path.KV, tokens, HANDOVER_S + 0.1 + tokens / 1000), 0.0)
    estimates.learn(record(Path.TOKENS, copy_s=10.0, sent=0), 0.0)
    assert takes(predicted(estimates), 1.1, 1.0)


def test_replicas_that_are_gone_are_forgotten() -> None:
    estimates = make()
    estimates.learn(record(whole_s=5.0), 0.0)
    estimates.keep({A, C})
    assert estimates.to_json(0.0)["links"] == [] and path_of(estimates) is Path.TOKENS


@given(st.permutations(range(8)))
def test_the_order_in_which_moves_are_reported_does_not_matter(order: list[int]) -> None:
    reordered, as_they_ended = make(), make()
    for n in order:
        reordered.learn(record(whole_s=1.0 + n), 100.0 * n)
    for n in range(8):
        as_they_ended.learn(record(whole_s=1.0 + n), 100.0 * n)
    assert reordered.to_json(800.0)["links"] == as_they_ended.to_json(800.0)["links"]


def test_old_evidence_gives_way_to_the_prior() -> None:
    estimates = make()
    estimates.learn(record(whole_s=50.0), 0.0)
    assert estimates.decide(move(), (), 0.0).kv_s == pytest.approx(50.0)
    assert takes(estimates.decide(move(), (), 20 * HALF_LIFE_S), 1.1, 1.0)


# --- what is chosen --------------------------------------------------------------------------------------


@given(st.floats(1e5, 1e8), st.floats(100.0, 1e5), st.integers(1, 100_000))
def test_the_choice_flips_at_the_break_even(bandwidth: float, rate: float, tokens: int) -> None:
    estimates = make(Line.of(bandwidth, 0.1), rate)
    kv_s, tokens_s = 0.1 + KV_BYTES * tokens / bandwidth, tokens / rate
    choice = predicted(estimates, tokens)
    assert takes(choice, kv_s, tokens_s)
    kv_s, tokens_s = kv_s + HANDOVER_S, tokens_s + HANDOVER_S
    if abs(kv_s - PATIENCE * tokens_s) > 1e-6 * kv_s:
        assert choice.path is (Path.KV if kv_s < PATIENCE * tokens_s else Path.TOKENS)


def test_a_slow_link_sends_tokens_up_to_the_context_that_takes_longer_to_prefill() -> None:
    """The link sends twice as fast as replicas prefill, but every copy takes 5 s more."""
    slow = make(Line.of(2e6, 5.0))
    assert [path_of(slow, tokens) for tokens in (100, 400, 550, 5000)] == [Path.TOKENS] * 2 + [Path.KV] * 2


@pytest.mark.parametrize("unlike", [profile(cache="other"), profile(cache="")], ids=["another cache", "no cache"])
def test_kv_goes_only_between_caches_that_are_alike(unlike: Profile) -> None:
    fast = Line.of(1e12)
    assert path_of(make(fast)) is Path.KV
    assert path_of(make(fast, b=unlike)) is Path.TOKENS
    assert path_of(make(fast, a=unlike, b=unlike)) is (Path.KV if unlike.cache else Path.TOKENS)


def test_between_replicas_without_a_profile_only_tokens_go() -> None:
    assert path_of(Estimates(Boundaries(), 1.0, Prices(LINE))) is Path.TOKENS


def test_a_move_that_cannot_wait_takes_the_sooner_path_though_there_is_no_room() -> None:
    estimates = make(boundaries=Boundaries(time_limit_s=0.1, slowdown=0.1))
    busy = [replace(move("x"), path=Path.KV), replace(move("y"), path=Path.KV), replace(move("z"), path=Path.TOKENS)]
    assert [choice.path for choice in estimates.choose([move()], busy, 0.0)] == [None]
    assert estimates.decide(move(), busy, 0.0).path is Path.TOKENS


def test_earlier_orders_count_on_their_links_and_targets() -> None:
    estimates = make(rate=1001.0)
    queued = {
        "kv": predicted(estimates).kv_s + 1.0,
        "tokens": predicted(estimates).tokens_s + 1000 / 1001,
    }
    after_kv = estimates.choose([move()], [replace(move("x"), path=Path.KV)], 0.0)
    after_tokens = estimates.choose([move()], [replace(move("x", source="c"), path=Path.TOKENS)], 0.0)
    elsewhere = estimates.choose([move()], [replace(move("x", target="c"), path=Path.KV)], 0.0)
    assert [choice.kv_s for choice in after_kv] == [pytest.approx(queued["kv"])]
    assert [choice.tokens_s for choice in after_tokens] == [pytest.approx(queued["tokens"])]
    assert [choice.kv_s for choice in elsewhere] == [predicted(estimates).kv_s]


def test_tokens_that_the_target_has_cost_nothing_by_either_path() -> None:
    def present(request: RequestId, replica: ReplicaId) -> Tokens:
        return Tokens(600 if (request, replica) == ("r", "b") else 0)

    estimates = make(rate=1001.0)
    found = estimates.decide(move(), (), 0.0, present)
    less = predicted(estimates, 400)
    assert (found.kv_s, found.tokens_s) == (less.kv_s, less.tokens_s)
    elsewhere = estimates.decide(move(target="c"), (), 0.0, present)
    assert elsewhere.kv_s == predicted(estimates).kv_s
    queued = estimates.choose([move("x")], [replace(move(), path=Path.KV)], 0.0, present=present)
    assert queued[0].kv_s == pytest.approx(predicted(estimates, 1400).kv_s)
    all_of_it = estimates.decide(move(), (), 0.0, lambda request, replica: Tokens(1000))
    assert all_of_it.tokens_s == predicted(estimates, 1).tokens_s, "the newest token is computed in any case"


def test_a_prefill_is_learned_without_the_tokens_that_the_target_had() -> None:
    lines = []
    for tokens in (0, 600):

        def present(request: RequestId, replica: ReplicaId, tokens: int = tokens) -> Tokens:
            return Tokens(tokens)

        estimates = make(boundaries=Boundaries(time_limit_s=1e-9, slowdown=1e6))
        for _ in range(10):
            (choice,) = estimates.choose([move()], [replace(move("x"), path=Path.KV)], 0.0, present=present)
            assert choice.path is Path.TOKENS
            estimates.learn(record(Path.TOKENS, whole_s=2.0), 0.0)
        lines.append(predicted(estimates).tokens_s)
    assert lines == pytest.approx([2.0, 2.6]), "the rest of the two seconds is the hand-over"


def test_the_urgent_ones_go_first() -> None:
    moves = [move("drain"), move("away", reason=Reason.EVACUATE), move("overload", reason=Reason.OVERLOAD)]
    assert [str(c.request) for c in make().choose(moves, (), 0.0)] == ["overload", "away", "drain"]


Moves = st.lists(
    st.tuples(st.integers(1, 3000), st.sampled_from("abcd"), st.sampled_from("abcd"), st.sampled_from(list(URGENCY))),
    max_size=14,
)
Limits = st.builds(Boundaries, st.just(1.0), st.floats(0.01, 5.0), st.floats(0.01, 5.0))


def drawn(moves: list[tuple[int, str, str, Reason]], prefix: str) -> list[Move]:
    return [move(f"{prefix}{n}", t, source, to, why) for n, (t, source, to, why) in enumerate(moves) if source != to]


@given(Moves, Moves, Limits)
def test_no_link_and_no_target_is_promised_more_than_its_boundary_but_to_a_single_move(
    moves: list[tuple[int, str, str, Reason]], earlier: list[tuple[int, str, str, Reason]], limits: Boundaries
) -> None:
    estimates, wanted = make(boundaries=limits), drawn(moves, "m")
    busy = [replace(each, path=Path.KV if n % 2 else Path.TOKENS) for n, each in enumerate(drawn(earlier, "e"))]
    path = {choice.request: choice.path for choice in estimates.choose(wanted, busy, 0.0)}
    assert sorted(path) == sorted(each.request for each in wanted)
    for link in {(each.source, each.target) for each in wanted}:
        new = [m.tokens for m in wanted if (m.source, m.target) == link and path[m.request] is Path.KV]
        old = [o.tokens for o in busy if (o.source, o.target) == link and o.path is Path.KV]
        fits = KV_BYTES * sum(new + old) <= LINE.rate * limits.time_limit_s * (1 + 1e-9)
        assert not new or fits or (len(new) == 1 and not old)
    for target in {each.target for each in wanted}:
        bounded = [m for m in wanted if m.target == target and m.reason is not Reason.ADMIT]
        new = [m.tokens for m in bounded if path[m.request] is Path.TOKENS]
        old = [o.tokens for o in busy if o.target == target and o.path is Path.TOKENS]
        fits = sum(new + old) <= 1000.0 * limits.slowdown * (1 + 1e-9)
        assert not new or fits or (len(new) == 1 and not old)


@given(Moves, st.randoms(use_true_random=False))
def test_neither_the_order_of_moves_nor_that_of_replicas_matters(
    moves: list[tuple[int, str, str, Reason]], random: object
) -> None:
    wanted = drawn(moves, "m")
    one, other = make(), make()
    for name in reversed("abcd"):
        other.profile(ReplicaId(name), profile())
    assert one.choose(wanted, (), 0.0) == other.choose(wanted[::-1], (), 0.0)


# --- learning by choosing --------------------------------------------------------------------------------


@given(st.floats(1e4, 1e7), st.floats(50.0, 1e5), st.integers(10, 20_000))
def test_who_hopes_for_the_best_ends_on_the_better_path(bandwidth: float, rate: float, tokens: int) -> None:
    estimates = make(Line.of(1e8, 0.1), 1e6)
    truth = {Path.KV: 0.2 + KV_BYTES * tokens / bandwidth, Path.TOKENS: 0.2 + tokens / rate}
    for _ in range(6):
        path = path_of(estimates, tokens)
        estimates.learn(record(path, tokens, truth[path]), 0.0)
    times = truth[Path.KV] / truth[Path.TOKENS] / PATIENCE
    assert times <= 1.01 if predicted(estimates, tokens).path is Path.KV else times >= 0.99


@pytest.mark.parametrize("path", [Path.KV, Path.TOKENS])
def test_moves_that_share_a_link_or_a_target_do_not_make_it_look_slower(path: Path) -> None:
    """Ten at once; each takes as long as all that has to pass until it is over."""
    kv = path is Path.KV
    estimates = make(Line.of(1e6 if kv else 1e3, 0.1), 1.0 if kv else 1000.0)
    wanted = [move(f"m{n}", 100 + 10 * n) for n in range(10)]
    choices = estimates.choose(wanted, (), 0.0)
    assert {choice.path for choice in choices} == {path}
    tokens = {each.request: each.tokens for each in wanted}
    before = predicted(estimates)
    ahead = 0
    for choice in choices:
        own = tokens[choice.request]
        ahead += own
        passed = sum(min(own, other) for other in tokens.values()) / 1000 if kv else ahead / 1000
        estimates.learn(record(path, own, HANDOVER_S + 0.1 * kv + passed, request=choice.request), 0.0)
    after = predicted(estimates)
    assert (after.kv_s, after.tokens_s) == pytest.approx((before.kv_s, before.tokens_s))


@pytest.mark.parametrize(("chosen", "ordered"), [(Path.KV, Path.TOKENS), (Path.TOKENS, Path.KV)])
def test_a_move_by_another_path_than_chosen_counts_for_the_path_taken(chosen: Path, ordered: Path) -> None:
    """Bytes of a copy that was not made are no tokens that were prefilled."""
    estimates = make(Line.of(1e9 if chosen is Path.KV else 1e4, 0.1))
    assert predicted(estimates).path is chosen
    for _ in range(10):
        estimates.learn(record(ordered, whole_s=5.1 + HANDOVER_S), 0.0)
        predicted(estimates)  # for the next move
    half = predicted(estimates, 500)
    kv_s, tokens_s = 0.1 + 2.5 + HANDOVER_S, 0.5 + 4.1 + HANDOVER_S
    assert {Path.KV: half.kv_s, Path.TOKENS: half.tokens_s}[ordered] == pytest.approx(
        {Path.KV: kv_s, Path.TOKENS: tokens_s}[ordered]
    )


def test_copies_that_are_given_up_again_and_again_are_not_ordered_again_and_again() -> None:
    estimates, orders = make(Line.of(1e8, 0.1)), []
    for _ in range(5):
        path = predicted(estimates).path
        orders.append(path)
        estimates.learn(record(Path.TOKENS, whole_s=4.0, copy_s=3.0 * (path is Path.KV), sent=0), 0.0)
    assert orders[0] is Path.KV and orders.count(Path.KV) <= 2 and orders[3:] == [Path.TOKENS] * 2


# --- how good it was -------------------------------------------------------------------------------------


def test_errors_are_of_the_predictions_for_the_path_taken() -> None:
    estimates = make()
    for kv_s in (1.0, 2.0, 4.0):
        estimates.learn(record(whole_s=2.0, predicted=kv_s), 0.0)
    estimates.learn(record(Path.TOKENS, whole_s=2.0, predicted=3.0), 0.0)
    assert estimates.errors(Path.KV) == Errors(3, 1.0, 0.5)
    assert estimates.errors(Path.TOKENS) == Errors(1, 1.5, 0.5)


def test_moves_without_prediction_or_by_another_path_than_intended_count_for_no_error() -> None:
    estimates = make()
    estimates.learn(record(), 0.0)
    estimates.learn(record(Path.TOKENS, copy_s=1.0, predicted=1.0), 0.0)
    assert estimates.errors(Path.KV) is None and estimates.errors(Path.TOKENS) is None


def test_prices_have_a_json_form() -> None:
    estimates = make()
    estimates.learn(record(whole_s=2.0, predicted=2.0), 0.0)
    shown = json.loads(json.dumps(estimates.to_json(0.0)))
    [link] = shown["links"]
    assert (link["source"], link["target"], link["observations"]) == ("a", "b", 1)
    rate = 1e6 / (2.0 - HANDOVER_S - 0.1)
    assert link["bytes_per_s"] == pytest.approx(rate) and link["latency_s"] == pytest.approx(0.1)
    assert shown["handover_s"] == pytest.approx(dict.fromkeys(("kv", "tokens", "queued"), HANDOVER_S))
    assert shown["errors"] == {"kv": {"count": 1, "ratio": 1.0, "error": 0.0}, "tokens": None}


def copied(took_s: float, done: bool = True, tokens: int = 1000) -> CopyReport:
    return CopyReport(ReplicaId("a"), ReplicaId("b"), Tokens(tokens), took_s, done)


def copy_s(estimates: Estimates, tokens: int = 1000, now: float = 0.0) -> float:
    """The expected time of a copy from a to b."""
    line = estimates.copying(ReplicaId("a"), ReplicaId("b"), now)
    assert line is not None
    return line.seconds(tokens)


def test_copies_and_moves_are_of_one_line_per_link() -> None:
    estimates = make()
    assert copy_s(estimates) == pytest.approx(predicted(estimates).kv_s - HANDOVER_S)
    for _ in range(6):
        estimates.learn_copy(copied(0.3), 0.0)
    assert copy_s(estimates) == pytest.approx(0.3, rel=0.05)
    assert predicted(estimates).kv_s == pytest.approx(copy_s(estimates) + HANDOVER_S)
    estimates.learn(record(whole_s=9.0, source="b", target="a"), 0.0)
    back = estimates.copying(B, A, 0.0)
    assert back is not None and back.seconds(1000) == pytest.approx(9.0 - HANDOVER_S)
    estimates.keep([A])
    assert estimates.copying(A, B, 0.0) is None


def test_a_copy_that_failed_makes_the_next_one_unlikely_for_a_while() -> None:
    estimates = make()
    before_s = copy_s(estimates)
    estimates.learn_copy(copied(0.1, done=False), 0.0)
    assert copy_s(estimates) > 5 * before_s
    assert copy_s(estimates, now=1e5) == pytest.approx(before_s, rel=0.05)


def test_nothing_is_copied_between_caches_that_differ_or_by_tokens() -> None:
    unlike = make(a=profile(), b=replace(profile(), cache="another"))
    by_tokens = make(boundaries=Boundaries(only=Path.TOKENS), a=profile(), b=profile())
    for estimates in (unlike, by_tokens):
        estimates.learn_copy(copied(1.0), 0.0)
        assert estimates.copying(ReplicaId("a"), ReplicaId("b"), 0.0) is None
