"""Calls of tools that the client demands, on real engines: they follow their schema, and a move changes nothing."""

import asyncio
import json
import re
from typing import Any

import pytest

from tests.integration.application import Application, Client, eventually

CHATS = "/v1/chat/completions"
WHY = "([a-z]{3} ){60}"
"""Long enough to be moved while it is written."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "replica": {"enum": ["a", "b", "c"]},
                    "why": {"type": "string", "pattern": f"^{WHY}$"},
                },
                "required": ["replica", "why"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("move", "drain")
]
NAMED = {"type": "function", "function": {"name": "drain"}}


def body(choice: Any, **extra: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Where do blocks move?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": 1,
        "seed": 7,
        "max_tokens": 3000,
        **extra,
    }


def calls(tool_calls: list[Any]) -> list[tuple[str, dict[str, str]]]:
    """Names and arguments. vLLM encodes those of a whole answer anew, and streams them as written."""
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in tool_calls]


async def whole(client: Client, choice: Any) -> tuple[list[tuple[str, dict[str, str]]], str]:
    """Calls and finish reason of an answer."""
    response = await client.http.post(CHATS, json=body(choice))
    assert response.status_code == 200, response.text
    (given,) = response.json()["choices"]
    assert not given["message"]["content"]
    return calls(given["message"]["tool_calls"]), given["finish_reason"]


async def streamed(client: Client, choice: Any, label: str) -> tuple[list[tuple[str, dict[str, str]]], str]:
    """As `whole`, of a streamed answer."""
    parts: dict[int, Any] = {}
    reason = ""
    headers = {"X-Request-Id": label}
    async with client.http.stream("POST", CHATS, json=body(choice, stream=True), headers=headers) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            (one,) = json.loads(line[6:])["choices"]
            for part in one["delta"].get("tool_calls") or ():
                function = parts.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})["function"]
                for name in function:
                    function[name] += part["function"].get(name) or ""
            reason = one["finish_reason"] or reason
    return calls([parts[index] for index in sorted(parts)]), reason


async def move(client: Client, label: str, by: str) -> None:
    """Move a request that has been under way for a while."""

    async def under_way() -> bool:
        requests = [request for replica in await client.running() for request in replica["requests"]]
        return any(request["label"] == label and request["tokens"] > 120 for request in requests)

    await eventually(under_way)
    accepted = await client.move(label, path=by)
    assert accepted.status_code == 202, accepted.text
    assert (await client.outcome(accepted.json()["id"]))["outcome"] == "committed"


@pytest.mark.parametrize(
    ("choice", "names", "reason", "by"),
    [("required", {"move", "drain"}, "tool_calls", "kv"), (NAMED, {"drain"}, "stop", "tokens")],
    ids=["required", "named"],
)
async def test_demanded_calls_follow_their_schema_and_move(
    application: Application, choice: Any, names: set[str], reason: str, by: str
) -> None:
    async with application.client() as client:
        wanted, finish = await whole(client, choice)
        label = f"calls-{by}-{reason}"
        asking = asyncio.create_task(streamed(client, choice, label))
        await move(client, label, by)
        assert await asking == (wanted, finish)
        await client.idle()
    assert wanted and finish == reason
    for name, arguments in wanted:
        assert name in names and set(arguments) == {"replica", "why"}
        assert arguments["replica"] in ("a", "b", "c") and re.fullmatch(WHY, arguments["why"])
