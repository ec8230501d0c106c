"""Addresses of media: found wherever vLLM would fetch them, allowed by domain, and left alone elsewhere."""

from typing import Any

import pytest

from app.frontend.guard.media import check_media
from app.ingress.errors import ApiError


def chat(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}


URL = "http://169.254.169.254/latest/meta-data"
ADDRESSED: dict[str, dict[str, Any]] = {
    "an image": chat({"type": "image_url", "image_url": {"url": URL}}),
    "an image as a text": chat({"type": "image_url", "image_url": URL}),
    "an image without a type": chat({"image_url": URL}),
    "audio": chat({"type": "audio_url", "audio_url": {"url": URL}}),
    "video": chat({"type": "video_url", "video_url": {"url": URL}}),
    "a file": chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
    "another scheme": chat({"type": "image_url", "image_url": {"url": "ftp://a.example/x"}}),
    "no scheme": chat({"type": "image_url", "image_url": {"url": "//a.example/x"}}),
    "no URL": chat({"type": "image_url", "image_url": {"url": "http://[::1"}}),
    "Anthropic's image": chat({"type": "image", "source": {"type": "url", "url": URL}}),
    "an image in a tool's result": chat(
        {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": URL}}]}
    ),
    "Responses' image": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    "Responses' file": {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": URL}]}]},
    "a screenshot": {"input": [{"type": "computer_call_output", "output": {"image_url": URL}}]},
}
POOLED: dict[str, dict[str, Any]] = {
    "a document": {"query": "x", "documents": {"content": [{"type": "image_url", "image_url": {"url": URL}}]}},
    "images": {"images": ["data:image/png;base64,AA", URL]},
    "inputs": {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": URL}}]}]},
}
OTHERS: dict[str, dict[str, Any]] = {
    "data": chat({"type": "image_url", "image_url": {"url": "DATA:image/png;base64,AAAA"}}),
    "text": chat({"type": "text", "text": URL}),
    "a schema": {"tools": [{"function": {"parameters": {"properties": {"url": {"const": URL}, "image_url": URL}}}}]},
    "a call": chat({"type": "tool_use", "name": "fetch", "input": {"url": URL}}),
    "an earlier call": {"messages": [{"tool_calls": [{"function": {"arguments": {"url": URL}}}]}]},
    "retrieved documents": {"documents": [{"title": "x", "url": URL}]},
    "metadata": {"metadata": {"url": URL}},
}


@pytest.mark.parametrize("body", ADDRESSED.values(), ids=ADDRESSED)
def test_addresses_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as error:
        check_media(body, ())
    assert (error.value.status, error.value.code) == (400, "media_not_allowed")
    with pytest.raises(ApiError):
        check_media(body, {"a.example"})


@pytest.mark.parametrize("body", POOLED.values(), ids=POOLED)
def test_addresses_in_inputs_of_pooling_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        check_media(body, (), pooling=True)


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_what_is_never_fetched_passes(body: dict[str, Any]) -> None:
    check_media(body, ())


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("https://a.example/x.png", True),
        ("HTTP://A.EXAMPLE:8080/x.png", True),
        ("https://b.a.example/x.png", False),
        ("https://a.example.evil.example/x.png", False),
        ("https://a.example/x@2.png", True),
        ("https://a.example@evil.example/x.png", False),
        ("https://evil.example@a.example/x.png", False),
        ("https://a.exa\nmple/", False),
        ("https://evil.example/#a.example", False),
        ("https://evil.example\\@a.example/", False),
        ("file://a.example/x.png", False),
        ("", False),
    ],
)
def test_a_domain_is_allowed_as_a_whole(address: str, allowed: bool) -> None:
    body = chat({"type": "image_url", "image_url": {"url": address}})
    if allowed:
        check_media(body, {"a.example"})
    else:
        with pytest.raises(ApiError) as error:
            check_media(body, {"a.example"})
        assert "a.example" in error.value.message
