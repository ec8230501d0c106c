"""ASGI plumbing: labels and bodies."""

from typing import Any

import pytest
from starlette.requests import Request

from app.ingress.asgi import MAX_LABEL, read_body, read_label
from app.ingress.errors import ApiError


@pytest.mark.parametrize(
    ("header", "label"),
    [
        (None, None),
        ("", None),
        ("my-request_1", "my-request_1"),
        ("<script>\u00e9 x", "scriptx"),
        ("a" * 1000, "a" * MAX_LABEL),
        ("\u00e9\u00e9", None),
        ('"}\\n', "n"),
    ],
    ids=["none", "empty", "harmless", "markup", "long", "nothing left", "quotes"],
)
def test_labels_are_short_and_harmless(header: str | None, label: str | None) -> None:
    assert read_label(header) == label


@pytest.mark.parametrize("declared", ["-1", "5.5", "\u00b2", "", "x"])
async def test_any_content_length_is_handled(declared: str) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    headers = [(b"content-length", declared.encode("latin-1"))]
    assert await read_body(Request({"type": "http", "method": "POST", "headers": headers}, receive), 1000) == b"{}"


async def test_a_body_in_single_bytes_is_read_up_to_the_limit() -> None:
    received = 0

    async def receive() -> Any:
        nonlocal received
        received += 1
        return {"type": "http.request", "body": b" ", "more_body": True}

    with pytest.raises(ApiError) as refused:
        await read_body(Request({"type": "http", "method": "POST", "headers": []}, receive), 1000)
    assert (refused.value.status, refused.value.code, received) == (413, "request_too_large", 1001)
