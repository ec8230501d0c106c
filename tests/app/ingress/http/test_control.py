"""The routes of operators and probes: health, access, orders, and hostile heads and paths."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from ray.serve._private.http_util import convert_object_to_asgi_messages

from app.ingress.http.orders import LoadAdapter
from deployments.api.calls import MoveAccepted, MoveRejected
from deployments.engine.tokens import expected
from migration.protocol.messages import PathRequest
from tests.app.client.sample import MATCHED
from tests.app.ingress.fakes import PROMPT, Api, Exchange, eventually, text_of

# --- probes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["starting: 0 of 2 replicas run", "no replica accepts requests"])
async def test_health_gives_the_reason(api: Api, reason: str) -> None:
    api.backend.unhealthy = reason
    response = await api.get("/health")
    assert (response.status_code, response.json()["error"]["message"]) == (503, reason)
    assert (await api.get("/live")).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/live", "/ping"])
async def test_a_healthy_service_answers_ok(api: Api, path: str) -> None:
    response = await api.get(path)
    assert (response.status_code, response.text) == (200, "OK")


@pytest.mark.parametrize("path", ["/health", "/metrics", "/mell/state"])
async def test_a_head_is_answered_as_its_get(api: Api, path: str) -> None:
    head, get = await api.send("HEAD", path), await api.get(path)
    assert (head.status_code, head.headers) == (200, get.headers)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_ping_is_the_health(api: Api, method: str) -> None:
    assert (await api.send(method, "/ping")).status_code == 200
    api.backend.unhealthy = "starting"
    assert (await api.send(method, "/ping")).status_code == 503


HEALTHZ, ROUTES = "/-/healthz", "/-/routes"


@pytest.mark.parametrize("path", [HEALTHZ, ROUTES])
@pytest.mark.parametrize("reason", [None, "starting: 0 of 2 replicas run"])
async def test_probes_are_answered_as_by_serves_proxy(api: Api, path: str, reason: str | None) -> None:
    api.backend.unhealthy, api.address = reason, ("10.0.0.1", 1)
    content: str | dict[str, str] = reason or ("success" if path == HEALTHZ else {"/": "mell"})
    start, sent = convert_object_to_asgi_messages(content, status_code=503 if reason else 200)
    response = await api.get(path)
    assert (response.status_code, response.content) == (start["status"], sent["body"])
    assert [dict(start["headers"])[b"content-type"].decode()] == response.headers.get_list("content-type")


async def test_routes_are_below_the_path_of_the_settings(api: Api) -> None:
    api.backend.settings = api.backend.settings.model_copy(update={"root_path": "/llm"})
    assert (await api.get(ROUTES)).json() == {"/llm": "mell"}


async def test_the_load_is_the_number_of_calls_that_run(api: Api) -> None:
    assert (await api.get("/load")).json() == {"server_load": 0}
    with api.backend.gate.admit(None), api.backend.gate.admit(None):
        assert (await api.get("/load")).json() == {"server_load": 2}
    assert (await api.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize("scope", ["all", "share", "process"])
async def test_metrics_have_a_scope(api: Api, scope: str) -> None:
    assert (await api.get(f"/metrics?scope={scope}")).text == f"# {scope}\n"


async def test_an_unknown_scope_is_refused(api: Api) -> None:
    response = await api.get("/metrics?scope=some")
    assert response.status_code == 400 and response.json()["error"]["param"] == "scope"
    assert (await api.get("/metrics")).text == "# all\n"


async def test_versions_are_listed(api: Api) -> None:
    assert (await api.get("/version")).json()["vllm"] == "2"


async def test_internal_errors_reveal_no_details(api: Api) -> None:
    api.backend.health = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    response = await api.get("/health")
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": None,
    }


# --- operators ----------------------------------------------------------------------------------------

ADMIN = [("GET", "/mell/state"), ("GET", "/mell/migrations"), ("POST", "/mell/migrations")]
ROLE = "/mell/replicas/a/role"
POOL = "/mell/replicas/a/memory"
MATCH = "/mell/cache/match"
MODE = "/mell/mode"


@pytest.mark.parametrize(("method", "path"), ADMIN)
@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
async def test_without_an_admin_key_loopback_has_access(api: Api, method: str, path: str, address: str) -> None:
    api.address = (address, 1)
    response = await api.send(method, path, **({"json": {"request_id": "x"}} if method == "POST" else {}))
    assert response.status_code in (200, 404)


@pytest.mark.parametrize(("method", "path"), ADMIN)
@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.1", "2001:db8::1", "testclient", ""])
async def test_without_an_admin_key_other_addresses_have_no_access(
    api: Api, method: str, path: str, address: str
) -> None:
    api.address = (address, 1)
    response = await api.send(method, path, headers={"X-Forwarded-For": "127.0.0.1"})
    assert response.status_code == 403 and "ingress.admin_key" in response.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), ADMIN)
@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer wrong-key", "Bearer secret-key ", "secret-key", "Basic secret-key", "Bearer \u00e9"],
)
async def test_with_an_admin_key_it_is_required(api: Api, method: str, path: str, given: str) -> None:
    api.backend.require("secret-key!")
    headers = {"Authorization": given.encode("latin-1")} if given else {}
    response = await api.send(method, path, headers=headers)
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert "secret-key!" not in response.text


async def test_the_body_of_a_call_without_access_is_not_read(api: Api) -> None:
    read: list[bytes] = []

    async def content() -> AsyncIterator[bytes]:
        read.append(b"{")
        yield b"{"

    api.address = ("10.0.0.1", 1)
    response = await api.post("/mell/migrations", content=content(), headers={"Content-Type": "application/json"})
    assert (response.status_code, read) == (403, [])


async def test_the_admin_key_gives_access_from_anywhere(api: Api) -> None:
    api.backend.require("secret-key!")
    api.address = ("10.0.0.1", 1)
    response = await api.get("/mell/state", headers={"Authorization": "Bearer secret-key!"})
    assert response.status_code == 200


async def labels_while_running(api: Api, headers: dict[str, str] | None) -> tuple[str, str]:
    asking = asyncio.create_task(api.complete(headers, max_tokens=200))
    await eventually(lambda: bool(list(api.backend.service.replica("a").host.loads())))
    state = (await api.get("/mell/state")).json()
    (request,) = [r for replica in state["replicas"] for r in replica["requests"]]
    await asking
    return request["id"], request["label"]


async def test_the_label_of_a_request_is_its_x_request_id(api: Api) -> None:
    assert (await labels_while_running(api, {"X-Request-Id": "mine<>" + "x" * 300}))[1] == "mine" + "x" * 124


async def order(api: Api, **fields: Any) -> httpx.Response:
    return await api.post("/mell/migrations", json=fields)


async def test_an_order_moves_a_running_request_by_its_label(api: Api) -> None:
    asking = asyncio.create_task(api.complete({"X-Request-Id": "mine"}, max_tokens=400))
    await eventually(lambda: any(load.tokens > 50 for load in api.backend.service.replica("a").host.loads()))
    accepted = await order(api, request_id="mine", target="b", path="kv")
    assert accepted.status_code == 202 and set(accepted.json()) == {"id"}
    assert (await asking).json()["choices"][0]["text"] == text_of(expected(tuple(PROMPT), 400))
    (record,) = api.backend.service.replica("a").moves.records()
    assert (record.id, record.outcome, record.path) == (accepted.json()["id"], "committed", "kv")
    await api.backend.service.idle()


@pytest.mark.parametrize("path", list(PathRequest))
async def test_an_order_names_request_target_and_path(api: Api, path: PathRequest) -> None:
    api.backend.answer = MoveAccepted("m1")
    response = await order(api, request_id="x", target="b", path=path.value)
    assert (response.status_code, response.json()) == (202, {"id": "m1"})
    assert api.backend.asked == [("x", "b", path)]


@pytest.mark.parametrize("blocks", [1500, None])
async def test_an_order_sets_the_size_of_a_pool(api: Api, blocks: int | None) -> None:
    response = await api.post(POOL, json={"blocks": blocks})
    assert (response.status_code, response.json()) == (202, {"id": "a", "blocks": blocks})
    assert api.backend.asked == [("a", blocks)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "blocks"),
        ({"blocks": "9"}, "blocks"),
        ({"blocks": 1.5}, "blocks"),
        ({"blocks": 9, "x": 1}, "x"),
        ([], None),
    ],
)
async def test_an_order_for_the_size_of_a_pool_is_checked(api: Api, body: Any, param: str | None) -> None:
    response = await api.post(POOL, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert (await api.post("/mell/replicas/z/memory", json={"blocks": 9})).status_code == 404


@pytest.mark.parametrize(("verb", "asleep"), [("sleep", True), ("wake", False)])
async def test_replicas_and_models_sleep_and_wake_by_order(api: Api, verb: str, asleep: bool) -> None:
    response = await api.post(f"/mell/replicas/a/{verb}")
    assert (response.status_code, response.json()) == (202, {"id": "a", "asleep": asleep})
    response = await api.post(f"/mell/models/org/tiny/{verb}")
    assert (response.status_code, response.json()) == (202, {"id": "Engine", "asleep": asleep})
    assert api.backend.asked == [("a", asleep), ("org/tiny", asleep)]
    assert (await api.post(f"/mell/replicas/z/{verb}")).status_code == 404


@pytest.mark.parametrize("role", ["prefill", "decode", "both", None])
async def test_an_order_sets_a_role_or_takes_it_back(api: Api, role: str | None) -> None:
    response = await api.post(ROLE, json={"role": role})
    assert (response.status_code, response.json()) == (202, {"id": "a", "role": role})
    assert api.backend.asked == [("a", role)]


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "role"), ({"role": "auto"}, "role"), ({"role": 1}, "role"), ({"role": "both", "x": 1}, "x"), ([], None)],
    ids=["none", "unknown", "a number", "another member", "a list"],
)
async def test_an_order_for_a_role_is_checked(api: Api, body: Any, param: str | None) -> None:
    response = await api.post(ROLE, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    response = await api.post("/mell/replicas/z/role", json={"role": "both"})
    assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"
    assert not api.backend.asked


async def test_an_order_sets_the_bounds(api: Api) -> None:
    order = {"min_replicas": 2, "max_replicas": 3}
    response = await api.post("/mell/bounds", json=order)
    assert (response.status_code, response.json()) == (200, order) and api.backend.asked == [(2, 3)]
    api.backend.answer = MoveRejected(422, "scheduler.mode is off")
    assert (await api.post("/mell/bounds", json=order)).status_code == 422


@pytest.mark.parametrize(
    "body",
    [{}, {"min_replicas": 0, "max_replicas": 0}, {"min_replicas": 3, "max_replicas": 2}, {"min_replicas": 1}],
    ids=["none", "no replica", "the wrong way round", "one"],
)
async def test_an_order_for_bounds_is_checked(api: Api, body: Any) -> None:
    response = await api.post("/mell/bounds", json=body)
    assert response.status_code == 400 and not api.backend.asked


async def test_an_order_sets_the_level_of_a_class(api: Api) -> None:
    response = await api.post("/mell/level", json={"ttft_p99_s": 1.5})
    assert response.status_code == 200
    assert response.json() == {"class": "default", "ttft_p99_s": 1.5, "itl_p99_ms": None}
    await api.post("/mell/level", json={"class": "chat", "itl_p99_ms": 40})
    assert api.backend.asked == [("default", 1.5, None), ("chat", None, 0.04)]
    api.backend.answer = MoveRejected(422, "no level is configured for the class 'chat'")
    assert (await api.post("/mell/level", json={"class": "chat", "ttft_p99_s": 1})).status_code == 422


@pytest.mark.parametrize("body", [{}, {"class": "chat"}, {"ttft_p99_s": 0}, {"itl_p99_ms": "40"}, {"rank": 1}])
async def test_an_order_for_a_level_is_checked(api: Api, body: Any) -> None:
    response = await api.post("/mell/level", json=body)
    assert response.status_code == 400 and not api.backend.asked


async def test_a_role_that_the_scheduler_refuses_is_refused(api: Api) -> None:
    api.backend.answer = MoveRejected(422, "scheduler.mode is off")
    response = await api.post(ROLE, json={"role": "both"})
    assert (response.status_code, response.json()["error"]["message"]) == (422, "scheduler.mode is off")


@pytest.mark.parametrize("mode", ["off", "observe", "act"])
async def test_an_order_sets_the_mode(api: Api, mode: str) -> None:
    response = await api.post(MODE, json={"mode": mode})
    assert (response.status_code, response.json()) == (200, {"mode": mode})
    assert api.backend.asked == [(mode,)]


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "mode"), ({"mode": "on"}, "mode"), ({"mode": False}, "mode"), ({"mode": "off", "x": 1}, "x"), ([], None)],
    ids=["none", "unknown", "a truth value", "another member", "a list"],
)
async def test_an_order_for_a_mode_is_checked(api: Api, body: Any, param: str | None) -> None:
    response = await api.post(MODE, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert not api.backend.asked


async def test_a_mode_that_the_scheduler_refuses_is_refused(api: Api) -> None:
    api.backend.answer = MoveRejected(422, "Serve decides the number of replicas")
    response = await api.post(MODE, json={"mode": "act"})
    assert (response.status_code, response.json()["error"]["type"]) == (422, "invalid_request_error")


async def test_the_mode_is_shown_with_the_configured_one_once_the_scheduler_has_reported(api: Api) -> None:
    api.backend.mode = {"as_of": 1.0, "mode": "off", "configured_mode": "act"}
    response = await api.get(MODE)
    assert (response.status_code, response.json()) == (200, {"mode": "off", "configured_mode": "act"})
    api.backend.mode = {"as_of": 0.0, "mode": "off"}
    assert (await api.get(MODE)).status_code == 503


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_mode_is_for_operators(api: Api, method: str) -> None:
    api.address = ("10.0.0.1", 1)
    assert (await api.send(method, MODE)).status_code == 403
    assert not api.backend.asked


async def test_target_and_path_are_optional(api: Api) -> None:
    api.backend.answer = MoveAccepted("m1")
    assert (await order(api, request_id="x")).status_code == 202
    assert api.backend.asked == [("x", None, PathRequest.AUTO)]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, "not_found_error"),
        (409, "conflict_error"),
        (422, "invalid_request_error"),
        (503, "service_unavailable_error"),
    ],
)
async def test_a_refused_order_has_its_reason_in_openais_shape(api: Api, status: int, kind: str) -> None:
    api.backend.answer = MoveRejected(status, "because", {"candidates": [{"id": "r1"}]})
    response = await order(api, request_id="x")
    assert response.status_code == status
    assert response.json()["error"] == {
        "message": "because",
        "type": kind,
        "param": None,
        "code": None,
        "candidates": [{"id": "r1"}],
    }


BAD_ORDERS: dict[str, tuple[bytes, str | None]] = {
    "no body": (b"", None),
    "broken JSON": (b"{", None),
    "a list": (b"[]", None),
    "null": (b"null", None),
    "invalid UTF-8": (b'{"request_id": "\xff"}', None),
    "a hundred thousand brackets": (b"[" * 100_000, None),
    "a huge number": (b'{"request_id": ' + b"9" * 5000 + b"}", None),
    "no request": (b"{}", "request_id"),
    "an empty request": (b'{"request_id": ""}', "request_id"),
    "a request that is a number": (b'{"request_id": 5}', "request_id"),
    "a lone surrogate": (b'{"request_id": "\\ud800"}', None),
    "a target that is a list": (b'{"request_id": "x", "target": []}', "target"),
    "a target with a lone surrogate": (b'{"request_id": "x", "target": "\\ud800"}', None),
    "an unknown path": (b'{"request_id": "x", "path": "air"}', "path"),
    "a path that is a list": (b'{"request_id": "x", "path": []}', "path"),
    "a path that is null": (b'{"request_id": "x", "path": null}', "path"),
    "an unknown member": (b'{"request_id": "x", "to": "b"}', "to"),
    "an unknown member with a lone surrogate": (b'{"request_id": "x", "\\ud800": "b"}', None),
}


@pytest.mark.parametrize(("content", "param"), BAD_ORDERS.values(), ids=BAD_ORDERS)
async def test_an_invalid_order_is_a_400_that_names_the_member(api: Api, content: bytes, param: str | None) -> None:
    response = await api.post("/mell/migrations", content=content, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error"), response.text
    assert param is None or error["param"] == param
    assert error["message"] and not api.backend.asked


async def test_a_web_page_cannot_give_orders(api: Api) -> None:
    """A page may post text/plain to loopback without a CORS preflight, but not JSON."""
    response = await api.post(
        "/mell/migrations", content=b'{"request_id": "x"}', headers={"Content-Type": "text/plain"}
    )
    assert response.status_code == 415 and not api.backend.asked


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL = {"lora_name": "sql", "lora_path": "/sql"}


@pytest.fixture
def updating(api: Api) -> Api:
    """With run-time loading of adapters, by the admin key."""
    api.backend.require("secret-key!")
    return api


async def test_adapters_are_loaded_and_unloaded_by_operators(updating: Api) -> None:
    key = {"Authorization": "Bearer secret-key!"}
    loaded = await updating.post(LOAD, json={**SQL, "load_inplace": True}, headers=key)
    unloaded = await updating.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 3}, headers=key)
    assert [(answer.status_code, answer.text) for answer in (loaded, unloaded)] == [(200, "loaded"), (200, "unloaded")]
    assert updating.backend.adapter_orders == [LoadAdapter(lora_name="sql", lora_path="/sql", load_inplace=True), "sql"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
@pytest.mark.parametrize("given", ["", "Bearer", "Bearer an-api-key", "Bearer secret-key", "Basic secret-key!"])
async def test_clients_cannot_load_adapters(updating: Api, path: str, given: str) -> None:
    answer = await updating.post(path, json=SQL, headers={"Authorization": given} if given else {})
    assert (answer.status_code, updating.backend.adapter_orders) == (401, [])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "sql"}, "lora_path"),
        ({**SQL, "lora_name": ""}, "lora_name"),
        ({**SQL, "lora_path": ["/sql"]}, "lora_path"),
        ({**SQL, "load_inplace": "yes"}, "load_inplace"),
        ({**SQL, "lora_int_id": 1}, "lora_int_id"),
    ],
)
async def test_an_invalid_adapter_is_a_400_that_names_the_member(updating: Api, body: Any, param: str) -> None:
    answer = await updating.post(LOAD, json=body, headers={"Authorization": "Bearer secret-key!"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert updating.backend.adapter_orders == []


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_without_the_setting_there_are_no_routes_for_adapters(api: Api, path: str) -> None:
    api.backend.settings = api.backend.settings.model_copy(update={"allow_runtime_lora_updating": False})
    answer = await api.post(path, json=SQL, headers={"Authorization": "Bearer secret-key!"})
    assert (answer.status_code, api.backend.adapter_orders) == (404, [])


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "blocks move"},
        {"prompt": [1, 2, 3], "model": "sql", "cache_salt": "alice:", "prompt_cache_key": "s"},
        {"messages": [{"role": "user", "content": "blocks move"}]},
    ],
    ids=["text", "token ids", "messages"],
)
async def test_a_prompt_is_looked_up(api: Api, body: dict[str, Any]) -> None:
    answer = await api.post(MATCH, json=body)
    assert (answer.status_code, answer.json()) == (200, MATCHED)
    (order,) = api.backend.matched
    assert order.model_dump(exclude_none=True) == body


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, None, "invalid_body"),
        ({"prompt": "x", "messages": []}, None, "invalid_body"),
        ({"prompt": {"text": "x"}}, "prompt", "invalid_value"),
        ({"prompt": ["x"]}, "prompt", "invalid_value"),
        ({"messages": ["x"]}, "messages", "invalid_value"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt", "invalid_value"),
        ({"prompt": "x", "n": 2}, "n", "unknown_parameter"),
    ],
    ids=str,
)
async def test_a_prompt_that_is_none_is_a_400(api: Api, body: Any, param: str | None, code: str) -> None:
    answer = await api.post(MATCH, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert api.backend.matched == []
    assert param is not None or error["message"] == "give either a prompt or messages"


# --- heads and paths ----------------------------------------------------------------------------------


def refusal(response: httpx.Response, status: int) -> None:
    """Assert that the response is an error in OpenAI's form."""
    assert response.status_code == status, response.text
    assert response.json()["error"].keys() >= {"message", "type", "param", "code"}


async def raw(api: Api, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> httpx.Response:
    """A call as passed on by a server without any checks."""
    exchange = Exchange(api, b"{}")
    exchange.task.cancel()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "surrogatepass"),
        "root_path": "",
        "query_string": b"\xff\x00&=" * 100,
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("mell", 80),
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    await api.app(scope, receive, send)
    start, *parts = sent
    content = b"".join(part.get("body", b"") for part in parts)
    return httpx.Response(start["status"], headers=start["headers"], content=content)


HEADS: dict[str, list[tuple[bytes, bytes]]] = {
    "a long label": [(b"x-request-id", b"x" * 1_000_000)],
    "a label of control characters": [(b"x-request-id", bytes(range(32)) + b"\x7f\xff")],
    "a long key": [(b"authorization", b"Bearer " + b"x" * 1_000_000)],
    "a key that is no text": [(b"authorization", b"Bearer \xff\xfe\x00")],
    "two keys": [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
    "two lengths": [(b"content-length", b"5"), (b"content-length", b"7")],
    "a length above all": [(b"content-length", b"9" * 20)],
    "ten thousand headers": [(b"x-%d" % n, b"y") for n in range(10_000)],
}


@pytest.mark.parametrize("headers", HEADS.values(), ids=HEADS)
async def test_no_head_causes_a_server_error(api: Api, headers: list[tuple[bytes, bytes]]) -> None:
    response = await raw(api, "POST", "/mell/migrations", headers)
    # The body is {}: unless the declared length differs, the first parameter is missing.
    refusal(response, 413 if headers[0][1].startswith(b"99") else 400)
    assert not api.backend.asked


@pytest.mark.parametrize(
    "path", ["/\x00", "/\ud800", "/v1/../v1/models/..", "//v1/models", "/" + "a" * 100_000, "*", ""]
)
async def test_no_path_causes_a_server_error(api: Api, path: str) -> None:
    refusal(await raw(api, "GET", path, []), 404)


@pytest.mark.parametrize("name", ["x" * 100_000, "\x00", "\ud800", "a/b/../c", "%", "\u202e"], ids=ascii)
async def test_no_name_causes_a_server_error(api: Api, name: str) -> None:
    refusal(await raw(api, "POST", f"/mell/replicas/{name}/drain", []), 404)


@pytest.mark.parametrize("method", ["", "get", "FOO", "TRACE", "CONNECT", "OPTIONS", "PATCH", "M" * 10_000, "\u00e9"])
@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/mell/migrations"])
async def test_no_method_causes_a_server_error(api: Api, method: str, path: str) -> None:
    response = await raw(api, method, path, [])
    refusal(response, 405)
    assert response.headers["allow"]
