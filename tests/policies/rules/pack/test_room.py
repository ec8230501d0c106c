"""The inner loops of finding room."""

from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.cluster import Cluster
from policies.model import ReplicaId, RequestId, Tokens
from policies.rules.pack.room import by_size, largest_below, smallest


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12), st.integers(0, 10))
def test_a_request_is_found_as_by_sorting(sizes: list[tuple[int, bool]], tokens: int) -> None:
    cluster = Cluster(Tokens(100))
    replica = cluster.add_replica(ReplicaId("r"), "n", Tokens(100))
    for number, (size, pinned) in enumerate(sizes):
        request = cluster.add_request(RequestId(f"q{number}"), Tokens(size))
        request.pinned = pinned
        cluster.decisions.place(request, replica)
    cluster.decisions.settle()
    movable = sorted((q for q in replica.requests.values() if not q.pinned), key=by_size)
    assert smallest(cluster, replica.requests.values(), tokens) is next(
        (q for q in movable if q.tokens >= tokens), None
    )
    assert largest_below(cluster, replica.requests.values(), tokens) is next(
        (q for q in reversed(movable) if q.tokens < tokens), None
    )
