"""Several choices of one answer, for one prompt or several, and prompts that are said again."""

import asyncio
import json
from typing import Any

import pytest

from app.ingress.openai.completions import COMPLETIONS
from app.ingress.openai.generation import to_plan
from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import CompletionRequest
from deployments.engine.tokens import expected
from migration.protocol.request import IngressId
from policies.model import RequestId
from tests.app.ingress.fakes import (
    MESSAGES,
    PROMPT,
    Api,
    Exchange,
    Service,
    body,
    events,
    eventually,
    make_api,
    make_service,
)
from tests.deployments.engine.fake_engine import prompt_of

SLOW_S = 0.01
"""At this pace nothing ends by itself while a test waits for it to be ended."""
OTHER = [7, 8, 9]


def text_of(model: Model, count: int, prompt: list[int] = PROMPT) -> str:
    """The text of an undisturbed answer."""
    before = model.tokenizer.decode(prompt)
    whole: str = model.tokenizer.decode([*prompt, *expected(tuple(prompt), count)])
    return whole[len(before) :].rstrip("\ufffd")


def by_index(chunks: list[Any]) -> dict[int, list[Any]]:
    """The choices of a stream's chunks."""
    told: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            told.setdefault(choice["index"], []).append(choice)
    return told


def said(choices: list[Any]) -> str:
    return "".join(c["text"] if "text" in c else c["delta"]["content"] for c in choices)


# --- n ------------------------------------------------------------------------------------------------


async def test_n_choices_are_told_in_order_and_the_prompt_counts_once(api: Api) -> None:
    answer = (await api.complete(max_tokens=10, n=3, best_of=3)).json()
    text = text_of(api.backend.model, 10)
    assert answer["choices"] == [
        {"index": index, "text": text, "logprobs": None, "finish_reason": "length"} for index in range(3)
    ]
    assert answer["usage"] == {"prompt_tokens": 40, "completion_tokens": 30, "total_tokens": 70}
    await api.backend.service.idle()


async def test_a_stream_interleaves_its_choices(model: Model) -> None:
    api = make_api(model, make_service(step_s=SLOW_S))
    chunks = events(await api.complete(max_tokens=8, n=3, stream=True, stream_options={"include_usage": True}))
    assert chunks.pop() == "[DONE]"
    assert chunks.pop()["usage"] == {"prompt_tokens": 40, "completion_tokens": 24, "total_tokens": 64}
    told = by_index(chunks)
    assert sorted(told) == [0, 1, 2] and len({chunk["id"] for chunk in chunks}) == 1
    assert {said(choices) for choices in told.values()} == {text_of(model, 8)}
    assert all([c["finish_reason"] for c in choices] == [None] * 7 + ["length"] for choices in told.values())
    firsts = [next(n for n, chunk in enumerate(chunks) if chunk["choices"][0]["index"] == i) for i in range(3)]
    lasts = [max(n for n, chunk in enumerate(chunks) if chunk["choices"][0]["index"] == i) for i in range(3)]
    assert max(firsts) < min(lasts)


async def test_every_choice_of_a_chat_opens_with_the_role(api: Api) -> None:
    told = by_index(events(await api.chat(max_tokens=5, n=2, stream=True, logprobs=True))[:-1])
    assert sorted(told) == [0, 1]
    for choices in told.values():
        assert [set(c["delta"]) for c in choices] == [{"role", "content"}] + [{"content"}] * 5
        assert [len((c["logprobs"] or {"content": []})["content"]) for c in choices] == [0, 1, 1, 1, 1, 1]
    whole = (await api.chat(max_tokens=5, n=2)).json()
    assert [c["message"]["content"] for c in whole["choices"]] == [said(told[0]), said(told[1])]


def plan(model: Model, **fields: Any) -> list[tuple[str, str, int | None, tuple[int, ...]]]:
    """Id, label, seed and prompt of what is submitted."""
    request = CompletionRequest.model_validate({"prompt": PROMPT, **fields})
    made = to_plan(COMPLETIONS, request, model, RequestId("r"), "label", IngressId("i"))
    pairs = zip(made.specs, made.samplings, strict=True)
    return [(spec.id, spec.label, sampling.seed, prompt_of(spec)) for spec, sampling in pairs]


def test_choices_are_requests_with_seeds_of_their_own(model: Model) -> None:
    prompt = tuple(PROMPT)
    assert plan(model, seed=5) == [("r", "label", 5, prompt)]
    assert plan(model, seed=5, n=2) == [("r-0", "label", 5, prompt), ("r-1", "label", 6, prompt)]
    assert [name for name, *_ in plan(model, n=2)] == ["r-0", "r-1"]
    assert plan(model, prompt=[PROMPT, OTHER], seed=5, n=2) == [
        ("r-0", "label", 5, prompt),
        ("r-1", "label", 6, prompt),
        ("r-2", "label", 5, tuple(OTHER)),
        ("r-3", "label", 6, tuple(OTHER)),
    ]


async def test_seeds_of_all_choices_must_fit(api: Api) -> None:
    error = (await api.complete(seed=(1 << 63) - 1, n=2)).json()["error"]
    assert (error["param"], error["code"]) == ("seed", "invalid_value")
    assert (await api.complete(seed=(1 << 63) - 2, n=2, max_tokens=1)).status_code == 200


# --- fates --------------------------------------------------------------------------------------------


async def asked(service: Service, tokens: int = 10) -> list[RequestId]:
    """The ids of the choices, once each has that many tokens."""
    live = service.streams._live
    await eventually(lambda: len(live) > 1 and all(c.reader.cursor.next_index >= tokens for c in live.values()))
    return list(live)


async def test_one_choice_moves_and_the_other_stays(model: Model) -> None:
    service = make_service()
    api = make_api(model, service)
    exchange = Exchange(api, body(max_tokens=300, n=2, logprobs=1))
    first, second = await asked(service)
    service.move(second, "b")
    await eventually(lambda: service.hosts(second) == "b")
    assert service.hosts(first) == "a"
    await exchange.ended()
    one, other = json.loads(exchange.sent[1]["body"])["choices"]
    assert one["text"] == other["text"] == text_of(model, 300) and one["logprobs"] == other["logprobs"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_choice_fails_and_all_of_the_answer_does(model: Model, stream: bool) -> None:
    service = make_service("a", step_s=SLOW_S)
    exchange = Exchange(make_api(model, service), body(max_tokens=900, n=3, stream=stream))
    ids = await asked(service, 3)
    host = service.replica("a").host
    host.stopping = True
    run = host._runs[ids[1]]
    host._lose(run, "lost by a test")
    service.replica("a").engine.abort(run.key)
    await exchange.ended()
    start, *rest = exchange.sent
    data = b"".join(message["body"] for message in rest).decode()
    if stream:
        *_, error, done = data.split("\n\n")[:-1]
        assert done == "data: [DONE]" and json.loads(error[6:])["error"]["code"] == "unavailable"
    else:
        assert start["status"] == 503 and "stopping" in json.loads(data)["error"]["message"]
    await service.idle()


async def test_no_choice_is_left_when_one_is_not_taken(model: Model) -> None:
    service = make_service("a", step_s=SLOW_S)
    api = make_api(model, service)
    host, submit = service.replica("a").host, service.replica("a").moves.submit

    def refuse(spec: Any, *rest: Any) -> None:
        host.stopping = spec.id.endswith("-2")
        submit(spec, *rest)

    service.replica("a").moves.submit = refuse  # type: ignore[method-assign, assignment]
    response = await api.complete(max_tokens=900, n=3)
    assert response.status_code == 503 and "stopping" in response.text
    host.stopping = False
    await service.idle()


async def test_all_choices_end_when_the_client_leaves(model: Model) -> None:
    service = make_service(step_s=SLOW_S)
    exchange = Exchange(make_api(model, service), body(max_tokens=900, n=4, stream=True))
    await exchange.chunks(8)
    exchange.disconnect()
    await exchange.ended()
    await service.idle()


async def test_a_choice_that_has_ended_does_not_wait_for_the_others(model: Model) -> None:
    """A stop string ends it in the ingress: the replica must be told, or would go on."""
    service = make_service(step_s=SLOW_S)
    api = make_api(model, service)
    text = text_of(model, 40)
    exchange = Exchange(api, body(prompt=[PROMPT, OTHER], max_tokens=900, stop=text[20:30], stream=True))
    first, second = await asked(service)
    assert text[20:30] not in text_of(model, 900, OTHER)
    await eventually(lambda: not service.hosts(first))
    assert service.hosts(second) == "a"
    exchange.disconnect()
    await exchange.ended()
    await service.idle()


# --- prompts ------------------------------------------------------------------------------------------


async def test_choices_follow_the_order_of_their_prompts(api: Api) -> None:
    answer = (await api.complete(prompt=[PROMPT, OTHER], max_tokens=10, n=2)).json()
    texts = [text_of(api.backend.model, 10, prompt) for prompt in (PROMPT, OTHER)]
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate([texts[0]] * 2 + [texts[1]] * 2))
    assert answer["usage"] == {"prompt_tokens": 43, "completion_tokens": 40, "total_tokens": 83}
    told = by_index(events(await api.complete(prompt=[PROMPT, OTHER], max_tokens=10, n=2, stream=True))[:-1])
    assert [said(told[index]) for index in range(4)] == [c["text"] for c in answer["choices"]]


async def test_texts_are_prompts_each(api: Api) -> None:
    texts = ["A request is", "Blocks move between"]
    alone = [(await api.complete(prompt=text, max_tokens=9)).json() for text in texts]
    both = (await api.complete(prompt=texts, max_tokens=9)).json()
    assert [c["text"] for c in both["choices"]] == [one["choices"][0]["text"] for one in alone]
    assert both["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


async def test_a_list_of_one_prompt_is_that_prompt(api: Api) -> None:
    one, same = [(await api.complete(prompt=prompt, max_tokens=9)).json() for prompt in (PROMPT, [PROMPT])]
    assert one["choices"] == same["choices"] and one["usage"] == same["usage"]


async def test_there_are_so_many_choices_at_most(api: Api) -> None:
    assert len((await api.complete(prompt=[OTHER] * 64, n=2, max_tokens=1)).json()["choices"]) == 128
    error = (await api.complete(prompt=[OTHER] * 65, n=2)).json()["error"]
    assert error["param"] == "prompt" and "130" in error["message"] and "128" in error["message"]


async def test_every_prompt_must_leave_room(api: Api) -> None:
    error = (await api.complete(prompt=[OTHER, [5] * 1020], max_tokens=5)).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded") and "1020" in error["message"]


# --- echo ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["A request is its token ids", PROMPT], ids=["text", "tokens"])
async def test_an_echo_is_the_prompt_before_the_answer(api: Api, prompt: str | list[int]) -> None:
    said_before = prompt if isinstance(prompt, str) else api.backend.model.tokenizer.decode(prompt)
    plain = (await api.complete(prompt=prompt, max_tokens=9, echo=False)).json()
    echoed = (await api.complete(prompt=prompt, max_tokens=9, echo=True)).json()
    assert echoed["choices"][0]["text"] == said_before + plain["choices"][0]["text"]
    assert echoed["usage"] == plain["usage"]
    chunks = events(await api.complete(prompt=prompt, max_tokens=9, echo=True, stream=True))[:-1]
    assert chunks[0]["choices"][0]["text"].startswith(said_before) and len(chunks) == 9
    assert said([chunk["choices"][0] for chunk in chunks]) == echoed["choices"][0]["text"]


async def test_every_choice_echoes_its_own_prompt(api: Api) -> None:
    texts = ["A request is", "Blocks move between"]
    plain, echoed = await asyncio.gather(
        *(api.complete(prompt=texts, n=2, max_tokens=4, echo=echo) for echo in (None, True))
    )
    for index, choice in enumerate(echoed.json()["choices"]):
        assert choice["text"] == texts[index // 2] + plain.json()["choices"][index]["text"]


async def test_what_a_prompt_says_ends_no_answer(api: Api) -> None:
    answer = (await api.complete(prompt="A request is", max_tokens=4, echo=True, stop="request")).json()
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("logprobs", [0, 3])
async def test_logprobs_of_an_echo_are_refused(api: Api, logprobs: int) -> None:
    error = (await api.complete(echo=True, logprobs=logprobs)).json()["error"]
    assert (error["param"], error["code"]) == ("echo", "unsupported_parameter") and "logprobs" in error["message"]


async def test_more_drawn_than_told_is_refused(api: Api) -> None:
    error = (await api.complete(n=2, best_of=3)).json()["error"]
    assert (error["param"], error["code"]) == ("best_of", "unsupported_parameter")
    assert (await api.chat(messages=MESSAGES, n=2, max_tokens=1)).status_code == 200
