"""Agents at work side by side, all with the same long instructions, each with its own conversation.

The instructions are computed once per replica, or copied from another one. With `cache.routing: session`, the name in
`prompt_cache_key` keeps the turns of an agent on the replica that has its conversation; otherwise the replica with the
earliest first token is chosen, which counts what is cached there.

python examples/agents.py --agents 4 --turns 3
"""

import argparse
import asyncio
import time
from typing import Any

from openai import AsyncOpenAI

INSTRUCTIONS = "You plan a journey with a team. Give the next step in one short sentence. " + " ".join(
    f"Rule {number}: a journey of {number} days has at most {2 * number} stops." for number in range(1, 30)
)


async def work(client: AsyncOpenAI, model: str, agent: str, turns: int, tokens: int) -> None:
    """Hold one agent's conversation, and print the time to the first token of each turn."""
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": f"I am {agent}. Where do we begin?"},
    ]
    for turn in range(1, turns + 1):
        began, first_s, answer, usage = time.monotonic(), 0.0, "", None
        stream = await client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"prompt_cache_key": agent},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                first_s = first_s or time.monotonic() - began
                answer += choice.delta.content or ""
            usage = chunk.usage or usage
        assert usage is not None
        details = usage.prompt_tokens_details
        # With `engine_kwargs.enable_prompt_tokens_details`, the server counts what it found in its cache.
        cached = "" if details is None else f", {details.cached_tokens} of them cached"
        print(
            f"{agent}, turn {turn}: {usage.prompt_tokens} tokens{cached}, first token after {first_s:.2f} s", flush=True
        )
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]


async def main() -> None:
    """Let all agents work at once."""
    parser = argparse.ArgumentParser(description="Agents that share their instructions.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument("--api-key", default="none", help="needed only if the server has keys")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=40, help="the longest answer, in tokens (default: %(default)s)")
    given = parser.parse_args()
    async with AsyncOpenAI(base_url=f"{given.url}/v1", api_key=given.api_key) as client:
        model = (await client.models.list()).data[0].id
        agents = (f"agent-{number}" for number in range(1, given.agents + 1))
        await asyncio.gather(*(work(client, model, agent, given.turns, given.tokens) for agent in agents))


if __name__ == "__main__":
    asyncio.run(main())
