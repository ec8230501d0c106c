"""Which moves send KV, which tokens, and which wait."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.model import Bytes, ReplicaId, RequestId, Tokens
from policies.paths.choice import PATIENCE, URGENCY, Candidate, Choice, Link, LinkId, Prefill, choose, choose_alone
from policies.plan import Path, Reason

WIRE = LinkId("wire")
TARGET = ReplicaId("t")


def move(
    name: str,
    tokens: int = 100,
    reason: Reason = Reason.OVERLOAD,
    *,
    source: str = "s",
    target: str = "t",
    links: tuple[str, ...] = ("wire",),
) -> Candidate:
    """A move of a request whose KV takes ten bytes per token, and whose prefill a second per 50 tokens."""
    return Candidate(
        RequestId(name),
        ReplicaId(source),
        ReplicaId(target),
        reason,
        Tokens(tokens),
        Bytes(10 * tokens),
        tokens / 50,
        tuple(LinkId(link) for link in links),
    )


def link(bytes_per_s: float = 1000.0, boundary: float = 2000.0, backlog: float = 0.0, latency_s: float = 0.0) -> Link:
    """A link: by default two moves of 100 tokens fit, and one takes a second."""
    return Link(bytes_per_s, boundary, backlog, latency_s)


def prefill(boundary_s: float = 4.0, backlog_s: float = 0.0) -> Prefill:
    """A replica: by default two moves of 100 tokens fit, and one takes two seconds."""
    return Prefill(boundary_s, backlog_s)


def paths(choices: list[Choice]) -> dict[str, str]:
    """The choices by request."""
    return {str(choice.request): str(choice.path or "wait") for choice in choices}


def chosen(*candidates: Candidate, wire: Link | None = None, target: Prefill | None = None) -> dict[str, str]:
    """The paths over one link to one replica."""
    return paths(choose(candidates, {WIRE: wire or link()}, {TARGET: target or prefill()}))


@pytest.mark.parametrize(("times", "path"), [(0.5, "kv"), (1.0, "kv"), (PATIENCE, "kv"), (PATIENCE + 0.1, "tokens")])
def test_kv_is_sent_unless_that_takes_many_times_as_long(times: float, path: str) -> None:
    assert chosen(move("a"), wire=link(500.0 / times)) == {"a": path}


@pytest.mark.parametrize(("bytes_per_s", "path"), [(501.0, "kv"), (499.0, "tokens")], ids=["faster", "slower"])
def test_a_move_beyond_the_boundary_takes_the_faster_path(bytes_per_s: float, path: str) -> None:
    assert chosen(move("a"), wire=link(bytes_per_s, boundary=999.0)) == {"a": path}


def test_a_move_without_room_on_the_better_path_takes_the_other() -> None:
    candidates = [move(name) for name in "abcde"]
    assert chosen(*candidates) == {
        "a": "kv",
        "b": "kv",
        "c": "tokens",
        "d": "tokens",
        "e": "wait",
    }


def test_a_queue_makes_its_path_longer() -> None:
    assert chosen(move("a"), move("b"), wire=link(1000 / 15)) == {"a": "kv", "b": "tokens"}


def test_urgent_moves_go_first_and_large_ones_before_small_ones() -> None:
    moves = [
        move("drain", 150, Reason.DRAIN),
        move("small", 20),
        move("large", 180),
        move("room", 150, Reason.MAKE_ROOM),
    ]
    assert [str(choice.request) for choice in choose(moves, {WIRE: link()}, {TARGET: prefill()})] == [
        "large",
        "small",
        "room",
        "drain",
    ]


def test_the_least_urgent_moves_wait() -> None:
    moves = [move("drain", 150, Reason.DRAIN), move("one", 150), move("two", 150)]
    assert chosen(*moves) == {"one": "kv", "two": "tokens", "drain": "wait"}


def test_every_reason_has_its_urgency() -> None:
    assert set(URGENCY) == set(Reason) - {Reason.LOST, Reason.HAND_OVER}, "the ingress has done these already"
    assert min(URGENCY, key=URGENCY.__getitem__) is Reason.OVERLOAD
    assert max(URGENCY, key=URGENCY.__getitem__) is Reason.DRAIN


def test_a_move_beyond_every_boundary_goes_where_nothing_else_is() -> None:
    assert chosen(move("huge", 10_000)) == {"huge": "kv"}
    assert chosen(move("huge", 10_000), wire=link(backlog=1)) == {"huge": "tokens"}
    assert chosen(move("huge", 10_000), wire=link(backlog=1), target=prefill(backlog_s=1.0)) == {"huge": "wait"}


def test_backlogs_of_earlier_epochs_count() -> None:
    assert chosen(move("a"), wire=link(backlog=1001), target=prefill(backlog_s=2.02)) == {"a": "wait"}
    assert chosen(move("a"), wire=link(backlog=1000), target=prefill(backlog_s=2.02)) == {"a": "kv"}


def test_a_move_needs_room_on_all_of_its_links_and_takes_as_long_as_the_slowest() -> None:
    links = {LinkId("port"): link(), LinkId("uplink"): link(500.0, latency_s=0.5)}
    [choice] = choose([move("a", links=("port", "uplink"))], links, {TARGET: prefill()})
    assert (choice.path, choice.kv_s, choice.tokens_s, choice.predicted_s) == (Path.KV, 2.5, 2.0, 2.5)
    links[LinkId("uplink")] = link(500.0, backlog=1500)
    assert paths(choose([move("a", links=("port", "uplink"))], links, {TARGET: prefill()})) == {"a": "tokens"}


def test_a_move_without_links_can_only_send_tokens() -> None:
    [choice] = choose([move("a", links=())], {}, {TARGET: prefill()})
    assert (choice.path, choice.kv_s) == (Path.TOKENS, inf)
    assert paths(choose([move("a", links=())], {}, {TARGET: prefill(backlog_s=3.0)})) == {"a": "wait"}


def test_a_move_that_waits_is_predicted_to_take_for_ever() -> None:
    assert Choice(RequestId("a"), None, 1.0, 2.0).predicted_s == inf


def test_without_consensus_two_sources_promise_the_same_room() -> None:
    moves = [move("a", 150, source="s1"), move("b", 150, source="s2"), move("c", 150, source="s2")]
    resources = {WIRE: link()}, {TARGET: prefill()}
    assert paths(choose(moves, *resources)) == {"a": "kv", "b": "tokens", "c": "wait"}
    assert paths(choose_alone(moves, *resources)) == {"a": "kv", "b": "kv", "c": "tokens"}


def test_queued_requests_need_no_part_of_the_boundary() -> None:
    queued = [move(name, 150, Reason.ADMIT, links=()) for name in "abc"]
    assert chosen(*queued) == dict.fromkeys("abc", "tokens")
    running = [replace(each, reason=Reason.DRAIN) for each in queued]
    assert chosen(*running) == {"a": "tokens", "b": "wait", "c": "wait"}


def test_before_prefills_have_a_price_kv_is_sent_and_tokens_where_that_has_no_room() -> None:
    unpriced = [replace(move(name), prefill_s=inf) for name in "abcd"]
    assert chosen(*unpriced) == {"a": "kv", "b": "kv", "c": "tokens", "d": "tokens"}
    choices = choose([replace(each, links=()) for each in unpriced], {}, {TARGET: prefill()})
    assert paths(choices) == dict.fromkeys("abcd", "tokens")
    assert {choice.faster for choice in choices} == {Path.TOKENS}


def test_the_hand_over_and_the_wait_for_other_prefills_make_tokens_slower() -> None:
    [choice] = choose([replace(move("a"), handover_s=0.25)], {WIRE: link()}, {TARGET: Prefill(4.0, 1.0, 0.5)})
    assert choice.tokens_s == 0.5 + 1.0 + 2.0 + 0.25


def test_an_unknown_link_is_an_error() -> None:
    with pytest.raises(KeyError):
        choose([move("a", links=("elsewhere",))], {WIRE: link()}, {TARGET: prefill()})


Moves = st.lists(st.tuples(st.integers(1, 300), st.sampled_from(list(URGENCY)), st.sampled_from("tuv")), max_size=12)
Boundary = st.floats(0.0, 5000.0)


@given(Moves, Boundary, Boundary, Boundary)
def test_no_bin_is_filled_beyond_its_boundary_but_by_a_single_move(
    moves: list[tuple[int, Reason, str]], bytes_boundary: float, tokens_boundary: float, backlog: float
) -> None:
    candidates = [move(f"m{n}", size, why, target=to) for n, (size, why, to) in enumerate(moves)]
    links = {WIRE: link(boundary=bytes_boundary, backlog=backlog)}
    prefills = {ReplicaId(name): prefill(tokens_boundary) for name in "tuv"}
    choices = choose(candidates, links, prefills)
    assert sorted(choice.request for choice in choices) == sorted(each.request for each in candidates)
    by_path = {choice.request: choice.path for choice in choices}
    sent = [each.size for each in candidates if by_path[each.request] is Path.KV]
    assert not sent or backlog + sum(sent) <= bytes_boundary or (backlog == 0 and len(sent) == 1)
    for name in "tuv":
        bounded = [each for each in candidates if each.target == name and each.reason is not Reason.ADMIT]
        computed = [each.prefill_s for each in bounded if by_path[each.request] is Path.TOKENS]
        assert len(computed) <= 1 or sum(computed) <= tokens_boundary + 1e-9


@given(Moves)
def test_the_order_of_the_moves_does_not_matter(moves: list[tuple[int, Reason, str]]) -> None:
    candidates = [move(f"m{n}", size, why) for n, (size, why, _) in enumerate(moves)]
    assert chosen(*candidates) == chosen(*reversed(candidates))
