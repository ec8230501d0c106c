"""Clients of each kind find what they expect: OpenAI's for responses, Anthropic's, and an agent of Pydantic AI."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, ModelRetry, RunContext, Tool, ToolDefinition, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

from tests.counts import LONG_ONLY
from tests.differential.forced import FORCED
from tests.integration.application import MODEL, Application, eventually
from tests.integration.asking import two_run

pytestmark = LONG_ONLY

ASKED: Any = [{"role": "user", "content": "Where do blocks move?"}]
GREEDY: Any = {"extra_body": {"temperature": 0}}
"""Anthropic's client has no parameter for it."""

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"replica": {"enum": ["a", "b"]}},
    "required": ["replica"],
    "additionalProperties": False,
}


class Placement(BaseModel):
    """A schema that even a model of noise can be made to follow."""

    model_config = ConfigDict(extra="forbid")

    replica: Literal["a", "b"]
    committed: bool


async def move(application: Application, label: str) -> None:
    """Move the request with that label once it has answered for a while."""
    async with application.client() as client:

        async def under_way() -> bool:
            requests = [request for replica in await client.running() for request in replica["requests"]]
            return any(request["label"] == label and request["tokens"] > 80 for request in requests)

        await eventually(under_way)
        accepted = await client.move(label, path="kv")
        assert accepted.status_code == 202, accepted.text
        assert (await client.outcome(accepted.json()["id"]))["outcome"] == "committed"


# --- OpenAI's responses -------------------------------------------------------------------------------


@pytest.fixture
async def openai_client(application: Application) -> AsyncIterator[AsyncOpenAI]:
    """A client as a user makes it, but for proxies, and that it does not try again."""
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(base_url=f"{application.url}/v1", api_key="none", http_client=http, max_retries=0) as made:
        yield made


async def test_a_response_and_its_stream_which_moves(application: Application, openai_client: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "Blocks move", "max_output_tokens": 600, "temperature": 0}
    asked |= {"extra_body": {"ignore_eos": True}}
    whole: Any = await openai_client.responses.create(**asked)
    assert whole.status == "incomplete" and whole.usage is not None and whole.usage.output_tokens == 600
    async with application.client() as client:
        await two_run(client)
    labelled: Any = {"extra_headers": {"X-Request-Id": "responding"}}
    moving = asyncio.create_task(move(application, "responding"))
    text = ""
    stream: Any = await openai_client.responses.create(**{**asked, **labelled, "stream": True})
    async for event in stream:
        if event.type == "response.output_text.delta":
            text += event.delta
    await moving
    assert text == whole.output_text != ""


async def test_a_response_is_parsed_into_an_object(openai_client: AsyncOpenAI) -> None:
    answer = await openai_client.responses.parse(
        model=MODEL, input="Blocks move", text_format=Placement, temperature=0, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Placement)


async def test_a_response_calls_a_function(openai_client: AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "name": "drain", "parameters": PARAMETERS, "strict": True}
    choice: Any = {"type": "function", "name": "drain"}
    answer: Any = await openai_client.responses.create(
        model=MODEL, input="Blocks move", tools=[tool], tool_choice=choice, temperature=0, max_output_tokens=200
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "drain" and json.loads(call.arguments)["replica"] in ("a", "b")


async def test_a_bad_response_is_the_clients_exception(openai_client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await openai_client.responses.create(model="other", input="Blocks move")
    with pytest.raises(openai.BadRequestError):
        await openai_client.responses.create(model=MODEL, input="Blocks move", extra_body={"presence_penalty": 3})


# --- Anthropic's messages -----------------------------------------------------------------------------


@pytest.fixture
async def anthropic_client(application: Application) -> AsyncIterator[AsyncAnthropic]:
    """The same, of Anthropic."""
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncAnthropic(base_url=application.url, api_key="none", http_client=http, max_retries=0) as made:
        yield made


async def test_a_message_and_its_stream_which_moves(application: Application, anthropic_client: AsyncAnthropic) -> None:
    asked: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 800, "system": "Be brief.", **GREEDY}
    whole = await anthropic_client.messages.create(**asked)
    (block,) = whole.content
    assert block.type == "text" and whole.stop_reason in ("max_tokens", "end_turn")
    async with application.client() as client:
        await two_run(client)
    moving = asyncio.create_task(move(application, "messaging"))
    async with anthropic_client.messages.stream(**asked, extra_headers={"X-Request-Id": "messaging"}) as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    await moving
    assert text == block.text != ""
    assert (final.content[0].type, final.usage.output_tokens) == ("text", whole.usage.output_tokens)


async def test_the_tokens_of_a_message_are_counted(anthropic_client: AsyncAnthropic) -> None:
    counted = await anthropic_client.messages.count_tokens(model=MODEL, messages=ASKED)
    answer = await anthropic_client.messages.create(model=MODEL, messages=ASKED, max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens > 0


async def test_a_message_uses_a_tool(anthropic_client: AsyncAnthropic) -> None:
    forced: Any = next(case.body for case in FORCED if case.name == "any call")
    asked = {name: value for name, value in forced.items() if name != "temperature"}
    answer = await anthropic_client.messages.create(**asked, **GREEDY)
    used = [block for block in answer.content if block.type == "tool_use"]
    assert used and used[0].name in ("move", "drain") and dict(used[0].input)["replica"] in ("a", "b")
    assert answer.stop_reason == "tool_use"


async def test_a_bad_message_is_the_clients_exception(anthropic_client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await anthropic_client.messages.create(model="other", messages=ASKED, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError):
        await anthropic_client.messages.create(model=MODEL, messages=ASKED, max_tokens=0)


# --- an agent -----------------------------------------------------------------------------------------


async def test_an_agent_calls_its_tool_and_gives_its_output(openai_client: AsyncOpenAI) -> None:
    asked: list[str] = []

    async def free_blocks(replica: Literal["a", "b"]) -> int:
        """The free blocks of a replica."""
        asked.append(replica)
        return 7

    async def once(context: RunContext[object], tool: ToolDefinition) -> ToolDefinition | None:
        return None if asked else tool

    agent = Agent(
        OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=openai_client)),
        output_type=ToolOutput(Placement, strict=True),
        tools=[Tool(free_blocks, prepare=once, strict=True)],
        model_settings=OpenAIChatModelSettings(temperature=1, seed=3, max_tokens=300, parallel_tool_calls=False),
        retries=10,
    )

    @agent.output_validator
    def after_a_call(output: Placement) -> Placement:
        """Weights of noise may forget the tool."""
        if not asked:
            raise ModelRetry("call free_blocks first")
        return output

    result = await agent.run("Where should blocks move?")
    assert isinstance(result.output, Placement)
    assert asked and set(asked) <= {"a", "b"}
    assert result.usage.requests >= 2
