"""Undisturbed answers of a real engine: the likeliest tokens, and either of two that tie."""

import json
from collections.abc import Callable

import httpx
import pytest

from app.client.api import ApiClient
from benchmarks.chaos.answers import StreamedAnswer, StreamVerdict, judge_among
from benchmarks.chaos.offers import Offer, text_of
from benchmarks.soak.stock import TIE, stock_texts

OFFER = Offer(0.0, "a", (5, 6, 7), 4)

Likely = Callable[[tuple[int, ...]], dict[int, float]]
"""Log-probabilities of the next token after an output."""


def server(likely: Likely) -> ApiClient:
    """A fake of vLLM's server with a made-up model."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert tuple(body["prompt"][:3]) == OFFER.prompt
        output = list(body["prompt"][3:])
        begun, tops = len(output), []
        for _ in range(body["max_tokens"]):
            top = likely(tuple(output))
            tops.append({f"token_id:{token}": value for token, value in top.items()})
            output.append(max(top, key=lambda token: top[token]))
        choice = {"token_ids": output[begun:], "logprobs": {"top_logprobs": tops}}
        return httpx.Response(200, json={"choices": [choice]})

    return ApiClient("http://vllm", transport=httpx.MockTransport(answer))


def tied_at(*outputs: tuple[int, ...], gap: float = TIE / 2) -> Likely:
    """Tokens 10, 11, 12 and so on; after `outputs`, the next token and the one 100 above it tie."""

    def likely(output: tuple[int, ...]) -> dict[int, float]:
        token = 10 + len(output)
        return {token: -1.0, token + 100: -1.0 - gap if output in outputs else -2.0}

    return likely


@pytest.mark.parametrize(
    ("likely", "answers"),
    [
        (tied_at(), [(10, 11, 12, 13)]),
        (tied_at((10,), gap=TIE * 2), [(10, 11, 12, 13)]),
        (tied_at((10,)), [(10, 11, 12, 13), (10, 111, 12, 13)]),
        (tied_at((10, 11, 12)), [(10, 11, 12, 13), (10, 11, 12, 113)]),
        (
            tied_at((10,), (10, 111)),
            [(10, 11, 12, 13), (10, 111, 12, 13), (10, 111, 112, 13)],
        ),
    ],
)
async def test_stock_texts_have_both_tokens_of_a_tie(likely: Likely, answers: list[tuple[int, ...]]) -> None:
    async with server(likely) as stock:
        assert await stock_texts(stock, "m", OFFER) == [text_of(OFFER.prompt, answer) for answer in answers]


def streamed(text: str) -> StreamedAnswer:
    return StreamedAnswer(text=text, chunks=4, finish="length", tokens=4, done=True)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("one two", StreamVerdict.EXACT),
        ("one deux", StreamVerdict.TIE),
        ("one zwei", StreamVerdict.WRONG),
        ("one deu", StreamVerdict.WRONG),
    ],
)
def test_answer_after_a_tie_must_be_exact(text: str, verdict: StreamVerdict) -> None:
    assert judge_among(streamed(text), OFFER, ["one two", "one deux"])[0] is verdict
