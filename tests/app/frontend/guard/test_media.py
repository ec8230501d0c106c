"""Addresses of media: found wherever vLLM would fetch them, allowed by domain, and left alone elsewhere."""

import asyncio
import json
from collections.abc import Collection
from typing import Any

import pytest

from app.frontend.guard.media import VIDEO_ITEMS, MediaGate, MediaHold, MediaUse, check_media
from app.ingress.errors import ApiError


def checked(body: dict[str, Any], domains: Collection[str] = (), items: int = 64, pooling: bool = False) -> MediaUse:
    return check_media(body, json.dumps(body).encode(), domains, items, pooling)


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
    "data that vLLM does not decode": chat({"type": "image_url", "image_url": {"url": "data:image/png,AAAA"}}),
    "data of nothing": chat({"type": "image_url", "image_url": {"url": "data:"}}),
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
        checked(body)
    assert (error.value.status, error.value.code) == (400, "media_not_allowed")
    with pytest.raises(ApiError):
        checked(body, {"a.example"})


@pytest.mark.parametrize("body", POOLED.values(), ids=POOLED)
def test_addresses_in_inputs_of_pooling_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        checked(body, pooling=True)


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_what_is_never_fetched_passes(body: dict[str, Any]) -> None:
    checked(body)


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
        checked(body, {"a.example"})
    else:
        with pytest.raises(ApiError) as error:
            checked(body, {"a.example"})
        assert "a.example" in error.value.message


# --- items ----------------------------------------------------------------------------------------------

DATA = "data:image/png;base64," + "A" * 400
ITEMS: dict[str, tuple[dict[str, Any], int]] = {
    "no item": (chat({"type": "text", "text": "an image_url"}), 0),
    "an image": (chat({"type": "image_url", "image_url": {"url": DATA}}), 1),
    "Anthropic's image": (chat({"type": "image", "source": {"type": "base64", "data": DATA}}), 1),
    "Responses' image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": DATA}]}]}, 1),
    "audio": (chat({"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}), 1),
    "embeddings": (chat({"type": "image_embeds", "image_embeds": "AAAA"}), 1),
    "two parts of one object": (chat({"image_url": DATA, "video_url": DATA}), 1 + VIDEO_ITEMS),
    "an escaped name": (json.loads('{"messages": [{"content": [{"im\\u0061ge_url": {"url": "data:;base64,"}}]}]}'), 1),
}


@pytest.mark.parametrize(("body", "items"), ITEMS.values(), ids=ITEMS)
def test_items_are_counted(body: dict[str, Any], items: int) -> None:
    assert checked(body).items == items
    if items:
        with pytest.raises(ApiError) as error:
            checked(body, items=items - 1)
        assert (error.value.status, error.value.code) == (400, "too_many_media")


def test_images_of_pooling_are_counted() -> None:
    assert checked({"images": [DATA, DATA]}, pooling=True).items == 2


def test_data_are_no_text() -> None:
    assert checked(chat({"type": "image_url", "image_url": {"url": DATA}})).characters == len(DATA)
    assert checked(chat({"type": "image", "source": {"data": DATA}})).characters == len(DATA)


def test_names_of_items_are_dropped() -> None:
    body = chat({"type": "image_url", "image_url": {"url": DATA}, "uuid": "mine"})
    assert checked(body).named and "uuid" not in body["messages"][0]["content"][1]
    other = chat({"type": "text", "text": "x", "uuid": "image_url"})
    assert not checked(other).named and "uuid" in other["messages"][0]["content"][1]


@pytest.mark.parametrize("item", [None, "", {}])
def test_name_without_an_item_is_refused(item: Any) -> None:
    with pytest.raises(ApiError) as error:
        checked(chat({"type": "image_url", "image_url": item, "uuid": "yours"}))
    assert error.value.param == "uuid"


# --- the gate -------------------------------------------------------------------------------------------


async def test_gate_lets_in_what_fits_in_order() -> None:
    gate, entered = MediaGate(4), list[int]()

    async def enter(items: int) -> MediaHold:
        hold = await gate.enter(items)
        entered.append(items)
        return hold

    first = await enter(3)
    waiting = [asyncio.create_task(enter(items)) for items in (4, 1)]
    await asyncio.sleep(0)
    assert (await gate.enter(0)).items == 0 and entered == [3], "a request without media waits for nothing"
    first.release()
    first.release()
    second = await waiting[0]
    await asyncio.sleep(0)
    assert entered == [3, 4]
    second.release()
    (await waiting[1]).release()


async def test_one_that_leaves_its_turn_holds_nothing() -> None:
    gate = MediaGate(2)
    hold = await gate.enter(1)
    leaving = asyncio.create_task(gate.enter(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait((leaving,))
    hold.release()
    async with asyncio.timeout(1):
        await gate.enter(2)
