"""Chats as a client sees them: prompts by the template, answers, streams, moves."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from app.ingress.errors import ApiError
from app.ingress.openai.model import Model
from app.ingress.openai.requests.template import ChatTemplate
from app.settings import ModelLoadingSettings
from deployments.engine.tokens import expected
from tests.app.ingress.fakes import MAX_CONTEXT, MESSAGES, Api, events, eventually, make_api

RENDERED = "system: Be brief.\nuser: Where do blocks move?\nassistant:"


def prompt(api: Api) -> tuple[int, ...]:
    return api.backend.model.encode(RENDERED, special=False)


def only(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def deltas(response: httpx.Response) -> list[Any]:
    """The chunks of a stream before its [DONE]."""
    *chunks, done = events(response)
    assert done == "[DONE]"
    return chunks


def said(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["delta"]["content"] for c in chunks if c["choices"])


# --- prompts ------------------------------------------------------------------------------------------


async def test_a_chat_is_the_completion_of_what_its_template_writes(api: Api) -> None:
    chat = only(await api.chat(max_tokens=30, temperature=0))
    completion = only(await api.complete(prompt=RENDERED, max_tokens=30, temperature=0))
    assert chat["message"]["content"] == completion["text"]


async def test_every_role_comes_to_the_template(api: Api) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a", "name": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "tool", "content": "e", "tool_call_id": "f"},
    ]
    assert (
        only(await api.chat(messages=messages, max_tokens=9))["message"]
        == only(
            await api.chat(messages=[{"role": m["role"], "content": m["content"]} for m in messages], max_tokens=9)
        )["message"]
    )
    tokens = (await api.post("/tokenize", json={"messages": messages})).json()["tokens"]
    assert api.backend.model.tokenizer.decode(tokens) == "system: a\nuser: c\nassistant: d\ntool: e\nassistant:"


async def test_parts_of_a_text_are_its_lines(api: Api) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answers = [await api.chat(messages=[{"role": "user", "content": c}], max_tokens=9) for c in (parts, "one\ntwo")]
    assert only(answers[0]) == only(answers[1])


async def test_an_empty_text_is_a_text(api: Api) -> None:
    assert only(await api.chat(messages=[{"role": "user", "content": ""}], max_tokens=1))


async def test_a_model_without_a_template_says_what_to_do(model: Model) -> None:
    api = make_api(replace(model, chat=None))
    for path in ("/v1/chat/completions", "/tokenize"):
        error = (await api.post(path, json={"messages": MESSAGES})).json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "no_chat_template")
        assert "model_loading_config.chat_template" in error["message"]
    assert (await api.complete(max_tokens=1)).status_code == 200


# --- answers ------------------------------------------------------------------------------------------


async def test_an_answer_is_openais(api: Api) -> None:
    answer = (await api.chat(max_tokens=7, n=1, tool_choice="none", response_format={"type": "text"})).json()
    text = answer["choices"][0]["message"].pop("content")
    assert isinstance(text, str) and text
    assert answer.pop("id").startswith("chatcmpl-") and isinstance(answer.pop("created"), int)
    size = len(prompt(api))
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": size, "completion_tokens": 7, "total_tokens": size + 7},
    }


@pytest.mark.parametrize("bound", [{"max_tokens": 3}, {"max_completion_tokens": 3}], ids=str)
async def test_either_name_bounds_an_answer(api: Api, bound: Any) -> None:
    assert (await api.chat(**bound)).json()["usage"]["completion_tokens"] == 3


async def test_an_answer_without_a_bound_may_fill_the_context(api: Api) -> None:
    assert (await api.chat()).json()["usage"]["total_tokens"] == MAX_CONTEXT


async def test_a_stream_opens_with_the_role_and_closes_with_the_reason(api: Api) -> None:
    whole = only(await api.chat(max_tokens=12))
    chunks = deltas(await api.chat(max_tokens=12, stream=True))
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all(set(c["choices"][0]["delta"]) == {"content"} for c in chunks[1:])
    assert said(chunks) == whole["message"]["content"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 12 + ["length"]
    heads = [{k: c[k] for k in ("id", "object", "created", "model")} for c in chunks]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["object"] == "chat.completion.chunk" and heads[0]["id"].startswith("chatcmpl-")
    assert all("usage" not in c for c in chunks)


async def test_usage_comes_last_in_a_stream_that_asks_for_it(api: Api) -> None:
    chunks = deltas(await api.chat(max_tokens=5, stream=True, stream_options={"include_usage": True}))
    assert [c["usage"] for c in chunks[:-1]] == [None] * 6
    size = len(prompt(api))
    assert (chunks[-1]["choices"], chunks[-1]["object"]) == ([], "chat.completion.chunk")
    assert chunks[-1]["usage"] == {"prompt_tokens": size, "completion_tokens": 5, "total_tokens": size + 5}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_a_chat(api: Api, stream: bool) -> None:
    text = only(await api.chat(max_tokens=40))["message"]["content"]
    stop = text[20:23]
    response = await api.chat(stop=stop, stream=stream)
    if stream:
        chunks = deltas(response)
        content, reason = said(chunks), chunks[-1]["choices"][0]["finish_reason"]
    else:
        content, reason = only(response)["message"]["content"], only(response)["finish_reason"]
    assert (content, reason) == (text[: text.index(stop)], "stop")
    await api.backend.service.idle()


async def test_an_error_amid_a_chat_is_an_event_before_done(api: Api) -> None:
    service = api.backend.service
    service.tie()
    asking = asyncio.create_task(api.chat(max_tokens=900, stream=True))
    await eventually(lambda: any(load.tokens > 60 for load in service.replica("a").host.loads()))
    service.kill("a")
    *chunks, error = deltas(await asking)
    assert "role" in chunks[0]["choices"][0]["delta"] and "seeded sampling" in error["error"]["message"]


@pytest.mark.parametrize("harm", ["move", "kill"])
async def test_a_chat_that_moves_says_what_it_would_have_said(api: Api, harm: str) -> None:
    service, model = api.backend.service, api.backend.model
    asking = asyncio.create_task(api.chat({"X-Request-Id": "mine"}, max_tokens=400, stream=True))
    await eventually(lambda: any(load.tokens > 90 for load in service.replica("a").host.loads()))
    if harm == "move":
        order = {"request_id": "mine", "target": "b"}
        assert (await api.post("/mell/migrations", json=order)).status_code == 202
    else:
        service.kill("a")
    chunks = deltas(await asking)
    tokens = list(expected(prompt(api), 400))
    whole = model.tokenizer.decode([*prompt(api), *tokens])[len(RENDERED) :]
    assert said(chunks) == whole.rstrip("\ufffd")
    assert sum("role" in c["choices"][0]["delta"] for c in chunks) == 1
    assert ("b", "submit" if harm == "kill" else "attach") in service.wires.calls
    await service.idle()


# --- templates ----------------------------------------------------------------------------------------


class OneTemplate:
    """A tokenizer with the templates that it is given."""

    def __init__(self, pretrained: Any, own: str | Mapping[str, str] | None) -> None:
        self.chat_template = own
        self.apply_chat_template = pretrained.apply_chat_template


STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("own", "configured", "written"),
    [
        ("own", None, "own"),
        ("own", "mine", "mine"),
        (None, "mine", "mine"),
        ({"default": "one", "tool_use": "two"}, None, "one"),
        ({"default": "one"}, "mine", "mine"),
    ],
    ids=["its own", "configured before its own", "configured", "the default of several", "configured before several"],
)
def test_which_template_is_taken(pretrained: Any, own: Any, configured: str | None, written: str) -> None:
    template = ChatTemplate.of(OneTemplate(pretrained, own), configured)
    assert template is not None and template.render(MESSAGES) == written


@pytest.mark.parametrize("own", [None, "", {"tool_use": "two"}], ids=["none", "empty", "no default"])
def test_there_may_be_no_template(pretrained: Any, own: Any) -> None:
    assert ChatTemplate.of(OneTemplate(pretrained, own)) is None


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ messages[0].role }}", "system"),
        ("{{ 'dev' if messages[0].role == 'developer' else 'other' }}", "dev"),
    ],
    ids=["that does not know it", "that knows it"],
)
def test_a_developer_is_the_system_to_a_template(pretrained: Any, source: str, shown: str) -> None:
    template = ChatTemplate.of(OneTemplate(pretrained, source))
    assert template is not None
    assert template.render([{"role": "developer", "content": "x"}]) == shown


def test_a_configured_template_that_is_not_jinja_is_told_at_the_start(pretrained: Any) -> None:
    with pytest.raises(ValueError, match=r"chat_template: line 2: "):
        ChatTemplate.of(OneTemplate(pretrained, None), "x\n{% if %}")


def test_a_configured_template_may_refuse_some_messages(pretrained: Any) -> None:
    template = ChatTemplate.of(OneTemplate(pretrained, None), "{{ raise_exception('never') }}")
    assert template is not None


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (STRICT, "users first"),
        ("{{ messages[0].mood.name }}", "mood"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
    ids=["a refusal", "something undefined", "an escape", "a change"],
)
def test_messages_that_a_template_refuses_are_the_clients_mistake(pretrained: Any, source: str, says: str) -> None:
    template = ChatTemplate.of(OneTemplate(pretrained, source))
    assert template is not None
    with pytest.raises(ApiError, match=says) as refused:
        template.render(MESSAGES)
    assert (refused.value.status, refused.value.param) == (400, "messages")


async def test_a_chat_that_its_template_refuses_is_not_begun(pretrained: Any, model: Model) -> None:
    api = make_api(replace(model, chat=ChatTemplate.of(OneTemplate(pretrained, STRICT))))
    response = await api.chat()
    assert response.status_code == 400 and "users first" in response.json()["error"]["message"]
    assert ("a", "submit") not in api.backend.service.wires.calls


async def test_a_template_that_writes_nothing_makes_no_chat(pretrained: Any, model: Model) -> None:
    api = make_api(replace(model, chat=ChatTemplate.of(OneTemplate(pretrained, "{{ '' }}"))))
    assert (await api.chat()).json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"", "is empty"), (b"\xff", "decode")],
    ids=["none", "empty", "bytes"],
)
def test_a_template_that_cannot_be_read_is_told_at_the_start(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValidationError, match=says):
        ModelLoadingSettings(chat_template=str(path))


def test_a_configured_template_is_read(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }}")
    assert ModelLoadingSettings(chat_template=str(path)).read_chat_template() == "{{ messages[0].content }}"
    assert ModelLoadingSettings().read_chat_template() is None
