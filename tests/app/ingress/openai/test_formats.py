"""What an answer has to match, from the body to what the engine is told."""

import json
from typing import Any

import pytest

from app.ingress.errors import ApiError
from app.ingress.openai.requests.schema import parse_chat, parse_completion
from app.ingress.openai.sampling import Structured

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "thing", "schema": SCHEMA, "strict": True}


def completion(**members: Any) -> Structured | None:
    return parse_completion(json.dumps({"prompt": "x", **members}).encode()).structured


def chat(**members: Any) -> Structured | None:
    messages = [{"role": "user", "content": "x"}]
    return parse_chat(json.dumps({"messages": messages, **members}).encode()).structured


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"json": SCHEMA}, Structured("json", json.dumps(SCHEMA))),
        ({"json": json.dumps(SCHEMA)}, Structured("json", json.dumps(SCHEMA))),
        ({"json_object": True}, Structured("json_object")),
        ({"regex": "a+"}, Structured("regex", "a+")),
        ({"choice": ["yes", "no"]}, Structured("choice", '["yes", "no"]')),
        ({"grammar": 'root ::= "a"'}, Structured("grammar", 'root ::= "a"')),
        ({"structural_tag": "{}"}, Structured("structural_tag", "{}")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_structured_outputs_are_vllms(wanted: dict[str, Any], told: Structured) -> None:
    assert completion(structured_outputs=wanted) == chat(structured_outputs=wanted) == told


@pytest.mark.parametrize(
    ("format", "told"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Structured("json_object")),
        ({"type": "json_schema", "json_schema": NAMED}, Structured("json", json.dumps(SCHEMA))),
    ],
    ids=["text", "JSON", "a schema"],
)
def test_response_formats_are_openais(format: dict[str, Any], told: Structured | None) -> None:
    assert completion(response_format=format) == chat(response_format=format) == told


def test_unless_it_is_asked_for_an_answer_matches_nothing() -> None:
    assert completion() is None and chat() is None
    assert chat(response_format=None, structured_outputs=None) is None


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "text", "extra": 1}}, "response_format.extra"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "structured_outputs"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(members: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**members)
    error = refused.value.body()["error"]
    assert (refused.value.status, error["param"]) == (400, param)
