"""When a prefix is copied: before a request runs, and before its replica stops."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.lines import Line
from policies.model import ReplicaId, Tokens
from policies.prefix.copies import SAVES, CopyReason, CopyTarget, Fetch, PrefixCopy, best_fetch, evacuate, longest
from policies.prefix.heat import HotPrefix
from policies.prefix.tree import HeldPrefix

A, B, C, D, E = (ReplicaId(name) for name in "abcde")


def rest_s(tokens: Tokens) -> float:
    """A prompt of 1,000 tokens takes a millisecond for each that is not there."""
    return (1000 - tokens) * 1e-3


FAST = Line(0.0, 1e-5)


def fetch(
    *donors: tuple[ReplicaId, int], here: int = 0, line: Line | None = FAST, limit_s: float = 10.0
) -> Fetch | None:
    pairs = [(donor, Tokens(tokens)) for donor, tokens in donors]
    return best_fetch(B, Tokens(here), rest_s(Tokens(here)), pairs, lambda donor, target: line, limit_s, rest_s)


def test_the_donor_with_which_the_first_token_comes_soonest_is_taken() -> None:
    near = fetch((A, 900), (C, 500))
    assert near is not None and (near.donor, near.tokens) == (A, 900)
    assert near.copy_s == pytest.approx(0.009) and near.saves_s == pytest.approx(0.9)
    slow = {A: Line(0.6, 1e-5), C: FAST}
    found = best_fetch(
        B, Tokens(0), 1.0, [(A, Tokens(900)), (C, Tokens(500))], lambda donor, _: slow[donor], 10.0, rest_s
    )
    assert found is not None and found.donor == C


def test_only_what_the_replica_lacks_is_copied() -> None:
    found = fetch((A, 900), here=400)
    assert found is not None and found.copy_s == pytest.approx(0.005) and found.saves_s == pytest.approx(0.5)


@pytest.mark.parametrize("donors", [(), ((A, 400),), ((A, 300),), ((B, 900),)])
def test_nobody_copies_what_is_there_or_from_itself(donors: tuple[tuple[ReplicaId, int], ...]) -> None:
    assert fetch(*donors, here=400) is None


def test_nothing_is_copied_where_nothing_can_be() -> None:
    assert fetch((A, 900), line=None) is None


@pytest.mark.parametrize(("latency_s", "pays"), [(0.9 - SAVES - 0.01, True), (0.9 - SAVES + 0.01, False)])
def test_a_copy_has_to_save_a_share(latency_s: float, pays: bool) -> None:
    assert (fetch((A, 900), line=Line(latency_s, 1e-9)) is not None) == pays


def test_a_copy_beyond_the_boundary_of_its_link_is_not_made() -> None:
    assert fetch((A, 900), line=Line(0.5, 1e-9), limit_s=0.4) is None


def test_the_longest_prefixes_in_hbm_are_compared() -> None:
    held = {A: HeldPrefix(1), B: HeldPrefix(0, 9), C: HeldPrefix(3), D: HeldPrefix(3), E: HeldPrefix(2)}
    assert longest(held) == ((C, 3), (D, 3), (E, 2))


# --- before a replica stops -----------------------------------------------------------------------------

BLOCK = 10
Held = Mapping[ReplicaId, HeldPrefix]


def prefix(name: int, blocks: int, rate: float = 1.0, **held: int) -> tuple[HotPrefix, Held]:
    """A prefix of that many blocks, all of which `a` has; `held` are those that others have."""
    names = tuple(name * 1000 + block for block in range(blocks))
    return HotPrefix(names, 0, rate), {A: HeldPrefix(blocks)} | {ReplicaId(r): HeldPrefix(n) for r, n in held.items()}


def target(replica: ReplicaId, free: int = 10**6, line: Line = FAST, needed: int = 0) -> CopyTarget:
    return CopyTarget(replica, Tokens(free), Tokens(free), line, lambda rate: Tokens(needed))


def evacuated(
    prefixes: list[tuple[HotPrefix, Held]], *targets: CopyTarget, reuse: float = 1.0, within_s: float = 10.0
) -> tuple[PrefixCopy, ...]:
    """The copies of `a`. A token takes a millisecond to compute, and a use a second is expected for one second."""
    return evacuate(A, prefixes, targets, BLOCK, lambda tokens, _: tokens * 1e-3, reuse, 1.0, within_s)


def test_prefixes_go_to_those_that_stay() -> None:
    first, second = evacuated([prefix(1, 5), prefix(2, 5, 0.5)], target(B), target(C))
    assert (first.donor, first.target, first.names, first.reason) == (
        A,
        B,
        tuple(range(1000, 1005)),
        CopyReason.EVACUATE,
    )
    assert first.tokens == 50 and first.copy_s == pytest.approx(5e-4)
    assert second.target == C, "one after the other"
    assert evacuated([prefix(1, 5)]) == ()


def test_only_missing_blocks_are_sent_and_to_where_most_are() -> None:
    (copy,) = evacuated([prefix(1, 5, b=1, c=3)], target(B), target(C))
    assert (copy.target, copy.tokens) == (C, 20)
    assert evacuated([prefix(1, 5, c=5)], target(B), target(C)) == (), "one that stays has all of it"


def test_a_longer_prefix_takes_the_place_of_its_beginning() -> None:
    (short, held), (long, _) = prefix(1, 3), prefix(1, 5)
    long_prefix = HotPrefix(long.names, 3, 0.5), {A: HeldPrefix(5)}
    (copy,) = evacuated([(short, held), long_prefix], target(B), target(C))
    assert (copy.names, copy.tokens) == (long.names, 50)


@pytest.mark.parametrize(
    ("rate", "reuse", "pays"), [(1.0, 1.0, True), (0.009, 1.0, False), (1.0, 0.009, False), (0.02, 1.0, True)]
)
def test_the_expected_uses_have_to_save_more_than_the_copy_takes(rate: float, reuse: float, pays: bool) -> None:
    assert bool(evacuated([prefix(1, 5, rate)], target(B), reuse=reuse)) == pays


def test_hotter_prefixes_of_the_target_are_not_displaced() -> None:
    assert evacuated([prefix(1, 5)], target(B, free=100, needed=60)) == ()
    (copy,) = evacuated([prefix(1, 5)], target(B, free=100, needed=60), target(C, free=100, needed=50))
    assert copy.target == C


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.01, 5.0), st.integers(0, 20), st.integers(0, 20)), max_size=12),
    st.integers(0, 1000),
    st.floats(0.0, 0.01),
)
def test_neither_time_nor_room_is_exceeded(
    given_: list[tuple[int, float, int, int]], free: int, within_s: float
) -> None:
    prefixes = [prefix(n, blocks, rate, b=b, c=c) for n, (blocks, rate, b, c) in enumerate(given_, 1)]
    copies = evacuated(sorted(prefixes, key=lambda p: -p[0].rate), target(B, free), target(C, free), within_s=within_s)
    assert sum(copy.copy_s for copy in copies) <= within_s * (1 + 1e-9)
    for replica in (B, C):
        assert sum(copy.tokens for copy in copies if copy.target == replica) <= free
    held = {p.names: h for p, h in prefixes}
    for copy in copies:
        assert copy.tokens == (len(copy.names) - min(held[copy.names][copy.target].hbm, len(copy.names))) * BLOCK > 0
