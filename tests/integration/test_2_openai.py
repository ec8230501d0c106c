"""OpenAI's own Python client finds what it expects: objects, streams, errors and retries."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any, Literal

import anyio
import httpx2
import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from pydantic import BaseModel, ConfigDict

from app.ingress.access.admission import Gate
from app.ingress.access.keys import ApiKey, digest
from app.ingress.access.limits import KeyLimits
from tests.adapters import ADAPTERS
from tests.app.ingress.fakes import make_api
from tests.counts import LONG_ONLY
from tests.docs.markdown import PAGES, Block, blocks
from tests.integration.application import MODEL, Application, prompt

CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where do blocks move?"}]
STEADY: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}


class Move(BaseModel):
    """A schema that even a model of noise can be made to follow."""

    model_config = ConfigDict(extra="forbid")

    path: Literal["kv", "tokens"]
    committed: bool


@pytest.fixture
def client(application: Application) -> Iterator[OpenAI]:
    """A client as a user makes it, but for proxies, and that it does not try again."""
    http = DefaultHttpxClient(trust_env=False)
    with OpenAI(base_url=f"{application.url}/v1", api_key="none", http_client=http, max_retries=0) as made:
        yield made


@pytest.fixture
async def concurrent(application: Application) -> AsyncIterator[AsyncOpenAI]:
    """The same for asyncio."""
    http = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(base_url=f"{application.url}/v1", api_key="none", http_client=http, max_retries=0) as made:
        yield made


EXAMPLES = [block for page in PAGES for block in blocks(page) if block.language == "python"]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_examples_of_the_documentation(
    application: Application, example: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert "http://127.0.0.1:8000/v1" in example.text
    # The default configuration serves another model than these tests.
    exec(example.text.replace("http://127.0.0.1:8000", application.url).replace("smollm2-135m", MODEL), {})
    assert len(capsys.readouterr().out) > 10


@LONG_ONLY
def test_models(client: OpenAI) -> None:
    model, *adapters = client.models.list()
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "vllm")
    assert [adapter.id for adapter in adapters] == list(ADAPTERS)


@LONG_ONLY
def test_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt(9, "openai"), max_tokens=12, logprobs=2, **STEADY)
    (choice,) = answer.choices
    assert answer.object == "text_completion" and choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.total_tokens == 9 + 12
    assert choice.logprobs is not None and len(choice.logprobs.token_logprobs or []) == 12
    assert choice.text and len(choice.logprobs.top_logprobs or []) == len(choice.logprobs.tokens or []) == 12


@LONG_ONLY
def test_choices_of_several_prompts(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["Blocks", "Tokens"], n=2, seed=5, max_tokens=8, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:6] for choice in answer.choices] == ["Blocks", "Blocks", "Tokens", "Tokens"]


@LONG_ONLY
def test_a_chat_is_streamed_with_its_usage(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 12, **STEADY}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content != ""
    assert last.usage is not None and whole.usage is not None and not last.choices
    # The second one finds the prompt in a cache.
    alike = {"prompt_tokens_details": None}
    assert last.usage.model_copy(update=alike) == whole.usage.model_copy(update=alike)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


@LONG_ONLY
def test_logprobs_of_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=6, logprobs=True, top_logprobs=3, **STEADY
    )
    scored = answer.choices[0].logprobs
    assert scored is not None and scored.content is not None and len(scored.content) == 6
    for token in scored.content:
        assert token.bytes == list(token.token.encode())
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob


@LONG_ONLY
def test_a_chat_that_follows_a_schema(client: OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "move", "schema": Move.model_json_schema()}}
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, seed=1, max_tokens=200, response_format=wanted)
    assert answer.choices[0].finish_reason == "stop"
    Move.model_validate_json(answer.choices[0].message.content or "")


@LONG_ONLY
def test_a_chat_is_parsed_into_an_object(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=CHAT, seed=1, max_tokens=200, response_format=Move)
    assert isinstance(answer.choices[0].message.parsed, Move)


@LONG_ONLY
async def test_streams_of_a_concurrent_client(concurrent: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "Blocks move", "max_tokens": 10, "n": 2, "seed": 3}
    whole = await concurrent.completions.create(**asked)
    texts = {0: "", 1: ""}
    async with await concurrent.completions.create(**asked, stream=True) as stream:
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert texts[0] != texts[1]


@LONG_ONLY
async def test_the_stream_helper_of_chats(concurrent: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "seed": 1, "max_tokens": 200, "response_format": Move}
    async with concurrent.chat.completions.stream(**asked) as stream:
        answer = await stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Move)


@LONG_ONLY
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"temperature": -1}, openai.BadRequestError),
        ({"n": 1000}, openai.BadRequestError),
        ({"extra_body": {"kv_transfer_params": {}}}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
    ],
    ids=["too cold", "too many choices", "for connectors", "other model"],
)
def test_errors_are_the_clients_exceptions(client: OpenAI, changes: Any, error: type[openai.APIStatusError]) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": CHAT, "max_tokens": 5, **changes})
    assert isinstance(caught.value.body, dict) and caught.value.body["message"]


@LONG_ONLY
def test_the_clients_request_id_is_returned(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "Blocks", "max_tokens": 1, "extra_headers": {"X-Request-Id": "mine"}}
    answer = client.completions.create(**asked)
    assert answer._request_id == "mine" and answer.id.startswith("cmpl-")


@pytest.mark.parametrize(
    "gate",
    [Gate(max_requests=1), Gate([ApiKey("alice", digest("alice-key"), KeyLimits(concurrent_requests=1))])],
    ids=["503, saturated", "429, a limit of the key"],
)
async def test_the_client_retries_after_the_time_in_retry_after(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The routes over fake engines: the other request ends while the client waits."""
    other, waits = ExitStack(), list[float]()
    other.enter_context(gate.admit("alice-key"))

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        other.close()

    monkeypatch.setattr(anyio, "sleep", sleep)
    http = DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(make_api(gate=gate).app), trust_env=False)
    async with AsyncOpenAI(base_url="http://mell/v1", api_key="alice-key", http_client=http, max_retries=1) as client:
        answer = await client.completions.create(model=MODEL, prompt="Blocks", max_tokens=2)
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    assert waits == [1.0], "the client waits for the time in Retry-After"
