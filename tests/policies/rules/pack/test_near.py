"""Pack's option `near`: moves stay on their node where another fits no better in kind."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica
from policies.cluster.search import needed_room
from policies.decision.limits import Limits
from policies.model import ReplicaState, RequestId, Tokens
from policies.rules.pack import Pack
from policies.rules.pack.room import Seeker
from tests.policies.cluster.named import named, picture
from tests.policies.history import COSTLY, Setting, Tick, played
from tests.policies.rules.test_histories import histories, settings
from tests.policies.settings import few
from tests.policies.stepping import Events, step

FAR = Pack(comfort=0.0, rest=0.0, drain_moves=0)
NEAR = replace(FAR, near=True)


def on_nodes(nodes: str, drawing: str, waiting: str = "") -> Cluster:
    """A cluster in which moves take time; the letters name the replicas' nodes."""
    cluster = named(drawing, waiting, holds=True, starts_as=ReplicaState.STARTING)
    for node, replica in zip(nodes, cluster.replicas.values(), strict=True):
        replica.node = node
    return cluster


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param(FAR, "A: p80 | B: s60 | C: q24 t70", id="the tightest"),
        pytest.param(NEAR, "A: p80 | B: q24 s60 | C: t70", id="the one on its node"),
    ],
)
def test_a_move_to_tight_room(policy: Pack, expected: str) -> None:
    cluster = on_nodes("xxy", "A: p80 q24 | B: s60 | C: t70")
    step(cluster, Events(), replace(policy, comfort=9.0), Limits())
    assert picture(cluster) == expected, "comfort is out of reach, so that all room is tight"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param(FAR, "A: p50 | B: r55 | C: q30 t62", id="to the tightest"),
        pytest.param(NEAR, "A: p50 | B: q30 r55 | C: t62", id="to the one on its node"),
    ],
)
def test_a_move_that_makes_room(policy: Pack, expected: str) -> None:
    cluster = on_nodes("xxy", "A: p50 q30 | B: r55 | C: t62", "s47")
    step(cluster, Events(), policy, Limits())
    assert picture(cluster) == expected


# --- properties ---------------------------------------------------------------------------------------

rows = st.lists(
    st.tuples(st.sampled_from("xyz"), st.lists(st.integers(1, 40), min_size=1, max_size=3)), min_size=2, max_size=7
)


def made(rows: Sequence[tuple[str, Sequence[int]]]) -> Cluster:
    names = "ABCDEFG"
    drawing = " | ".join(
        f"{names[i]}: {' '.join(f'{chr(97 + 3 * i + j)}{size}' for j, size in enumerate(sizes))}"
        for i, (_, sizes) in enumerate(rows)
    )
    return on_nodes("".join(node for node, _ in rows), drawing)


def rooms(cluster: Cluster, source: Replica, tokens: int, near: bool) -> list[Replica]:
    return [
        r
        for r in cluster.running()
        if r is not source and r.room >= needed_room(cluster, tokens) and (r.node == source.node or not near)
    ]


@given(rows, st.integers(1, 60), st.integers(0, 40) | st.integers(60, 90), st.booleans())
def test_room_is_found_first_on_the_same_node(
    rows: list[tuple[str, list[int]]], tokens: int, comfort: int, spread: bool
) -> None:
    """Room is found if and only if there is some; on another node only if its own has none of the kind."""
    cluster = made(rows)
    source = cluster.running()[0]
    request = cluster.new_request(RequestId("new"), Tokens(tokens))
    found = Seeker(cluster, comfort, 8, spread, spread, near=True).find(request, source)
    assert (found is None) == (not rooms(cluster, source, tokens, near=False))
    if found is None:
        return
    comfortable = rooms(cluster, source, tokens + comfort, near=False)
    assert found in (comfortable or rooms(cluster, source, tokens, near=False)), "near, but not as comfortable"
    own = rooms(cluster, source, tokens + (comfort if comfortable else 0), near=True)
    assert found.node == source.node or not own, "far, though the node has room of that kind"


@few
@given(settings | st.just(COSTLY), histories)
def test_on_a_single_node_it_decides_nothing(setting: Setting, history: list[Tick]) -> None:
    """New replicas are `policies.cluster.supply`'s, eight on a node: more are not needed here."""
    setting = replace(setting, supply=min(setting.supply or 0, 8))
    plain, near = (list(played(policy, setting, history)) for policy in (Pack(), Pack(near=True)))
    assert [plan for _, plan, _ in near] == [plan for _, plan, _ in plain]


@few
@given(settings, histories)
def test_it_breaks_no_rule(setting: Setting, history: list[Tick]) -> None:
    assert all(not wrong for _, _, wrong in played(Pack(near=True), setting, history))
