"""Schemas and expressions: their size, and that of their counted repetitions."""

import json
import time
from typing import Any

import pytest

from app.frontend.guard.constraints import MAX_CONSTRAINT_BYTES, MAX_EXPRESSION, check_constraints, unrolled
from app.ingress.errors import ApiError

LENGTHS = {
    "": 0,
    "abc": 3,
    "a{3}": 3,
    "a{3,}": 3,
    "a{3,5}b": 6,
    "a{0}": 1,
    "(ab){3}": 6,
    "((ab){3}c){2}": 14,
    "[a-z{2}]{3}": 3,
    "[]a]{3}": 3,
    "[^]a]{3}": 3,
    "[\\]]{3}": 3,
    "\\({3}": 3,
    "\\d{4}-\\d{2}": 7,
    "a{3}{3}": 9,
    "a{x}": 4,
    "(a|bc){2}": 8,
    "((a": 1,
    "a))": 3,
    "\n{2}": 2,
}


@pytest.mark.parametrize(("expression", "length"), LENGTHS.items(), ids=ascii)
def test_repetitions_are_written_out(expression: str, length: int) -> None:
    assert unrolled(expression) == length


BOMBS = {
    "one repetition": f"a{{{MAX_EXPRESSION + 1}}}",
    "an open one": f"a{{{MAX_EXPRESSION + 1},}}",
    "a long number": f"a{{{'9' * 5000}}}",
    "nested ones": "((((a{1,200}){1,200}){1,200}){1,200})",
    "many groups": "(" * 5000 + "a" + "){2}" * 5000,
    "a long expression": "ab" * MAX_EXPRESSION,
}


@pytest.mark.parametrize("pattern", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("structured_outputs", lambda schema: {"json": schema}),
        ("structured_outputs", lambda schema: {"json": json.dumps(schema)}),
        ("response_format", lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}),
        ("tools", lambda schema: [{"type": "function", "function": {"name": "f", "parameters": schema}}]),
        ("tools", lambda schema: [{"name": "f", "input_schema": schema}]),
        ("text", lambda schema: {"format": {"schema": schema}}),
        ("output_config", lambda schema: {"format": {"schema": schema}}),
    ],
    ids=["json", "text", "response_format", "tools", "Anthropic's tools", "Responses", "Anthropic"],
)
def test_long_expressions_in_schemas_are_refused(name: str, held: Any, pattern: str) -> None:
    schemas: list[dict[str, Any]] = [{"properties": {"a": {"pattern": pattern}}}, {"patternProperties": {pattern: {}}}]
    for schema in schemas:
        began = time.process_time()
        with pytest.raises(ApiError) as error:
            check_constraints({name: held(schema)})
        assert (error.value.status, error.value.param) == (400, name) and time.process_time() - began < 10


def test_many_expressions_count_together() -> None:
    def schema(count: int) -> dict[str, Any]:
        return {"json": {"properties": {f"p{n}": {"pattern": "a{200}"} for n in range(count)}}}

    check_constraints({"structured_outputs": schema(100)})
    with pytest.raises(ApiError):
        check_constraints({"structured_outputs": schema(101)})
    with pytest.raises(ApiError):
        check_constraints({"structured_outputs": schema(60), "tools": [schema(60)]})


def test_usual_expressions_pass() -> None:
    usual = [
        "^\\d{4}-\\d{2}-\\d{2}T\\d{2}:\\d{2}:\\d{2}Z$",
        "^[\\w.+-]{1,64}@[\\w-]{1,255}\\.[a-z]{2,}$",
        "^(ab|cd){1,20}$",
    ]
    tools = [{"function": {"parameters": {"properties": {"x": {"pattern": each}}}}} for each in usual * 30]
    check_constraints({"tools": tools, "response_format": None, "text": "x"})
    check_constraints({"structured_outputs": {"json": {"properties": {"pattern": {"type": "string"}}}}})


def test_sizes_are_bounded() -> None:
    check_constraints({"structured_outputs": {"regex": "a" * (MAX_CONSTRAINT_BYTES - 20)}})
    check_constraints({"tools": [{"function": {"description": "a" * MAX_CONSTRAINT_BYTES}}]})
    for name in ("structured_outputs", "response_format", "text"):
        with pytest.raises(ApiError) as error:
            check_constraints({name: {"regex": "a" * MAX_CONSTRAINT_BYTES}})
        assert error.value.param == name
