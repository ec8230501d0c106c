"""Adapters by operators' calls while the application runs."""

import asyncio
import shutil
from typing import Any

import httpx

from tests.adapters import RANK, make_adapter
from tests.counts import LONG_ONLY
from tests.integration.application import Answer, Application, Client, prompt

pytestmark = LONG_ONLY


async def load(client: Client, name: str, path: object, **others: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **others}
    return await client.http.post("/v1/load_lora_adapter", json=body)


async def unload(client: Client, name: str) -> httpx.Response:
    return await client.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def names(client: Client) -> list[str]:
    return [model["id"] for model in (await client.http.get("/v1/models")).json()["data"]]


async def test_adapters_come_and_go(updating: Application) -> None:
    first, second = (make_adapter(updating.folder / name, seed) for seed, name in enumerate(("first", "second"), 10))
    tokens = prompt(200, "come and go")
    async with updating.client() as client:
        base, _ = await client.complete(tokens, 60)
        before = await names(client)
        assert (await load(client, "late", first)).text == "Success: LoRA adapter 'late' added successfully."
        assert await names(client) == [*before, "late"]
        one, _ = await client.complete(tokens, 60, model="late")
        assert (await load(client, "late", first)).status_code == 400
        running, whole = Answer(), asyncio.create_task(client.complete(tokens, 600, model="late"))
        want, _ = await whole
        reading = asyncio.create_task(client.stream(running, tokens, 600, "late", model="late"))
        await running.until(10)
        # The running request keeps its adapter, on the replica that it moves to as well.
        assert (await load(client, "late", second, load_inplace=True)).status_code == 200
        two, _ = await client.complete(tokens, 60, model="late")
        assert (await unload(client, "late")).status_code == 200
        assert (await client.outcome((await client.move("late", path="kv")).json()["id"]))["outcome"] == "committed"
        await reading
        assert running.text == want and want.startswith(one)
        assert len({base, one, two}) == 3
        assert (await client.http.post("/v1/completions", json={"model": "late", "prompt": tokens})).status_code == 404
        assert (await unload(client, "late")).status_code == 404 and await names(client) == before


async def test_a_bad_adapter_breaks_nothing(updating: Application) -> None:
    tokens = prompt(100, "bad adapters")
    high, torn = make_adapter(updating.folder / "high", 12, rank=2 * RANK), make_adapter(updating.folder / "torn", 13)
    (torn / "adapter_model.safetensors").write_bytes(b"torn")
    gone = make_adapter(updating.folder / "gone", 14)
    async with updating.client() as client:
        pids = [replica["pids"] for replica in await client.running()]
        want, _ = await client.complete(tokens, 40)
        for path, named in (
            (updating.folder / "none", "with weights"),
            (high, "max_lora_rank"),
            (torn, "cannot be loaded"),
        ):
            refused = await load(client, "bad", path)
            assert refused.status_code == 400 and named in refused.text, refused.text
        assert (await load(client, "gone", gone)).status_code == 200
        shutil.rmtree(gone)
        body = {"model": "gone", "prompt": tokens, "max_tokens": 5}
        refused = await client.http.post("/v1/completions", json=body)
        assert refused.status_code == 503 and "with weights" in refused.text, refused.text
        assert (await unload(client, "gone")).status_code == 200
        again, _ = await client.complete(tokens, 40)
        assert again == want and [replica["pids"] for replica in await client.running()] == pids


async def test_only_operators_load_adapters(updating: Application) -> None:
    folder = make_adapter(updating.folder / "closed", 15)
    async with httpx.AsyncClient(base_url=updating.url, trust_env=False) as http:
        for headers in ({}, {"Authorization": "Bearer other-key"}):
            body = {"lora_name": "closed", "lora_path": str(folder)}
            assert (await http.post("/v1/load_lora_adapter", json=body, headers=headers)).status_code == 401
