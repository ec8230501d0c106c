"""vLLM's own server application on Mell's engines, beside its answers: ends, aborts, private members and counts."""

import asyncio
import json
from typing import Any

import pytest

from tests import counts
from tests.integration.application import MODEL, Application, Client, eventually, process, prompt, total
from tests.integration.asking import two_run

LONG = 600
STEADY = {"temperature": 0, "ignore_eos": True}
DRAWN = {"temperature": 1, "seed": 11, "ignore_eos": True}


async def ask(client: Client, body: dict[str, Any], label: str) -> dict[str, Any]:
    """The answer to a completion."""
    response = await client.http.post("/v1/completions", json={"model": MODEL, **body}, headers={"X-Request-Id": label})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def requests_of(client: Client, label: str) -> list[dict[str, Any]]:
    """The running requests of a call."""
    return [r for replica in (await client.state())["replicas"] for r in replica["requests"] if label in r["label"]]


async def move_while(client: Client, asking: "asyncio.Task[Any]", label: str, times: int) -> int:
    """Move each request of a call up to that many times while it runs; the number of moves that were committed."""
    begun: list[str] = []
    for path in ["kv", "tokens", "auto"][:times]:
        running = await requests_of(client, label)
        while not running and not asking.done():
            running = await requests_of(client, label)
        for request in running:
            response = await client.move(request["id"], path=path)
            begun += [response.json()["id"]] if response.status_code == 202 else []
        for migration in begun:
            await client.outcome(migration)
    outcomes = [await client.outcome(migration) for migration in begun]
    return sum(outcome["outcome"] == "committed" for outcome in outcomes)


@counts.LONG_ONLY
async def test_a_stop_string_ends_a_request_that_has_moved(application: Application) -> None:
    async with application.client() as client:
        await two_run(client)
        body = {"prompt": prompt(30, "stop"), "max_tokens": LONG, **STEADY}
        whole = await ask(client, body, "stop-whole")
        text = whole["choices"][0]["text"]
        stop = text[len(text) * 2 // 3 :][:12]
        asking = asyncio.create_task(ask(client, {**body, "stop": [stop]}, "stop-early"))
        assert await move_while(client, asking, "stop-early", 1) == 1
        stopped = await asking
        choice = stopped["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["text"] == text[: text.index(stop)]
        await client.idle()


async def test_a_client_that_leaves_frees_its_blocks(application: Application) -> None:
    async with application.client() as client:
        body = {"prompt": prompt(30, "leaves"), "max_tokens": 2000, "n": 2, **DRAWN}
        asking = asyncio.create_task(ask(client, body, "leaves"))

        async def both_run() -> bool:
            return len(await requests_of(client, "leaves")) == 2

        await eventually(both_run)
        asking.cancel()
        await client.idle()


@counts.LONG_ONLY
async def test_private_members_of_a_client_reach_no_connector(application: Application) -> None:
    async with application.client() as client:
        body = {"prompt": prompt(5, "private"), "max_tokens": 9, **STEADY}
        plain = await ask(client, body, "plain")
        load = {"mell_load": {"load": "/etc/passwd", "first": 0, "last": 1}}
        for private in ({"kv_transfer_params": load}, {"vllm_xargs": {"kv_transfer_params": json.dumps(load)}}):
            response = await client.http.post("/v1/completions", json={"model": MODEL, **body, **private})
            assert response.status_code == 400 or response.json()["choices"] == plain["choices"]


@counts.LONG_ONLY
async def test_a_request_counts_once(application: Application) -> None:
    async with application.client() as client:
        await two_run(client)
        before = await client.metrics()
        body = {"prompt": prompt(5, "counted"), "max_tokens": LONG, **STEADY}
        asking = asyncio.create_task(ask(client, body, "counted"))
        assert await move_while(client, asking, "counted", 2)
        await asking
        after = await client.metrics()
        for name, grown in (
            ("vllm:request_success_total", 1),
            ("vllm:request_generation_tokens_sum", LONG),
            ("vllm:request_prompt_tokens_sum", 5),
            ("vllm:e2e_request_latency_seconds_count", 1),
        ):
            assert total(after, name) - total(before, name) == grown, name


@counts.LONG_ONLY
async def test_scores_are_the_probabilities_of_tokens(application: Application) -> None:
    async with application.client() as client:
        body = {"model": MODEL, "query": prompt(20, "query"), "items": [prompt(5, "one"), prompt(9, "two")]}
        scores = []
        for labels in ([5, 6], [6, 5]):
            response = await client.http.post("/generative_scoring", json={**body, "label_token_ids": labels})
            assert response.status_code == 200, response.text
            scores.append([item["score"] for item in response.json()["data"]])
        for one, other in zip(*scores, strict=True):
            assert 0 < one < 1 and abs(one + other - 1) < 1e-6


@counts.LONG_ONLY
async def test_operators_reset_all_prefix_caches(application: Application) -> None:
    async with application.client() as client:
        await two_run(client)
        await client.idle()
        body = {"prompt": prompt(200, "cached"), "max_tokens": 2, **STEADY}
        hits = []
        for reset in (False, False, True):
            if reset:
                answer = (await client.http.post("/mell/reset_prefix_cache")).json()
                assert answer == {"success": True, "failed": {}}
            before = total(await client.metrics(), "vllm:prefix_cache_hits_total")
            for _ in range(2):  # `best_fit` puts both on one replica
                await ask(client, body, "cached")
            hits.append(total(await client.metrics(), "vllm:prefix_cache_hits_total") - before)
        assert hits[1] > hits[0] == hits[2] > 0


@counts.LONG_ONLY
async def test_a_replica_with_requests_keeps_its_cache_and_has_no_profiler(application: Application) -> None:
    async with application.client() as client:
        await two_run(client)
        body = {"prompt": prompt(5, "busy"), "max_tokens": 2000, **STEADY}
        asking = asyncio.create_task(ask(client, body, "busy"))

        async def runs() -> bool:
            return bool(await requests_of(client, "busy"))

        await eventually(runs)
        answer = (await client.http.post("/mell/reset_prefix_cache")).json()
        assert not answer["success"] and set(answer["failed"].values()) == {"the prefix cache is in use"}
        assert len(answer["failed"]) == 1
        profiled = (await client.http.post("/mell/start_profile")).json()
        assert len(profiled["failed"]) == 2 and "engine_kwargs.profiler_config" in str(profiled["failed"])
        asking.cancel()
        await client.idle()


@counts.LONG_ONLY
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_errors_of_messages_are_anthropics(application: Application, path: str) -> None:
    async with application.client() as client:
        for body, status, kind in (
            ({"model": "other", "messages": [], "max_tokens": 5}, 404, "not_found_error"),
            ({"model": MODEL, "messages": 5, "max_tokens": 5}, 400, "invalid_request_error"),
            ({"model": MODEL, "messages": [{"role": "user"}], "max_tokens": 5}, 400, "invalid_request_error"),
        ):
            response = await client.http.post(path, json=body)
            answer = response.json()
            assert (response.status_code, answer["type"], answer["error"]["type"]) == (status, "error", kind)


async def test_the_ingress_has_a_modest_size(application: Application) -> None:
    assert process("ServeReplica:mell:Ingress").memory_full_info().uss < 1 << 30
