"""The benchmark of placements by content."""

import pytest

from benchmarks.routing.placing import DOCUMENT, EPOCH, NEW, measure
from policies.prefix.routing import Routing


@pytest.mark.parametrize("routing", [Routing.TREE, Routing.LEAST_LOAD])
def test_the_tree_grows_by_what_arrivals_compute(routing: Routing) -> None:
    found = measure(routing, replicas=4, arrivals=EPOCH, documents=8)
    # Each of the 8 * 4 / 8 documents is on all four replicas.
    assert found.blocks == 4 * DOCUMENT + EPOCH * NEW
    assert 0 < found.p50_us <= found.p99_us
