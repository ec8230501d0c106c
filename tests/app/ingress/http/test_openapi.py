"""The OpenAPI document describes Mell's own routes: their bodies, responses and refusals."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.routing import Route, WebSocketRoute

from app.ingress.http import answers
from app.ingress.http.control import ROUTES
from app.ingress.http.openapi import document
from app.ingress.http.operation import OperatorOperation, order_of
from deployments.api.calls import MoveAccepted, MoveRejected
from migration.protocol.record import Outcome
from policies.decision.reports import status_of
from policies.model import SOLE_POOL
from tests.app.client.sample import match
from tests.app.ingress.fakes import Api, make_api
from tests.deployments.scheduler.fakes import make_report
from tests.deployments.scheduler.test_scheduler import caching, make_record, make_scheduler, running
from tests.deployments.scheduler.test_scheduler import named as named_call

OWN = document()
BY_ID = {str(route.operation_id): route for route in ROUTES}
OPERATORS = [id for id, route in BY_ID.items() if isinstance(route, OperatorOperation)]
BODIES = {id: body for id, route in BY_ID.items() if (body := order_of(route))}
BETWEEN_TWO = ("handOver", "takeRequest")
"""Calls that need another Mell (`tests/app/ingress/hand_over`)."""
FOR_BROWSERS = {"/mell/", "/mell/assets/{name}", "/mell/events"}
"""The operators' page, which is described by itself, and no interface for programs."""


def described_path(route: Route) -> str:
    """The path of a route in the document, which does not say that a parameter may have slashes."""
    return route.path.replace(":path}", "}")


def described(route: APIRoute) -> dict[str, Any]:
    """The operation object of a route."""
    (operation,) = [o for o in OWN["paths"][described_path(route)].values() if o["operationId"] == route.operation_id]
    assert isinstance(operation, dict)
    return operation


def check(route: APIRoute, response: httpx.Response) -> None:
    """Assert that status, media type and body are documented, and that all of the body is."""
    documented = described(route)["responses"]
    status, kind = str(response.status_code), response.headers["content-type"]
    assert status in documented, f"{route.operation_id} does not document {status}: {response.text[:300]}"
    assert kind in documented[status]["content"], f"{route.operation_id} does not document {kind} with {status}"
    if response.status_code >= 400:
        fits(answers.Error, response.json(), whole=False)
    elif route.response_model is not None and issubclass(route.response_model, BaseModel):
        fits(route.response_model, response.json())


def fits(model: type[BaseModel], value: Any, whole: bool = True) -> None:
    """Assert that the model describes the value; `whole`: with every member of it."""
    parsed = model.model_validate_json(json.dumps(value), strict=True).model_dump(
        mode="json", exclude_unset=True, by_alias=True
    )
    assert parsed == value or not whole


async def call(api: Api, route: APIRoute, **options: Any) -> httpx.Response:
    """The example of an operation."""
    (method,) = route.methods - {"HEAD"}
    if body := BODIES.get(str(route.operation_id)):
        options = {"json": body.model_json_schema()["examples"][0], **options}
    return await api.send(method, described_path(route).format(replica="a", node="gpu-a", model="tiny"), **options)


def named(*ids: str) -> Any:
    return pytest.mark.parametrize("route", [BY_ID[name] for name in ids], ids=ids)


# --- the document -------------------------------------------------------------------------------------


async def test_every_route_is_described_and_nothing_else(api: Api) -> None:
    routes = [route for route in api.app.routes if isinstance(route, Route) and route.path not in FOR_BROWSERS]
    http = [route for route in api.app.routes if not isinstance(route, WebSocketRoute)]
    assert len(routes) + len(FOR_BROWSERS) == len(http)
    there = {(m, described_path(r)) for r in routes for m in (r.methods or set()) - {"HEAD"}}
    assert {(method.upper(), path) for path, methods in OWN["paths"].items() for method in methods} == there
    assert len(BY_ID) == len(ROUTES) and all(described(route)["summary"] for route in ROUTES)


def test_the_document_is_of_openapi_3_1() -> None:
    assert OWN["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(OWN).validate()


def test_errors_and_defaults_of_fastapi_are_not_described() -> None:
    schemas = OWN["components"]["schemas"].keys()
    assert {"Error", "MoveRequest", "State"} <= schemas and not {"HTTPValidationError", "ValidationError"} & schemas
    assert [name for name in schemas if "__" in name] == [], "two models of one name"


class Asked(BaseModel):
    """The body of a route of vLLM."""

    a: int


def test_vllms_routes_join_with_the_schemas_that_they_need() -> None:
    router = APIRouter()

    @router.post("/v1/x")
    async def x(body: Asked) -> None: ...

    whole = document([route for route in router.routes if isinstance(route, APIRoute)])
    schemathesis.openapi.from_dict(whole).validate()
    assert whole["paths"].keys() == OWN["paths"].keys() | {"/v1/x"}
    assert whole["paths"]["/v1/x"]["post"]["security"] == [{"apiKey": []}, {}]
    assert "Asked" in whole["components"]["schemas"] and "Asked" not in OWN["components"]["schemas"]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_every_parameter_has_a_description(body: type[BaseModel]) -> None:
    schema = body.model_json_schema()
    objects = [schema, *schema.get("$defs", {}).values()]
    members = [pair for part in objects for pair in part.get("properties", {}).items()]
    assert [name for name, member in members if not member.get("description")] == []


# --- answers ------------------------------------------------------------------------------------------


@named(*(name for name in BY_ID if name not in ("migrate", "getState", "listMigrations", *BETWEEN_TWO)))
async def test_an_example_is_answered_as_described(api: Api, route: APIRoute) -> None:
    response = await call(api, route)
    assert response.status_code == (route.status_code or 200), response.text
    check(route, response)


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
    state = await scheduler.core.state(SOLE_POOL)
    assert [replica["requests"] for replica in state["replicas"]][1]
    fits(answers.State, state)
    fits(answers.State, {"as_of": 0.0, "mode": "off", "replicas": []})


@pytest.mark.virtual_time
async def test_migrations_are_what_is_described() -> None:
    scheduler = await make_scheduler(make_report("b"))
    await scheduler.core.record(SOLE_POOL, make_record("m1"))
    await scheduler.core.record(SOLE_POOL, replace(make_record("m2", Outcome.COMMITTED), pause_s=0.1, error="none"))
    migrations = await scheduler.core.migrations(SOLE_POOL)
    assert len(migrations["migrations"]) == 2
    fits(answers.Migrations, migrations)


@pytest.mark.virtual_time
async def test_a_match_is_what_is_described() -> None:
    scheduler = await make_scheduler(*caching())
    found = await scheduler.core.match(SOLE_POOL, named_call("x").arrival)
    assert found["replicas"]
    fits(answers.Match, found)
    fits(answers.Match, match(None, off="no replica has a mirror"))


def test_what_is_not_described_does_not_fit() -> None:
    fits(answers.DrainStarted, {"id": "x", "state": "DRAINING"})
    with pytest.raises(ValidationError):
        fits(answers.DrainStarted, {"id": 5, "state": "DRAINING"})
    with pytest.raises(AssertionError):
        fits(answers.DrainStarted, {"id": "x", "state": "DRAINING", "other": 1})


# --- refusals -----------------------------------------------------------------------------------------


@named(*OPERATORS)
async def test_callers_without_the_key_are_refused_as_described(api: Api, route: APIRoute) -> None:
    api.backend.require("secret-key!")
    response = await call(api, route)
    assert response.status_code == 401
    check(route, response)
    response = await call(api, route, headers={"Authorization": "Bearer secret-key!"})
    answered = 422 if route.operation_id in BETWEEN_TWO else route.status_code or 200
    assert response.status_code in (answered, 404), response.text


@named(*OPERATORS)
async def test_strangers_are_refused_as_described(api: Api, route: APIRoute) -> None:
    api.address = ("10.0.0.1", 1)
    response = await call(api, route)
    assert response.status_code == 403
    check(route, response)


@named(*BODIES)
async def test_bodies_that_are_none_are_refused_as_described(route: APIRoute) -> None:
    api = make_api(max_body_bytes=200)
    wrong = [("{", "application/json", 400), ("{}", "text/plain", 415), (" " * 201, "application/json", 413)]
    for content, kind, status in wrong:
        response = await call(api, route, json=None, content=content, headers={"Content-Type": kind})
        assert response.status_code == status
        check(route, response)


@pytest.mark.parametrize("status", [404, 409, 422, 503])
@named("migrate", "drain")
async def test_an_order_is_refused_as_described(api: Api, route: APIRoute, status: int) -> None:
    if status in route.responses:
        api.backend.answer = MoveRejected(status, "because", {"candidates": [{"id": "r1"}]})
        response = await call(api, route)
        assert response.status_code == status
        check(route, response)


async def test_bad_health_is_as_described(api: Api) -> None:
    api.backend.unhealthy = "starting"
    response = await call(api, BY_ID["health"])
    assert response.status_code == 503
    check(BY_ID["health"], response)
