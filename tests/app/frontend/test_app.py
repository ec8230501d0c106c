"""vLLM's application over fake replicas and real streams: whole and streamed, moved, lost, left and refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.frontend.calls import CURRENT, ApiCall
from app.ingress.errors import ApiError
from benchmarks.chaos.offers import draw_prompt, undisturbed
from deployments.engine.tokens import expected
from migration.protocol.core_messages import decode_request
from migration.protocol.errors import Refused
from migration.protocol.ports import Loss, LossKind
from policies.causes import Cause
from policies.model import RequestId
from tests.app.frontend.conftest import CONTEXT, FrontendApi, config, serving
from tests.app.ingress.fakes import Exchange, Service, eventually
from tests.app.ingress.streams.streaming import KV, TOKENS

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # Every member that OpenAI has given up, and vLLM's chats still take.
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

PROMPT = [5, 6, 7]
CHAT = [{"role": "user", "content": "Where do blocks move?"}]
LONG = 200
GENERATING = [
    ("/v1/completions", {"prompt": PROMPT}, "max_tokens"),
    ("/v1/chat/completions", {"messages": CHAT}, "max_tokens"),
    ("/v1/responses", {"input": "Where do blocks move?"}, "max_output_tokens"),
    ("/v1/messages", {"messages": CHAT, "model": "mell-tiny"}, "max_tokens"),
]
BOTH_WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def events(text: str) -> list[Any]:
    """The data of server-sent events."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def text_of(path: str, body: str, stream: bool) -> str:
    """The text of an answer."""
    parts = events(body) if stream else [json.loads(body)]
    match path:
        case "/v1/completions":
            return "".join(choice["text"] for part in parts for choice in part["choices"])
        case "/v1/chat/completions":
            named = "delta" if stream else "message"
            return "".join(choice[named].get("content") or "" for part in parts for choice in part["choices"])
        case "/v1/responses" if stream:
            return "".join(part["delta"] for part in parts if part["type"] == "response.output_text.delta")
        case "/v1/responses":
            return str(parts[0]["output"][0]["content"][0]["text"])
        case _ if stream:
            return "".join(part["delta"].get("text", "") for part in parts if part["type"] == "content_block_delta")
        case _:
            return str(parts[0]["content"][0]["text"])


async def running(service: Service, count: int = 1, tokens: int = 3) -> list[RequestId]:
    """The ids of the requests, once there are `count`, with so many tokens each."""
    live = service.streams._live
    await eventually(
        lambda: len(live) >= count and all(run.reader.cursor.next_index >= tokens for run in live.values())
    )
    return list(live)


def prompt_of(service: Service, request: RequestId) -> tuple[int, ...]:
    return tuple(decode_request(service.streams._live[request].spec.body).prompt_token_ids or ())


async def move(service: Service, request: RequestId, to: str, path: Any = KV) -> None:
    service.move(request, to, path)
    await eventually(lambda: service.hosts(request) == to)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "Where do blocks move?"}), ("/v1/chat/completions", {"messages": CHAT})],
)
async def test_the_tokens_of_a_prompt_are_those_of_its_request(
    api: FrontendApi, path: str, body: dict[str, Any]
) -> None:
    asking = asyncio.create_task(api.post(path, **body, max_tokens=LONG))
    (request,) = await running(api.service)
    assert tuple(await api.frontend.tokens(json.dumps(body).encode())) == prompt_of(api.service, request)
    await asking


@pytest.mark.parametrize(
    "body",
    [{"prompt": "Move. " * CONTEXT}, {"prompt": ""}, {"messages": [{"content": "nobody's"}]}],
    ids=["too long", "empty", "no role"],
)
async def test_a_prompt_that_vllm_refuses_has_no_tokens(api: FrontendApi, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        await api.frontend.tokens(json.dumps(body).encode())
    assert refused.value.status == 400 and refused.value.message


@BOTH_WAYS
@pytest.mark.parametrize(("path", "body", "bound"), GENERATING, ids=[path for path, _, _ in GENERATING])
async def test_a_request_that_moves_twice_has_the_same_answer(
    api: FrontendApi, path: str, body: dict[str, Any], bound: str, stream: bool
) -> None:
    asking = asyncio.create_task(api.post(path, **{**body, bound: LONG, "stream": stream}))
    (request,) = await running(api.service)
    text = api.frontend.decode(expected(prompt_of(api.service, request), LONG))
    await move(api.service, request, "b", KV)
    await move(api.service, request, "a", TOKENS)
    answer = await asking
    assert answer.status_code == 200
    assert text_of(path, answer.text, stream) == text
    await api.service.idle()


@BOTH_WAYS
async def test_a_lost_replica_does_not_show(own: FrontendApi, stream: bool) -> None:
    asking = asyncio.create_task(own.post("/v1/completions", prompt=PROMPT, max_tokens=LONG, stream=stream))
    await running(own.service)
    own.service.kill("a")
    answer = await asking
    text = own.frontend.decode(expected(tuple(PROMPT), LONG))
    assert text_of("/v1/completions", answer.text, stream) == text
    await own.service.idle()


async def test_the_text_of_benchmarks_is_that_of_answers(api: FrontendApi) -> None:
    prompts = [draw_prompt(seed, 20) for seed in range(12)]
    answers = await asyncio.gather(*(api.post("/v1/completions", prompt=list(p), max_tokens=LONG) for p in prompts))
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [undisturbed(prompt, LONG) for prompt in prompts]


async def test_logprobs_are_those_of_an_undisturbed_run(api: FrontendApi) -> None:
    ask = {"prompt": PROMPT, "max_tokens": LONG, "logprobs": 2}
    undisturbed = (await api.post("/v1/completions", **ask)).json()["choices"][0]
    asking = asyncio.create_task(api.post("/v1/completions", **ask))
    (request,) = await running(api.service)
    await move(api.service, request, "b")
    moved = (await asking).json()["choices"][0]
    assert moved == undisturbed and len(moved["logprobs"]["token_logprobs"]) == LONG


async def test_choices_are_requests_of_one_call(api: FrontendApi) -> None:
    call = ApiCall("client's name")
    token = CURRENT.set(call)
    asking = asyncio.create_task(api.post("/v1/completions", prompt=PROMPT, max_tokens=LONG, n=2))
    CURRENT.reset(token)
    requests = await running(api.service, 2)
    await move(api.service, requests[1], "b")
    choices = (await asking).json()["choices"]
    assert [choice["text"] for choice in choices] == [api.frontend.decode(expected(tuple(PROMPT), LONG))] * 2
    assert {request.spec.id for request in call.requests} == set(requests)
    assert {request.spec.label for request in call.requests} == {"client's name"[:6] + "sname"}
    assert sorted(request.moves for request in call.requests) == [0, 1]
    assert [(len(request.tokens), request.finish) for request in call.requests] == [(LONG, "length")] * 2
    assert len({request.external_id for request in call.requests}) == 1


async def test_without_a_layer_around_it_the_label_is_vllms_name(api: FrontendApi) -> None:
    body = {"prompt": PROMPT, "max_tokens": LONG}
    headers = {"X-Request-Id": ("mine 1\u00e4" * 60).encode("latin-1")}
    asking = asyncio.create_task(api.send("POST", "/v1/completions", json=body, headers=headers))
    (request,) = await running(api.service)
    label = api.service.streams._live[request].spec.label
    assert label.startswith("cmpl-mine1mine1") and len(label) == 128
    assert (await asking).status_code == 200


async def test_an_answer_may_have_vllms_default_length(api: FrontendApi) -> None:
    answer = await api.post("/v1/completions", prompt=PROMPT, max_tokens=16)
    assert answer.json()["usage"]["completion_tokens"] == 16


async def test_beams_are_requests_of_one_token(api: FrontendApi) -> None:
    call = ApiCall()
    token = CURRENT.set(call)
    answer = await api.post("/v1/completions", prompt=PROMPT, max_tokens=3, n=2, use_beam_search=True, temperature=0)
    CURRENT.reset(token)
    assert [len(choice["text"]) > 0 for choice in answer.json()["choices"]] == [True, True]
    assert (call.prompt_tokens, call.completion_tokens) == (len(PROMPT), 5)
    assert len(call.requests) == len(call.prompts) == 1, "what a call keeps does not grow with the length of its beams"


@pytest.mark.parametrize(
    ("method", "path", "body", "member", "value"),
    [
        ("GET", "/v1/models", {}, "object", "list"),
        ("POST", "/tokenize", {"prompt": "blocks"}, "max_model_len", CONTEXT),
        ("POST", "/detokenize", {"tokens": [5, 6]}, "prompt", "#$"),
        ("POST", "/v1/messages/count_tokens", {"messages": CHAT, "model": "mell-tiny"}, "input_tokens", 27),
    ],
)
async def test_what_needs_no_engine_is_answered(
    api: FrontendApi, method: str, path: str, body: dict[str, Any], member: str, value: object
) -> None:
    answer = await api.send(method, path, json=body)
    assert (answer.status_code, answer.json()[member]) == (200, value)


async def test_an_image_is_refused(api: FrontendApi) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
    answer = await api.post("/v1/chat/completions", messages=[{"role": "user", "content": [image]}])
    assert answer.status_code == 400


async def test_stored_responses_are_refused(api: FrontendApi) -> None:
    answer = await api.post("/v1/responses", input="x", background=True)
    assert answer.status_code == 400
    answer = await api.post("/v1/responses", input="x", previous_response_id="resp_1", max_output_tokens=3)
    assert answer.status_code in (400, 404)


@BOTH_WAYS
async def test_a_client_that_leaves_ends_its_requests(api: FrontendApi, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "n": 2, "stream": stream}
    # That of uvicorn, by which Starlette decides how it looks for a disconnect.
    exchange = Exchange(api, json.dumps(body).encode(), spec_version="2.3")  # type: ignore[arg-type]
    requests = await running(api.service, 2)
    readers = [api.service.streams._live[request].reader for request in requests]
    exchange.disconnect()
    await exchange.ended()
    await api.service.idle()
    assert [reader.cursor.finish for reader in readers] == [None, None], "they ran to their ends"


@BOTH_WAYS
async def test_without_a_replica_a_call_waits_and_is_refused_before_its_answer_begins(
    own: FrontendApi, stream: bool
) -> None:
    own.service.members.become()
    asking = asyncio.create_task(own.post("/v1/completions", prompt=PROMPT, stream=stream))
    await asyncio.sleep(0.1)
    assert not asking.done()
    answer = await asking
    assert answer.status_code == answer.json()["error"]["code"] == 503
    assert "no replica" in answer.json()["error"]["message"]


async def test_a_replica_that_comes_in_time_serves_what_waited(own: FrontendApi) -> None:
    own.service.members.become()
    asking = asyncio.create_task(own.post("/v1/completions", prompt=PROMPT, max_tokens=3))
    await asyncio.sleep(0.1)
    own.service.members.become("a")
    assert (await asking).status_code == 200


async def full() -> None:
    raise Refused("the replica is full", Cause.NO_ROOM)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_call_that_no_replica_takes_is_refused(own: FrontendApi, n: int) -> None:
    own.service.wires.before = {(replica, "submit"): full for replica in "ab"}
    ask = {"prompt": PROMPT, "max_tokens": 3, "n": n}
    answer = await own.post("/v1/completions", **ask)
    assert answer.status_code == 503 and "the replica is full" in answer.json()["error"]["message"]
    answer = await own.post("/v1/completions", **ask, stream=True)
    (error,) = events(answer.text)
    assert error["error"]["code"] == 503 and answer.text.endswith("data: [DONE]\n\n")
    await own.service.idle()
    assert not own.frontend._client.core._requests and not own.frontend._client.core._calls
    assert not own.frontend._client.output_processor.has_unfinished_requests()


@BOTH_WAYS
async def test_an_answer_that_cannot_be_completed_ends_with_an_error(own: FrontendApi, stream: bool) -> None:
    asking = asyncio.create_task(own.post("/v1/completions", prompt=PROMPT, max_tokens=LONG, stream=stream))
    await running(own.service)
    own.service.kill("a", noticed=False)
    own.service.kill("b")
    own.service.members.become()
    answer = await asking
    error = (events(answer.text)[-1] if stream else answer.json())["error"]
    assert (error["code"], error["message"]) == (503, "no replica is available")


async def test_a_choice_that_cannot_be_completed_ends_the_others(own: FrontendApi) -> None:
    asking = asyncio.create_task(own.post("/v1/completions", prompt=PROMPT, max_tokens=LONG, n=3))
    first, *_ = await running(own.service, 3)
    run = own.service.streams._live[first]
    run._listener.lost(Loss(LossKind.UNAVAILABLE, "one of them is lost"))
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "one of them is lost")
    await own.service.idle()
    assert not own.frontend._client.core._requests
    assert not own.frontend._client.output_processor.has_unfinished_requests()


async def test_a_tool_call_moves_in_its_middle() -> None:
    async with serving(config({"tool_call_parser": "hermes"})) as api:
        called = '<tool_call>\n{"name": "weather", "arguments": {"city": "' + "Bern " * 20 + '"}}\n</tool_call>'
        tokenizer = api.frontend._client.get_tokenizer()
        api.service.say([*tokenizer.encode(called), tokenizer.eos_token_id])
        tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
        ask = {"messages": CHAT, "tools": tools, "stream": True, "max_tokens": 300}
        asking = asyncio.create_task(api.post("/v1/chat/completions", **ask))
        (request,) = await running(api.service, tokens=30)
        await move(api.service, request, "b")
        calls = [c["delta"].get("tool_calls") for e in events((await asking).text) for c in e["choices"]]
        functions = [call["function"] for each in calls if each for call in each]
        assert "".join(f.get("name") or "" for f in functions) == "weather"
        assert json.loads("".join(f.get("arguments") or "" for f in functions)) == {"city": "Bern " * 20}


async def test_a_request_counts_once_however_often_it_moves(own: FrontendApi) -> None:
    asking = asyncio.create_task(own.post("/v1/completions", prompt=PROMPT, max_tokens=LONG))
    (request,) = await running(own.service)
    await move(own.service, request, "b")
    await asking
    exposed = {family.name: family.samples for family in await own.frontend.metrics("i")}
    succeeded = [line for line in exposed["vllm:request_success"].splitlines() if 'finished_reason="length"' in line]
    assert [line.split()[-1] for line in succeeded] == ["1.0"] and 'replica="i"' in succeeded[0]
    assert "vllm:request_generation_tokens_sum{" in exposed["vllm:request_generation_tokens"]
    assert "vllm:num_requests_running" not in exposed


async def test_a_defect_after_the_placement_ends_the_answer(own: FrontendApi, monkeypatch: pytest.MonkeyPatch) -> None:
    run = own.service.streams.run

    @asynccontextmanager
    async def failing(spec: Any, reader: Any, listener: Any) -> AsyncIterator[None]:
        async with run(spec, reader, listener):
            monkeypatch.setattr(listener, "ended", None)
            yield

    monkeypatch.setattr(own.service.streams, "run", failing)
    answer = await asyncio.wait_for(own.post("/v1/completions", prompt=PROMPT, max_tokens=LONG), 5)
    assert answer.status_code == 500
    await own.service.idle()


async def test_a_failed_application_is_not_healthy(own: FrontendApi) -> None:
    own.frontend.check_health()
    own.frontend._client.core._wire.socket.send(b"no message")
    await eventually(lambda: own.frontend._client.errored)
    with pytest.raises(RuntimeError, match="has failed"):
        own.frontend.check_health()
    assert (await own.post("/v1/completions", prompt=PROMPT)).status_code == 500


async def test_nothing_is_left_behind() -> None:
    async with serving(config()) as api:
        asking = asyncio.create_task(api.post("/v1/completions", prompt=PROMPT, max_tokens=400))
        await running(api.service)
        core = api.frontend._client.core
        assert not core._folder.exists()
    asking.cancel()
    api.service.members.become()
    await asyncio.wait({asking})
    assert not core._requests and core._reading.done()
    await api.service.idle()
