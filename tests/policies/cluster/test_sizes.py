"""Best and worst fit for requests that share blocks, against a search of all replicas."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.cluster import Cluster
from policies.cluster.search import best_on_node, fits, tightest, widest
from policies.cluster.sizes import choose, size_of
from policies.model import ReplicaId, RequestId, Tokens
from tests.policies.cluster.named import impose
from tests.policies.settings import unhurried

paths = st.builds(lambda common, own: [0] * common + [1] * own, st.integers(0, 5), st.integers(0, 2))
"""A prompt as the branches that it takes, one per block of ten tokens: a beginning that is common to all, and more."""
requests = st.lists(st.tuples(paths, st.integers(1, 30), st.integers(0, 11)), max_size=24)
"""Prompts, the tokens behind them, and the replicas."""


def names(path: Sequence[int]) -> tuple[int, ...]:
    return tuple(hash(tuple(path[: end + 1])) for end in range(len(path)))


@unhurried
@given(requests, paths, st.integers(1, 30), st.integers(2, 6), st.integers(0, 3))
def test_fits_are_those_of_a_search(
    there: list[tuple[list[int], int, int]], path: list[int], rest: int, count: int, headroom: int
) -> None:
    cluster = Cluster(Tokens(100))
    cluster.share_blocks(10, lambda request: ())
    replicas = [cluster.add_replica(ReplicaId(f"r{n}"), "node", Tokens(100), max_requests=3) for n in range(count)]
    impose(cluster, headroom=headroom)
    for number, (prompt, more, at) in enumerate(there):
        tokens = Tokens(10 * len(prompt) + more)
        cluster.add_request(RequestId(f"q{number}"), tokens, replicas[at % count], names=names(prompt))
    request = cluster.new_request(RequestId("new"), Tokens(10 * len(path) + rest), names=names(path))
    size = size_of(cluster, request)
    fitting = [replica for replica in replicas if fits(cluster, request, replica)]
    assert (
        tightest(cluster, size) is choose(fitting, size, False) is best_on_node(cluster, "node", size, lambda r: True)
    )
    assert widest(cluster, size) is choose(fitting, size, True)
    odd = [replica for replica in fitting if replica.order % 2]
    assert tightest(cluster, size, lambda r: r.order % 2) is choose(odd, size, False)
    assert widest(cluster, size, lambda r: r.order % 2) is choose(odd, size, True)
