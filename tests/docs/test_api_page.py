"""docs/api.md has the open endpoints, and Mell's own ones as the OpenAPI document has them."""

import ast
from pathlib import Path

import pytest

from app.frontend.guard.routes import OPEN_ROUTES, RouteTask
from app.ingress.description.openapi import STATUSES, own_document
from app.ingress.description.operations import OPERATIONS, Operation
from deployments.engine.port import Tie
from docs.make.api import CODES, PAGE, TIED, page

SOURCES = Path(__file__).parents[2]


def section(operation: Operation) -> str:
    return page().split(f"### `{operation.method} {operation.path}`\n")[1].split("\n##")[0]


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m docs.make"


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.id)
def test_every_operation_has_a_section(operation: Operation) -> None:
    text = section(operation)
    assert operation.summary in text and f"http://127.0.0.1:8000{operation.path.partition('{')[0]}" in text
    assert all(f"- {rule}" in text for rule in operation.refused)
    assert all(f"`{name}` in the path" in text for name in operation.in_path)
    assert all(str(status) in text for status in operation.errors)
    if operation.body is not None:
        names = own_document()["components"]["schemas"][operation.body.__name__]["properties"]
        assert all(f"| `{name}` |" in text for name in names)


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
    files = [path for room in ("app/ingress", "app/frontend") for path in (SOURCES / room).rglob("*.py")]
    assert set[str]().union(*map(codes, files)) == CODES.keys()
    assert {status for status, _ in CODES.values()} <= STATUSES.keys()


def test_everything_immovable_is_listed() -> None:
    assert set(Tie) == TIED.keys() and all(tie in page() for tie in Tie)


def test_the_open_endpoints_of_models_that_generate_are_listed() -> None:
    pooling = {path for path, route in OPEN_ROUTES.items() if route.task is RouteTask.POOL}
    assert [path for path in OPEN_ROUTES.keys() - pooling if f"{path}`" not in page()] == []
