"""What the soak of prefix caches draws, and how it judges answers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from app.client.api import ApiClient
from benchmarks.soak import cached
from benchmarks.soak.cached import (
    KINDS,
    CachedAnswer,
    CachedRequest,
    CachedRound,
    CachedShape,
    CachedSoak,
    CachedVerdict,
    common_prefix,
    count_requests,
    draw_requests,
    judge_cached,
    render_cached,
    second_turn,
)

SHAPE = CachedShape()


def answered(*tokens: int, logprobs: Sequence[float] = ()) -> CachedAnswer:
    return CachedAnswer(list(tokens), list(logprobs))


def asked(kind: str = "greedy", output: int = 3) -> CachedRequest:
    return CachedRequest("r", kind, (1, 2), output)


class Computed:
    """Further computed answers, in turn; the last one again and again."""

    def __init__(self, *answers: CachedAnswer) -> None:
        self.answers = list(answers)
        self.asked: list[Mapping[str, Any]] = []

    async def __call__(self, more: Mapping[str, Any]) -> CachedAnswer:
        self.asked.append(more)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_rounds_share_most_prefixes_and_have_all_kinds() -> None:
    first, later = draw_requests(0, 1, SHAPE), draw_requests(0, 2, SHAPE)
    assert first == draw_requests(0, 1, SHAPE) and first != later
    assert {request.kind for request in first} == set(KINDS)
    prefixes = [{common_prefix(0, number, family, SHAPE) for family in range(SHAPE.families)} for number in (1, 2, 40)]
    assert len(prefixes[0] & prefixes[1]) == SHAPE.families - 1 and not prefixes[0] & prefixes[2]
    assert all(any(request.prompt[: len(prefix)] == prefix for prefix in prefixes[0]) for request in first)
    moving = [request for request in first if request.path]
    assert 0 < len(moving) < len(first) and all(request.move_at <= request.output // 2 for request in moving)


def test_second_turn_goes_on_behind_the_answer() -> None:
    request = second_turn(asked(), answered(7, 8, 9), 0)
    assert request.prompt[:5] == (1, 2, 7, 8, 9) and len(request.prompt) == 25 and request.path is None


def test_request_has_no_salt_unless_it_is_computed() -> None:
    assert "cache_salt" not in asked().body("m", None)
    body = asked("seeded").body("m", "s", logprobs=20)
    assert (body["cache_salt"], body["logprobs"], body["seed"]) == ("s", 20, KINDS["seeded"]["seed"])


def test_answer_is_read_from_events() -> None:
    answer = CachedAnswer()
    scores = {"token_logprobs": [-0.1], "top_logprobs": [{"a": -0.1}]}
    answer.take({"choices": [{"token_ids": [5], "logprobs": scores}]})
    answer.take({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 64}}})
    assert (answer.tokens, answer.logprobs, answer.cached) == ([5], [-0.1], 64)
    with pytest.raises(ValueError, match="broken"):
        answer.take({"error": {"message": "broken"}})


@pytest.mark.parametrize(
    ("answer", "computed", "verdict"),
    [
        (answered(1, 2, 3), answered(1, 2, 3), CachedVerdict.SAME),
        (answered(1, 2, 3, logprobs=[-1.0]), answered(1, 2, 3, logprobs=[-1.0005]), CachedVerdict.SAME),
        (answered(1, 2, 3, logprobs=[-1.0]), answered(1, 2, 3, logprobs=[-1.1]), CachedVerdict.DIFFERENT),
        (answered(1, 2), answered(1, 2, 3), CachedVerdict.DIFFERENT),
        (answered(1, 2, 4), answered(1, 2, 3), CachedVerdict.DIFFERENT),
    ],
    ids=["equal", "equal up to rounding", "other logprobs", "cut off", "another token"],
)
async def test_answer_is_compared_with_the_computed_one(
    answer: CachedAnswer, computed: CachedAnswer, verdict: CachedVerdict
) -> None:
    assert (await judge_cached(asked("seeded"), answer, computed, Computed(answered(1, 2, 3))))[0] is verdict


async def test_answer_that_is_computed_in_another_batch_is_right() -> None:
    compute = Computed(answered(1, 2, 3), answered(1, 2, 4))
    found, _ = await judge_cached(asked("seeded"), answered(1, 2, 4), answered(1, 2, 3), compute)
    assert found is CachedVerdict.ROUNDING and len(compute.asked) == 2


@pytest.mark.parametrize(("other", "verdict"), [(-0.70001, CachedVerdict.TIE), (-0.9, CachedVerdict.DIFFERENT)])
async def test_token_that_is_as_likely_as_the_computed_one_is_right(other: float, verdict: CachedVerdict) -> None:
    again = answered(1, 2, 3)
    again.tops = [{}, {}, {"token_id:3": -0.7, "token_id:4": other}]
    assert (await judge_cached(asked(), answered(1, 2, 4), answered(1, 2, 3), Computed(again)))[0] is verdict


def test_report_has_the_sums_of_all_rounds_and_every_fault() -> None:
    one, two = CachedRound(1), CachedRound(2, bad=["cached-0-2-1, greedy: token 3 of 9"])
    for done in (one, two):
        done.requests["greedy"] += 2
        done.tokens.update(prompt=100, cached=60)
        done.copies["done from host"] += 1
    lines = [{"setting": {}}, *(json.loads(json.dumps(done.to_json())) for done in (one, two))]
    assert count_requests(lines) == 4
    text = "\n".join(render_cached(lines))
    assert "4 requests in 2 rounds" in text and "120 cached, 200 prompt" in text and "2 done from host" in text
    assert "BAD: round 2: cached-0-2-1, greedy: token 3 of 9" in text


class CachingServer:
    """In Mell's place: answers that depend on the prompt, cached prefixes, moves and copies.

    With `noise`, an answer to a prompt that is cached has another token.
    """

    def __init__(self, noise: bool = False) -> None:
        self.noise = noise
        self.seen: set[tuple[int, ...]] = set()
        self.moved: list[str] = []
        self.copied = 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        match request.method, request.url.path:
            case "POST", "/v1/completions":
                return self._complete(body)
            case "POST", "/mell/migrations":
                self.moved.append(body["request_id"])
                return httpx.Response(202, json={"id": f"m{len(self.moved)}"})
            case "GET", "/mell/migrations":
                ended = [{"id": f"m{1 + i}", "path": "kv", "outcome": "committed"} for i in range(len(self.moved))]
                return httpx.Response(200, json={"migrations": ended})
            case "POST", "/mell/cache/match":
                tokens = ({"hbm": 0, "dram": 0}, {"hbm": 0, "dram": 64})
                replicas = [{"id": f"r{i}", "tokens": each} for i, each in enumerate(tokens)]
                return httpx.Response(200, json={"replicas": replicas})
            case "POST", "/mell/cache/copy":
                self.copied += (body["from"], body["to"]) == ("r1", "r0")
                return httpx.Response(200, json={"outcome": "done"})
        return httpx.Response(200, json={})

    def _complete(self, body: dict[str, Any]) -> httpx.Response:
        prompt, salted = tuple(body["prompt"]), "cache_salt" in body
        cached = 64 if not salted and prompt in self.seen else 0
        if not salted:
            self.seen.add(prompt)
        tokens = [(sum(prompt) + i) % 500 for i in range(body["max_tokens"])]
        if cached and self.noise:
            tokens[-1] += 1
        events: list[dict[str, Any]] = []
        for token in tokens:
            scores = {"token_logprobs": [-1.0], "top_logprobs": [{f"token_id:{token}": -1.0}]}
            events.append({"choices": [{"token_ids": [token], "logprobs": scores if "logprobs" in body else None}]})
        events.append({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}})
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return httpx.Response(200, text=f"{lines}data: [DONE]\n\n")


@pytest.mark.parametrize("noise", [False, True], ids=["sound", "noise in cached blocks"])
async def test_round_compares_all_turns_and_finds_wrong_answers(noise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "COPY_EVERY_S", 0.0)
    fake = CachingServer(noise)
    shape = CachedShape(requests=30, families=2, message=(1, 1), turning=0.5)
    async with ApiClient("http://mell", transport=httpx.MockTransport(fake.answer)) as client:
        done = await CachedSoak(client, "m", shape, 0).round(1)
    assert 30 < done.requests.total() < 60, "with some second turns"
    assert done.moves == {"kv committed": len(fake.moved)} and 0 < len(fake.moved) < 30
    assert done.copies["done from host"] == fake.copied > 0
    assert 0 < done.tokens["cached"] < done.tokens["prompt"]
    if noise:
        assert done.verdicts["different"] == len(done.bad) > 0
    else:
        assert done.verdicts == {"same": done.requests.total()} and not done.bad
