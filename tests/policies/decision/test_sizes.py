"""The sizes of requests that share blocks: by their prompts, and by the engines' own counts."""

from collections.abc import Sequence

import pytest

from policies.cluster.changes import Arrival
from policies.decision.deciding import decide_pool, place
from policies.decision.limits import Limits, Sizes, Terms, as_given
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport, Resident, Status
from policies.decision.placement import Decision, Place, Queue
from policies.model import SOLE_POOL, Blocks, Phase, ReplicaId, ReplicaState, RequestId, RequestLoad, Tokens
from policies.plan import Plan

A, B = ReplicaId("a"), ReplicaId("b")
BLOCK = 10
CAPACITY = Tokens(1000)
DOCUMENT = tuple(range(100, 150))
"""500 tokens."""


class Observed:
    """A pool of two replicas, whose engines report their requests and their used tokens."""

    def __init__(self, sizes: Sizes = Sizes.MARGINAL, policy: str = "best_fit") -> None:
        self.memory = PoolMemory(Terms(policy, as_given(Limits()), sizes=sizes))
        self.now = 0.0

    def report(self, used: dict[ReplicaId, int], there: dict[str, tuple[ReplicaId, int]], *gone: str) -> Plan:
        """An epoch later, the engines use so many tokens, and have these requests with their tokens decoding."""
        self.now += 1.0
        report = PoolReport(
            Pool(SOLE_POOL, capacity=CAPACITY, min_replicas=2, max_replicas=2),
            tuple(
                Status(r, ReplicaState.RUNNING, "node", CAPACITY, BLOCK, Blocks((CAPACITY - tokens) // BLOCK))
                for r, tokens in used.items()
            ),
            requests=tuple(
                Resident(r, RequestLoad(RequestId(name), "", Tokens(tokens), Phase.DECODE, 1.0, 0))
                for name, (r, tokens) in there.items()
            ),
            gone=tuple(map(RequestId, gone)),
        )
        (plan,) = decide_pool(self.memory, report, self.now)
        self.memory.cluster.check_integrity()
        return plan

    def arrive(self, name: str, tokens: int, names: Sequence[int] = DOCUMENT) -> Decision:
        decision = place(self.memory, Arrival(RequestId(name), Tokens(tokens), tuple(names)), self.now)
        self.memory.cluster.check_integrity()
        return decision

    def room(self, replica: ReplicaId) -> int:
        return self.memory.cluster.replicas[replica].room


def shared(sizes: Sizes = Sizes.MARGINAL) -> Observed:
    """Two requests with the same document on replica a, which has 390 tokens left; b has 490."""
    made = Observed(sizes)
    made.report({A: 0, B: 0}, {})
    first = made.arrive("first", 550)
    assert isinstance(first, Place) and first.replica == A
    made.report({A: 550, B: 510}, {"first": (A, 550), "other": (B, 510)})
    second = made.arrive("second", 560)
    assert isinstance(second, Place if sizes is Sizes.MARGINAL else Queue)
    made.report({A: 610, B: 510}, {"second": (A, 560)})
    assert (made.room(A), made.room(B)) == (390, 490)
    return made


@pytest.mark.parametrize(("tokens", "fits"), [(890, True), (891, False)], ids=["the last token", "one token too many"])
def test_an_arrival_needs_room_for_what_it_adds(tokens: int, fits: bool) -> None:
    decision = shared().arrive("third", tokens)
    assert isinstance(decision, Place) == fits
    if fits:
        assert decision == Place(A)


def test_without_marginal_sizes_an_arrival_needs_room_for_its_whole_prompt() -> None:
    made = Observed(Sizes.BLIND)
    made.report({A: 610, B: 510}, {"first": (A, 550), "second": (A, 560), "other": (B, 510)})
    assert isinstance(made.arrive("third", 540), Queue)


def test_the_engines_count_holds_if_blocks_turn_out_not_to_be_shared() -> None:
    made = shared()
    made.report({A: 1000, B: 510}, {"first": (A, 550), "second": (A, 560)})
    assert made.room(A) == 0


def test_a_shared_document_stays_until_the_last_request_with_it_ends() -> None:
    made = shared()
    made.report({A: 560, B: 510}, {}, "first")
    assert made.room(A) == 440
    made.report({A: 0, B: 510}, {}, "second")
    assert made.room(A) == 1000


def test_a_document_whose_requests_have_ended_counts_in_full() -> None:
    made = shared()
    made.report({A: 0, B: 510}, {}, "first", "second")
    third = made.arrive("third", 600)
    assert third == Place(A) and made.room(A) == 400


def restarted() -> Observed:
    """A new scheduler, to which nobody gives the prompts of the requests that run already."""
    made = Observed()
    made.report({A: 610, B: 510}, {"first": (A, 550), "second": (A, 560), "other": (B, 510)})
    assert (made.room(A), made.room(B)) == (390, 490), "the engines' counts show what is shared, not with whom"
    return made


def test_a_new_scheduler_counts_an_arrival_in_full() -> None:
    assert isinstance(restarted().arrive("third", 540), Queue)


def test_a_new_scheduler_counts_marginal_sizes_of_what_comes_to_it() -> None:
    made = restarted()
    assert made.arrive("third", 390) == Place(A)
    made.report({A: 780, B: 510}, {"third": (A, 390)}, "first")
    assert made.room(A) == 220
    assert made.arrive("fourth", 600, DOCUMENT[:38]) == Place(A)
