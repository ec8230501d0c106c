"""Two replicas by hand: a long answer is moved there and back while it streams.

python examples/by_hand.py
"""

import argparse
import asyncio
import json
import os
from uuid import uuid4

import httpx


async def answer(client: httpx.AsyncClient, label: str, tokens: int) -> bool:
    """Ask for so many tokens. True if the stream has them all, and its end."""
    body = {
        "prompt": "Blocks move",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    counted = 0
    async with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": label}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return counted == tokens
            if line.startswith("data: ") and (usage := json.loads(line.removeprefix("data: ")).get("usage")):
                counted = usage["completion_tokens"]
    return False


async def move(operator: httpx.AsyncClient, label: str) -> None:
    """Order one move after the other, by KV and by tokens in turn, until cancelled."""
    paths = ["kv", "tokens"]
    while True:
        ordered = await operator.post("/mell/migrations", json={"request_id": label, "path": paths[0]})
        if ordered.status_code == httpx.codes.ACCEPTED:
            print(await ended(operator, ordered.json()["id"]), flush=True)
            paths.reverse()
        await asyncio.sleep(0.2)  # Otherwise the request is not there yet, is moving, or has ended.


async def ended(operator: httpx.AsyncClient, migration: str) -> str:
    """The end of a migration, in one line."""
    while True:
        records = (await operator.get("/mell/migrations")).raise_for_status().json()["migrations"]
        for found in records:
            if found["id"] == migration and found["outcome"] is not None:
                return f"{found['source']} -> {found['target']} by {found['path']}: {found['outcome']}"
        await asyncio.sleep(0.1)


async def main() -> None:
    """Move an answer for as long as it streams."""
    parser = argparse.ArgumentParser(description="Move an answer between two replicas while it streams.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument(
        "--admin-key", default=os.environ.get("MELL_ADMIN_KEY"), help="the ingress.admin_key, if one is set"
    )
    parser.add_argument("--tokens", type=int, default=600, help="the length of the answer (default: %(default)s)")
    given = parser.parse_args()
    headers = {"Authorization": f"Bearer {given.admin_key}"} if given.admin_key else {}
    label = f"by-hand-{uuid4().hex[:6]}"
    async with (
        httpx.AsyncClient(base_url=given.url, timeout=600) as client,
        httpx.AsyncClient(base_url=given.url, timeout=600, headers=headers) as operator,
    ):
        moving = asyncio.create_task(move(operator, label))
        whole = await answer(client, label, given.tokens)
        moving.cancel()
    print("the stream is whole" if whole else "the stream is broken")
    if not whole:
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main())
