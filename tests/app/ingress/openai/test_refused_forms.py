"""What an engine refuses before the first token is blamed on the parameter that says what the answer has to match."""

from typing import Any

import pytest

from tests.app.ingress.fakes import Api, events

SCHEMA = {"type": "object", "minProperties": -1}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "f"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture
def strict(api: Api) -> Api:
    """An API whose engines refuse everything."""
    for replica in api.backend.service.replicas.values():
        replica.engine.refusal = "no engine compiles this"
    return api


FORMS: dict[str, tuple[dict[str, Any], str | None]] = {
    "a schema": ({"response_format": FORMAT}, "response_format"),
    "any object": ({"response_format": {"type": "json_object"}}, "response_format"),
    "an expression": ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    "a named call": ({"tools": TOOLS, "tool_choice": NAMED}, "tools"),
    "calls": ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
    "no call": ({"tools": TOOLS, "tool_choice": "none", "response_format": FORMAT}, "response_format"),
    "any text": ({"response_format": {"type": "text"}}, None),
    "nothing": ({}, None),
}


@pytest.mark.parametrize(("asked", "param"), FORMS.values(), ids=FORMS)
async def test_the_form_is_named(strict: Api, asked: Any, param: str | None) -> None:
    response = await strict.chat(**asked)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert error["message"] == f"{param}: no engine compiles this" if param else "no engine compiles this"
    streamed = events(await strict.chat(**asked, stream=True))
    assert streamed == [{"error": error}, "[DONE]"]
    await strict.backend.service.idle()


async def test_the_form_of_a_completion_is_named(strict: Api) -> None:
    response = await strict.complete(structured_outputs={"grammar": "root ::="}, n=2)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs")


async def test_what_is_not_the_clients_fault_is_not_blamed_on_it(api: Api) -> None:
    api.backend.service.members.become()
    response = await api.chat(response_format=FORMAT)
    assert (response.status_code, response.json()["error"]["param"]) == (503, None)
