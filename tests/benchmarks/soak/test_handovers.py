"""What the soak of hand-overs draws, compares and counts."""

import json
from typing import Any

import httpx
import pytest

from app.client.api import ApiClient
from benchmarks.soak.cached import KINDS
from benchmarks.soak.handovers import (
    HandoverRound,
    HandoverShape,
    HandoverSoak,
    count_handovers,
    draw_turn,
    render_handovers,
)
from deployments.config import Caching

SHAPE = HandoverShape(conversations=8, turns=2, at_once=3, prompt=(4, 8), output=(6, 9), moving=0.5, think_s=0.0)


class Replying:
    """In the place of a server: answers that depend on the prompt, hand-overs and moves.

    With `noise`, answers to requests that are handed over have another last token; `cached` tokens of each are cached.
    """

    def __init__(self, noise: bool = False, cached: int = 0) -> None:
        self.noise = noise
        self.cached = cached
        self.records: list[dict[str, Any]] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        match request.method, request.url.path:
            case "POST", "/v1/completions":
                return self._complete(body, request.headers.get("x-request-id", ""))
            case "POST", "/mell/migrations":
                self._note(body["request_id"], "requested by operator")
                return httpx.Response(202, json={"id": "m"})
        return httpx.Response(200, json={"migrations": self.records})

    def _note(self, label: str, trigger: str) -> None:
        self.records.append({"label": label, "trigger": trigger, "path": "kv", "outcome": "committed", "cause": None})

    def _complete(self, body: dict[str, Any], label: str) -> httpx.Response:
        tokens = [(sum(body["prompt"]) + i) % 500 for i in range(body["max_tokens"])]
        if label:
            self._note(label, "disaggregate")
            tokens[-1] += self.noise
        events: list[dict[str, Any]] = []
        for token in tokens:
            scores = {"token_logprobs": [-1.0], "top_logprobs": [{f"token_id:{token}": -1.0}]}
            events.append({"choices": [{"token_ids": [token], "logprobs": scores if "logprobs" in body else None}]})
        events.append({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": self.cached}}})
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return httpx.Response(200, text=f"{lines}data: [DONE]\n\n")


async def played(fake: Replying, caching: Caching = Caching.FULL, bare: Replying | None = None) -> HandoverRound:
    transports = (httpx.MockTransport(each.answer) for each in (fake, bare or Replying()))
    mell, other = (ApiClient("http://server", transport=transport) for transport in transports)
    async with mell, other:
        return await HandoverSoak(mell, other, caching, SHAPE, 0).round(3)


def test_turns_go_on_behind_each_other_and_have_all_kinds() -> None:
    first = draw_turn(0, 1, 2, 0, (), SHAPE)
    assert first == draw_turn(0, 1, 2, 0, (), SHAPE) != draw_turn(0, 2, 2, 0, (), SHAPE)
    context = (*first.prompt, 7, 8)
    second = draw_turn(0, 1, 2, 1, context, SHAPE)
    assert second.prompt[: len(context)] == context and len(second.prompt) > len(context)
    drawn = [draw_turn(0, 1, place, 0, (), SHAPE) for place in range(SHAPE.conversations)]
    assert {request.kind for request in drawn} == set(KINDS)
    assert 0 < sum(request.path is not None for request in drawn) < len(drawn)
    assert all(2 <= request.move_at <= request.output // 2 for request in drawn)


async def test_round_compares_all_turns_and_counts_hand_overs_apart_from_moves() -> None:
    done = await played(Replying(cached=32), bare=Replying())
    assert not done.bad and done.verdicts == {"same": 16} and done.kinds.total() == 16
    assert done.handovers == {"kv committed": 16} and 0 < done.moves["kv committed"] < 16
    assert done.tokens["cached"] == 16 * 32


async def test_answers_that_differ_are_found() -> None:
    done = await played(Replying(noise=True))
    assert done.verdicts == {"different": 16} and len(done.bad) == 16


@pytest.mark.parametrize(("caching", "bad"), [(Caching.NONE, 16), (Caching.PREFILL, 0)])
async def test_without_caching_nothing_may_be_cached(caching: Caching, bad: int) -> None:
    assert len((await played(Replying(cached=32), caching)).bad) == bad


async def test_answers_are_compared_with_computed_ones_only() -> None:
    done = await played(Replying(), bare=Replying(cached=32))
    assert len(done.bad) == SHAPE.conversations and not done.verdicts


async def test_rounds_add_up_by_setting() -> None:
    one = (await played(Replying())).to_json()
    other = (await played(Replying(noise=True), Caching.NONE)).to_json()
    lines = json.loads(json.dumps([{"setting": {"seed": 0}}, one, one, other]))
    assert (count_handovers(lines), count_handovers(lines, Caching.FULL)) == (48, 32)
    text = "\n".join(render_handovers(lines))
    assert "48 hand-overs by KV in 3 rounds" in text and "full: 32 in 2 rounds" in text and "32 same" in text
    assert "decode: 0 in 0 rounds" in text and "BAD: round 3, none: handover-0-3-" in text
