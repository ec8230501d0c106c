"""The first minute of a user: the shipped configuration as `make serve` starts it, and its model's answers."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.smollm2 import ensure_smollm2
from benchmarks.servers import Rig, bare_vllm
from tests.counts import LONG_ONLY
from tests.integration.conftest import ROOT, START_LIMIT_S, Stage, free_port
from tests.integration.runs import COMMANDS, LAUNCHER, Left, Run, wait_until

MODEL = "smollm2-135m"
QUESTIONS = ("Why is the sky blue?", "What is the capital of France? Tell me about it.", "Tell me a story about a dog.")
TOKENS, MOVED_AT = 80, 12


@dataclass
class Chat:
    """A streamed answer so far. A chunk may have several tokens."""

    text: str = ""
    chunks: int = field(default=0, compare=False)
    finish: str | None = None


def label_of(question: str) -> str:
    """The last word."""
    return question.rstrip("?.").split()[-1]


def body_of(question: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        yield client


async def ask(client: httpx.AsyncClient, question: str, then: Callable[[], Awaitable[None]] | None = None) -> Chat:
    """The answer; behind MOVED_AT chunks, `then` is awaited beside it."""
    chat, beside = Chat(), None
    async with client.stream(
        "POST", "/v1/chat/completions", json=body_of(question), headers={"X-Request-Id": label_of(question)}
    ) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                chat.text += choice["delta"].get("content") or ""
                chat.chunks += 1
                chat.finish = choice["finish_reason"] or chat.finish
            if then is not None and beside is None and chat.chunks >= MOVED_AT:
                beside = asyncio.ensure_future(then())
    if beside is not None:
        await beside
    return chat


async def ask_all(url: str) -> list[Chat]:
    async with client_of(url) as client:
        return [await ask(client, question) for question in QUESTIONS]


async def ask_and_disturb(url: str) -> list[Chat]:
    """The answers: moved by KV, moved by tokens, and continued after the death of their replica."""
    async with client_of(url) as client:

        async def move(question: str, path: str) -> None:
            order = {"request_id": label_of(question), "path": path}
            answer = await client.post("/mell/migrations", json=order)
            assert answer.status_code == 202, answer.text

        async def kill() -> None:
            state = (await client.get("/mell/state")).json()
            (replica,) = [replica for replica in state["replicas"] if replica["requests"]]
            os.kill(replica["pids"][0], signal.SIGKILL)

        by_kv, by_tokens, killed = QUESTIONS
        chats = [
            await ask(client, by_kv, lambda: move(by_kv, "kv")),
            await ask(client, by_tokens, lambda: move(by_tokens, "tokens")),
        ]
        records = (await client.get("/mell/migrations")).json()["migrations"]
        assert sorted((record["path"], record["outcome"]) for record in records) == [
            ("kv", "committed"),
            ("tokens", "committed"),
        ]
        return [*chats, await ask(client, killed, kill)]


@pytest.fixture
def config(tmp_path: Path) -> tuple[Path, dict[str, Any], int]:
    """The shipped configuration on a free port, with moves by order only; and its engine settings."""
    shipped = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    args = shipped["applications"][0]["args"]
    args["ingress"]["port"] = port = free_port()
    args["scheduler"]["mode"] = "off"
    path = tmp_path / "serve_config.yaml"
    path.write_text(yaml.safe_dump(shipped))
    return path, args["engine_kwargs"], port


@LONG_ONLY
def test_the_shipped_model_answers_as_in_vllm_moved_and_after_a_death(
    stage: Stage, tmp_path: Path, config: tuple[Path, dict[str, Any], int]
) -> None:
    """A start shows a dozen lines, and the end, while a replica starts again, no traceback."""
    stage.clear()
    path, engine, port = config
    flags = ["--model", str(ensure_smollm2()), "--served-model-name", MODEL]
    with bare_vllm(free := free_port(), replace(Rig(), extra=engine), flags=flags) as _:
        wanted = asyncio.run(ask_all(f"http://127.0.0.1:{free}"))
    assert "France is Paris" in wanted[1].text
    run = Run([*COMMANDS[LAUNCHER], str(path)], port, tmp_path)
    try:
        wait_until(run.healthy, START_LIMIT_S)
        wait_until(lambda: "dashboard" in run.output, 10.0)
        shown = run.output.splitlines()
        assert len(shown) <= 12 and not any("WARNING" in line for line in shown), run.output
        assert asyncio.run(ask_and_disturb(run.url)) == wanted
        wait_until(lambda: len(run.replicas()) < 2 or run.has("initialize_and_get_metadata"), START_LIMIT_S)
        left, length = Left(run), len(run.output)
        run.signal_group(signal.SIGINT)
        assert run.process.wait(150) == 0
        assert left.nothing()
        assert "Traceback" not in run.output[length:] and run.output.endswith("mell: stopped\n")
    finally:
        run.close()


@LONG_ONLY
def test_interrupted_while_engines_start_all_ends_at_once(stage: Stage, tmp_path: Path) -> None:
    stage.clear()
    config = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    config["applications"][0]["args"]["ingress"]["port"] = port = free_port()
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    run = Run([*COMMANDS[LAUNCHER], str(path)], port, tmp_path)
    try:
        wait_until(lambda: run.has("Engine.initialize_and_get_metadata"), START_LIMIT_S)
        left = Left(run)
        run.signal_group(signal.SIGINT)
        assert run.process.wait(150) == 0
        assert left.nothing()
        assert "Traceback" not in run.output and run.output.endswith("mell: stopped\n")
    finally:
        run.close()
