"""docs/api.md has the contents of the OpenAPI document."""

import ast
from pathlib import Path

import pytest

from app.ingress.openai.description.openapi import STATUSES, document
from app.ingress.openai.description.operations import OPERATIONS, Operation
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
        names = document()["components"]["schemas"][operation.body.__name__]["properties"]
        assert all(f"| `{name}` |" in text for name in names)


@pytest.mark.parametrize(
    "row",
    [
        "| `temperature` | number (0 or more, at most 2) or `null` | `null` |",
        "| `seed` | whole number (-2^63 or more, less than 2^63) or `null` | `null` |",
        '| `path` | `"auto"` or `"kv"` or `"tokens"` | `"auto"` |',
        "| `tokens` | list of whole number | required |",
        "| `stream_options` | [StreamOptions](#streamoptions) or `null` | `null` |",
        "| `stop` | text (not empty) or list of text (not empty) or `null` | `null` |",
    ],
)
def test_rows_have_type_bounds_and_default(row: str) -> None:
    assert row in page()


def test_every_link_within_the_page_leads_somewhere() -> None:
    text = page()
    headings = {line.lstrip("# ").lower().replace(" ", "-") for line in text.splitlines() if line.startswith("#")}
    links = {part.split(")")[0] for part in text.split("](#")[1:]}
    assert links and links <= headings


def literals(path: Path, keyword: str) -> set[str]:
    """The expressions for a keyword argument in all calls of the file."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    given = [k.value for call in calls for k in call.keywords if k.arg == keyword]
    return {value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)}


def test_every_code_is_explained() -> None:
    written = set[str]().union(*(literals(path, "code") for path in (SOURCES / "app/ingress").rglob("*.py")))
    assert written == CODES.keys()
    assert {status for status, _ in CODES.values()} <= STATUSES.keys()


def test_everything_immovable_is_listed() -> None:
    assert set(Tie) == TIED.keys() and all(tie in page() for tie in Tie)
