"""Calls in a model's own manner, read by vLLM's parsers: told as vLLM tells them, wherever the request runs."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from app.ingress.errors import ApiError
from app.ingress.frontends import _load_model
from app.ingress.openai.answers.tool_parser import ToolParser
from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import ChatRequest, parse_chat
from app.ingress.openai.requests.tools import Tool, schema_of_calls
from app.ingress.openai.sampling import Structured
from app.main import _engine_config, _ingress_config, read_settings
from tests.app.ingress.fakes import MESSAGES, Api, PlainRequests
from tests.app.ingress.openai.test_tools import (
    ARGUMENTS,
    CITY,
    NAMED,
    TOOLS,
    assembled,
    called,
    choices,
    moved,
    only,
    scripted,
)

HERMES = (
    f'Let me look. <tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
CALLS = [("weather", ARGUMENTS), ("time", "{}")]


@pytest.fixture(scope="module")
def hermes(model: Model, pretrained: Any) -> Model:
    """The tiny model, said to call tools in the manner of Hermes."""
    return replace(model, parser=ToolParser.load("hermes", pretrained))


def request(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"messages": MESSAGES, "tools": TOOLS, **fields}).encode())


async def told(api: Api, stream: bool, **fields: Any) -> tuple[str | None, list[tuple[str, str]], str]:
    """Text, calls and finish reason of an answer."""
    response = await api.chat(tools=TOOLS, stream=stream, **fields)
    if stream:
        chunks = choices(response)
        return *assembled(chunks), chunks[-1]["finish_reason"]
    choice = only(response)
    message = choice["message"]
    return message["content"], called(message.get("tool_calls", ())), choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "required"}], ids=str)
async def test_calls_are_told_with_the_text_before_them(hermes: Model, stream: bool, fields: Any) -> None:
    answer = await told(scripted(hermes, HERMES), stream, **fields)
    assert answer == ("Let me look. ", CALLS, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_may_call_nothing(hermes: Model, stream: bool) -> None:
    assert await told(scripted(hermes, "It is 5 < 6."), stream) == ("It is 5 < 6.", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_function_ends_with_stop(hermes: Model, stream: bool) -> None:
    text = HERMES[HERMES.index("<") :].split("\n<tool_call>")[0]
    answer = await told(scripted(hermes, text), stream, tool_choice=NAMED)
    assert answer == ("" if stream else None, CALLS[:1], "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_without_calls_a_text_is_a_text(hermes: Model, stream: bool) -> None:
    response = await scripted(hermes, HERMES).chat(tools=TOOLS, tool_choice="none", stream=stream)
    if stream:
        assert "".join(choice["delta"]["content"] for choice in choices(response)) == HERMES
    else:
        assert only(response)["message"]["content"] == HERMES


async def test_one_call_is_told_if_there_may_not_be_more(hermes: Model) -> None:
    for stream in (False, True):
        assert (await told(scripted(hermes, HERMES), stream, parallel_tool_calls=False))[1] == CALLS[:1]


@pytest.mark.parametrize("harm", ["kv", "tokens", "kill"])
async def test_calls_that_move_are_what_they_would_have_been(hermes: Model, harm: str) -> None:
    unmoved = choices(await scripted(hermes, HERMES).chat(tools=TOOLS, stream=True))
    chunks = choices(await moved(scripted(hermes, HERMES, step_s=0.005), harm, tools=TOOLS))
    assert assembled(chunks) == assembled(unmoved) == ("Let me look. ", CALLS)
    assert chunks[-1]["finish_reason"] == unmoved[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_marks_of_a_call_may_be_special_tokens(model: Model, pretrained: Any, stream: bool) -> None:
    marked = copy.deepcopy(pretrained)
    marked.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    tokenizer = marked.backend_tokenizer
    assert "<tool_call>" not in tokenizer.decode(tokenizer.encode(HERMES).ids)
    marked_model = replace(model, tokenizer=tokenizer, parser=ToolParser.load("hermes", marked))
    assert await told(scripted(marked_model, HERMES), stream) == ("Let me look. ", CALLS, "tool_calls")


def test_demanded_calls_are_in_the_models_manner(hermes: Model) -> None:
    assert hermes.parser is not None
    calling = hermes.parser(request(tool_choice="required"))
    assert calling.structured is not None and calling.structured.kind == "structural_tag"
    assert "<tool_call>" in calling.structured.value and calling.reason == "tool_calls"
    assert hermes.parser(request(tool_choice=NAMED)).reason == "stop"


@pytest.mark.parametrize("parallel", [True, False])
def test_demanded_calls_are_vllms_json_where_a_parser_has_no_form_of_its_own(pretrained: Any, parallel: bool) -> None:
    parser = ToolParser.load("pythonic", pretrained)
    structured = parser(request(tool_choice="required", parallel_tool_calls=parallel)).structured
    schema = schema_of_calls([Tool.model_validate(tool) for tool in TOOLS], parallel)
    assert structured is not None and json.loads(structured.value) == schema
    assert parser(request(tool_choice=NAMED)).structured == Structured("json", json.dumps(CITY))


def test_a_format_holds_where_calls_are_free(pretrained: Any) -> None:
    calling = ToolParser.load("pythonic", pretrained)(request(response_format={"type": "json_object"}))
    assert calling.structured == Structured("json_object")


def test_tools_that_vllm_refuses_are_the_clients_mistake(pretrained: Any) -> None:
    parser = ToolParser.load("pythonic", pretrained)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"$defs": {"a": definition}}}}
        for name, definition in (("f", {}), ("g", {"type": "null"}))
    ]
    with pytest.raises(ApiError, match="multiple schemas") as refused:
        parser(request(tools=tools, tool_choice="required"))
    assert (refused.value.status, refused.value.param) == (400, "tools")


@pytest.mark.parametrize(("name", "says"), [("nope", "not found"), ("mistral", "could not locate")])
def test_a_parser_that_does_not_fit_is_told_at_the_start(pretrained: Any, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"tool_call_parser is '{name}': .*{says}"):
        ToolParser.load(name, pretrained)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parser_that_fails_ends_the_answer(
    hermes: Model, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    def fail(*args: Any, **named: Any) -> None:
        raise IndexError("of a parser")

    monkeypatch.setattr(Hermes2ProToolParser, "extract_tool_calls", fail)
    monkeypatch.setattr(Hermes2ProToolParser, "extract_tool_calls_streaming", fail)
    api = scripted(hermes, HERMES)
    response = await api.chat(tools=TOOLS, stream=stream)
    assert "tool_parser_failed" in response.text and "of a parser" not in response.text
    await api.backend.service.idle()


async def test_what_looked_like_the_beginning_of_a_call_is_told_in_the_end(model: Model, pretrained: Any) -> None:
    text = "It is 5 <tool_"
    parsed = replace(model, parser=ToolParser.load("qwen3_coder", pretrained))
    assert await told(scripted(parsed, text), stream=True) == (text, [], "stop")


def test_the_setting_names_the_parser() -> None:
    settings = read_settings({"model_loading_config": {"tool_call_parser": "hermes"}})
    config = _ingress_config(settings, _engine_config(settings))
    assert isinstance(_load_model(config, PlainRequests()).parser, ToolParser)
    assert _load_model(config.model_copy(update={"tool_call_parser": None}), PlainRequests()).parser is None
