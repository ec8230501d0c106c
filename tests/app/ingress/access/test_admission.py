"""Admission over HTTP: keys and their limits, concurrent requests, and the release by refusals and ends."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.frontend.guard.bodies import DEFAULT_CHARGE_TOKENS
from app.ingress.access.admission import FirstTokenDeadlines, Gate
from app.ingress.access.classes import HEADER, ClassChooser
from app.ingress.access.keys import ApiKey, KeyFile, digest, entry
from app.ingress.access.limits import KeyLimits
from policies.precedence import ServiceClass, ServiceClasses
from tests.app.ingress.fakes import MAX_CONTEXT, PROMPT, Api, Exchange, body, eventually, make_api, make_service

ALICE = {"Authorization": "Bearer alice-key"}
BOB = {"Authorization": "Bearer bob-key"}


class Clock:
    """A manual clock, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(name: str, **limits: int) -> ApiKey:
    return ApiKey(name, digest(f"{name}-key"), KeyLimits(**limits))


def limited(clock: Clock | None = None, max_requests: int | None = None, **limits: int) -> Api:
    """The routes with two keys: Alice's has limits, Bob's has none."""
    gate = Gate([key("alice", **limits), key("bob")], max_requests, clock or Clock())
    return make_api(gate=gate)


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and Retry-After."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"], response.headers.get("retry-after")


# --- keys ---------------------------------------------------------------------------------------------

CLIENT_CALLS: dict[str, tuple[str, str, Any]] = {
    "completions": ("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
    "chats": ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    "models": ("GET", "/v1/models", None),
    "tokenize": ("POST", "/tokenize", {"prompt": "x"}),
    "detokenize": ("POST", "/detokenize", {"tokens": PROMPT}),
}


@pytest.mark.parametrize(("method", "path", "content"), CLIENT_CALLS.values(), ids=CLIENT_CALLS)
async def test_with_keys_clients_need_a_valid_one(method: str, path: str, content: Any) -> None:
    api = limited()
    options = {} if content is None else {"json": content}
    assert (await api.send(method, path, headers=ALICE, **options)).status_code == 200
    for wrong in ({}, {"Authorization": "Bearer eve-key"}, {"X-API-Key": "alice-key"}, {"Authorization": "alice-key"}):
        response = await api.send(method, path, headers=wrong, **options)
        assert refusal(response) == (401, "invalid_api_key", None)
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path", "content"), CLIENT_CALLS.values(), ids=CLIENT_CALLS)
async def test_without_keys_every_client_is_admitted(api: Api, method: str, path: str, content: Any) -> None:
    options = {} if content is None else {"json": content}
    assert (await api.send(method, path, headers=ALICE, **options)).status_code == 200


OPEN = ("/health", "/ping", "/load", "/live", "/version", "/-/healthz", "/-/routes")


@pytest.mark.parametrize("path", OPEN)
async def test_probes_need_no_key(path: str) -> None:
    assert (await limited().get(path)).status_code == 200


def test_every_route_beside_the_clients_is_for_operators_or_probes(api: Api) -> None:
    """A new route needs a decision on its access and an entry here."""
    paths = {getattr(route, "path", "") for route in api.app.routes}
    operators = {"/mell/state", "/mell/migrations", "/mell/replicas/{replica}/drain", "/mell/events"}
    operators |= {"/mell/replicas/{replica}/memory", "/mell/replicas/{replica}/role"}
    operators |= {"/mell/replicas/{replica}/sleep", "/mell/replicas/{replica}/wake"}
    operators |= {"/mell/models/{model:path}/sleep", "/mell/models/{model:path}/wake"}
    operators |= {"/mell/bounds", "/mell/level", "/mell/mode", "/mell/ingress/drain"}
    operators |= {"/mell/pairs", "/mell/pairs/{replica}"}
    operators |= {"/mell/nodes/{node}/drain", "/mell/hand-over", "/mell/hand-over/requests"}
    operators |= {"/mell/reset_prefix_cache", "/mell/start_profile", "/mell/stop_profile"}
    operators |= {"/mell/cache/match", "/mell/cache/copy", "/mell/cache/pin", "/mell/cache"}
    operators |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    page = {"/mell/", "/mell/assets/{name}"}
    assert paths == operators | page | {*OPEN, "/metrics", "/openapi.json"}


async def test_api_keys_and_the_admin_key_are_distinct() -> None:
    api = limited()
    api.backend.require("the-admin-key")
    admin = {"Authorization": "Bearer the-admin-key"}
    assert (await api.get("/mell/state", headers=admin)).status_code == 200
    assert refusal(await api.get("/mell/state", headers=ALICE)) == (401, "invalid_api_key", None)
    assert refusal(await api.get("/v1/models", headers=admin)) == (401, "invalid_api_key", None)


async def test_without_a_key_the_body_is_not_read() -> None:
    """Otherwise clients without a key could occupy megabytes."""
    exchange = Exchange(limited(), b"")
    exchange._incoming.get_nowait()
    await exchange.ended()
    assert exchange.sent[0]["status"] == 401


# --- limits of a key ----------------------------------------------------------------------------------


async def test_requests_per_minute() -> None:
    clock = Clock()
    api = limited(clock, requests_per_minute=2)
    for _ in range(2):
        assert (await api.complete(ALICE, max_tokens=1)).status_code == 200
    response = await api.complete(ALICE, max_tokens=1)
    assert refusal(response) == (429, "rate_limit_exceeded", "30")
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert (await api.complete(BOB, max_tokens=1)).status_code == 200
    clock.now += 9.5
    assert refusal(await api.post("/tokenize", json={"prompt": "x"}, headers=ALICE))[2] == "21"
    clock.now += 20.5
    assert (await api.complete(ALICE, max_tokens=1)).status_code == 200


async def test_models_may_be_listed_at_any_rate() -> None:
    api = limited(requests_per_minute=1)
    assert all([(await api.get("/v1/models", headers=ALICE)).status_code == 200 for _ in range(3)])


async def test_the_final_charge_is_the_tokens_used() -> None:
    api = limited(tokens_per_minute=600)
    assert (await api.complete(ALICE, max_tokens=60)).status_code == 200
    response = await api.complete(ALICE, max_tokens=480)
    assert refusal(response) == (429, "rate_limit_exceeded", "2")  # 520 of the 500 that are left, at 10 per second
    assert (await api.complete(ALICE, max_tokens=460)).status_code == 200


async def test_a_running_request_is_charged_its_maximum() -> None:
    gate = Gate([key("alice", tokens_per_minute=600)], clock=Clock())
    api = make_api(make_service(step_s=0.01), gate=gate)
    exchange = Exchange(api, body(max_tokens=540, stream=True), headers=ALICE)
    await exchange.chunks(3)
    assert refusal(await api.complete(ALICE, max_tokens=20)) == (429, "rate_limit_exceeded", "4")
    exchange.disconnect()
    await exchange.ended()
    answer = await api.complete(ALICE, max_tokens=20)
    assert answer.status_code == 200, "what the client that left has not used is its key's again"


@pytest.mark.parametrize(
    ("path", "default"), [("/v1/completions", 16), ("/v1/chat/completions", DEFAULT_CHARGE_TOKENS)]
)
async def test_an_answer_without_max_tokens_is_charged_a_default(path: str, default: int) -> None:
    content = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    charged = len(json.dumps(content, separators=(",", ":"))) // 4 + default
    for spare, status in ((0, 200), (-1, 429)):
        api = limited(tokens_per_minute=MAX_CONTEXT + charged)
        api.backend.gate._meters["alice"].charge(MAX_CONTEXT - spare, 1000.0)
        assert (await api.post(path, json=content, headers=ALICE)).status_code == status


async def test_a_request_without_a_replica_costs_no_tokens() -> None:
    gate = Gate([key("alice", tokens_per_minute=100)], clock=Clock())
    service = make_service("a", no_replica_timeout_s=0)
    service.kill("a")
    api = make_api(service, gate=gate)
    for _ in range(3):
        assert (await api.complete(ALICE, max_tokens=60)).status_code == 503


async def test_concurrent_requests() -> None:
    gate = Gate([key("alice", concurrent_requests=2), key("bob")], clock=Clock())
    api = make_api(make_service(step_s=0.01), gate=gate)
    first, second = [Exchange(api, body(max_tokens=900, stream=True), headers=ALICE) for _ in range(2)]
    await first.chunks(1)
    await second.chunks(1)
    assert refusal(await api.complete(ALICE, max_tokens=1)) == (429, "rate_limit_exceeded", "1")
    assert (await api.complete(BOB, max_tokens=1)).status_code == 200
    first.task.cancel()
    await first.ended()
    assert (await api.complete(ALICE, max_tokens=1)).status_code == 200
    second.disconnect()
    await second.ended()


# --- how many at a time -------------------------------------------------------------------------------


async def test_a_saturated_ingress_answers_503() -> None:
    api = make_api(make_service(step_s=0.01), gate=Gate(max_requests=2))
    running = [Exchange(api, body(max_tokens=900, stream=True)), Exchange(api, body(max_tokens=900))]
    await eventually(lambda: api.backend.streams.count == 2)
    response = await api.complete(max_tokens=1)
    assert refusal(response) == (503, "saturated", "1")
    assert response.json()["error"]["type"] == "service_unavailable_error"
    assert (await api.get("/health")).status_code == 200
    for exchange in running:
        exchange.disconnect()
        await exchange.ended()
    assert (await api.complete(max_tokens=1)).status_code == 200


async def test_a_request_whose_first_token_would_be_late_for_its_class_is_refused() -> None:
    soonest_s = [7.4]
    chooser = ClassChooser(ServiceClasses({"chat": ServiceClass(1), "batch": ServiceClass(-1)}))
    deadlines = FirstTokenDeadlines(2.0, {"chat": 1.0, "default": 4.0}.copy, lambda: soonest_s[0])
    api = make_api(gate=(gate := Gate(chooser=chooser)), deadlines=deadlines)

    async def asked(name: str) -> httpx.Response:
        return await api.complete(max_tokens=1, headers={HEADER: name})

    late = await asked("chat")
    assert refusal(late) == (503, "saturated", "6"), "in 5.4 s, rounded up"
    assert "later than 2 s" in late.json()["error"]["message"] and gate.running == 0
    assert [(await asked(name)).status_code for name in ("default", "batch")] == [200, 200]
    soonest_s[0] = 2.0
    assert (await asked("chat")).status_code == 200


async def test_a_503_counts_nothing_against_the_key() -> None:
    api = limited(max_requests=1, requests_per_minute=1)
    with api.backend.gate.admit("bob-key"):
        assert refusal(await api.complete(ALICE, max_tokens=1))[1] == "saturated"
    assert (await api.complete(ALICE, max_tokens=1)).status_code == 200


ENDS: dict[str, bytes] = {
    "answered": body(max_tokens=2),
    "streamed": body(max_tokens=2, stream=True),
    "malformed": b"{",
    "too long": body(prompt=[7] * (MAX_CONTEXT + 1)),
    "too large": b" " * (2 << 20),
}


@pytest.mark.parametrize("content", ENDS.values(), ids=ENDS)
async def test_every_end_releases_the_admission(content: bytes) -> None:
    gate = Gate([key("alice", concurrent_requests=1)], max_requests=1, clock=Clock())
    api = make_api(gate=gate)
    for _ in range(3):
        response = await api.post(
            "/v1/completions", content=content, headers={**ALICE, "Content-Type": "application/json"}
        )
        assert response.status_code not in (429, 503)


@pytest.mark.parametrize("how", ["disconnect", "cancellation"])
async def test_a_disconnect_during_the_body_releases_the_admission(how: str) -> None:
    gate = Gate(max_requests=1)
    exchange = Exchange(make_api(gate=gate), b"")
    exchange._incoming.get_nowait()
    await eventually(lambda: gate.running == 1)
    if how == "disconnect":
        exchange.disconnect()
    else:
        exchange.task.cancel()
    await exchange.ended()
    assert gate.running == 0


async def test_the_length_of_prompts_is_limited() -> None:
    api = make_api(max_prompt_tokens=len(PROMPT))
    assert (await api.complete(max_tokens=1)).status_code == 200
    response = await api.complete(prompt=[*PROMPT, 7], max_tokens=1)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")


# --- other keys ---------------------------------------------------------------------------------------


async def test_a_changed_file_changes_only_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(entry("alice", "alice-key") + "  requests_per_minute: 2\n" + entry("eve", "eve-key"))
    file = KeyFile(str(path))
    gate = Gate(file.read(), clock=Clock())
    api = make_api(gate=gate)
    eve = {"Authorization": "Bearer eve-key"}
    assert [(await api.complete(who, max_tokens=1)).status_code for who in (ALICE, eve)] == [200, 200]
    path.write_text(entry("alice", "new-key") + "  requests_per_minute: 3\n" + entry("bob", "bob-key"))
    gate.reload(file)
    new = {"Authorization": "Bearer new-key"}
    asked = (ALICE, eve, BOB, new, new, new)
    assert [(await api.complete(who, max_tokens=1)).status_code for who in asked] == [401, 401, 200, 200, 200, 429]


async def test_an_invalid_file_is_logged_and_leaves_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(entry("alice", "alice-key"))
    file = KeyFile(str(path))
    gate = Gate(file.read())
    path.write_text("[]")
    with caplog.at_level(logging.ERROR, logger="ray.serve"):
        gate.reload(file)
        gate.reload(file)
    assert [record.getMessage() for record in caplog.records] == [
        f"the API keys remain unchanged: {path}: the list is empty; `python -m app.keys NAME` makes a key and its entry"
    ]
    api = make_api(gate=gate)
    assert (await api.complete(ALICE, max_tokens=1)).status_code == 200
    assert (await api.complete(max_tokens=1)).status_code == 401


async def test_a_file_with_an_unknown_class_is_logged_and_leaves_the_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(entry("alice", "alice-key"))
    file = KeyFile(str(path))
    gate = Gate(file.read())
    path.write_text(entry("bob", "bob-key") + "  classes: [gold]\n")
    with caplog.at_level(logging.ERROR, logger="ray.serve"):
        gate.reload(file)
    assert [record.getMessage() for record in caplog.records] == [
        f"the API keys remain unchanged: {path}: key 1 lists 'gold'; the classes are default"
    ]
    assert gate.authenticate("alice-key") is not None


async def test_both_keys_of_a_name_are_valid_and_have_its_limit_together() -> None:
    both = [ApiKey("alice", digest(each), KeyLimits(requests_per_minute=2)) for each in ("alice-key", "bob-key")]
    api = make_api(gate=Gate(both, clock=Clock()))
    answers = [await api.complete(headers, max_tokens=1) for headers in (ALICE, BOB, BOB)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


async def test_a_removed_key_does_not_end_its_running_requests() -> None:
    gate = Gate([key("alice")], clock=Clock())
    api = make_api(gate=gate)
    asking = asyncio.create_task(api.complete(ALICE, max_tokens=300))
    await eventually(lambda: api.backend.streams.count == 1)
    gate.replace_keys([key("bob")])
    assert (await asking).status_code == 200 and gate.running == 0
