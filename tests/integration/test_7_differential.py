"""Mell beside vLLM's own OpenAI server: the same requests, the same answers, and no others when the requests move.

MELL_CORPUS_SEED and MELL_CORPUS_SIZE draw other requests; MELL_CORPUS_CASE sends only the request of that number.
"""

import asyncio
import os
import random
import re
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import httpx
import pytest

from app.ingress.openai.requests.schema import ChatRequest, CompletionRequest
from benchmarks.servers import bare_vllm
from tests.counts import LONG
from tests.integration.application import Application, Client
from tests.integration.conftest import Stage
from tests.integration.corpus import CHATS, COMPLETIONS, ODD, Case, corpus
from tests.integration.server_answers import ServerAnswer, ask, differences

SEED = int(os.environ.get("MELL_CORPUS_SEED", "20240607"))
CASES = corpus(SEED, int(os.environ.get("MELL_CORPUS_SIZE", "400" if LONG else "150")))
ONLY = os.environ.get("MELL_CORPUS_CASE")
ASKED = CASES if ONLY is None else [CASES[int(ONLY)]]
AT_ONCE = 8
NOISE, MOVED_NOISE = 1e-3, 1e-4
"""Tolerance for logprobs: in another batch, or after a move, sums are added up in another order."""

LEFT_OUT = {
    "service_tier": "OpenAI's own; vLLM has null",
    "system_fingerprint": "optional in OpenAI's API; vLLM's is of its version and settings, which /version tells",
    "metrics": "vLLM's own, for a setting",
    "kv_transfer_params": "vLLM's own, for disaggregated prefill",
    "ec_transfer_params": "vLLM's own, for disaggregated encoders",
    "prompt_text": "vLLM's own, for return_token_ids",
    "prompt_token_ids": "vLLM's own, for return_token_ids",
    "prompt_logprobs": "vLLM's own, for prompt_logprobs",
    "usage.prompt_tokens_details": "optional in OpenAI's API; vLLM has null unless a setting is made",
    "usage.completion_tokens_details": "optional in OpenAI's API; vLLM has null",
    "choices[].stop_reason": "vLLM's own: which stop string or token it was",
    "choices[].token_ids": "vLLM's own, for return_token_ids",
    "choices[].prompt_token_ids": "vLLM's own, for return_token_ids",
    "choices[].prompt_logprobs": "vLLM's own, for prompt_logprobs",
    "choices[].routed_experts": "vLLM's own, for mixtures of experts",
    "choices[].message.annotations": "null in vLLM",
    "choices[].message.audio": "null in vLLM",
    "choices[].message.function_call": "null in vLLM",
    "choices[].message.tool_calls": "empty in vLLM without tools",
    "choices[].message.reasoning": "null in vLLM without a reasoning parser",
}
"""Members of vLLM's answers that Mell's do not have, and why not."""

ADDED = {"choices[].logprobs.refusal": "OpenAI's, which vLLM leaves out"}
"""Members of Mell's answers that vLLM's do not have."""

ENDS = {"committed", "too late"}
"""The outcomes of a move: committed, or too late since the answer was over."""

OVER = {"the request ended by itself", "the client left"}
"""Errors of such migrations. The ingress leaves a choice that a stop string ends."""

UNKNOWN = "Mell refuses what it does not know; vLLM ignores it"
UNLIKE = {
    "several greedy choices": (400, 200, "OpenAI allows it, and they are equal; vLLM refuses"),
    "n None": (400, 200, "OpenAI allows null; vLLM does so in chats only"),
    "logit_bias {'5': 200}": (200, 400, "OpenAI allows -100 to 100; vLLM makes it 100"),
    "logprobs 6": (200, 400, "OpenAI allows 5; vLLM has a setting, 20 unless made"),
    "made_up 1": (200, 400, UNKNOWN),
    "an unknown member of a chat": (200, 400, UNKNOWN),
    "best_of above n": (200, 400, "vLLM has no best_of, and ignores it"),
    "a bad bias in a stream": (200, 400, "vLLM finds it in the engine, when the stream has begun, and sends an event"),
    "echo with logprobs": (200, 400, "not supported: Mell's replicas tell no logprobs of prompts"),
    "a prompt that ends within a character": (200, 200, "vLLM's answer begins with the prompt, once more"),
    "a prompt that leaves too little": (
        200,
        400,
        "vLLM shortens the answer that was asked for, unless it is too far off",
    ),
    "two lengths": (200, 400, "vLLM takes max_completion_tokens; Mell has the client say which it means"),
    "messages [{'role': 'user'}]": (200, 400, "OpenAI wants content; vLLM makes it empty"),
    "messages [{'role': 'assistant', 'content': None}]": (
        200,
        400,
        "OpenAI wants content, or calls; vLLM makes it empty",
    ),
    "messages [{'role': 'user', 'content': []}]": (200, 400, "OpenAI wants at least one part; vLLM makes it empty"),
    "messages [{'role': 'robot', 'content': 'hello'}]": (200, 400, "vLLM leaves roles to the template"),
}
"""Odd requests that are answered otherwise: vLLM's status, Mell's, and why."""


@pytest.fixture(scope="module")
def bare(stage: Stage) -> dict[int, ServerAnswer]:
    """The answers of vLLM's server, by case. It has ended before Mell starts: each engine takes gigabytes."""
    stage.clear()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with bare_vllm(port):
        return asyncio.run(answers(f"http://127.0.0.1:{port}", ASKED))


async def answers(url: str, cases: Iterable[Case]) -> dict[int, ServerAnswer]:
    """The answers of a server, by case, to a few requests at a time."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:

        async def one(case: Case) -> tuple[int, ServerAnswer]:
            async with gate:
                return case.number, await ask(http, case, f"case-{case.number}")

        return dict(await asyncio.gather(*map(one, cases)))


def test_the_corpus_has_every_parameter() -> None:
    tools = {"tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"}
    for path, kind in ((COMPLETIONS, CompletionRequest), (CHATS, ChatRequest)):
        asked = {name for case in CASES if case.path == path and not case.odd for name in case.body}
        assert asked >= kind.model_fields.keys() - tools - {"suffix"}, kind


def test_answers_are_vllms(bare: dict[int, ServerAnswer], application: Application) -> None:
    given = asyncio.run(answers(application.url, ASKED))
    failed = [text for case in ASKED for text in compared(case, bare[case.number], given[case.number])]
    assert not failed, report(failed)


def compared(case: Case, bare: ServerAnswer, mell: ServerAnswer) -> list[str]:
    """The faults of Mell's answer to a request, by comparison with vLLM's."""
    if case.odd in UNLIKE:
        # A difference that is no more must not stay in the list.
        statuses = (bare.status, mell.status)
        same = statuses == (200, 200) and not differences(bare, mell, NOISE)
        return [] if statuses == UNLIKE[case.odd][:2] and not same else [line(case, f"answered with {statuses}")]
    found = differences(bare, mell, NOISE)
    if mell.error is None and not found:
        found += [f"{name} is left out" for name in bare.members - mell.members - LEFT_OUT.keys()]
        found += [f"{name} is added" for name in mell.members - bare.members - ADDED.keys()]
    return [line(case, text) for text in found]


def line(case: Case, text: str) -> str:
    """One line of a report, with what is needed to ask again."""
    odd = f" ({case.odd})" if case.odd else ""
    return f"MELL_CORPUS_SEED={SEED} MELL_CORPUS_CASE={case.number}{odd}: {text[:600]}\n  {str(case.body)[:600]}"


UNNAMED = {"a schema that is none", "a regex that is none", "a grammar that is none"}
"""Odd requests that the engine itself refuses. Its errors do not name the parameter."""


async def test_refusals_name_the_parameter(application: Application) -> None:
    odd = [case for case in ASKED if case.odd and case.odd not in UNNAMED]
    for number, answer in (await answers(application.url, odd)).items():
        if answer.error is not None:
            named = re.split(r"[.\[]", answer.error["param"] or "")[0]
            assert named in ODD[CASES[number].odd][1], line(CASES[number], str(answer.error))


# --- moved --------------------------------------------------------------------------------------------


class Journey:
    """A request that is moved while its answer streams."""

    def __init__(self, client: Client, case: Case) -> None:
        body = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
        self._client, self._case = client, replace(case, body=body)
        self._answer = ServerAnswer(0, "")
        self._news = asyncio.Event()

    async def unmoved(self) -> ServerAnswer:
        """The answer without moves. It comes first, so that no moved blocks are in the caches."""
        return await ask(self._client.http, self._case, f"unmoved-{self._case.number}")

    async def moved(self, moves: list[tuple[int, int, str]], outcomes: Counter[str]) -> ServerAnswer:
        """The answer with moves, one after the other: (steps, choice, path) moves a choice after that many steps."""
        asking = asyncio.create_task(self._ask())
        for steps, choice, path in moves:
            while not asking.done() and not self._has(choice, steps):
                self._news.clear()
                await self._news.wait()
            outcomes[await self._move(choice, path)] += 1
        return await asking

    async def _ask(self) -> ServerAnswer:
        try:
            return await ask(self._client.http, self._case, self._label, self._watch)
        finally:
            self._news.set()

    async def _watch(self, answer: ServerAnswer) -> None:
        self._answer = answer
        self._news.set()

    def _has(self, choice: int, steps: int) -> bool:
        return choice in self._answer.choices and self._answer.choices[choice].steps >= steps

    @property
    def _label(self) -> str:
        return f"moved-{self._case.number}"

    async def _move(self, choice: int, path: str) -> str:
        """Move a choice. Returns the outcome."""
        reference = f"{self._answer.id}-{choice}" if self._case.choices > 1 else self._label
        reply = await self._client.move(reference, path=path)
        if reply.status_code == 202:
            record = await self._client.outcome(reply.json()["id"])
            return "too late" if record["error"] in OVER else str(record["outcome"])
        message = str(reply.json()["error"]["message"])
        return "too late" if reply.status_code == 404 or message.endswith("is not here") else message


def drawn(case: Case, unmoved: ServerAnswer) -> list[tuple[int, int, str]]:
    """1 to 3 moves at random steps of the unmoved answer, except the last steps."""
    draw = random.Random(f"{SEED}/{case.number}/moves")
    points = []
    for _ in range(draw.choice([1, 2, 3])):
        choice = draw.choice(sorted(unmoved.choices))
        steps = draw.randrange(1, max(2, unmoved.choices[choice].steps - 6))
        points.append((steps, choice, draw.choice(["kv", "tokens", "auto"])))
    return sorted(points)


async def test_moves_change_no_answer(application: Application) -> None:
    gate, failed = asyncio.Semaphore(AT_ONCE), list[str]()
    outcomes, committed = Counter[str](), set[int]()

    async def one(case: Case, client: Client) -> None:
        own = Counter[str]()
        async with gate:
            journey = Journey(client, case)
            unmoved = await journey.unmoved()
            moves = drawn(case, unmoved)
            moved = await journey.moved(moves, own)
        found = differences(unmoved, moved, MOVED_NOISE) + [text for text in own if text not in ENDS]
        failed.extend(line(case, f"moved at {moves}: {text}") for text in found)
        outcomes.update(own)
        if own["committed"]:
            committed.add(case.number)

    async with application.client() as client:
        movable = [case for case in ASKED if not case.odd]
        await asyncio.gather(*(one(case, client) for case in movable))
        await client.idle()
    assert not failed, report(failed)
    assert ONLY or len(committed) > len(movable) // 2, (outcomes, len(committed))
    assert ONLY or outcomes["committed"] > sum(outcomes.values()) // 2, outcomes


def report(lines: list[str]) -> str:
    return "\n".join([f"{len(lines)} differences", *lines])
