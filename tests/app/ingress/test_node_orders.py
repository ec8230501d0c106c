"""Drains of nodes: by any of their names, again, and refused where nothing would be left."""

from dataclasses import replace
from typing import Any

import pytest

from app.ingress.errors import ApiError
from app.ingress.node_orders import DrainingNodes, NodeOrders
from deployments.serve.nodes import Node
from migration.protocol.errors import PeerLost, Refused
from policies.causes import Cause
from tests.app.ingress.fakes import HEAD_NODE, NODE_A, NODE_B, Api, FakeNodes


@pytest.fixture
def cluster() -> FakeNodes:
    return FakeNodes()


def orders(cluster: FakeNodes) -> NodeOrders:
    async def state() -> dict[str, Any]:
        return {"replicas": [{"id": "x", "node": NODE_A.id}, {"id": "y", "node": NODE_B.id}, {"id": "z"}]}

    return NodeOrders(cluster, state)


@pytest.mark.parametrize("name", [NODE_A.id, NODE_A.address, NODE_A.hostname])
async def test_a_node_has_three_names(cluster: FakeNodes, name: str) -> None:
    for _ in range(2):
        assert await orders(cluster).drain(name, 150.0) == DrainingNodes([NODE_A.id], ["x"])
    assert cluster.drained == [(NODE_A.id, 150.0)] * 2


async def test_all_nodes_of_a_host_are_drained(cluster: FakeNodes) -> None:
    cluster.listed.append(replace(NODE_B, id="c" * 8, hostname=NODE_A.hostname))
    assert (await orders(cluster).drain("gpu-a", None)).nodes == [NODE_A.id, "c" * 8]


async def test_a_node_that_has_ended_needs_no_drain(cluster: FakeNodes) -> None:
    cluster.listed[1] = replace(NODE_A, is_alive=False)
    assert await orders(cluster).drain(NODE_A.hostname, None) == DrainingNodes([], [])
    assert not cluster.drained


@pytest.mark.parametrize(
    ("listed", "name", "status", "reason"),
    [
        ([HEAD_NODE, NODE_A], "gpu-x", 404, "no node has the id, address or host name 'gpu-x'"),
        ([HEAD_NODE, NODE_A], "head", 422, "head is Ray's head node"),
        ([NODE_A, replace(NODE_B, is_alive=False)], "gpu-a", 422, "gpu-a is the only node"),
    ],
    ids=["unknown", "head", "only"],
)
async def test_a_drain_is_refused(cluster: FakeNodes, listed: list[Node], name: str, status: int, reason: str) -> None:
    cluster.listed = listed
    with pytest.raises(ApiError, match=reason) as refused:
        await orders(cluster).drain(name, None)
    assert refused.value.status == status and not cluster.drained


@pytest.mark.parametrize(
    ("failure", "status"),
    [(PeerLost("Ray does not answer"), 503), (Refused("Ray does not drain it", Cause.NOT_RUNNING), 422)],
    ids=["no answer", "refused"],
)
async def test_ray_may_fail(cluster: FakeNodes, failure: Exception, status: int) -> None:
    cluster.failure = failure
    with pytest.raises(ApiError, match=str(failure)) as refused:
        await orders(cluster).drain("gpu-a", None)
    assert refused.value.status == status


async def test_the_order_has_the_time_that_is_left(api: Api) -> None:
    response = await api.post("/mell/nodes/gpu-a/drain", json={"within_s": 20})
    assert (response.status_code, response.json()) == (202, {"nodes": [NODE_A.id], "replicas": []})
    assert (await api.post("/mell/nodes/10.0.0.2/drain")).status_code == 202
    assert api.backend.ray_nodes.drained == [(NODE_A.id, 20.0), (NODE_A.id, None)]
    assert (await api.post("/mell/nodes/gpu-x/drain")).json()["error"]["nodes"] == ["gpu-a", "gpu-b", "head"]
    assert (await api.post("/mell/nodes/gpu-a/drain", json={"within_s": -1})).status_code == 400


def test_a_node_of_rays_list() -> None:
    entry = {"NodeID": "a" * 8, "NodeManagerAddress": "10.0.0.2", "NodeManagerHostname": "gpu-a", "Alive": True}
    assert Node.of(entry | {"Resources": {"CPU": 1.0}}) == NODE_A
    assert Node.of(entry | {"Resources": {"node:__internal_head__": 1.0}}).is_head
    assert not Node.of(entry | {"Alive": False, "Resources": {}}).is_alive
