"""What the scheduler knows between two reports: the reports, and what it placed since."""

import pytest

from policies.decision.ledger import Ledger
from policies.model import Blocks, Phase, ReplicaId, ReplicaLoad, ReplicaState, RequestId, RequestLoad, Tokens

A, B, R = ReplicaId("a"), ReplicaId("b"), RequestId("r")


def load(
    id: str = "a", *requests: str, free: int = 10, state: ReplicaState = ReplicaState.RUNNING, size: int = 16
) -> ReplicaLoad:
    there = tuple(RequestLoad(RequestId(r), r, Tokens(16), Phase.DECODE, 1.0, 0) for r in requests)
    return ReplicaLoad(ReplicaId(id), state, "node", Tokens(320), size, Blocks(free), 4, there)


def ledger(*loads: ReplicaLoad, ttl_s: float = 10.0) -> Ledger:
    made = Ledger(ttl_s)
    report(made, *loads, now=0.0)
    return made


def report(ledger: Ledger, *loads: ReplicaLoad, now: float, asked_at: float | None = None) -> None:
    """Reports arrive that were asked for just now, unless said otherwise."""
    ledger.report([(load, now if asked_at is None else asked_at) for load in loads], now)


def seen(ledger: Ledger, now: float = 1.0, replica: ReplicaId = A) -> tuple[list[str], int]:
    """The requests and the free blocks of a replica."""
    [load] = [load for load in ledger.state(now).replicas if load.id == replica]
    return [request.id for request in load.requests], load.free_blocks


def test_without_reports_there_is_no_replica() -> None:
    assert Ledger(10.0).state(now=0.0).replicas == ()


def test_state_is_what_replicas_report() -> None:
    assert ledger(load("b"), load("a", "x")).state(now=1.0).replicas == (load("a", "x"), load("b"))


def test_placement_counts_from_the_moment_it_is_decided() -> None:
    book = ledger(load("a", "x"))
    book.place(R, "label", A, Tokens(40), now=1.0)
    assert seen(book) == (["x", "r"], 7)


def test_placed_request_is_waiting_and_must_stay() -> None:
    book = ledger(load())
    book.place(R, "label", A, Tokens(40), now=1.0)
    ((_, request),) = book.state(now=3.5).requests()
    assert (request.label, request.tokens, request.phase, request.age_s) == ("label", 40, Phase.WAITING, 2.5)
    assert request.immovable == "not yet reported by its replica"


@pytest.mark.parametrize(("tokens", "free"), [(1, 9), (16, 9), (17, 8), (160, 0), (1_000, 0)])
def test_placement_takes_whole_blocks_and_never_more_than_there_are(tokens: int, free: int) -> None:
    book = ledger(load())
    book.place(R, "r", A, Tokens(tokens), now=1.0)
    assert seen(book) == (["r"], free)


def test_burst_is_seen_as_what_it_will_need() -> None:
    book = ledger(load())
    for i in range(3):
        book.place(RequestId(f"r{i}"), "r", A, Tokens(32), now=1.0)
    assert seen(book) == (["r0", "r1", "r2"], 4)


def test_request_placed_again_counts_only_where_it_was_placed_last() -> None:
    book = ledger(load("a"), load("b"))
    book.place(R, "r", A, Tokens(16), now=1.0)
    book.place(R, "r", B, Tokens(16), now=1.0)
    assert seen(book) == ([], 10) and seen(book, replica=B) == (["r"], 9)


def test_report_of_the_request_replaces_its_placement() -> None:
    book = ledger(load())
    book.place(R, "r", A, Tokens(160), now=1.0)
    report(book, load("a", "r", free=8), now=2.0)
    assert seen(book, now=2.0) == (["r"], 8)


def test_report_from_elsewhere_replaces_it_too() -> None:
    book = ledger(load("a"), load("b"))
    book.place(R, "r", A, Tokens(16), now=1.0)
    report(book, load("a"), load("b", "r"), now=2.0)
    assert seen(book, now=2.0) == ([], 10)


def test_report_without_the_request_keeps_its_placement() -> None:
    book = ledger(load())
    book.place(R, "r", A, Tokens(16), now=1.0)
    report(book, load(free=6), now=2.0)
    assert seen(book, now=2.0) == (["r"], 5)


@pytest.mark.parametrize(("now", "there"), [(10.9, ["r"]), (11.0, [])], ids=["just before", "at its end"])
def test_placement_expires(now: float, there: list[str]) -> None:
    book = ledger(load(), ttl_s=10.0)
    book.place(R, "r", A, Tokens(16), now=1.0)
    assert seen(book, now)[0] == there


def test_expired_placement_does_not_come_back_with_an_earlier_clock() -> None:
    book = ledger(load())
    book.place(R, "r", A, Tokens(16), now=1.0)
    report(book, load(), now=11.0)
    assert seen(book, now=2.0) == ([], 10)


def test_report_from_elsewhere_that_is_older_than_the_placement_leaves_it() -> None:
    """The request was on b, and is on a now: what b says of it has passed."""
    book = ledger(load("a"), load("b", "r"))
    book.place(R, "r", A, Tokens(16), now=1.0)
    report(book, load("a"), load("b", "r"), now=1.5, asked_at=0.9)
    assert seen(book, now=1.5) == (["r"], 9)


def test_replica_that_is_not_reported_is_not_there_and_keeps_its_placements() -> None:
    book = ledger(load("a"), load("b"))
    book.place(R, "r", A, Tokens(16), now=1.0)
    report(book, load("b"), now=2.0)
    assert [r.id for r in book.state(2.0).replicas] == [B]
    report(book, load("a"), load("b"), now=3.0)
    assert seen(book, now=3.0) == (["r"], 9)


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.STOPPED])
def test_replica_that_takes_no_requests_is_left_as_reported(state: ReplicaState) -> None:
    book = ledger(load(state=state))
    book.place(R, "r", A, Tokens(16), now=1.0)
    assert seen(book) == ([], 10)
