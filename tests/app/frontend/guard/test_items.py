"""Items of a response's input that vLLM would fail on, and those that it has."""

from typing import Any

import pytest

from app.frontend.guard.items import FEW, check_items
from app.ingress.errors import ApiError

USER = {"role": "user", "content": "x"}
ANSWER = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
TEXT = {"type": "output_text", "text": "x", "annotations": []}
VALID: list[Any] = [
    USER,
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"role": "user", "content": []},
    {"role": "assistant", "content": "x"},
    {**ANSWER, "content": [TEXT]},
    {**ANSWER, "content": [TEXT, {"type": "refusal", "refusal": "no"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"type": "reasoning", "id": "r", "summary": [], "content": []},
]


@pytest.mark.parametrize("content", [[], [{"type": "refusal", "refusal": "no"}], [5], [{"text": 5}]], ids=str)
def test_an_answer_without_text_is_named(content: Any) -> None:
    with pytest.raises(ApiError) as error:
        check_items([USER, {**ANSWER, "content": content}])
    assert (error.value.status, error.value.param) == (400, "input[1]")


@pytest.mark.parametrize("items", ["x", None, 5, VALID, VALID * FEW], ids=lambda items: str(items)[:20])
def test_valid_items_pass(items: Any) -> None:
    check_items(items)


@pytest.mark.parametrize("item", [{}, 5, {"type": "x"}, {**USER, "content": 5}], ids=str)
def test_a_wrong_item_among_many_is_named(item: Any) -> None:
    check_items([item])
    with pytest.raises(ApiError) as error:
        check_items([*[USER] * FEW, item])
    assert (error.value.status, error.value.param) == (400, f"input[{FEW}]") and len(error.value.message) < 500
