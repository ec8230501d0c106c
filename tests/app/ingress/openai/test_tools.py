"""Chats with tools as a client sees them: what the model is shown, what it must say, and the calls that are told."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.ingress.errors import ApiError
from app.ingress.openai.answers.calls import Call, Calling, ListReading, NamedReading, Said, joined
from app.ingress.openai.answers.choice import Outset
from app.ingress.openai.answers.tool_answer import CallingChoice
from app.ingress.openai.chat import CHAT
from app.ingress.openai.model import Model
from app.ingress.openai.requests.template import ChatTemplate
from app.ingress.openai.requests.tools import Tool, schema_of_calls
from app.ingress.openai.sampling import Prompt, Sampling, Structured
from app.ingress.streams.conversation import Conversation, Opened
from migration.protocol.core_messages import Frames
from migration.protocol.reading import Output, Reader
from tests.app.ingress.fakes import MESSAGES, Api, PlainRequests, events, eventually, make_api, make_service
from tests.migration.world import spec

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": 'It "rains".', "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = '{"city": "K\u00f6ln {[\\"a\\\\"}'
BOTH = f'[{{"name": "weather", "parameters": {ARGUMENTS}}}, {{"name": "time", "parameters": {{}} }}]'
"""An answer of two calls. In the first one's arguments there is what could be taken for their end."""


def scripted(model: Model, text: str, step_s: float = 0.001) -> Api:
    """The routes over replicas that all say this text."""
    service = make_service(step_s=step_s)
    service.say([*model.tokenizer.encode(text).ids, model.tokenizer.token_to_id("</s>")])
    return make_api(model, service)


def only(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def choices(response: httpx.Response) -> list[Any]:
    """The choices of a stream's chunks."""
    *chunks, done = events(response)
    assert done == "[DONE]"
    return [choice for chunk in chunks for choice in chunk["choices"]]


def refusal(response: httpx.Response) -> tuple[str, str]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def called(told: Sequence[Any]) -> list[tuple[str, str]]:
    """Names and arguments of the calls of a message; each must be as OpenAI has it."""
    assert all(set(call) == {"id", "type", "function"} and call["type"] == "function" for call in told)
    assert all(call["id"].startswith("chatcmpl-tool-") for call in told) and len({c["id"] for c in told}) == len(told)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in told]


def assembled(told: Sequence[Any]) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls that a client makes of the chunks of a stream."""
    assert told[0]["delta"] == {"role": "assistant", "content": ""}
    text = ""
    calls: dict[int, Any] = {}
    for delta in [choice["delta"] for choice in told]:
        text += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if (index := part["index"]) in calls:
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                calls[index]["function"]["arguments"] += part["function"]["arguments"]
            else:
                assert index == len(calls)
                calls[index] = {name: value for name, value in part.items() if name != "index"}
    return text, called([calls[index] for index in sorted(calls)])


# --- what the model is shown --------------------------------------------------------------------------

SHOWING = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"


class Template:
    """A tokenizer with templates of its own."""

    def __init__(self, pretrained: Any, own: Any) -> None:
        self.chat_template = own
        self.apply_chat_template = pretrained.apply_chat_template


def with_template(model: Model, pretrained: Any, own: Any) -> Model:
    return replace(model, chat=ChatTemplate.of(Template(pretrained, own)))


async def shown(api: Api, **fields: Any) -> str:
    tokens = (await api.post("/tokenize", json={"messages": MESSAGES, **fields})).json()["tokens"]
    text: str = api.backend.model.tokenizer.decode(tokens)
    return text


async def test_the_template_sees_tools_as_vllm_shows_them(pretrained: Any, model: Model) -> None:
    api = make_api(with_template(model, pretrained, "{{ tools | tojson }}"))
    function = {"name": "time", "description": None, "parameters": None}
    strict = {"type": "function", "function": {**function, "strict": True}}
    assert json.loads(await shown(api, tools=[TOOLS[0], TOOLS[1], strict])) == [
        TOOLS[0],
        {"type": "function", "function": function},
        strict,
    ]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"city": "x"}', {"city": "x"}), ("", {}), (None, {}), ("{", {}), ("[1]", {}), ("null", {})],
    ids=["an object", "empty", "none", "broken", "a list", "null"],
)
async def test_the_template_sees_earlier_calls_as_vllm_shows_them(
    pretrained: Any, model: Model, arguments: str | None, read: Any
) -> None:
    api = make_api(with_template(model, pretrained, "{{ messages | tojson }}"))
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": arguments}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": "It is noon.", "tool_calls": []},
    ]
    assert json.loads(await shown(api, messages=messages)) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "time", "arguments": read}}],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "a"},
        {"role": "assistant", "content": "It is noon."},
    ]


async def test_a_template_for_tools_is_taken_with_tools(pretrained: Any, model: Model) -> None:
    api = make_api(with_template(model, pretrained, {"default": "plain", "tool_use": "tools"}))
    assert [await shown(api), await shown(api, tools=TOOLS)] == ["plain", "tools"]


@pytest.mark.parametrize("choice", ["none", "required"])
async def test_a_chat_is_what_tokenize_says(pretrained: Any, model: Model, choice: str) -> None:
    api = scripted(with_template(model, pretrained, SHOWING), BOTH)
    answer = (await api.chat(tools=TOOLS, tool_choice=choice)).json()
    counted = (await api.post("/tokenize", json={"messages": MESSAGES, "tools": TOOLS})).json()["count"]
    assert answer["usage"]["prompt_tokens"] == counted > 100


async def test_tools_belong_to_messages(api: Api) -> None:
    assert refusal(await api.post("/tokenize", json={"prompt": "x", "tools": TOOLS}))[0] == "tools"


# --- what it must say ---------------------------------------------------------------------------------


async def told_the_engine(api: Api, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Structured | None:
    """What the engine is told of the form of an answer."""
    told: list[Structured | None] = []
    make = PlainRequests.make

    def note(requests: PlainRequests, prompt: tuple[int, ...], sampling: Sampling) -> Frames:
        told.append(sampling.structured)
        return make(requests, prompt, sampling)

    monkeypatch.setattr(PlainRequests, "make", note)
    assert (await api.chat(tools=TOOLS, max_tokens=1, **fields)).status_code == 200
    (structured,) = told
    return structured


async def test_a_named_function_binds_the_engine_to_its_parameters(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await told_the_engine(api, monkeypatch, tool_choice=NAMED) == Structured("json", json.dumps(CITY))


async def test_required_calls_bind_the_engine_to_the_tools(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    structured = await told_the_engine(api, monkeypatch, tool_choice="required", parallel_tool_calls=False)
    schema = schema_of_calls([Tool.model_validate(tool) for tool in TOOLS], parallel=False)
    assert structured == Structured("json", json.dumps(schema)) and schema["maxItems"] == 1


async def test_without_calls_the_engine_is_free(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await told_the_engine(api, monkeypatch, tool_choice="none") is None


def test_definitions_of_tools_come_to_the_top() -> None:
    def tool(name: str, definition: Any) -> Tool:
        parameters = {"type": "object", "$defs": {name: definition}}
        return Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})

    schema = schema_of_calls([tool("a", {"type": "null"}), tool("b", {}), tool("b", {})], parallel=True)
    assert schema["$defs"] == {"a": {"type": "null"}, "b": {}} and "maxItems" not in schema
    assert "$defs" not in json.dumps(schema["items"])
    with pytest.raises(ApiError, match="'a'"):
        schema_of_calls([tool("a", {"type": "null"}), tool("a", {})], parallel=True)
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"$defs": 5}}}
    with pytest.raises(ApiError, match="'f'"):
        schema_of_calls([Tool.model_validate(wrong)], parallel=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": NAMED, "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
    ids=["auto by default", "auto", "an unknown function", "required and a format", "named and a regex", "no tools"],
)
async def test_what_cannot_be_called_is_refused(api: Api, fields: Any, param: str) -> None:
    assert refusal(await api.chat(**fields))[0] == param
    assert ("a", "submit") not in api.backend.service.wires.calls


async def test_the_refusal_of_auto_says_what_to_set(api: Api) -> None:
    assert "model_loading_config.tool_call_parser" in refusal(await api.chat(tools=TOOLS))[1]


# --- the calls that are told --------------------------------------------------------------------------

REQUIRED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
CALLS = [("weather", ARGUMENTS), ("time", "{}")]


async def test_required_calls_are_told(model: Model) -> None:
    api = scripted(model, BOTH)
    choice = only(await api.chat(**REQUIRED))
    assert called(choice["message"].pop("tool_calls")) == CALLS
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": None, "refusal": None},
        "logprobs": None,
        "finish_reason": "tool_calls",
    }
    told = choices(await api.chat(**REQUIRED, stream=True))
    assert assembled(told) == ("", CALLS)
    assert [choice["finish_reason"] for choice in told] == [None] * (len(told) - 1) + ["tool_calls"]
    assert len(told) > len(ARGUMENTS) / 4, "arguments come as they are generated"


@pytest.mark.parametrize("fields", [{}, {"parallel_tool_calls": False}], ids=str)
async def test_a_named_functions_arguments_are_told(model: Model, fields: Any) -> None:
    api = scripted(model, ARGUMENTS)
    wanted = {"tools": TOOLS, "tool_choice": NAMED, **fields}
    choice = only(await api.chat(**wanted))
    assert called(choice["message"]["tool_calls"]) == CALLS[:1] and choice["finish_reason"] == "stop"
    told = choices(await api.chat(**wanted, stream=True))
    assert assembled(told) == ("", CALLS[:1]) and told[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_off_says_so(model: Model, stream: bool) -> None:
    api = scripted(model, BOTH)
    response = await api.chat(**REQUIRED, max_tokens=40, stream=stream)
    if stream:
        told = choices(response)
        (call,), reason = assembled(told)[1], told[-1]["finish_reason"]
    else:
        (call,), reason = called(only(response)["message"]["tool_calls"]), only(response)["finish_reason"]
    assert reason == "length" and call[0] == "weather" and ARGUMENTS.startswith(call[1]) and call[1] != ARGUMENTS


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_is_told_if_there_may_not_be_more(model: Model, stream: bool) -> None:
    response = await scripted(model, BOTH).chat(**REQUIRED, parallel_tool_calls=False, stream=stream)
    calls = assembled(choices(response))[1] if stream else called(only(response)["message"]["tool_calls"])
    assert calls == CALLS[:1]


async def test_every_choice_has_calls_of_its_own(model: Model) -> None:
    api = scripted(model, BOTH)
    told = (await api.chat(**REQUIRED, n=2)).json()["choices"]
    calls = [call for choice in told for call in choice["message"]["tool_calls"]]
    assert called(calls) == CALLS * 2
    streamed = choices(await api.chat(**REQUIRED, n=2, stream=True))
    assert [assembled([c for c in streamed if c["index"] == index]) for index in (0, 1)] == [("", CALLS)] * 2


async def test_logprobs_of_calls_are_told_for_every_token(model: Model) -> None:
    api = scripted(model, BOTH)
    whole = only(await api.chat(**REQUIRED, logprobs=True))["logprobs"]["content"]
    told = choices(await api.chat(**REQUIRED, logprobs=True, stream=True))
    assert [token for choice in told[1:] for token in choice["logprobs"]["content"]] == whole
    assert len(whole) == len(model.tokenizer.encode(BOTH).ids) + 1


async def test_the_request_is_counted_by_the_reason_that_is_told(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        await scripted(model, BOTH).chat(**REQUIRED)
    assert "tool_calls" in caplog.text


async def test_a_stop_string_ends_calls(model: Model) -> None:
    api = scripted(model, BOTH)
    choice = only(await api.chat(**REQUIRED, stop=", {"))
    assert called(choice["message"]["tool_calls"]) == CALLS[:1] and choice["finish_reason"] == "tool_calls"


# --- moves --------------------------------------------------------------------------------------------


async def moved(api: Api, harm: str, **fields: Any) -> httpx.Response:
    """A streamed answer that is moved, or loses its replica, in its midst."""
    service = api.backend.service
    label = f"mine-{harm}"
    asking = asyncio.create_task(api.chat({"X-Request-Id": label}, stream=True, **fields))
    await eventually(lambda: any(c.reader.cursor.next_index > 30 for c in service.streams._live.values()))
    if harm == "kill":
        service.kill("a")
    else:
        order = {"request_id": label, "target": "b", "path": harm}
        assert (await api.post("/mell/migrations", json=order)).status_code == 202
    response = await asking
    assert ("b", "submit" if harm == "kill" else "attach") in service.wires.calls
    await service.idle()
    return response


@pytest.mark.parametrize("harm", ["kv", "tokens", "kill"])
async def test_calls_that_move_are_what_they_would_have_been(model: Model, harm: str) -> None:
    api = scripted(model, BOTH, step_s=0.005)
    told = choices(await moved(api, harm, **REQUIRED))
    assert assembled(told) == ("", CALLS) and told[-1]["finish_reason"] == "tool_calls"


# --- readings -----------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    calls=st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), ANYTHING, max_size=3)), min_size=1),
    indent=st.sampled_from([None, 0, 2]),
    ascii=st.booleans(),
    data=st.data(),
)
def test_a_list_of_calls_is_read_in_any_pieces(
    calls: Any, indent: int | None, ascii: bool, data: st.DataObject
) -> None:
    objects = [{"name": name, "parameters": arguments} for name, arguments in calls]
    text = json.dumps(objects, indent=indent, ensure_ascii=ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reading = ListReading()
    said = joined([reading.part(piece, (), False) for piece in pieces])
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == calls and not said.text
    assert [call.arguments for call in said.calls] == [c.arguments for c in ListReading().whole(text, ()).calls]


def test_a_named_function_that_is_given_nothing_is_not_called() -> None:
    assert NamedReading("f").whole("", ()) == Said()


def test_parts_are_joined_call_by_call() -> None:
    parts = [Said("a"), Said(calls=(Call(1, "x", "i", "f"),)), Said("b", (Call(0, "y", "j", "g"), Call(1, "z")))]
    assert joined(parts) == Said("ab", (Call(0, "y", "j", "g"), Call(1, "xz", "i", "f")))


# --- a parser -----------------------------------------------------------------------------------------


class Heard:
    """A reading that keeps what it is given."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, tuple[int, ...], bool]] = []

    def part(self, text: str, tokens: tuple[int, ...], over: bool) -> Said:
        self.parts.append((text, tokens, over))
        return Said(text)

    def whole(self, text: str, tokens: tuple[int, ...]) -> Said:
        raise NotImplementedError


class Unseen:
    """Nobody measures the steps."""

    def step(self) -> None:
        pass


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("late", [False, True], ids=["with the last token", "after it"])
async def test_a_reading_hears_one_token_at_a_time_however_they_come(model: Model, size: int, late: bool) -> None:
    ids = tuple(model.tokenizer.encode(BOTH).ids)
    heard = Heard()
    conversation = Conversation(spec(), Reader())
    outset = Outset(
        0,
        Opened(conversation, AsyncMock()),
        model.tokenizer,
        CHAT.shape,
        (),
        Prompt(()),
        Sampling(9),
        cast(Any, Unseen()),
    )
    choice = CallingChoice(outset, Calling(lambda prompt: heard, None, "tool_calls"))

    async def come() -> None:
        for at in range(0, len(ids), size):
            last = at + size >= len(ids)
            finish = "length" if last and not late else None
            conversation.deliver(Output(at, ids[at : at + size], (), finish))
            await asyncio.sleep(0)
        if late:
            conversation.deliver(Output(len(ids), (), (), "length"))

    coming = asyncio.create_task(come())
    chunks = [chunk async for chunk in choice.events("data: {", "}\n\n")]
    await coming
    assert [tokens for _, tokens, _ in heard.parts if tokens] == [(token,) for token in ids]
    assert [over for _, _, over in heard.parts] == [False] * (len(heard.parts) - 1) + [True]
    assert "".join(text for text, _, _ in heard.parts) == BOTH
    assert b'"finish_reason":"length"' in chunks[-1]


class Broken:
    """A reading that fails in the midst."""

    def part(self, text: str, tokens: tuple[int, ...], over: bool) -> Said:
        if "ea" in text or over:
            raise ApiError(500, "it failed", code="tool_parser_failed")
        return Said(text)

    whole = None


async def test_a_failure_to_read_is_an_event_before_done(model: Model) -> None:
    api = scripted(replace(model, parser=lambda request: Calling(lambda prompt: Broken(), None, "x")), BOTH)  # type: ignore[arg-type, return-value]
    *chunks, error, done = events(await api.chat(tools=TOOLS, stream=True))
    assert chunks and done == "[DONE]" and error["error"]["code"] == "tool_parser_failed"
    await api.backend.service.idle()


def test_vllm_is_not_imported_without_a_parser() -> None:
    code = (
        "import sys, app.ingress.openai.answers.tool_parser, app.ingress.openai.chat; sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
