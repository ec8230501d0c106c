"""docs/api.md has the open endpoints, and Mell's own ones as the OpenAPI document has them."""

import ast
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from app.frontend.guard.routes import OPEN_ROUTES, RouteTask
from app.ingress.http.control import ROUTES
from app.ingress.http.operation import STATUSES, order_of
from deployments.engine.port import Tie
from docs.make.api import CODES, PAGE, TIED, page

SOURCES = Path(__file__).parents[2]


def section(route: APIRoute) -> str:
    (method,) = route.methods - {"HEAD"}
    return page().split(f"### `{method} {route.path_format}`\n")[1].split("\n##")[0]


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m docs.make"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.operation_id)
def test_every_operation_has_a_section(route: APIRoute) -> None:
    text = section(route)
    assert str(route.summary) in text and f"http://127.0.0.1:8000{route.path.partition('{')[0]}" in text
    assert all(line in text for line in route.description.splitlines() if line != "Refused:")
    assert all(f"`{name}` in the path" in text for name in route.param_convertors)
    assert all(str(status) in text for status in route.responses if status != "default")
    if body := order_of(route):
        assert all(f"| `{name}` |" in text for name in body.model_json_schema()["properties"])


@pytest.mark.parametrize(
    "row",
    [
        '| `path` | `"auto"` or `"kv"` or `"tokens"` | `"auto"` |',
        "| `request_id` | text (not empty) | required |",
        "| `target` | text or `null` | `null` |",
        "| `replicas` | list of [ReplicaDetails](#replicadetails) |  |",
    ],
)
def test_rows_have_type_bounds_and_default(row: str) -> None:
    assert row in page()


def test_every_link_within_the_page_leads_somewhere() -> None:
    text = page()
    headings = {line.lstrip("# ").lower().replace(" ", "-") for line in text.splitlines() if line.startswith("#")}
    links = {part.split(")")[0] for part in text.split("](#")[1:]}
    assert links and links <= headings


def codes(path: Path) -> set[str]:
    """The codes of errors in a file: for the keyword `code`, and as the third argument of `invalid`."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    given = [k.value for call in calls for k in call.keywords if k.arg == "code"]
    given += [call.args[2] for call in calls if ast.unparse(call.func) == "invalid" and len(call.args) > 2]
    return {value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)}


def test_every_code_is_explained() -> None:
    files = [path for room in ("app/service", "app/ingress", "app/frontend") for path in (SOURCES / room).rglob("*.py")]
    assert set[str]().union(*map(codes, files)) == CODES.keys()
    assert {status for status, _ in CODES.values()} <= STATUSES.keys()


def test_everything_immovable_is_listed() -> None:
    assert set(Tie) == TIED.keys() and all(tie in page() for tie in Tie)


def test_the_open_endpoints_of_models_that_generate_are_listed() -> None:
    pooling = {path for path, route in OPEN_ROUTES.items() if route.task is RouteTask.POOL}
    assert [path for path in OPEN_ROUTES.keys() - pooling if f"{path}`" not in page()] == []
