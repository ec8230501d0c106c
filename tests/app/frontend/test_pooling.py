"""A pooling model's endpoints of vLLM's application over fake replicas, whose vectors are functions of the prompts."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from app.frontend.calls import CURRENT, ApiCall
from migration.protocol.errors import PeerLost, Refused
from policies.causes import Cause
from policies.model import ReplicaId
from tests.app.frontend.conftest import CONTEXT, POOLING, FrontendApi, config, serving
from tests.app.ingress.fakes import Exchange, eventually, make_service, pooled
from tests.deployments.engine.quick_engine import set_pace
from tests.migration.world import INGRESS

pytestmark = pytest.mark.asyncio(loop_scope="module")

TASKS = ("embed", "token_embed")
INPUTS = [[5, 6, 7], [8, 9], [10]]
CHAT = [{"role": "user", "content": "Where do blocks move?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[FrontendApi]:
    async with serving(config(engine=POOLING), tasks=TASKS) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def slow() -> AsyncIterator[FrontendApi]:
    """An application whose requests end only if their replicas' steps are shortened."""
    async with serving(config(engine=POOLING), step_s=60, tasks=TASKS) as served:
        yield served


async def embed(api: FrontendApi, **body: Any) -> list[Any]:
    """The vectors of an answer, in the order of their indices."""
    answer = await api.post("/v1/embeddings", **body)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return [each["embedding"] for each in data]


async def asking(api: FrontendApi, input: Any, count: int = 1) -> Exchange:
    """A call whose `count` requests run on replica a."""
    body = json.dumps({"input": input}).encode()
    exchange = Exchange(api, body, "/v1/embeddings", spec_version="2.3")  # type: ignore[arg-type]
    await eventually(lambda: len(api.service.replica("a").host._runs) == count)
    return exchange


async def test_every_input_has_its_vector(api: FrontendApi) -> None:
    answer = await api.post("/v1/embeddings", input=INPUTS, model="mell-tiny")
    assert [each["embedding"] for each in answer.json()["data"]] == [pooled(tokens) for tokens in INPUTS]
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, INPUTS))
    await api.service.idle()


async def test_a_prompt_may_be_as_long_as_the_context(api: FrontendApi) -> None:
    whole = [5] * CONTEXT
    assert await embed(api, input=whole) == [pooled(whole)]
    assert (await api.post("/v1/embeddings", input=[*whole, 5])).status_code == 400


async def test_numbers_travel_as_bytes_too(api: FrontendApi) -> None:
    (encoded,) = await embed(api, input=INPUTS[0], encoding_format="base64")
    assert np.frombuffer(base64.b64decode(encoded), np.float32).tolist() == pooled(INPUTS[0])
    raw = await api.post("/v1/embeddings", input=INPUTS, encoding_format="bytes_only")
    assert np.frombuffer(raw.content, np.float32).tolist() == [n for tokens in INPUTS for n in pooled(tokens)]


async def test_texts_and_chats_are_tokenized(api: FrontendApi) -> None:
    tokens = (await api.post("/tokenize", prompt="blocks move")).json()["tokens"]
    assert await embed(api, input="blocks move") == [pooled(tokens)]
    chat = (await api.post("/tokenize", messages=CHAT, add_generation_prompt=False)).json()["tokens"]
    assert await embed(api, messages=CHAT) == [pooled(chat)]


async def test_a_score_is_computed_of_two_vectors(api: FrontendApi) -> None:
    texts = ["blocks move", "the stream never breaks"]
    one, *others = (np.array(vector) for vector in await embed(api, input=["a query", *texts]))
    expected = [float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)) for other in others]
    scores = (await api.post("/score", queries="a query", documents=texts)).json()["data"]
    assert [each["score"] for each in scores] == pytest.approx(expected)
    ranked = (await api.post("/rerank", query="a query", documents=texts)).json()["results"]
    assert sorted(each["relevance_score"] for each in ranked) == pytest.approx(sorted(expected))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/classify"])
async def test_what_the_model_does_not_do_is_answered_as_by_vllm(api: FrontendApi, path: str) -> None:
    answer = await api.post(path, prompt="a", messages=CHAT, input="a", model="mell-tiny")
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


async def test_requests_belong_to_their_call(api: FrontendApi) -> None:
    call = ApiCall("mine")
    token = CURRENT.set(call)
    answering = asyncio.create_task(embed(api, input=INPUTS))
    CURRENT.reset(token)
    await answering
    assert (call.prompt_tokens, call.completion_tokens) == (sum(map(len, INPUTS)), 0)
    assert [request.finish for request in call.requests] == ["stop"] * len(INPUTS)


async def test_a_request_on_a_replica_that_dies_is_sent_to_another(slow: FrontendApi) -> None:
    answering = asyncio.create_task(embed(slow, input=INPUTS))
    a, b = slow.service.replica("a"), slow.service.replica("b")
    await eventually(lambda: len(a.host._runs) == len(INPUTS))
    set_pace(b.engine, decode_s=0.001)
    slow.service.kill("a")
    assert await answering == [pooled(tokens) for tokens in INPUTS]
    await slow.service.idle()


async def test_a_request_does_not_move(slow: FrontendApi) -> None:
    exchange = await asking(slow, [5])
    (request,) = slow.service.streams._live
    with pytest.raises(Refused, match="pooling model's request") as refusal:
        slow.service.move(request, "b")
    assert refusal.value.cause is Cause.IMMOVABLE
    (load,) = slow.service.replica("a").host.loads()
    assert load.immovable == str(refusal.value)
    exchange.disconnect()
    await slow.service.idle()


async def test_a_client_that_leaves_ends_its_requests(slow: FrontendApi) -> None:
    exchange = await asking(slow, INPUTS, count=len(INPUTS))
    exchange.disconnect()
    await exchange.ended()
    await slow.service.idle()


async def test_the_application_waits_for_a_replica_that_knows_the_tasks() -> None:
    from app.frontend.app import VllmFrontend

    service = make_service()
    for replica in service.replicas.values():
        replica.engine.tasks = TASKS
    running = service.members.running
    service.members.become()

    async def unreachable() -> None:
        raise PeerLost("not yet")

    service.wires.before[ReplicaId("a"), "tasks"] = unreachable
    made = config(engine=POOLING)
    starting = asyncio.create_task(VllmFrontend.start(made, made.models[0], service.streams, INGRESS))
    await asyncio.sleep(0.5)
    assert not starting.done() and not service.wires.calls
    service.members.become(*running)
    frontend = await asyncio.wait_for(starting, 20)
    assert [call for call in service.wires.calls if call[1] == "tasks"] == [("a", "tasks"), ("b", "tasks")]
    await frontend.close()
