"""Requests with images on real engines: moved by KV and by tokens, and continued after deaths, they answer the same.

The split application serves a model of images with M-RoPE: its positions depend on the images.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.servers import ENGINE, Rig, bare_vllm
from tests.counts import LONG_ONLY
from tests.differential.answers import ServerAnswer
from tests.differential.bodies import CHATS, MESSAGES, MODEL, RESPONSES, Body
from tests.differential.cases import Case, Course
from tests.differential.comparison import differences
from tests.integration.application import BLOCK, Application, Client, eventually
from tests.integration.asking import OrderedMove, ask, ask_all, ask_and_move, sightings, two_run
from tests.integration.conftest import SPLIT_KWARGS, THINKING_KWARGS, Stage, free_port
from tests.integration.models.rows import How, row
from tests.integration.test_1_migration import loaded
from tests.integration.test_3_failures import home, lost
from tests.integration.test_3_tensor_parallel import three_streams
from tests.tinyvision import MARKS, data_url, ensure_tiny_vision

pytestmark = LONG_ONLY

IMAGES = row("Images (Qwen-VL, LLaVA, PaddleOCR-VL)")
SEED = 20261123
OUTPUT = 120
NOISE = 1e-4


def chat(images: list[str], text: str = "Where do blocks move?", **more: Any) -> Body:
    """A chat about images; greedy."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    sampling = {"temperature": 0, "ignore_eos": True, "max_completion_tokens": OUTPUT}
    return {"model": MODEL, "messages": [message], **sampling, **more}


ONE, TWO = [data_url(1)], [data_url(2, 300, 90), data_url(3, 90, 300)]
_PART = {"type": "input_image", "image_url": ONE[0], "detail": "auto"}
_SOURCE = {"type": "base64", "media_type": "image/png", "data": ONE[0].partition(",")[2]}
BODIES: list[tuple[str, Body]] = [
    (CHATS, chat(ONE)),
    (CHATS, chat(TWO, stream=True, stream_options={"include_usage": True})),
    (CHATS, chat([*TWO, *ONE], temperature=0.9, seed=7)),
    (CHATS, chat(ONE, repetition_penalty=1.3, presence_penalty=0.6, logprobs=True, top_logprobs=2)),
    (CHATS, chat(TWO, prompt_logprobs=1, n=2, temperature=0.9, seed=8)),
    (CHATS, chat(TWO * 3, structured_outputs={"regex": "([a-z]{3} ){60}"}, max_completion_tokens=200)),
    (
        RESPONSES,
        {
            "model": MODEL,
            "input": [{"role": "user", "content": [_PART, {"type": "input_text", "text": "look"}]}],
            "temperature": 0,
            "max_output_tokens": OUTPUT,
        },
    ),
    (
        MESSAGES,
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": [{"type": "image", "source": _SOURCE}]}],
            "temperature": 0,
            "max_tokens": OUTPUT,
            "stream": True,
        },
    ),
]
CASES = [Case(number, "images", path, body, Course.STEPS) for number, (path, body) in enumerate(BODIES)]
KEPT: dict[int, ServerAnswer] = {}


async def unmoved(split: Application) -> dict[int, ServerAnswer]:
    """The answers without moves."""
    if not KEPT:
        KEPT.update(await ask_all(split.url, CASES))
    return KEPT


def line(case: Case, text: object) -> str:
    return f"{case}: {text}"


async def test_images_decide_the_answers(split: Application) -> None:
    known = await unmoved(split)
    assert [answer.status for answer in known.values()] == [200] * len(CASES), [a.error for a in known.values()]
    async with split.client() as client:
        texts = []
        for url in (data_url(1), data_url(1, 200, 150), data_url(9), data_url(1)):
            answer = await ask(client.http, replace(CASES[0], body=chat([url])), "seen")
            texts.append(answer.document["choices"][0]["message"]["content"])
        assert texts[0] == texts[3] and len({*texts}) == 3
        assert len({*texts[0].split()}) > 20, "the model repeats itself: equality would prove nothing"


async def test_answers_to_images_are_vllms(stage: Stage, request: pytest.FixtureRequest) -> None:
    """Its own server with two workers as well; it has ended before Mell starts."""
    stage.clear()
    rig = Rig(extra={**ENGINE, **SPLIT_KWARGS, **THINKING_KWARGS, "model": str(ensure_tiny_vision())})
    with bare_vllm(free_port(), rig) as port:
        theirs = await ask_all(f"http://127.0.0.1:{port}", CASES)
    ours = await unmoved(request.getfixturevalue("split"))
    failed = [line(case, differences(theirs[case.number], ours[case.number], 1e-3)[:3]) for case in CASES]
    assert not [each for each in failed if not each.endswith("[]")], failed


async def test_moves_change_no_answer_to_images(split: Application) -> None:
    known = await unmoved(split)
    draw = random.Random(SEED)
    failed, outcomes = list[str](), Counter[tuple[str, str]]()

    async def one(case: Case, client: Client, paths: tuple[str, ...]) -> None:
        before = known[case.number]
        points = sorted(draw.sample(range(2, OUTPUT - 40), len(paths)))
        ordered = [OrderedMove(at, draw.randrange(2), path) for at, path in zip(points, paths, strict=True)]
        label = f"images-{case.number}-{paths[0]}"
        answer, made = await ask_and_move(client, seen, case, label, before.prompt_tokens or 0, ordered)
        failed.extend(line(case, f"{made}: {each}") for each in differences(before, answer, NOISE)[:2])
        outcomes.update((path, move.outcome) for path, move in zip(paths, made, strict=True))

    async with split.client() as client, sightings(client) as seen:
        await two_run(client)
        for paths in (("kv", "tokens", "kv"), ("tokens", "kv", "tokens")):
            await asyncio.gather(*(one(case, client, paths) for case in CASES))
        await client.idle()
    assert not failed, "\n".join(failed)
    assert IMAGES.how is How.KV
    for path in ("kv", "tokens"):
        assert outcomes[path, "committed"] > len(CASES) // 2, outcomes


async def test_target_loads_blocks_that_end_within_an_image(split: Application) -> None:
    """A copied range may end within the last image of the prompt."""
    async with split.client() as client:
        for count in range(1, 9):
            case = replace(CASES[0], body=chat([data_url(100 + i) for i in range(count)], text="x"))
            tokens = await prompt_tokens(client, case)
            # The last block of the prompt's is full only after some output, and the image reaches into it.
            if len(tokens) % BLOCK > len(tokens) - 1 - last_image(tokens) > 0:
                break
        else:
            pytest.fail("no prompt has its last image across a block's end")
        await client.settle()
        before = await ask(client.http, case, "within")
        await client.settle()
        counts = {r["id"]: r["kv_blocks_loaded"] for r in await client.running()}
        async with sightings(client) as seen:
            answer, (made,) = await ask_and_move(
                client, seen, case, "within-moved", len(tokens), [OrderedMove(1, 0, "kv")]
            )
        assert not differences(before, answer, NOISE) and made.outcome == "committed"
        record = next(m for m in await client.migrations() if m["label"] == "within-moved")
        await loaded(client, record["target"], counts, record["blocks"])
        await client.idle()


async def prompt_tokens(client: Client, case: Case) -> list[int]:
    response = await client.http.post("/tokenize", json={"model": MODEL, "messages": case.asked["messages"]})
    found: list[int] = response.json()["tokens"]
    return found


def last_image(tokens: list[int]) -> int:
    """The index of the last token that stands for a part of an image."""
    return max(index for index, token in enumerate(tokens) if token == 512)


async def test_placeholders_in_texts_end_no_engine(split: Application) -> None:
    async with split.client() as client:
        for body in (chat([], text=MARKS[0] * 40), chat(ONE, text=MARKS[1] + MARKS[0] * 3), chat(ONE, text=MARKS[2])):
            answer = await ask(client.http, replace(CASES[0], body=body), "marks")
            assert answer.status in (200, 400)
        again = await ask(client.http, CASES[0], "marks")
        assert not differences((await unmoved(split))[0], again, NOISE)
        await client.idle()


async def test_the_death_of_one_worker_changes_no_answer(split: Application) -> None:
    """To images, and to text. The last test of this application: it does not wait for the replica's successor."""
    known = await unmoved(split)
    async with split.client() as client:
        await two_run(client)
        async with three_streams(client, "one-worker"):
            asking = [asyncio.create_task(ask(client.http, case, f"killed-{case.number}")) for case in CASES]

            async def decoding() -> bool:
                return any(request["phase"] == "decode" for request in (await home(client))["requests"])

            await eventually(decoding)
            doomed = await home(client)
            os.kill(doomed["pids"][3], signal.SIGKILL)
            answers = await asyncio.gather(*asking)
        await lost(client, doomed)
    failed = [line(c, d) for c, a in zip(CASES, answers, strict=True) for d in differences(known[c.number], a, NOISE)]
    assert not failed, "\n".join(failed)
