"""Pooling models: vectors and scores are the model's own, whatever happens to replicas, and requests never move.

Their application is a `serve run` without Mell's launcher, which leaves nothing behind either. The answers of three
models are compared with those of vLLM's own server.
"""

import asyncio
import base64
import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from app.tinymodel import ensure_tiny_model
from benchmarks.servers import Rig, bare_vllm
from deployments.engine.port import Tie
from tests.counts import LONG_ONLY
from tests.integration.application import MODEL, Application, Client, eventually, total
from tests.integration.conftest import START_LIMIT_S, Stage, free_port, pooling
from tests.integration.models.rows import How, row
from tests.integration.pooling_models import CONTEXT, ensure_encoder, ensure_reranker
from tests.integration.runs import AGENTS, COMMANDS, SERVE_RUN, WITHIN_S, Left, Run, wait_until

pytestmark = LONG_ONLY

NOISE = 1e-4
"""Tolerance for numbers: in another batch, their sums are added up in another order."""
QUERY = "Where do blocks move?"
TEXTS = ["Blocks move between replicas", "the stream never breaks", "a cache is only a cache", "A"]


@pytest.fixture(scope="module")
def encoder_run(stage: Stage) -> Iterator[Run]:
    """Two replicas with an encoder, which has no KV cache, under `serve run`."""
    stage.clear()
    config = pooling(ensure_encoder())
    config["applications"][0]["args"]["ingress"]["port"] = (port := free_port())
    path = stage.folder / "encoder.yaml"
    path.write_text(yaml.safe_dump(config))
    started = Run([*COMMANDS[SERVE_RUN], str(path)], port, stage.folder)
    try:
        wait_until(started.healthy, START_LIMIT_S)
        yield started
    finally:
        started.close()


@pytest.fixture
def encoder(encoder_run: Run, stage: Stage) -> Application:
    """Its application."""
    return Application(encoder_run.url, faults=Path(), capacity=0, folder=stage.folder)


# --- the model itself ---------------------------------------------------------------------------------


@cache
def encoder_itself() -> tuple[Any, Any]:
    """The encoder's tokenizer and its model, without vLLM."""
    from transformers import AutoTokenizer, BertModel

    folder = ensure_encoder()
    return AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()


def tokens_of(text: str) -> list[int]:
    tokenizer, _ = encoder_itself()
    return list(tokenizer(text)["input_ids"])


def vector_of(tokens: Sequence[int]) -> Any:
    """The vector that the encoder itself makes of tokens: the first token's, with length 1."""
    import torch

    _, model = encoder_itself()
    with torch.no_grad():
        first = model(torch.tensor([list(tokens)])).last_hidden_state[0, 0].numpy()
    return first / np.linalg.norm(first)


async def post(client: Client, path: str, **body: Any) -> Any:
    response = await client.http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return response.json()


def vectors(document: Any) -> list[Any]:
    """The vectors of an answer, in the order of their inputs."""
    assert [each["index"] for each in document["data"]] == list(range(len(document["data"])))
    return [np.array(each["embedding"]) for each in document["data"]]


async def test_vectors_are_the_models_own(encoder: Application) -> None:
    async with encoder.client() as client:
        tokens = [tokens_of(text) for text in TEXTS]
        document = await post(client, "/v1/embeddings", input=TEXTS)
        as_tokens = await post(client, "/v1/embeddings", input=tokens)
        encoded = await post(client, "/v1/embeddings", input=TEXTS[0], encoding_format="base64")
        scored = await post(client, "/score", queries=QUERY, documents=TEXTS)
        ranked = await post(client, "/v1/rerank", query=QUERY, documents=TEXTS, top_n=2)
    expected = [vector_of(each) for each in tokens]
    for made in (vectors(document), vectors(as_tokens)):
        assert np.allclose(made, expected, atol=NOISE)
    assert document["usage"]["prompt_tokens"] == sum(map(len, tokens))
    raw = base64.b64decode(encoded["data"][0]["embedding"])
    assert np.allclose(np.frombuffer(raw, np.float32), expected[0], atol=NOISE)
    scores = [float(vector_of(tokens_of(QUERY)) @ vector) for vector in expected]
    assert [each["score"] for each in scored["data"]] == pytest.approx(scores, abs=NOISE)
    best = sorted(range(len(TEXTS)), key=lambda index: -scores[index])[:2]
    assert [result["index"] for result in ranked["results"]] == best


HOSTILE: dict[str, tuple[str, dict[str, Any], int]] = {
    "a token id below zero": ("/v1/embeddings", {"input": [5, -1]}, 400),
    "a token id beyond the vocabulary": ("/v1/embeddings", {"input": [[5], [1 << 20]]}, 400),
    "a number of 63 bits": ("/v1/embeddings", {"input": [(1 << 63) - 1]}, 400),
    "too many inputs": ("/v1/embeddings", {"input": ["a"] * 2049}, 400),
    "too long an input": ("/v1/embeddings", {"input": [5] * (CONTEXT + 1)}, 400),
    "no input": ("/v1/embeddings", {"input": []}, 400),
    "an empty input": ("/v1/embeddings", {"input": [[]]}, 400),
    "dimensions that the model does not have": ("/v1/embeddings", {"input": "a", "dimensions": 5}, 400),
    "another task": ("/pooling", {"input": "a", "task": "classify"}, 400),
    "a plugin's task": ("/pooling", {"data": {"a": 1}, "task": "plugin"}, 400),
    "documents that do not pair": ("/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, 400),
    "media": ("/v1/embeddings", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
    "text to generate": ("/v1/completions", {"prompt": "a"}, 404),
    "a chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 404),
    "classes": ("/classify", {"input": "a"}, 404),
}


async def test_odd_requests_are_refused_and_leave_the_engines_alone(encoder: Application) -> None:
    async with encoder.client() as client:
        before = [replica["pids"] for replica in await client.running()]
        found = {}
        for name, (path, body, _) in HOSTILE.items():
            response = await client.http.post(path, json={"model": MODEL, **body})
            found[name] = response.status_code, response.text[:200]
        wrong = {name: each for name, each in found.items() if each[0] != HOSTILE[name][2]}
        assert not wrong
        assert (await client.http.get("/health")).status_code == 200
        assert vectors(await post(client, "/v1/embeddings", input="A"))
        assert [replica["pids"] for replica in await client.running()] == before


async def test_every_input_is_one_request_in_the_metrics(encoder: Application) -> None:
    async with encoder.client() as client:
        before = await client.metrics()
        document = await post(client, "/v1/embeddings", input=TEXTS)
        after = await client.metrics()

    def more(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    tokens = document["usage"]["prompt_tokens"]
    assert more("vllm:request_success_total") == len(TEXTS)
    assert more("vllm:request_prompt_tokens_sum") == more("vllm:prompt_tokens_total") == tokens
    assert more("mell_requests_total", endpoint="embeddings", outcome="ok") == 1
    assert (more("mell_request_prompt_tokens_total"), more("mell_request_completion_tokens_total")) == (tokens, 0)


# --- many at once, ordered to move, and killed --------------------------------------------------------


def inputs(seed: int, count: int = 16) -> list[list[int]]:
    """Long inputs that no other seed has."""
    draw = np.random.default_rng(seed)
    return draw.integers(5, 100, (count, CONTEXT)).tolist()  # type: ignore[no-any-return]


async def flood(client: Client, calls: int) -> list["asyncio.Task[Any]"]:
    """Calls that keep the replicas busy, labelled by their numbers."""

    async def one(seed: int) -> Any:
        body = {"model": MODEL, "input": inputs(seed)}
        response = await client.http.post("/v1/embeddings", json=body, headers={"X-Request-Id": f"flood-{seed}"})
        assert response.status_code == 200, response.text
        return response.json()

    return [asyncio.create_task(one(seed)) for seed in range(calls)]


async def busy(client: Client) -> list[dict[str, Any]]:
    """The replicas once each has requests, the one with the most first."""
    found: list[dict[str, Any]] = []

    async def all_are() -> bool:
        found[:] = sorted(await client.running(), key=lambda replica: -len(replica["requests"]))
        return len(found) == 2 and all(len(replica["requests"]) > 10 for replica in found)

    await eventually(all_are, within_s=60)
    return found


async def refusal(client: Client, source: str, target: str) -> httpx.Response:
    """The answer to an order to move one of a replica's requests that has not ended meanwhile."""
    found: list[httpx.Response] = []

    async def answered() -> bool:
        (requests,) = (r["requests"] for r in await client.running() if r["id"] == source)
        found[:] = [await client.move(requests[-1]["id"], target=target)] if requests else []
        return bool(found) and found[0].status_code != 404

    await eventually(answered)
    return found[0]


async def test_requests_stay_and_those_of_a_killed_replica_are_sent_to_another(encoder: Application) -> None:
    async with encoder.client() as client:
        calls = await flood(client, 40)
        doomed, other = await busy(client)
        assert {r["immovable_reason"] for r in doomed["requests"]} == {str(Tie.POOLED)}
        assert not any(r["movable"] for r in doomed["requests"])
        assert doomed["capacity_tokens"] >= CONTEXT
        order = await refusal(client, doomed["id"], other["id"])
        assert row("Pooling models (embeddings, scores, classes)").how is How.PLACED
        assert order.status_code == 422 and order.json()["error"]["message"] == Tie.POOLED, order.text
        os.kill(doomed["pids"][1], signal.SIGKILL)
        documents = await asyncio.gather(*calls)
        lost = [m for m in await client.migrations() if m["source"] == doomed["id"]]
    assert lost and all(m["reason"].startswith("replica lost") for m in lost)
    for seed, document in enumerate(documents):
        made = vectors(document)
        assert len(made) == 16
        assert np.allclose(made[seed % 16], vector_of(inputs(seed)[seed % 16]), atol=NOISE)


def test_nothing_is_left_of_serve_run(encoder_run: Run) -> None:
    """SIGTERM to its process group, as a rule while the killed replica's successor starts."""
    left = Left(encoder_run)
    assert left.memory()
    encoder_run.signal_group(signal.SIGTERM)
    encoder_run.process.wait(WITHIN_S)
    left.wait(except_for=AGENTS)


# --- beside vLLM's own server -------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolingRig(Rig):
    """The conditions of a pooling model, whose folder `make` gives."""

    make: Callable[[], Path] = ensure_encoder

    @property
    def shape(self) -> Any:
        return SimpleNamespace(folder=self.make)


CHAT = [{"role": "user", "content": QUERY}]
MODELS: dict[str, tuple[Callable[[], Path], dict[str, Any]]] = {
    "encoder": (ensure_encoder, {}),
    "token vectors": (ensure_encoder, {"pooler_config": {"task": "token_embed"}}),
    "reranker": (ensure_reranker, {}),
    "embedding llama": (ensure_tiny_model, {"runner": "pooling", "convert": "embed", "max_model_len": 1024}),
}
PATHS = [
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions", "/v1/responses"),
]
"""Without /v1/messages, whose errors have Anthropic's form in Mell."""
BODIES: list[dict[str, Any]] = [
    {"input": TEXTS},
    {"input": TEXTS[0], "encoding_format": "base64"},
    {"input": TEXTS, "encoding_format": "bytes_only"},
    {"input": TEXTS, "encoding_format": "bytes", "embed_dtype": "float16"},
    {"input": [5, 6, 7]},
    {"input": [[5, 6, 7], [8]]},
    {"input": TEXTS[0] * 200, "truncate_prompt_tokens": 20},
    {"input": TEXTS[0] * 400},
    {"input": TEXTS[0], "dimensions": 16},
    {"input": TEXTS[0], "use_activation": False},
    {"input": TEXTS[0], "task": "token_embed"},
    {"input": TEXTS[0], "task": "embed"},
    {"input": TEXTS[0], "model": "another"},
    {"input": ""},
    {"input": []},
    {"messages": CHAT},
    {"texts": TEXTS, "input_type": "query", "embedding_types": ["float"]},
    {"queries": QUERY, "documents": TEXTS},
    {"text_1": QUERY, "text_2": TEXTS[0]},
    {"queries": TEXTS, "documents": TEXTS[::-1]},
    {"query": QUERY, "documents": TEXTS},
    {"query": QUERY, "documents": TEXTS, "top_n": 2, "max_tokens_per_doc": 3},
    {"query": QUERY, "documents": []},
    {"prompt": QUERY, "max_tokens": 3},
    {"tokens": [5, 6]},
    {},
]
CASES = list(itertools.product(PATHS, BODIES))


async def answers(url: str) -> list[httpx.Response]:
    """A server's answers to all cases, eight at a time."""
    gate = asyncio.Semaphore(8)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:

        async def ask(path: str, body: dict[str, Any]) -> httpx.Response:
            async with gate:
                return await http.post(path, json={"model": MODEL, **body})

        return await asyncio.gather(*(ask(path, body) for path, body in CASES))


def content(response: httpx.Response) -> Any:
    """An answer's document, without names, times and the model's tasks in errors, whose order differs by process."""
    if response.headers["content-type"] == "application/octet-stream":
        return ["bytes", len(response.content)]
    try:
        return _without_names(response.json())
    except ValueError:
        return response.text


def _without_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_names(each) for each in value]
    if isinstance(value, str):
        return value.partition(" Supported tasks: ")[0]
    if not isinstance(value, dict):
        return value
    members = {name: _without_names(each) for name, each in value.items() if name not in ("id", "created")}
    if isinstance(encoded := members.get("embedding", members.get("data")), str):
        members["embedding"] = np.frombuffer(base64.b64decode(encoded), np.float32).tolist()
        members.pop("data", None)
    return members


def different(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """The differences of two contents."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            yield from different(one[name], other[name], f"{path}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            yield from different(mine, theirs, f"{path}[]")
    elif isinstance(one, float) and isinstance(other, float):
        if abs(one - other) > NOISE:
            yield f"{path}: {one} != {other}"
    elif one != other:
        yield f"{path}: {str(one)[:300]} != {str(other)[:300]}"


def report(wanted: Iterable[httpx.Response], given: Iterable[httpx.Response]) -> list[str]:
    """The differences of two servers, one line each."""
    lines = []
    for (path, body), want, got in zip(CASES, wanted, given, strict=True):
        found = [*different(want.status_code, got.status_code), *different(content(want), content(got))][:2]
        lines += [f"{path} {str(body)[:150]}: {each}" for each in found]
    return lines


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_vllms_server(stage: Stage, name: str) -> None:
    make, engine_kwargs = MODELS[name]
    stage.clear()
    with bare_vllm(free_port(), PoolingRig(extra=engine_kwargs, make=make)) as port:
        wanted = asyncio.run(answers(f"http://127.0.0.1:{port}"))
    application = stage.show(f"pooling {name}", pooling(make(), **engine_kwargs))
    given = asyncio.run(answers(application.url))
    assert sum(response.status_code == 200 for response in wanted) > 20
    lines = report(wanted, given)
    assert not lines, "\n".join([f"{len(lines)} differences", *lines])
