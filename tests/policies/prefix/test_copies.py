"""When a prefix is copied before a request runs."""

import pytest

from policies.cost.lines import Line
from policies.model import ReplicaId, Tokens
from policies.prefix.copies import SAVES, Donor, Fetch, best_fetch, longest
from policies.prefix.tree import HeldPrefix

A, B, C, D, E = (ReplicaId(name) for name in "abcde")


def rest_s(tokens: Tokens) -> float:
    """A prompt of 1,000 tokens takes a millisecond for each that is not there."""
    return (1000 - tokens) * 1e-3


FAST = Line(0.0, 1e-5)


LOAD = Line(0.1, 2e-4)


def fetch(
    *donors: tuple[ReplicaId, int],
    here: int = 0,
    line: Line | None = FAST,
    limit_s: float = 10.0,
    dram: int = 0,
    wait_s: float = 0.0,
) -> Fetch | None:
    """The copy with such donors, each of which has the last `dram` tokens in its host's memory."""
    found, own_s = [Donor(donor, Tokens(tokens), Tokens(dram)) for donor, tokens in donors], rest_s(Tokens(here))
    return best_fetch(B, Tokens(here), wait_s, own_s, found, lambda donor, target: line, LOAD, limit_s, rest_s)


def test_the_donor_with_which_the_first_token_comes_soonest_is_taken() -> None:
    near = fetch((A, 900), (C, 500))
    assert near is not None and (near.donor, near.tokens) == (A, 900)
    assert near.copy_s == pytest.approx(0.009) and near.within_s == pytest.approx(0.9)
    slow = {A: Line(0.6, 1e-5), C: FAST}
    donors = [Donor(A, Tokens(900)), Donor(C, Tokens(500))]
    found = best_fetch(B, Tokens(0), 0.0, 1.0, donors, lambda donor, _: slow[donor], LOAD, 10.0, rest_s)
    assert found is not None and found.donor == C


def test_only_what_the_replica_lacks_is_copied() -> None:
    found = fetch((A, 900), here=400)
    assert found is not None and found.copy_s == pytest.approx(0.005) and found.within_s == pytest.approx(0.5)


def test_a_request_waits_for_its_copy_until_its_turn_and_as_long_as_it_saves() -> None:
    found = fetch((A, 900), here=400, wait_s=2.0)
    assert found is not None and found.within_s == pytest.approx(2.5)


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


def test_donor_loads_first_what_only_its_host_has() -> None:
    found = fetch((A, 900), dram=500)
    assert found is not None and found.copy_s == pytest.approx(0.009 + 0.2) and found.within_s == pytest.approx(0.9)


@pytest.mark.parametrize(("dram", "pays"), [(2900, True), (3100, False)])
def test_load_at_the_donor_counts_against_what_the_copy_saves(dram: int, pays: bool) -> None:
    assert (fetch((A, 900), line=Line(0.01, 1e-9), dram=dram) is not None) == pays


def test_load_at_the_donor_does_not_occupy_the_link() -> None:
    assert fetch((A, 900), dram=500, limit_s=0.01) is not None


def test_the_longest_prefixes_are_compared_and_of_equals_that_with_the_most_in_hbm() -> None:
    held = {A: HeldPrefix(1), B: HeldPrefix(0, 3), C: HeldPrefix(3), D: HeldPrefix(2, 1), E: HeldPrefix(1, 1)}
    assert longest(held, 16) == ((C, 48, 0), (D, 48, 16), (B, 48, 48))


def test_no_replica_is_a_donor_of_what_it_has_only_promised() -> None:
    held = {A: HeldPrefix(4, promised=4), B: HeldPrefix(3, 2, promised=1), C: HeldPrefix(3, 1, promised=2)}
    assert longest(held, 16) == ((B, 64, 16), (C, 32, 0))
