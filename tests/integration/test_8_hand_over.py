"""One Mell hands all its requests over to another one: clients notice nothing, and replicas are idle."""

import asyncio
import copy
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.counts import LONG_ONLY
from tests.integration.application import Answer, Application, Client, eventually, prompt
from tests.integration.conftest import ROOT, Stage, free_port

pytestmark = LONG_ONLY

OWN_KEY, THEIR_KEY = "the-key-of-the-old", "the-key-of-the-new"
PACED = {"num_gpu_blocks_override": 2048, "block_size": 16, "max_model_len": 2000, "decode_s": 0.03}


@dataclass
class Replacement:
    """A Mell, and the one at `to` that replaces it."""

    old: Application
    new: Application

    async def hand_over(self, *options: str) -> tuple[int, str]:
        """Order it, as an operator does: exit status and output."""
        command = [sys.executable, "-m", "app.cli", "hand-over", "--url", self.old.url, "--to", self.new.url, *options]
        keys = {"MELL_ADMIN_KEY": OWN_KEY, "MELL_TO_ADMIN_KEY": THEIR_KEY, "PYTHONPATH": str(ROOT)}
        process = await asyncio.create_subprocess_exec(
            *command,
            env=os.environ | keys,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()


def configured(**args: Any) -> dict[str, Any]:
    """Two applications in one cluster, one replica each, that move nothing by themselves."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    (old,) = config["applications"]
    fixed = {
        "deployment_config": {"num_cpus": 0.05, "autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        "scheduler": {"policy": "best_fit", "mode": "off", "epoch_s": 0.5},
    }
    old["args"] |= fixed | args
    old["args"]["ingress"]["admin_key"] = OWN_KEY
    new = copy.deepcopy(old) | {"name": "new", "route_prefix": "/new"}
    new["args"]["ingress"] |= {"admin_key": THEIR_KEY, "port": free_port()}
    config["applications"] = [old, new]
    return config


@pytest.fixture(params=["paced", "vllm"])
def replacement(request: pytest.FixtureRequest, stage: Stage) -> Iterator[Replacement]:
    """Two Mells, with paced or with real engines."""
    paced = request.param == "paced"
    config = configured(engine="paced", engine_kwargs=PACED) if paced else configured()
    port = config["applications"][1]["args"]["ingress"]["port"]
    old = stage.show(f"replacement-{request.param}", config)
    new = Application(f"http://127.0.0.1:{port}", Path(), old.capacity, old.folder, THEIR_KEY)
    yield Replacement(old, new)
    stage.clear()


async def healthy(client: Client) -> bool:
    try:
        return (await client.http.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


def sampling(number: int) -> dict[str, Any]:
    """Greedy, seeded, with penalties, and with logprobs."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0, "seed": number},
        {"frequency_penalty": 0.7},
        {"logprobs": 2},
    )
    return {**kinds[number % len(kinds)], "return_token_ids": True}


async def test_no_stream_notices_the_replacement_of_its_mell(replacement: Replacement) -> None:
    prompts = {f"stream-{n}": prompt(20 + n, n) for n in range(24)}
    tokens = 600
    async with replacement.old.client() as old, replacement.new.client() as new:
        await eventually(lambda: healthy(new), within_s=120)

        async def unmoved(number: int, label: str) -> str:
            answer = Answer()
            await new.stream(answer, prompts[label], tokens, label, **sampling(number))
            return answer.text

        expected = await asyncio.gather(*(unmoved(number, label) for number, label in enumerate(prompts)))
        answers = [Answer() for _ in prompts]
        streams = [
            asyncio.create_task(old.stream(answer, prompts[label], tokens, label, **sampling(number)))
            for number, (label, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        await asyncio.gather(*(answer.until(5) for answer in answers))
        status, output = await replacement.hand_over("--wait", "60")
        assert status == 0, output
        assert f"to {replacement.new.url}: 0 requests here" in output
        assert sum(len(replica["requests"]) for replica in (await new.state())["replicas"]) > len(prompts) // 2
        await old.idle()
        assert not all(answer.done for answer in answers)

        text, _ = await old.complete(prompts["stream-0"], 8)
        assert text and expected[0].startswith(text)
        await asyncio.gather(*streams)
        assert [answer.error for answer in answers] == [None] * len(answers)
        assert [answer.text for answer in answers] == expected
        assert all(answer.usage and answer.usage["completion_tokens"] == tokens for answer in answers)
        assert {move["reason"] for move in await old.migrations()} == {"hand-over"}
        assert (await replacement.hand_over())[0] == 0
        await new.idle()
