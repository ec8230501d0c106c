"""Predicted durations of moves, learning from ended moves, and the choice of paths."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.lines import Line
from policies.model import Bytes, ReplicaId, RequestId, Tokens
from policies.paths.beliefs import Priors, Profile
from policies.paths.choice import PATIENCE, URGENCY, Choice
from policies.paths.estimates import Boundaries, Errors, Estimates
from policies.plan import Move, MoveReport, Path, Reason
from policies.prefix.copies import CopyReport

A, B, C, D = (ReplicaId(name) for name in "abcd")
KV_BYTES = 1000
"""Of one token."""
PRIORS = Priors(within_node=Line.of(1e6, 0.1), between_nodes=Line.of(1e5, 0.1), prefill=Line.of(500.0), handover_s=0.1)


def profile(
    node: str = "one", rate: float = 1000.0, staging: float | None = None, cache: str = "cache", latency_s: float = 0.0
) -> Profile:
    """A replica with a prefill rate in tokens per second."""
    return Profile(node, cache, KV_BYTES, Line.of(rate, latency_s), staging)


def make(priors: Priors = PRIORS, boundaries: Boundaries | None = None, **others: Profile) -> Estimates:
    """Estimates of replicas a to d on one node; `others` replace or add some. Boundaries are out of the way."""
    estimates = Estimates(boundaries or Boundaries(time_limit_s=1e6, slowdown=1e6), 1.0, priors)
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
    """A move that took `whole_s`; without it, its target has not reported when the request went on."""
    kv = path is Path.KV
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
        copy_s=copy_s if copy_s is not None else 0.1 * kv,
        fell_back=not kv and copy_s is not None and copy_s > 0,
        predicted_s=predicted,
    )


def predicted(estimates: Estimates, tokens: int = 1000, source: str = "a", target: str = "b") -> Choice:
    """The prediction for a move that shares nothing."""
    return estimates.decide(move(tokens=tokens, source=source, target=target), (), 0.0)


def takes(choice: Choice, kv_s: float, tokens_s: float) -> bool:
    """True if that was the prediction."""
    return choice.kv_s == pytest.approx(kv_s) and choice.tokens_s == pytest.approx(tokens_s)


def path_of(estimates: Estimates, tokens: int = 1000, source: str = "a", target: str = "b") -> Path:
    path = predicted(estimates, tokens, source, target).path
    assert path is not None
    return path


# --- what is believed ------------------------------------------------------------------------------------


def test_without_evidence_links_are_as_their_kind_and_replicas_as_profiled() -> None:
    estimates = make(d=profile("two", rate=4000.0))
    near, far = predicted(estimates), predicted(estimates, target="d")
    assert takes(near, 0.1 + 1.0, 0.1 + 1.0)
    assert takes(far, 0.1 + 10.0, 0.1 + 0.25)


def test_a_link_is_no_faster_than_its_ends_stage_blocks() -> None:
    assert predicted(make(a=profile(staging=1e5))).kv_s == pytest.approx(10.1)
    assert predicted(make(b=profile(staging=1e5))).kv_s == pytest.approx(10.1)
    assert predicted(make(b=profile(staging=1e9))).kv_s == pytest.approx(1.1)


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
    assert predicted(estimates, source="b", target="c").kv_s == before


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


def test_a_prefill_is_learned_for_the_target_whatever_the_source() -> None:
    estimates = make()
    for tokens in (500, 1000, 2000, 1000, 500):
        estimates.learn(record(Path.TOKENS, tokens, 0.2 + tokens / 100, source="c"), 0.0)
    assert predicted(estimates).tokens_s == pytest.approx(10.2)
    assert predicted(estimates, target="d").tokens_s == pytest.approx(1.1)


def test_a_profile_that_comes_anew_leaves_the_evidence() -> None:
    estimates = make()
    estimates.learn(record(Path.TOKENS, whole_s=5.0), 0.0)
    estimates.profile(B, profile(rate=1.0))
    assert predicted(estimates).tokens_s == pytest.approx(5.0)


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
    assert choice.kv_s == pytest.approx(40.0 * PATIENCE)
    assert choice.tokens_s == pytest.approx(1.1)


def test_a_copy_that_failed_at_once_makes_the_link_slower_too() -> None:
    estimates = make()
    estimates.learn(record(Path.TOKENS, copy_s=0.001, sent=0), 0.0)
    assert predicted(estimates).kv_s == pytest.approx(1.1 * PATIENCE)


def test_one_failed_copy_does_not_outweigh_much_evidence() -> None:
    estimates = make()
    for tokens in (500, 1000, 2000, 1000, 500, 1000):
        estimates.learn(record(Path.KV, tokens, 0.1 + tokens / 1000), 0.0)
    estimates.learn(record(Path.TOKENS, copy_s=10.0, sent=0), 0.0)
    assert predicted(estimates).kv_s == pytest.approx(1.1)


def test_replicas_that_are_gone_are_forgotten() -> None:
    estimates = make()
    estimates.learn(record(whole_s=5.0), 0.0)
    estimates.learn(record(Path.TOKENS, whole_s=5.0), 0.0)
    estimates.keep({A, C})
    shown = estimates.to_json(0.0)
    assert shown["links"] == [] and [each["replica"] for each in shown["prefill"]] == [A, C]
    assert path_of(estimates) is Path.TOKENS


@given(st.permutations(range(8)))
def test_the_order_in_which_moves_are_reported_does_not_matter(order: list[int]) -> None:
    reordered, as_they_ended = make(), make()
    for n in order:
        reordered.learn(record(whole_s=1.0 + n), 100.0 * n)
    for n in range(8):
        as_they_ended.learn(record(whole_s=1.0 + n), 100.0 * n)
    assert reordered.decide(move(), (), 800.0) == as_they_ended.decide(move(), (), 800.0)


def test_old_evidence_gives_way_to_the_prior() -> None:
    estimates = make()
    estimates.learn(record(whole_s=50.0), 0.0)
    later = 20 * PRIORS.half_life_s
    assert estimates.decide(move(), (), 0.0).kv_s == pytest.approx(50.0)
    assert estimates.decide(move(), (), later).kv_s == pytest.approx(1.1)


# --- what is chosen --------------------------------------------------------------------------------------


@given(st.floats(1e5, 1e8), st.floats(100.0, 1e5), st.floats(0.0, 0.5), st.integers(1, 100_000))
def test_the_choice_flips_at_the_break_even(bandwidth: float, rate: float, handover_s: float, tokens: int) -> None:
    priors = replace(PRIORS, within_node=Line.of(bandwidth, 0.1), handover_s=handover_s)
    estimates = make(priors, b=profile(rate=rate))
    kv_s, tokens_s = 0.1 + KV_BYTES * tokens / bandwidth, handover_s + tokens / rate
    choice = predicted(estimates, tokens)
    assert takes(choice, kv_s, tokens_s)
    if abs(kv_s - PATIENCE * tokens_s) > 1e-6 * kv_s:
        assert choice.path is (Path.KV if kv_s < PATIENCE * tokens_s else Path.TOKENS)


def test_a_slow_link_sends_tokens_up_to_the_context_that_takes_longer_to_prefill() -> None:
    """The link sends twice as fast as replicas prefill, but every copy takes 5 s more, against 0.1 s."""
    slow = make(replace(PRIORS, within_node=Line.of(2e6, 5.0), handover_s=0.1))
    assert [path_of(slow, tokens) for tokens in (100, 400, 450, 5000)] == [Path.TOKENS] * 2 + [Path.KV] * 2


@pytest.mark.parametrize("unlike", [profile(cache="other"), profile(cache="")], ids=["another cache", "no cache"])
def test_kv_goes_only_between_caches_that_are_alike(unlike: Profile) -> None:
    fast = replace(PRIORS, within_node=Line.of(1e12))
    assert path_of(make(fast)) is Path.KV
    assert path_of(make(fast, b=unlike)) is Path.TOKENS
    assert path_of(make(fast, a=unlike, b=unlike)) is (Path.KV if unlike.cache else Path.TOKENS)


def test_between_replicas_without_a_profile_only_tokens_go() -> None:
    assert path_of(Estimates(Boundaries(), 1.0, PRIORS)) is Path.TOKENS


def test_a_move_that_cannot_wait_takes_the_sooner_path_though_there_is_no_room() -> None:
    estimates = make(boundaries=Boundaries(time_limit_s=0.1, slowdown=0.1))
    busy = [replace(move("x"), path=Path.KV), replace(move("y"), path=Path.KV), replace(move("z"), path=Path.TOKENS)]
    assert [choice.path for choice in estimates.choose([move()], busy, 0.0)] == [None]
    assert estimates.decide(move(), busy, 0.0).path is Path.TOKENS


def test_earlier_orders_count_on_their_links_and_targets() -> None:
    estimates = make(b=profile(rate=1001.0))
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

    estimates = make(b=profile(rate=1001.0))
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
        (choice,) = estimates.choose([move()], [replace(move("x"), path=Path.KV)], 0.0, present=present)
        assert choice.path is Path.TOKENS
        estimates.learn(record(Path.TOKENS, whole_s=2.0), 0.0)
        lines.append(predicted(estimates).tokens_s)
    assert lines[0] == pytest.approx(2.0, rel=0.1) and lines[1] > 1.5 * lines[0]


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
        fits = KV_BYTES * sum(new + old) <= PRIORS.within_node.rate * limits.time_limit_s * (1 + 1e-9)
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
    hopeful = replace(PRIORS, within_node=Line.of(1e8, 0.1), prefill=Line.of(1e6))
    estimates = make(hopeful, b=profile(rate=1e6))
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
    fast, slow = Line.of(1e6, 0.1), Line.of(1e3, 0.1)
    estimates = make(replace(PRIORS, within_node=fast if kv else slow), b=profile(rate=1.0 if kv else 1000.0))
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
        estimates.learn(record(path, own, 0.1 + passed, request=choice.request), 0.0)
    assert takes(predicted(estimates), before.kv_s, before.tokens_s)


@pytest.mark.parametrize(("chosen", "ordered"), [(Path.KV, Path.TOKENS), (Path.TOKENS, Path.KV)])
def test_a_move_by_another_path_than_chosen_counts_for_the_path_taken(chosen: Path, ordered: Path) -> None:
    """Bytes of a copy that was not made are no tokens that were prefilled."""
    estimates = make(replace(PRIORS, within_node=Line.of(1e9 if chosen is Path.KV else 1e4, 0.1)))
    assert predicted(estimates).path is chosen
    estimates.learn(record(ordered, whole_s=5.1), 0.0)
    half = predicted(estimates, 500)
    assert {Path.KV: half.kv_s, Path.TOKENS: half.tokens_s}[ordered] == pytest.approx(0.1 + 2.5)


def test_copies_that_are_given_up_again_and_again_are_not_ordered_again_and_again() -> None:
    estimates, orders = make(replace(PRIORS, within_node=Line.of(1e8, 0.1))), []
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


def test_beliefs_have_a_json_form() -> None:
    estimates = make()
    estimates.learn(record(whole_s=2.0, predicted=2.0), 0.0)
    shown = json.loads(json.dumps(estimates.to_json(0.0)))
    [link] = shown["links"]
    assert (link["source"], link["target"], link["observations"]) == ("a", "b", 1)
    assert link["bytes_per_s"] == pytest.approx(1e6 / 1.9) and link["latency_s"] == pytest.approx(0.1)
    assert [each["replica"] for each in shown["prefill"]] == ["a", "b", "c", "d"]
    assert shown["errors"] == {"kv": {"count": 1, "ratio": 1.0, "error": 0.0}, "tokens": None}


def copied(took_s: float, done: bool = True, tokens: int = 1000) -> CopyReport:
    return CopyReport(ReplicaId("a"), ReplicaId("b"), Tokens(tokens), took_s, done)


def copy_s(estimates: Estimates, tokens: int = 1000, now: float = 0.0) -> float:
    """The expected time of a copy from a to b."""
    line = estimates.copying(ReplicaId("a"), ReplicaId("b"), now)
    assert line is not None
    return line.seconds(tokens)


def test_without_evidence_a_copy_takes_the_time_of_a_move() -> None:
    estimates = make(a=profile(), b=profile())
    assert copy_s(estimates) == pytest.approx(predicted(estimates).kv_s)


def test_copies_are_learned_by_link_and_leave_moves_alone() -> None:
    estimates = make(a=profile(), b=profile())
    moves_s, there_s = predicted(estimates).kv_s, copy_s(estimates)
    for _ in range(6):
        estimates.learn_copy(copied(there_s / 4), 0.0)
    assert copy_s(estimates) == pytest.approx(there_s / 4, rel=0.05)
    assert predicted(estimates).kv_s == moves_s
    back = estimates.copying(ReplicaId("b"), ReplicaId("a"), 0.0)
    assert back is not None and back.seconds(1000) == pytest.approx(there_s)
    estimates.keep([ReplicaId("a")])
    assert estimates.copying(ReplicaId("a"), ReplicaId("b"), 0.0) is None


def test_a_copy_that_failed_makes_the_next_one_unlikely_for_a_while() -> None:
    estimates = make(a=profile(), b=profile())
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
