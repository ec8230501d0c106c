"""The OpenAPI document says what the routes take and answer."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
import schemathesis
from pydantic import BaseModel, ValidationError
from starlette.routing import Route

from app.ingress.access.admission import Gate
from app.ingress.access.keys import ApiKey, digest
from app.ingress.access.limits import KeyLimits
from app.ingress.openai.description import described
from app.ingress.openai.description.openapi import document, models
from app.ingress.openai.description.operations import OPERATIONS, Access, Operation
from app.ingress.openai.model import Model
from deployments.api.calls import MoveAccepted, MoveRejected
from migration.protocol.record import Outcome
from policies.decision.reports import status_of
from tests.app.ingress.fakes import MESSAGES, Api, make_api
from tests.app.ingress.openai.conformance import BY_ID, check, fits
from tests.deployments.scheduler.fakes import make_report
from tests.deployments.scheduler.test_scheduler import make_record, make_scheduler, running

KEY = "mell-a-key"
FOR_BROWSERS = {"/mell/", "/mell/assets/{name}", "/mell/events"}
"""The operators' page, which is described by itself, and no interface for programs."""


def url(operation: Operation) -> str:
    return operation.path.replace("{model}", "tiny").replace("{replica}", "a")


async def call(api: Api, operation: Operation, **options: Any) -> httpx.Response:
    """The example of an operation."""
    if operation.body is not None:
        options = {"json": dict(operation.example), **options}
    return await api.send(operation.method, url(operation), **options)


def named(*ids: str) -> Any:
    return pytest.mark.parametrize("operation", [BY_ID[name] for name in ids or BY_ID], ids=lambda o: o.id)


# --- the document -------------------------------------------------------------------------------------


async def test_every_route_is_described_and_nothing_else(api: Api) -> None:
    routes = [route for route in api.app.routes if isinstance(route, Route) and route.path not in FOR_BROWSERS]
    assert len(routes) + len(FOR_BROWSERS) == len(api.app.routes)
    there = {(m, r.path.replace(":path", "")) for r in routes for m in (r.methods or set()) - {"HEAD"}}
    assert {(operation.method, operation.path) for operation in OPERATIONS} == there
    paths = document()["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == there


def test_the_document_is_of_openapi_3_1() -> None:
    assert document()["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(document()).validate()


async def test_it_is_served_to_anybody(model: Model) -> None:
    api = make_api(model, gate=Gate([ApiKey("alice", digest(KEY))]))
    api.backend.require("secret-key!")
    api.address = ("10.0.0.1", 1)
    response = await api.get("/openapi.json")
    assert response.status_code == 200 and response.json() == document()


def test_whatever_is_referred_to_is_there() -> None:
    def references(value: Any) -> set[str]:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        own = {value["$ref"]} if isinstance(value, dict) and isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, parts))

    there = {f"#/components/schemas/{name}" for name in document()["components"]["schemas"]}
    assert references(document()) <= there


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.body], ids=lambda o: o.id)
def test_every_parameter_has_a_description(operation: Operation) -> None:
    def nameless(model: type[BaseModel]) -> list[str]:
        schema = model.model_json_schema()
        objects = [schema, *schema.get("$defs", {}).values()]
        return [name for part in objects for name, member in part.get("properties", {}).items() if not _says(member)]

    def _says(member: dict[str, Any]) -> bool:
        return bool(member.get("description"))

    assert operation.body is not None and nameless(operation.body) == []


def test_operations_are_distinct() -> None:
    assert len(BY_ID) == len(OPERATIONS)
    names = [model.__name__ for model in {m for operation in OPERATIONS for m in models(operation)}]
    assert len(names) == len({*names}), "two models of one name would be told apart by their modules"


# --- answers ------------------------------------------------------------------------------------------


@named(*(name for name in BY_ID if name not in ("migrate", "getState", "listMigrations")))
async def test_an_example_is_answered_as_described(api: Api, operation: Operation) -> None:
    response = await call(api, operation)
    assert response.status_code == operation.answer.status, response.text
    check(operation, response)


async def test_an_order_is_answered_as_described(api: Api) -> None:
    api.backend.answer = MoveAccepted("m1")
    response = await call(api, BY_ID["migrate"])
    assert response.status_code == 202
    check(BY_ID["migrate"], response)


COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "no likeliest": {"logprobs": 0},
    "choices": {"prompt": ["one", "two"], "n": 2},
    "an echo": {"echo": True},
    "a stop": {"stop": ["e"], "max_tokens": 100},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "no likeliest": {"logprobs": True},
    "choices": {"n": 2},
    "a named call": {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    "calls": {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
}
GENERATED = [
    *(("createCompletion", {"prompt": "Blocks move", **asked}) for asked in COMPLETIONS.values()),
    *(("createChatCompletion", {"messages": MESSAGES, **asked}) for asked in CHATS.values()),
]


@pytest.mark.parametrize("streamed", [False, {"include_usage": False}, {"include_usage": True}], ids=str)
@pytest.mark.parametrize(("name", "asked"), GENERATED, ids=[*COMPLETIONS, *CHATS])
async def test_an_answer_is_what_is_described(api: Api, name: str, asked: Any, streamed: Any) -> None:
    if "tools" in asked:
        ids = api.backend.model.tokenizer.encode('[{"name": "f", "parameters": {"a": 1}}]').ids
        api.backend.service.say(ids)
    body = {"max_tokens": 60, **asked, **({"stream": True, "stream_options": streamed} if streamed else {})}
    response = await api.send("POST", BY_ID[name].path, json=body)
    assert response.status_code == 200, response.text
    check(BY_ID[name], response)


@pytest.mark.virtual_time
async def test_the_state_is_what_is_described() -> None:
    scheduler = await make_scheduler(make_report("b", requests=(running("r", "mine"),)))
    scheduler.listing.without_room = (status_of(make_report("a").load),)
    await scheduler.epoch()
    state = await scheduler.core.state()
    assert [replica["requests"] for replica in state["replicas"]][1]
    fits(described.State, state)
    fits(described.State, {"as_of": 0.0, "mode": "off", "replicas": []})


@pytest.mark.virtual_time
async def test_migrations_are_what_is_described() -> None:
    scheduler = await make_scheduler(make_report("b"))
    await scheduler.core.record(make_record("m1"))
    await scheduler.core.record(replace(make_record("m2", Outcome.COMMITTED), pause_s=0.1, error="none"))
    migrations = await scheduler.core.migrations()
    assert len(migrations["migrations"]) == 2
    fits(described.Migrations, migrations)


def test_what_is_not_described_does_not_fit() -> None:
    fits(described.Text, {"prompt": "x"})
    with pytest.raises(ValidationError):
        fits(described.Text, {"prompt": 5})
    with pytest.raises(AssertionError):
        fits(described.Text, {"prompt": "x", "other": 1})


# --- refusals -----------------------------------------------------------------------------------------


@named(*(operation.id for operation in OPERATIONS if operation.access is not Access.ANYBODY))
async def test_who_lacks_the_key_is_refused_as_described(model: Model, operation: Operation) -> None:
    api = make_api(model, gate=Gate([ApiKey("alice", digest(KEY))]))
    api.backend.require("secret-key!")
    response = await call(api, operation)
    assert response.status_code == 401
    check(operation, response)
    key = {Access.CLIENT: KEY, Access.OPERATOR: "secret-key!"}[operation.access]
    response = await call(api, operation, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code in (operation.answer.status, 404), response.text


@named(*(operation.id for operation in OPERATIONS if operation.access is Access.OPERATOR))
async def test_strangers_are_refused_as_described(api: Api, operation: Operation) -> None:
    api.address = ("10.0.0.1", 1)
    response = await call(api, operation)
    assert response.status_code == 403
    check(operation, response)


@named(*(operation.id for operation in OPERATIONS if 429 in operation.errors))
async def test_limits_are_told_as_described(model: Model, operation: Operation) -> None:
    key = ApiKey("alice", digest(KEY), KeyLimits(requests_per_minute=1))
    api = make_api(model, gate=Gate([key]))
    headers = {"Authorization": f"Bearer {KEY}"}
    assert (await call(api, operation, headers=headers)).status_code == 200
    response = await call(api, operation, headers=headers)
    assert response.status_code == 429
    check(operation, response)
    header = document()["paths"][operation.path]["post"]["responses"]["429"]["headers"]["Retry-After"]
    assert header["required"] and int(response.headers["Retry-After"]) >= header["schema"]["minimum"]


@named(*(operation.id for operation in OPERATIONS if operation.body))
async def test_bodies_that_are_none_are_refused_as_described(model: Model, operation: Operation) -> None:
    api = make_api(model, max_body_bytes=200)
    wrong = [("{", "application/json", 400), ("{}", "text/plain", 415), (" " * 201, "application/json", 413)]
    for content, kind, status in wrong:
        response = await call(api, operation, json=None, content=content, headers={"Content-Type": kind})
        assert response.status_code == status
        check(operation, response)


@named("createCompletion", "createChatCompletion")
async def test_a_service_without_replicas_refuses_as_described(api: Api, operation: Operation) -> None:
    api.backend.service.members.become()
    response = await call(api, operation)
    assert response.status_code == 503
    check(operation, response)


@named("createCompletion", "createChatCompletion", "tokenize", "detokenize")
async def test_a_full_ingress_and_a_late_answer_are_as_described(model: Model, operation: Operation) -> None:
    full = make_api(model, gate=Gate(max_requests=0))
    response = await call(full, operation)
    assert response.status_code == 503 and response.headers["Retry-After"]
    check(operation, response)


@named("createCompletion", "createChatCompletion")
async def test_an_answer_that_is_late_is_as_described(model: Model, operation: Operation) -> None:
    api = make_api(model, request_timeout_s=0.0)
    response = await call(api, operation)
    assert response.status_code == 504
    check(operation, response)
    await asyncio.sleep(0)


@pytest.mark.parametrize("status", [404, 409, 422, 503])
@named("migrate", "drain")
async def test_an_order_is_refused_as_described(api: Api, operation: Operation, status: int) -> None:
    if status in operation.errors:
        api.backend.answer = MoveRejected(status, "because", {"candidates": [{"id": "r1"}]})
        response = await call(api, operation)
        assert response.status_code == status
        check(operation, response)


async def test_bad_health_is_as_described(api: Api) -> None:
    api.backend.unhealthy = "starting"
    response = await call(api, BY_ID["health"])
    assert response.status_code == 503
    check(BY_ID["health"], response)
