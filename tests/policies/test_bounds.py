"""The lower bound and the repack: known answers, and their order around the true optimum."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.bounds import best_fit_decreasing, least_bins, least_replicas, martello_toth_l2
from policies.cluster.cluster import Cluster
from policies.model import ReplicaId, RequestId, Tokens
from policies.prefix.sharing import ActivePrompt, ActivePrompts
from tests.policies.exhaustive import optimum

unhurried = settings(deadline=None)
"""A busy machine is no failure."""

packings = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=11), st.just(capacity))
)


@pytest.mark.parametrize(
    ("sizes", "capacity", "expected"),
    [
        pytest.param([], 10, 0, id="nothing"),
        pytest.param([10], 10, 1, id="one full bin"),
        pytest.param([5, 5], 10, 1, id="exactly half twice"),
        pytest.param([5, 5, 5], 10, 2, id="exactly half three times"),
        pytest.param([6, 6, 6], 10, 3, id="just above half: no two together"),
        pytest.param([5, 5], 9, 2, id="above half of an odd capacity"),
        pytest.param([4, 5], 9, 1, id="both sides of half of an odd capacity"),
        pytest.param([6, 5, 5], 10, 2, id="half does not go with more than half"),
        pytest.param([7, 7, 4, 4, 4], 10, 4, id="k = 4: bins with a 7 are closed to a 4"),
        pytest.param([6, 6, 4, 4, 4], 10, 3, id="k = 4: bins with a 6, exactly C - k, are not"),
        pytest.param([9, 9, 6, 3, 3], 10, 4, id="k = 2: neither the total nor the halves decide"),
        pytest.param([1] * 21, 10, 3, id="the total rounded up"),
    ],
)
def test_the_lower_bound(sizes: list[int], capacity: int, expected: int) -> None:
    assert martello_toth_l2(sizes, capacity) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([3, 7, 4, 6], 2, id="pairs"),
        pytest.param([5, 5, 5, 5], 2, id="halves"),
        pytest.param([6, 5, 4, 3, 2], 2, id="the fullest bin with room, not the first"),
    ],
)
def test_the_repack(sizes: list[int], expected: int) -> None:
    assert best_fit_decreasing(sizes, 10) == expected


def test_the_repack_is_not_always_the_optimum() -> None:
    assert optimum([4, 4, 3, 3, 3, 3], 10) == 2
    assert best_fit_decreasing([4, 4, 3, 3, 3, 3], 10) == 3


def by_definition(sizes: list[int], capacity: int) -> int:
    """L2 over all thresholds, as it is written."""
    best = 0
    for k in range(capacity // 2 + 1):
        apart = [s for s in sizes if s > capacity - k]
        large = [s for s in sizes if capacity - k >= s > capacity / 2]
        small = [s for s in sizes if capacity / 2 >= s >= k]
        lacking = sum(small) - (len(large) * capacity - sum(large))
        best = max(best, len(apart) + len(large) + max(0, -(-lacking // capacity)))
    return best


@unhurried
@given(packings)
def test_the_lower_bound_equals_its_definition(packing: tuple[list[int], int]) -> None:
    sizes, capacity = packing
    assert martello_toth_l2(sizes, capacity) == by_definition(sizes, capacity)


@unhurried
@given(packings)
def test_the_optimum_lies_between(packing: tuple[list[int], int]) -> None:
    sizes, capacity = packing
    best = optimum(sizes, capacity)
    assert sum(sizes) <= martello_toth_l2(sizes, capacity) * capacity
    assert martello_toth_l2(sizes, capacity) <= best <= best_fit_decreasing(sizes, capacity)
    assert 9 * best_fit_decreasing(sizes, capacity) <= 11 * best + 6


@pytest.mark.parametrize("bound", [martello_toth_l2, best_fit_decreasing])
@pytest.mark.parametrize("size", [0, -1, 11], ids=["nothing", "negative", "above the capacity"])
def test_sizes_that_no_request_has_are_refused(bound: Callable[[list[int], int], int], size: int) -> None:
    with pytest.raises(ValueError, match=rf"1\.\.10, not {size}$"):
        bound([5, size, 5], 10)


# --- bins that have common blocks once --------------------------------------------------------------------

BLOCK = 4


@dataclass(frozen=True)
class Held:
    """A request of `tokens` tokens whose prompt takes these branches, one per block."""

    path: Sequence[int]
    tokens: Tokens
    prompt: ActivePrompt | None

    @property
    def blocks(self) -> set[tuple[int, ...]]:
        """The beginnings of the prompt that others may have: one per block, without that of the last token."""
        return {tuple(self.path[: end + 1]) for end in range(min(len(self.path), (self.tokens - 1) // BLOCK))}


def held(*requests: tuple[Sequence[int], int]) -> tuple[list[Held], ActivePrompts]:
    """Requests by their branches and the tokens behind these."""
    prompts = ActivePrompts(BLOCK)
    made = []
    for path, rest in requests:
        names = [hash(tuple(path[: end + 1])) for end in range(len(path))]
        tokens = Tokens(BLOCK * len(path) + rest)
        made.append(Held(path, tokens, prompts.begin(names, tokens)))
    return made, prompts


def partitions(requests: Sequence[Held]) -> Iterator[list[list[Held]]]:
    """All ways to put requests into bins."""
    if not requests:
        yield []
        return
    for bins in partitions(requests[1:]):
        yield [[requests[0]], *bins]
        for at in range(len(bins)):
            yield [*bins[:at], [requests[0], *bins[at]], *bins[at + 1 :]]


def in_bin(requests: Sequence[Held]) -> int:
    """The tokens of a bin, by sets of blocks."""
    blocks = [request.blocks for request in requests]
    return sum(r.tokens for r in requests) - BLOCK * (
        sum(map(len, blocks)) - len(set[tuple[int, ...]]().union(*blocks))
    )


DOCUMENT = (0,) * 20


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        pytest.param([], 0, id="nothing"),
        pytest.param([(DOCUMENT, 10), (DOCUMENT, 10)], 1, id="a document and two questions"),
        pytest.param([(DOCUMENT, 10), ((1,) * 20, 10)], 2, id="two documents"),
        pytest.param([(DOCUMENT[:5], 60), (DOCUMENT[:5], 60)], 2, id="the distinct tokens decide"),
        pytest.param([(DOCUMENT[:2], 52)] * 3, 3, id="what each has for itself decides"),
        pytest.param([(DOCUMENT[:15], 25)] * 4, 3, id="what is behind the common beginning decides"),
        pytest.param([(DOCUMENT[:15], 25)] * 4 + [((1,), 2)] * 9, 3, id="that of one document among other requests"),
        pytest.param([((0, *DOCUMENT[:14], 7), 21), ((0, *DOCUMENT[:14], 8), 21)] * 2, 3, id="behind a common half"),
    ],
)
def test_the_lower_bound_with_common_blocks(requests: list[tuple[Sequence[int], int]], expected: int) -> None:
    made, prompts = held(*requests)
    assert least_bins(made, 100, prompts) == expected


@unhurried
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(1, 12)), max_size=6), st.integers(28, 48)
)
def test_no_packing_takes_fewer_bins(requests: list[tuple[list[int], int]], capacity: int) -> None:
    made, prompts = held(*requests)
    feasible = (bins for bins in partitions(made) if all(in_bin(each) <= capacity for each in bins))
    assert least_bins(made, capacity, prompts) <= min(map(len, feasible))


@unhurried
@given(st.lists(st.integers(1, 40), max_size=11))
def test_without_common_blocks_the_bound_is_the_same(sizes: list[int]) -> None:
    made, prompts = held(*(([100 + number], size) for number, size in enumerate(sizes)))
    whole = [BLOCK + size for size in sizes]
    assert least_bins(made, 48, prompts) == least_bins(made, 48, None) == martello_toth_l2(whole, 48)


# --- of a cluster -------------------------------------------------------------------------------------


def cluster_of(*requests: tuple[Sequence[int], int], shares: bool = True, capacity: int = 100) -> Cluster:
    """One large and one small replica; the requests are on the large one but for the last, which waits."""
    cluster = Cluster(Tokens(capacity))
    large = cluster.add_replica(ReplicaId("large"), "node", Tokens(capacity))
    cluster.add_replica(ReplicaId("small"), "node", Tokens(capacity // 2))
    if shares:
        cluster.share_blocks(BLOCK, lambda request: ())
    for number, (path, tokens) in enumerate(requests):
        at = None if number == len(requests) - 1 else large
        cluster.add_request(RequestId(f"r{number}"), Tokens(tokens), at, names=path)
    return cluster


def test_the_bound_of_a_cluster_is_that_of_the_requests_on_its_replicas() -> None:
    waiting = ((), 100)
    assert least_replicas(cluster_of(waiting)) == 0
    assert least_replicas(cluster_of(((), 60), ((), 60), waiting)) == 2
    document = tuple(range(20))
    assert least_replicas(cluster_of((document, 20 * BLOCK + 5), (document, 20 * BLOCK + 5), waiting)) == 1
    assert least_replicas(cluster_of(((), 130), ((), 1), waiting)) == 2, "one is larger than any replica"
    assert least_replicas(cluster_of(((), 60), waiting, shares=False)) is None
    assert least_replicas(Cluster(Tokens(100))) is None
