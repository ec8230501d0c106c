"""The programs in examples/ that need an operator's rights, against a Mell with an admin key."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.app.cli.fake_mell import serving
from tests.app.client.sample import record, replica, request, state

EXAMPLES = Path(__file__).parents[3] / "examples"
KEY = "open-sesame"


class KeyedMell:
    """`/mell` takes the admin key only. Completions take none, and stream until a call of `/mell` is repeated."""

    def __init__(self) -> None:
        self.operated = asyncio.Event()
        self.calls: set[tuple[str, str]] = set()

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/mell/state", self.operate),
                Route("/mell/migrations", self.operate, methods=["GET", "POST"]),
            ]
        )

    async def complete(self, http: Request) -> Response:
        """Stream an answer, its length, and its end."""
        if "authorization" in http.headers:
            return JSONResponse({"error": {"message": "the admin key is for operators"}}, 401)
        usage = json.dumps({"usage": {"completion_tokens": (await http.json())["max_tokens"]}})

        async def events() -> Any:
            await self.operated.wait()
            yield f"data: {usage}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def operate(self, http: Request) -> Response:
        """The state, and migrations that are over at once."""
        if http.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "this call requires the admin key"}}, 401)
        call = http.method, http.url.path
        if call in self.calls:
            self.operated.set()
        self.calls.add(call)
        if http.url.path == "/mell/state":
            return JSONResponse(state(replica("a", request("r", 32), request("s", 32))))
        if http.method == "POST":
            return JSONResponse({"id": "0123456789abcdef"}, 202)
        return JSONResponse({"migrations": [record("0123456789abcdef")]})


@pytest.mark.slow
@pytest.mark.parametrize("by_option", [True, False], ids=["option", "environment"])
@pytest.mark.parametrize("example", ["burst.py", "by_hand.py", "spot.py"])
async def test_an_example_gives_operators_calls_the_admin_key(example: str, by_option: bool, tmp_path: Path) -> None:
    arguments = {
        "burst.py": ("--streams", "2"),
        "by_hand.py": (),
        "spot.py": (str(tmp_path / "notice"), "--streams", "2"),
    }
    key = ("--admin-key", KEY) if by_option else ()
    environment = {"NO_PROXY": "127.0.0.1"} | ({} if by_option else {"MELL_ADMIN_KEY": KEY})
    with serving(KeyedMell()) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(EXAMPLES / example), *arguments[example], "--url", url, *key),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **environment},
        )
        output, errors = (each.decode() for each in await process.communicate())
    assert process.returncode == 0, errors
    assert {"burst.py": "2 of 2 streams whole", "by_hand.py": "committed", "spot.py": "is written"}[example] in output
