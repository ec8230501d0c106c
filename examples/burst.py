"""A burst of long answers: replicas open for it, requests move, and close after it. No stream may break.

python examples/burst.py --streams 60
"""

import argparse
import asyncio
import json
import os
import time

import httpx


async def stream(client: httpx.AsyncClient, number: int, tokens: int) -> bool:
    """One answer of so many tokens. True if its stream is whole."""
    body = {
        "prompt": f"Story {number}: once upon a time",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    counted = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return counted == tokens
            if line.startswith("data: ") and (usage := json.loads(line.removeprefix("data: ")).get("usage")):
                counted = usage["completion_tokens"]
    return False


async def watch(operator: httpx.AsyncClient, began: float) -> None:
    """Print the running replicas and the requests on them whenever these change, until cancelled."""
    before = ""
    while True:
        replicas = (await operator.get("/mell/state")).raise_for_status().json()["replicas"]
        now = "  ".join(f"{each['id']} {each['state'].lower()}: {len(each['requests'])}" for each in replicas)
        if now != before:
            print(f"{time.monotonic() - began:6.1f} s  {now}", flush=True)
        before = now
        await asyncio.sleep(1)


async def main() -> None:
    """Send the burst, and show the replicas meanwhile."""
    parser = argparse.ArgumentParser(description="A burst of streams, and the replicas that serve it.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument(
        "--admin-key", default=os.environ.get("MELL_ADMIN_KEY"), help="the ingress.admin_key, if one is set"
    )
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=400, help="the length of each answer (default: %(default)s)")
    given = parser.parse_args()
    headers = {"Authorization": f"Bearer {given.admin_key}"} if given.admin_key else {}
    limits = httpx.Limits(max_connections=given.streams)
    async with (
        httpx.AsyncClient(base_url=given.url, timeout=600, limits=limits) as client,
        httpx.AsyncClient(base_url=given.url, timeout=600, headers=headers) as operator,
    ):
        watching = asyncio.create_task(watch(operator, time.monotonic()))
        found = await asyncio.gather(*(stream(client, number, given.tokens) for number in range(given.streams)))
        watching.cancel()
        moved = (await operator.get("/mell/migrations")).raise_for_status().json()["migrations"]
    print(f"{sum(found)} of {given.streams} streams whole; the newest {len(moved)} migrations are in `mell migrations`")
    if not all(found):
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main())
