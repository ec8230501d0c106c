"""Orders to the engines of all running replicas, and the calls of operators for them."""

from typing import Any

import pytest

from app.ingress.engine_orders import EngineOrders
from app.ingress.errors import ApiError
from deployments.engine.port import ProfileSession
from migration.protocol.errors import PeerLost, Refused
from policies.causes import Cause
from tests.app.ingress.fakes import Api, Utilities
from tests.deployments.scheduler.fakes import FakeMembership

pytestmark = pytest.mark.virtual_time

ORDERS = ["reset_prefix_cache", "start_profile", "stop_profile"]


@pytest.mark.parametrize("order", ORDERS)
async def test_an_order_goes_to_all_replicas(api: Api, order: str) -> None:
    response = await api.post(f"/mell/{order}")
    assert (response.status_code, response.json()) == (200, {"success": True, "failed": {}})
    session = ProfileSession() if order == "start_profile" else None
    assert sorted(api.backend.utilities.orders) == [("a", order, session), ("b", order, session)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("the prefix cache is in use", "the prefix cache is in use"),
        (PeerLost("replica b died"), "replica b died"),
        (ValueError(), "ValueError()"),
        ("silent", "no answer within "),
    ],
    ids=["refusal", "death", "mistake", "silence"],
)
async def test_each_failure_has_its_replica(api: Api, order: str, answer: Any, shown: str) -> None:
    api.backend.utilities.answers["b"] = answer
    outcome = (await api.post(f"/mell/{order}")).json()
    assert not outcome["success"] and list(outcome["failed"]) == ["b"] and outcome["failed"]["b"].startswith(shown)


async def test_replicas_that_have_left_get_no_order(api: Api) -> None:
    api.backend.service.kill("a")
    await api.post("/mell/reset_prefix_cache")
    assert [replica for replica, _, _ in api.backend.utilities.orders] == ["b"]


async def test_a_session_has_the_bounds_of_its_order(api: Api) -> None:
    await api.post("/mell/start_profile", json={"profile_prefix": "a", "delay_iterations": 3, "max_iterations": 5})
    assert api.backend.utilities.orders[0][2] == ProfileSession("a", 3, 5)


@pytest.mark.parametrize(
    "body", [{"profile_prefix": "../x"}, {"profile_prefix": ""}, {"max_iterations": -1}, {"iterations": 1}, []]
)
async def test_a_wrong_session_is_refused(api: Api, body: Any) -> None:
    assert (await api.post("/mell/start_profile", json=body)).status_code == 400
    assert not api.backend.utilities.orders


@pytest.mark.parametrize("order", ORDERS)
async def test_orders_are_the_operators(api: Api, order: str) -> None:
    api.backend.require("secret-key!")
    assert (await api.post(f"/mell/{order}")).status_code == 401
    api.backend.require(None)
    api.address = ("10.0.0.1", 1)
    assert (await api.post(f"/mell/{order}")).status_code == 403
    assert not api.backend.utilities.orders


DROP = "/mell/cache"


async def test_blocks_are_deleted_on_all_replicas_or_on_one(api: Api) -> None:
    api.backend.utilities.answers["b"] = "the blocks of its cache have no names"
    both = await api.send("DELETE", DROP, json={"prompt": "x"})
    assert both.status_code == 200 and both.json() == {
        "success": False,
        "blocks": {"a": 3},
        "failed": {"b": "the blocks of its cache have no names"},
    }
    one = await api.send("DELETE", DROP, json={"messages": [{"role": "user", "content": "x"}], "replica": "a"})
    assert one.json() == {"success": True, "blocks": {"a": 3}, "failed": {}}
    empty = await api.send("DELETE", DROP)
    assert list(empty.json()["blocks"]) == ["a"]
    named, everything = ("delete_blocks", (7, 8)), ("delete_blocks", None)
    orders = [(replica, (order, about)) for replica, order, about in api.backend.utilities.orders]
    assert orders == [("a", named), ("b", named), ("a", named), ("a", everything), ("b", everything)]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"prompt": "x", "messages": []}, 400, "give a prompt or messages"),
        ({"cache_salt": "s"}, 400, "give one of both"),
        ({"model": "m", "replica": "a"}, 400, "give one of both"),
        ({"prompt": "x", "replica": "z"}, 404, "no replica 'z' is running"),
        ({"prompt": "x", "prompt_cache_key": "s"}, 400, "unknown parameter"),
        ({"replica": ""}, 400, "replica"),
    ],
)
async def test_a_wrong_deletion_is_refused(api: Api, body: Any, status: int, reason: str) -> None:
    response = await api.send("DELETE", DROP, json=body)
    assert response.status_code == status and reason in response.json()["error"]["message"]
    assert not api.backend.utilities.orders


async def test_deletions_are_the_operators(api: Api) -> None:
    api.backend.require("secret-key!")
    assert (await api.send("DELETE", DROP)).status_code == 401
    assert not api.backend.utilities.orders


PIN = "/mell/cache/pin"


async def test_blocks_are_pinned_where_they_are(api: Api) -> None:
    api.backend.utilities.answers["b"] = "unknown"
    both = await api.send("POST", PIN, json={"prompt": "x", "ttl_s": 60})
    assert both.status_code == 200
    assert both.json() == {"success": True, "blocks": {"a": 2}, "failed": {}, "ttl_s": 60.0}
    api.backend.utilities.answers["b"] = "budget"
    full = await api.send("POST", PIN, json={"prompt": "x"})
    assert (full.json()["success"], full.json()["failed"]) == (False, {"b": "refused: budget"})
    one = await api.send("POST", PIN, json={"prompt": "x", "replica": "a", "ttl_s": 0})
    assert one.json()["blocks"] == {"a": 2}
    orders = [(replica, about) for replica, _, about in api.backend.utilities.orders]
    names = (7, 8)
    assert orders == [
        ("a", (names, 60.0)),
        ("b", (names, 60.0)),
        ("a", (names, 600.0)),
        ("b", (names, 600.0)),
        ("a", (names, 0.0)),
    ]


@pytest.mark.parametrize(
    ("a", "b", "status"),
    [
        ("unknown", "unknown", 404),
        ("unknown", "budget", 409),
        ("no_tier", "no_tier", 409),
        ("silent", "silent", 503),
    ],
)
async def test_a_prompt_that_no_replica_pins_is_an_error(api: Api, a: str, b: str, status: int) -> None:
    api.backend.utilities.answers |= {"a": a, "b": b}
    response = await api.send("POST", PIN, json={"prompt": "x"})
    assert response.status_code == status and response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"ttl_s": 5}, 400, "give either a prompt or messages"),
        ({"prompt": "x", "ttl_s": -1}, 400, "ttl_s"),
        ({"prompt": "x", "ttl_s": 100000}, 400, "ttl_s"),
        ({"prompt": "x", "replica": "z"}, 404, "no replica 'z' is running"),
    ],
)
async def test_a_wrong_pin_is_refused(api: Api, body: Any, status: int, reason: str) -> None:
    response = await api.send("POST", PIN, json=body)
    assert response.status_code == status and reason in response.json()["error"]["message"]
    assert not api.backend.utilities.orders


COPY = "/mell/cache/copy"


async def test_a_prompt_is_copied_from_one_replica_to_another(api: Api) -> None:
    answer = await api.send("POST", COPY, json={"prompt": "x", "from": "a", "to": "b"})
    assert answer.status_code == 200
    shown = {name: answer.json()[name] for name in ("source", "target", "reason", "outcome", "held", "blocks")}
    assert shown == {"source": "a", "target": "b", "reason": "manual", "outcome": "done", "held": 3, "blocks": 3}
    [(replica, order, (asked, to))] = api.backend.utilities.orders
    assert (replica, order, asked.spec.prompt_tokens, to) == ("a", "copy_prefix", 3, "b")


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"from": "a", "to": "b"}, 400, "give either a prompt or messages"),
        ({"prompt": "x", "messages": [], "from": "a", "to": "b"}, 400, "give either a prompt or messages"),
        ({"prompt": "x", "from": "a", "to": "a"}, 400, "the same replica"),
        ({"prompt": "x", "from": "a"}, 400, "to: Field required"),
        ({"prompt": "x", "from": "z", "to": "b"}, 404, "no replica 'z' is running"),
        ({"prompt": "x", "from": "a", "to": "z"}, 404, "no replica 'z' is running"),
    ],
)
async def test_a_wrong_copy_is_refused(api: Api, body: Any, status: int, reason: str) -> None:
    response = await api.send("POST", COPY, json=body)
    assert response.status_code == status and reason in response.json()["error"]["message"]
    assert not api.backend.utilities.orders


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        ("the replica has no block of this prefix", 409, "aborted: the replica has no block"),
        (Refused("4 copies from this replica are under way", Cause.NO_SLOT), 409, "4 copies"),
        (PeerLost("gone"), 503, "replica a does not answer"),
    ],
)
async def test_a_copy_that_was_not_made_is_an_error(
    api: Api, answer: str | Exception, status: int, reason: str
) -> None:
    api.backend.utilities.answers["a"] = answer
    response = await api.send("POST", COPY, json={"prompt": "x", "from": "a", "to": "b"})
    assert response.status_code == status and reason in response.json()["error"]["message"]


async def test_copies_are_the_operators(api: Api) -> None:
    api.backend.require("secret-key!")
    assert (await api.send("POST", COPY, json={"prompt": "x", "from": "a", "to": "b"})).status_code == 401
    assert not api.backend.utilities.orders


async def test_orders_reach_the_replicas_of_all_pools() -> None:
    pools = [(Utilities(), FakeMembership("a", "b")), (Utilities(), FakeMembership("c"))]
    orders = EngineOrders(pools)
    assert await orders.reset_prefix_cache() == {}
    assert [[replica for replica, _, _ in utilities.orders] for utilities, _ in pools] == [["a", "b"], ["c"]]
    blocks, _ = await orders.delete_blocks((7,), "c")
    assert list(blocks) == ["c"] and pools[1][0].orders[-1] == ("c", "delete_blocks", (7,))
    with pytest.raises(ApiError, match="no replica 'd' is running") as refused:
        await orders.delete_blocks(None, "d")
    assert refused.value.details == {"replicas": ["a", "b", "c"]}


async def test_with_several_models_there_is_no_hand_over(api: Api) -> None:
    api.backend.require("admin-key")
    api.backend.hand_over = None  # type: ignore[assignment]
    key = {"Authorization": "Bearer admin-key"}
    answers = [
        await api.get("/mell/hand-over", headers=key),
        await api.post("/mell/hand-over", json={"to": "http://new:8000"}, headers=key),
        await api.send("DELETE", "/mell/hand-over", headers=key),
    ]
    for answer in answers:
        assert answer.status_code == 422
        assert answer.json()["error"]["message"] == "this Mell serves several models, and a hand-over is of one"
