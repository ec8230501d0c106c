"""Logprobs as clients see them: whole, streamed, under moves and deaths; written as vLLM's server writes them."""

import json
import math
import random
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.v1.engine.logprobs import LogprobsProcessor, create_sample_logprobs
from vllm.v1.outputs import LogprobsLists

from app.ingress.openai.answers.logprobs import Scored, Scorer, chat_logprobs, completion_logprobs
from app.ingress.openai.model import Model
from deployments.engine.tokens import expected
from migration.protocol.core_messages import decode_logprobs, encode_logprobs
from migration.protocol.messages import PathRequest
from migration.protocol.reader import ReaderState
from migration.protocol.request import Delta
from tests.app.ingress.fakes import MESSAGES, PROMPT, Api, Exchange, body, events, eventually, make_api, make_service
from tests.deployments.engine.fake_engine import expected_logprobs, prompt_of
from tests.migration.world import spec

# --- as vLLM writes them ------------------------------------------------------------------------------

Told = tuple[int, float, list[tuple[int, float]]]
"""A sampled token, its logprob, and the likeliest."""


def vllms(pretrained: Any, told: Sequence[Told], top: int, endpoint: str) -> Any:
    """What vLLM's server makes of it."""
    processor = LogprobsProcessor(pretrained, create_sample_logprobs(False), None, 0.0, top, None)
    for token, logprob, likely in told:
        ids, values = [token, *(t for t, _ in likely)], [logprob, *(v for _, v in likely)]
        rank = np.array([1], dtype=np.int32)
        processor._update_sample_logprobs(LogprobsLists(np.array([ids]), np.array([values], dtype=np.float32), rank))
    tokens = [token for token, _, _ in told]
    server: Any = SimpleNamespace(
        return_tokens_as_token_ids=False, _get_decoded_token=OpenAIServingChat._get_decoded_token
    )
    server._get_top_logprobs = partial(OpenAIServingChat._get_top_logprobs, server)
    if endpoint == "chat":
        made: Any = OpenAIServingChat._create_chat_logprobs(server, tokens, processor.logprobs, pretrained, top)
        return {**made.model_dump(), "refusal": None}
    made = OpenAIServingCompletion._create_completion_logprobs(server, tokens, processor.logprobs, top, pretrained)
    return made.model_dump()


def read(tokenizer: Tokenizer, ids: Sequence[int], rests: Sequence[bytes], top: int = 0) -> list[Scored]:
    """Tokens that were a step each, with the rests of these steps."""
    scorer = Scorer(tokenizer, top)
    scorer.take(enumerate(rests))
    return scorer.read(ids, 0, len(rests))


def ours(tokenizer: Tokenizer, told: Sequence[Told], top: int, endpoint: str) -> Any:
    rests = [
        encode_logprobs([token, *(t for t, _ in likely)], [logprob, *(v for _, v in likely)])
        for token, logprob, likely in told
    ]
    scored = read(tokenizer, [token for token, _, _ in told], rests, top)
    return (chat_logprobs if endpoint == "chat" else completion_logprobs)(scored, top)


def draw_told(vocabulary: int, top: int, seed: int) -> list[Told]:
    """The sampled token is sometimes among the likeliest; many tokens are parts of characters."""
    draw = random.Random(seed)
    told = []
    for _ in range(200):
        likely = [(t, -n / 4 if n < 4 else -math.inf) for n, t in enumerate(draw.sample(range(vocabulary), top))]
        inside = bool(likely) and draw.random() < 0.5
        told.append((*(draw.choice(likely) if inside else (draw.randrange(vocabulary), -8.5)), likely))
    return told


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs_are_written_as_vllm_writes_them(
    pretrained: Any, tokenizer: Tokenizer, top: int, endpoint: str
) -> None:
    told = draw_told(512, top, seed=top)
    assert ours(tokenizer, told, top, endpoint) == vllms(pretrained, told, top, endpoint)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_characters_of_several_tokens_are_written_as_vllm_writes_them(
    pretrained: Any, tokenizer: Tokenizer, endpoint: str
) -> None:
    ids = tokenizer.encode("naïve 🙂 tokens, ½ a 語 each", add_special_tokens=False).ids
    told: list[Told] = [(token, -0.5, [(token, -0.5), (300, -1.0)]) for token in ids]
    assert ours(tokenizer, told, 2, endpoint) == vllms(pretrained, told, 2, endpoint)
    texts = [token.text for token in read(tokenizer, ids, [encode_logprobs([id], [-1.0]) for id in ids])]
    assert "".join(texts) == "naïve 🙂 tokens, ½ a 語 each" and "" in texts


def test_leading_spaces_are_written_as_vllm_writes_them() -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "▁▁▁": 2, "s": 3, "▁": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    told = draw_told(5, 3, seed=1)
    pretrained = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert ours(tokenizer, told, 3, "completions") == vllms(pretrained, told, 3, "completions")
    the = read(tokenizer, [1, 2], [encode_logprobs([id], [-1.0]) for id in (1, 2)])
    assert [token.text for token in the] == [" the", "   "]


# --- whole and streamed -------------------------------------------------------------------------------

TOKENS = expected(tuple(PROMPT), 300)


def scored(model: Model, count: int, top: int, prompt: tuple[int, ...] = tuple(PROMPT)) -> list[Scored]:
    """What there is to be told of the first tokens of an undisturbed answer."""
    rests = [rest for _, rest in expected_logprobs(prompt, count, top)]
    return read(model.tokenizer, expected(prompt, count), rests, top)


def choice(response: Any) -> Any:
    assert response.status_code == 200, response.text
    (only,) = response.json()["choices"]
    return only


def joined(chunks: list[Any]) -> dict[str, list[Any]]:
    """The logprobs of a stream, joined."""
    whole: dict[str, list[Any]] = {}
    for chunk in chunks:
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            whole.setdefault(key, []).extend(values or [])
    return whole


async def test_a_completion_has_its_logprobs(api: Api) -> None:
    logprobs = choice(await api.complete(max_tokens=20, logprobs=3))["logprobs"]
    assert logprobs == completion_logprobs(scored(api.backend.model, 20, 3), 3)
    assert max(len(top) for top in logprobs["top_logprobs"]) == 3
    assert logprobs["token_logprobs"][0] == decode_logprobs(expected_logprobs(tuple(PROMPT), 1, 0)[0][1])[0].logprob


async def test_no_likeliest_are_the_token_itself(api: Api) -> None:
    logprobs = choice(await api.complete(max_tokens=3, logprobs=0))["logprobs"]
    pairs = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: logprob} for token, logprob in pairs]


@pytest.mark.parametrize(("asked", "top"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 20}, 20)], ids=str)
async def test_a_chat_has_its_logprobs(api: Api, asked: Any, top: int) -> None:
    answer = choice(await api.chat(max_tokens=20, logprobs=True, **asked))
    tokens = (await api.post("/tokenize", json={"messages": MESSAGES})).json()["tokens"]
    assert answer["logprobs"] == chat_logprobs(scored(api.backend.model, 20, top, tuple(tokens)), top)
    assert [len(token["top_logprobs"]) for token in answer["logprobs"]["content"]] == [top] * 20
    assert all(bytes(token["bytes"]).decode() == token["token"] for token in answer["logprobs"]["content"])


@pytest.mark.parametrize("path", ["completions", "chat"])
async def test_a_stream_has_the_logprobs_of_each_chunk(api: Api, path: str) -> None:
    ask, asked = (api.chat, {"logprobs": True}) if path == "chat" else (api.complete, {"logprobs": 2})
    whole = choice(await ask(max_tokens=30, **asked))["logprobs"]
    chunks = events(await ask(max_tokens=30, stream=True, **asked))[:-1]
    told = [c["choices"][0]["logprobs"] for c in chunks]
    if path == "chat":
        assert told.pop(0) is None and joined(chunks) == {"content": whole["content"], "refusal": []}
        assert all(len(logprobs["content"]) == 1 for logprobs in told)
    else:
        assert joined(chunks) == whole and all(len(logprobs["tokens"]) == 1 for logprobs in told)


@pytest.mark.parametrize("asked", [{}, {"logprobs": None}], ids=str)
async def test_without_being_asked_for_there_are_none(api: Api, asked: Any) -> None:
    assert choice(await api.complete(max_tokens=3, **asked))["logprobs"] is None
    assert choice(await api.chat(max_tokens=3, logprobs=False, top_logprobs=0))["logprobs"] is None


async def test_the_token_that_ends_an_answer_has_logprobs_and_no_text(api: Api) -> None:
    end, model = 20, api.backend.model
    asked: dict[str, Any] = {"max_tokens": 60, "stop_token_ids": [TOKENS[end]], "logprobs": 1}
    answer = choice(await api.complete(**asked))
    assert answer["logprobs"] == completion_logprobs(scored(model, end + 1, 1), 1)
    assert joined(events(await api.complete(stream=True, **asked))[:-1]) == answer["logprobs"]


# --- stop strings -------------------------------------------------------------------------------------


async def test_logprobs_end_with_the_token_that_completes_a_stop_string(api: Api) -> None:
    text = choice(await api.complete(max_tokens=60))["text"]
    stop = text[40:46]
    assert text.count(stop) == 1
    answer = await api.complete(max_tokens=60, logprobs=0, stop=stop)
    count, logprobs = answer.json()["usage"]["completion_tokens"], choice(answer)["logprobs"]
    assert logprobs == completion_logprobs(scored(api.backend.model, count, 0), 0)
    said = api.backend.model.tokenizer.decode(list(TOKENS[:count]))
    assert stop in said and stop not in api.backend.model.tokenizer.decode(list(TOKENS[: count - 1]))
    chunks = events(await api.complete(max_tokens=60, logprobs=0, stop=stop, stream=True))[:-1]
    assert joined(chunks) == logprobs


async def test_tokens_that_come_at_once_count_to_the_stop_string_only(model: Model) -> None:
    """After a move many tokens can come in one step. What follows a stop string in it does not count."""
    service = make_service("a", step_s=0.0001)
    api = make_api(model, service)
    text = choice(await api.complete(max_tokens=60))["text"]
    asked: dict[str, Any] = {"max_tokens": 60, "logprobs": 0, "stop": text[40:46]}
    slowly = (await make_api(model).complete(**asked)).json()

    host = service.replica("a").host
    publish = host._publish
    host._publish = lambda run: publish(run) if run.finish else None  # type: ignore[method-assign]
    at_once = (await api.complete(**asked)).json()
    assert (at_once["choices"], at_once["usage"]) == (slowly["choices"], slowly["usage"])


# --- moves and deaths ---------------------------------------------------------------------------------

REQUEST = spec(tokens=300, logprobs=2)
LOGPROBS = expected_logprobs(prompt_of(REQUEST), 300, 2)


@pytest.mark.parametrize("path", [PathRequest.KV, PathRequest.TOKENS])
async def test_a_moved_answer_has_the_logprobs_of_an_unmoved_one(model: Model, path: PathRequest) -> None:
    service = make_service()
    api = make_api(model, service)
    unmoved = choice(await api.complete(max_tokens=300, logprobs=2))
    exchange = Exchange(api, body(max_tokens=300, logprobs=2))
    await eventually(lambda: any(c.reader.cursor.next_index > 10 for c in service.streams._live.values()))
    (request_id,) = service.streams._live
    service.move(request_id, "b", path)
    await exchange.ended()
    data = b"".join(m.get("body", b"") for m in exchange.sent)
    assert json.loads(data)["choices"] == [unmoved]
    assert service.replica("a").moves.records()[0].outcome == "committed"


async def test_an_answer_whose_replica_died_has_the_logprobs_of_another() -> None:
    service = make_service()
    async with service.streams.open(REQUEST) as conversation:
        await service.reading(conversation, 10)
        service.kill("a")
        await eventually(lambda: conversation.finish is not None)
    assert tuple(conversation.extras) == LOGPROBS
    await service.idle()


async def test_tokens_that_came_without_their_logprobs_are_computed_anew() -> None:
    """The source dies amid a move: the target has tokens from it that the reader never got, without their logprobs."""
    service = make_service("abc", order="acb")
    service.replica("b").faults["adopted"] = "silent"
    async with service.streams.open(REQUEST) as conversation:
        await service.reading(conversation, 10)

        def lose(batch: tuple[object, ...]) -> bool:
            return conversation.reader.state is ReaderState.MOVING and any(
                isinstance(e, Delta) and e.hop == 0 for e in batch
            )

        service.wires.lose = lose
        service.move(REQUEST.id, "b")
        await eventually(lambda: "b" in service.hosts(REQUEST.id))
        missed = service.replica("b").host.snapshot(REQUEST.id).outputs
        assert len(missed) > conversation.reader.cursor.next_index, "nothing was missed"
        service.kill("a")
        await eventually(lambda: conversation.finish is not None)
    assert tuple(conversation.tokens) == expected(prompt_of(REQUEST), 300)
    assert tuple(conversation.extras) == LOGPROBS
    await service.idle()
