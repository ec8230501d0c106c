"""The OpenAPI document describes Mell's own routes: their bodies, responses and refusals."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
import schemathesis
from pydantic import BaseModel, ValidationError
from starlette.routing import Route

from app.ingress.description import described
from app.ingress.description.openapi import models, own_document, whole_document
from app.ingress.description.operations import JSON, OPERATIONS, Access, Operation
from deployments.api.calls import MoveAccepted, MoveRejected
from migration.protocol.record import Outcome
from policies.decision.reports import status_of
from tests.app.client.sample import match
from tests.app.ingress.fakes import Api, make_api
from tests.deployments.scheduler.fakes import make_report
from tests.deployments.scheduler.test_scheduler import caching, make_record, make_scheduler, running
from tests.deployments.scheduler.test_scheduler import named as named_call

BY_ID = {operation.id: operation for operation in OPERATIONS}
FOR_BROWSERS = {"/mell/", "/mell/assets/{name}", "/mell/events"}
"""The operators' page, which is described by itself, and no interface for programs."""


def check(operation: Operation, response: httpx.Response) -> None:
    """Assert that status, media type and body are documented, and that all of the body is."""
    documented = own_document()["paths"][operation.path][operation.method.lower()]["responses"]
    status, kind = str(response.status_code), response.headers["content-type"]
    assert status in documented, f"{operation.id} does not document {status}: {response.text[:300]}"
    assert kind in documented[status]["content"], f"{operation.id} does not document {kind} with {status}"
    if response.status_code >= 400:
        fits(described.Error, response.json(), whole=False)
    elif operation.answer.model is not None:
        fits(operation.answer.model, response.json())
    elif kind == JSON:
        assert isinstance(response.json(), dict)


def fits(model: type[BaseModel], value: Any, whole: bool = True) -> None:
    """Assert that the model describes the value; `whole`: with every member of it."""
    parsed = model.model_validate_json(json.dumps(value), strict=True).model_dump(
        mode="json", exclude_unset=True, by_alias=True
    )
    assert parsed == value or not whole


async def call(api: Api, operation: Operation, **options: Any) -> httpx.Response:
    """The example of an operation."""
    if operation.body is not None:
        options = {"json": dict(operation.example), **options}
    return await api.send(operation.method, operation.path.replace("{replica}", "a"), **options)


def named(*ids: str) -> Any:
    return pytest.mark.parametrize("operation", [BY_ID[name] for name in ids or BY_ID], ids=lambda o: o.id)


# --- the document -------------------------------------------------------------------------------------


async def test_every_route_is_described_and_nothing_else(api: Api) -> None:
    routes = [route for route in api.app.routes if isinstance(route, Route) and route.path not in FOR_BROWSERS]
    assert len(routes) + len(FOR_BROWSERS) == len(api.app.routes)
    there = {(m, r.path) for r in routes for m in (r.methods or set()) - {"HEAD"}} | {("GET", "/openapi.json")}
    assert {(operation.method, operation.path) for operation in OPERATIONS} == there
    paths = own_document()["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == there


def test_the_document_is_of_openapi_3_1() -> None:
    assert own_document()["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(own_document()).validate()


def test_vllms_routes_join_with_the_schemas_that_they_need() -> None:
    schema = {"$ref": "#/components/schemas/Asked"}
    content = {"application/json": {"schema": schema}}
    call = {"requestBody": {"content": content}, "responses": {"200": {"description": "."}}}
    schemas = {"Asked": {"properties": {"a": {"$ref": "#/components/schemas/Part"}}}, "Part": {}, "Other": {}}
    document = whole_document({"paths": {"/v1/x": {"post": call}}, "components": {"schemas": schemas}})
    schemathesis.openapi.from_dict(document).validate()
    assert document["paths"].keys() == own_document()["paths"].keys() | {"/v1/x"}
    assert document["paths"]["/v1/x"]["post"]["security"] == [{"apiKey": []}, {}]
    own = own_document()["components"]["schemas"].keys()
    assert document["components"]["schemas"].keys() == own | {"Asked", "Part"}


def test_whatever_is_referred_to_is_there() -> None:
    def references(value: Any) -> set[str]:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        own = {value["$ref"]} if isinstance(value, dict) and isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, parts))

    there = {f"#/components/schemas/{name}" for name in own_document()["components"]["schemas"]}
    assert references(own_document()) <= there


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


@named(*(name for name in BY_ID if name not in ("migrate", "getState", "listMigrations", "openapi")))
async def test_an_example_is_answered_as_described(api: Api, operation: Operation) -> None:
    response = await call(api, operation)
    assert response.status_code == operation.answer.status, response.text
    check(operation, response)


async def test_an_order_is_answered_as_described(api: Api) -> None:
    api.backend.answer = MoveAccepted("m1")
    response = await call(api, BY_ID["migrate"])
    assert response.status_code == 202
    check(BY_ID["migrate"], response)


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


@pytest.mark.virtual_time
async def test_a_match_is_what_is_described() -> None:
    scheduler = await make_scheduler(*caching())
    found = await scheduler.core.match(named_call("x").arrival)
    assert found["replicas"]
    fits(described.Match, found)
    fits(described.Match, match(None, off="no replica has a mirror"))


def test_what_is_not_described_does_not_fit() -> None:
    fits(described.DrainStarted, {"id": "x", "state": "DRAINING"})
    with pytest.raises(ValidationError):
        fits(described.DrainStarted, {"id": 5, "state": "DRAINING"})
    with pytest.raises(AssertionError):
        fits(described.DrainStarted, {"id": "x", "state": "DRAINING", "other": 1})


# --- refusals -----------------------------------------------------------------------------------------


@named(*(operation.id for operation in OPERATIONS if operation.access is Access.OPERATOR))
async def test_callers_without_the_key_are_refused_as_described(api: Api, operation: Operation) -> None:
    api.backend.require("secret-key!")
    response = await call(api, operation)
    assert response.status_code == 401
    check(operation, response)
    response = await call(api, operation, headers={"Authorization": "Bearer secret-key!"})
    assert response.status_code in (operation.answer.status, 404), response.text


@named(*(operation.id for operation in OPERATIONS if operation.access is Access.OPERATOR))
async def test_strangers_are_refused_as_described(api: Api, operation: Operation) -> None:
    api.address = ("10.0.0.1", 1)
    response = await call(api, operation)
    assert response.status_code == 403
    check(operation, response)


@named(*(operation.id for operation in OPERATIONS if operation.body))
async def test_bodies_that_are_none_are_refused_as_described(operation: Operation) -> None:
    api = make_api(max_body_bytes=200)
    wrong = [("{", "application/json", 400), ("{}", "text/plain", 415), (" " * 201, "application/json", 413)]
    for content, kind, status in wrong:
        response = await call(api, operation, json=None, content=content, headers={"Content-Type": kind})
        assert response.status_code == status
        check(operation, response)


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
