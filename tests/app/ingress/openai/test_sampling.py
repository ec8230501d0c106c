"""Sampling parameters: what replicas are told of them, and what an answer shows of them."""

from typing import Any

import pytest

from app.ingress.openai.chat import CHAT
from app.ingress.openai.completions import COMPLETIONS
from app.ingress.openai.generation import to_plan
from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import ChatRequest, CompletionRequest
from app.ingress.openai.sampling import Sampling
from deployments.engine.tokens import expected
from migration.protocol.request import IngressId
from policies.model import RequestId
from tests.app.ingress.fakes import MESSAGES, PROMPT, Api, events

TOKENS = expected(tuple(PROMPT), 60)

TOLD: list[tuple[dict[str, Any], Sampling]] = [
    ({}, Sampling(9)),
    ({"temperature": 0, "top_p": 0.5, "top_k": 3}, Sampling(9, temperature=0.0, top_p=0.5, top_k=3)),
    ({"temperature": None, "top_p": None, "top_k": None, "min_p": None}, Sampling(9)),
    ({"top_k": -1}, Sampling(9)),
    ({"min_p": 0.25}, Sampling(9, min_p=0.25)),
    ({"seed": 0}, Sampling(9, seed=0)),
    ({"ignore_eos": True}, Sampling(9, ignore_eos=True)),
    ({"priority": -7}, Sampling(9, priority=-7)),
    ({"stop_token_ids": [7, 5]}, Sampling(9, stop_token_ids=(7, 5))),
    ({"stop_token_ids": [], "logit_bias": {}}, Sampling(9)),
    ({"min_tokens": 9}, Sampling(9, min_tokens=9)),
    ({"presence_penalty": 2, "frequency_penalty": -2}, Sampling(9, presence_penalty=2.0, frequency_penalty=-2.0)),
    ({"presence_penalty": None, "frequency_penalty": None, "repetition_penalty": None}, Sampling(9)),
    ({"repetition_penalty": 1.5}, Sampling(9, repetition_penalty=1.5)),
    ({"logit_bias": {7: 100, 5: -0.5}}, Sampling(9, logit_bias=((5, -0.5), (7, 100.0)))),
]


@pytest.mark.parametrize(("given", "told"), TOLD, ids=lambda value: ", ".join(value) if isinstance(value, dict) else "")
def test_replicas_are_told_what_the_client_asks_for(model: Model, given: dict[str, Any], told: Sampling) -> None:
    names = RequestId("r"), "label", IngressId("i")
    completion = CompletionRequest.model_validate({"prompt": PROMPT, "max_tokens": 9, **given})
    chat = ChatRequest.model_validate({"messages": MESSAGES, "max_completion_tokens": 9, **given})
    for plan in (to_plan(COMPLETIONS, completion, model, *names), to_plan(CHAT, chat, model, *names)):
        assert plan.samplings == (told,)


def reason_and_text(choice: Any) -> tuple[str | None, str]:
    return choice["finish_reason"], choice["text"] if "text" in choice else choice["message"]["content"]


async def test_a_token_that_ends_the_answer_is_counted_and_not_said(api: Api) -> None:
    end = 20
    before = (await api.complete(max_tokens=end)).json()["choices"][0]["text"]
    answer = (await api.complete(max_tokens=60, stop_token_ids=[TOKENS[end]])).json()
    assert TOKENS[end] not in TOKENS[:end]
    assert reason_and_text(answer["choices"][0]) == ("stop", before)
    assert answer["usage"]["completion_tokens"] == end + 1
    chunks = events(await api.complete(max_tokens=60, stop_token_ids=[TOKENS[end]], stream=True))[:-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == before
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * end + ["stop"]


async def test_what_a_stop_string_might_have_begun_with_is_said_at_the_end(api: Api) -> None:
    """The answer ends by a token while text is held back."""
    end = 20
    before = (await api.complete(max_tokens=end)).json()["choices"][0]["text"]
    answer = await api.complete(max_tokens=60, stop_token_ids=[TOKENS[end]], stop=before[-2:] + "?!")
    assert reason_and_text(answer.json()["choices"][0]) == ("stop", before)


async def test_no_stop_string_ends_an_answer_before_its_least_tokens(api: Api) -> None:
    text = (await api.complete(max_tokens=60)).json()["choices"][0]["text"]
    early, late = text[10:16], text[-12:-6]
    assert text.count(early) == text.count(late) == 1
    answer = (await api.complete(max_tokens=60, stop=[early, late], min_tokens=30)).json()
    assert reason_and_text(answer["choices"][0]) == ("stop", text[: text.index(late)])
    assert answer["usage"]["completion_tokens"] > 30
