"""Mell beside vLLM's own server: the same requests, the same answers, and no others when requests move or replicas die.

MELL_CORPUS_SEED and MELL_CORPUS_SIZE draw other requests; MELL_CORPUS_CASE sends only the request of that number.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.servers import ENGINE, Rig, bare_vllm
from tests.adapters import ADAPTERS
from tests.counts import LONG
from tests.differential.answers import ServerAnswer
from tests.differential.bodies import CHATS, COMPLETIONS
from tests.differential.cases import Case, Course, corpus
from tests.differential.comparison import Difference, differences, proven_tie, scored_tokens
from tests.differential.forced import FORCED, part_of
from tests.differential.odd import ODD
from tests.integration.application import Application, Client
from tests.integration.asking import (
    AT_ONCE,
    ENDED,
    Moved,
    OrderedMove,
    Sightings,
    ask,
    ask_all,
    ask_and_move,
    sightings,
    two_run,
)
from tests.integration.conftest import ADAPTER_KWARGS, FRONTEND_KWARGS, THINKING_KWARGS, Stage, free_port
from tests.integration.departures import DEPARTURES, expected

SEED = int(os.environ.get("MELL_CORPUS_SEED", "20240607"))
CASES = corpus(SEED, int(os.environ.get("MELL_CORPUS_SIZE", "400" if LONG else "40")))
ONLY = os.environ.get("MELL_CORPUS_CASE")
NOISE, MOVED_NOISE = 1e-3, 1e-4
"""Tolerance for logprobs: against vLLM's server, and of moved requests against unmoved ones."""

ATTEMPTS = 5
"""Most times that a request with a forced part is sent: on a busy machine, a move may come behind that part."""

KILLED = 24 if LONG else 5
"""Requests whose replica is killed."""


def asked(cases: Sequence[Case]) -> list[Case]:
    """All cases in a long run. Else none with an adapter, one in seven of the forced parts, and one in ten odd ones."""
    if ONLY:
        return [cases[int(ONLY)]]
    if LONG:
        return list(cases)
    forced = [case for case in cases if case.name in {part.name for part in FORCED}]
    odd = [case for case in cases if case.course is Course.ODD]
    left_out = {case.number for each, step in ((forced, 7), (odd, 10)) for i, case in enumerate(each) if i % step}
    return [case for case in cases if case.number not in left_out and case.asked.get("model") not in ADAPTERS]


ASKED = asked(CASES)


@pytest.fixture(scope="session")
def bare(stage: Stage) -> dict[int, ServerAnswer]:
    """The answers of vLLM's server, by case."""
    return answers_of_vllm(stage, ASKED)


def answers_of_vllm(stage: Stage, cases: Sequence[Case]) -> dict[int, ServerAnswer]:
    """The answers of vLLM's own server, by case. It has ended before Mell starts: each engine takes gigabytes.

    Requests with a budget of reasoning come last, one by one: if one ends while it reasons, vLLM's batch may keep its
    budget for the request that takes its row, and forces the end of reasoning upon that (`history.drop_budgets`).
    """
    stage.clear()
    budgeted = [case for case in cases if "thinking_token_budget" in case.asked]
    others = [case for case in cases if case not in budgeted]
    adapters = {**ADAPTER_KWARGS, "lora_modules": stage.lora_modules} if LONG else {}
    rig = replace(Rig(), extra={**ENGINE, **THINKING_KWARGS, **FRONTEND_KWARGS, **adapters})
    with bare_vllm(free_port(), rig) as port:
        url = f"http://127.0.0.1:{port}"
        return asyncio.run(ask_all(url, others)) | asyncio.run(ask_all(url, budgeted, at_once=1))


def test_vllm_answers_what_it_has_to(bare: dict[int, ServerAnswer]) -> None:
    refused = [case for case in ASKED if case.course is not Course.ODD and bare[case.number].status != 200]
    assert not refused, report(line(case, str(bare[case.number].error)) for case in refused)
    unforced = [case for case in ASKED if case.forced and not part_of(bare[case.number].document, case.forced)]
    assert not unforced, report(line(case, f"has no {case.forced}") for case in unforced)


def test_departures_are_of_odd_requests() -> None:
    assert DEPARTURES.keys() <= ODD.keys()


async def test_answers_are_vllms(bare: dict[int, ServerAnswer], application: Application) -> None:
    failed = await faults(application, bare)
    assert not failed, report(failed)


KEPT: dict[str, dict[int, ServerAnswer]] = {}
"""The answers of each application without moves, by case. A module's fixture would not outlive other modules' tests."""


async def unmoved(application: Application, cases: Sequence[Case]) -> dict[int, ServerAnswer]:
    """An application's answers without moves, by case."""
    if application.url not in KEPT:
        KEPT[application.url] = await ask_all(application.url, cases)
    return KEPT[application.url]


async def faults(application: Application, bare: dict[int, ServerAnswer]) -> list[str]:
    """Every difference from vLLM's answers that is neither on purpose nor a tie."""
    failed: list[str] = []
    given = await unmoved(application, ASKED)
    async with application.client() as client:
        for case in ASKED:
            want, got = expected(case, bare[case.number]), given[case.number]
            found = differences(want, got, NOISE)
            if departure := DEPARTURES.get(case.name) if case.course is Course.ODD else None:
                statuses = (want.status, got.status)
                if statuses != departure[:2] or not found:
                    # A difference that is no more must not stay in the list.
                    failed.append(line(case, f"answered with {statuses}"))
            elif found and not await is_tie(client, case, want):
                failed += [line(case, str(difference)) for difference in found[:3]]
    return failed


async def is_tie(client: Client, case: Case, want: ServerAnswer) -> bool:
    """True if a greedy answer differs from `want` because two tokens are equally likely."""
    if not case.greedy or case.path not in (COMPLETIONS, CHATS) or case.choices > 1 or case.course is not Course.STEPS:
        return False
    scored = {"logprobs": 5} if case.path == COMPLETIONS else {"logprobs": True, "top_logprobs": 5}
    body = {name: value for name, value in case.asked.items() if name not in ("stream", "stream_options", "echo")}
    answer = await ask(client.http, replace(case, body=body | scored), f"tie-{case.number}")
    (choice,) = want.document["choices"]
    text = choice["text"] if case.path == COMPLETIONS else (choice.get("message") or choice["delta"])["content"]
    return proven_tie(text or "", scored_tokens(answer.document), NOISE)


def line(case: Case, text: str) -> str:
    """One line of a report, with what is needed to ask again."""
    return f"MELL_CORPUS_SEED={SEED} MELL_CORPUS_CASE={case}: {text[:600]}\n  {case.path} {str(case.body)[:600]}"


def report(lines: Iterable[str]) -> str:
    found = list(lines)
    return "\n".join([f"{len(found)} differences", *found])


# --- moved --------------------------------------------------------------------------------------------


def drawn(case: Case, answer: ServerAnswer) -> list[OrderedMove]:
    """1 to 3 moves at random lengths of the output, except the last tokens; the first within a forced part."""
    draw = random.Random(f"{SEED}/{case.number}/moves")
    if case.inside:
        first = case.inside.start + len(case.inside) // 4
        return [OrderedMove(first, 0, draw.choice(["kv", "tokens"])), *_further(case, draw)]
    length = (answer.output_tokens or 0) // case.choices
    points = sorted(draw.randrange(1, max(2, length - 6)) for _ in range(draw.choice([1, 2, 3])))
    return [OrderedMove(at, draw.randrange(case.choices), draw.choice(["kv", "tokens", "auto"])) for at in points]


def _further(case: Case, draw: random.Random) -> list[OrderedMove]:
    return [OrderedMove(case.inside.stop + 5, 0, draw.choice(["kv", "tokens"]))] if draw.random() < 0.5 else []


def movable(cases: Iterable[Case], answers: dict[int, ServerAnswer]) -> list[Case]:
    """The cases that run long enough to be moved."""
    return [case for case in cases if case.course is Course.STEPS and answers[case.number].status == 200]


async def test_moves_change_no_answer(application: Application) -> None:
    known = await unmoved(application, ASKED)
    gate, failed = asyncio.Semaphore(AT_ONCE), list[str]()
    outcomes, committed = Counter[str](), set[int]()

    async def one(case: Case, client: Client, seen: Sightings) -> None:
        before = known[case.number]
        ordered = drawn(case, before)
        async with gate:
            for attempt in range(ATTEMPTS):
                label = f"moved-{case.number}-{attempt}"
                answer, moves = await ask_and_move(client, seen, case, label, before.prompt_tokens or 0, ordered)
                found = [*map(str, differences(before, answer, MOVED_NOISE)[:3]), *refused(moves)]
                failed.extend(line(case, f"moved: {list(zip(ordered, moves, strict=True))}: {text}") for text in found)
                outcomes.update(move.outcome for move in moves)
                done = [move for move in moves if move.outcome == "committed"]
                if done:
                    committed.add(case.number)
                if not case.inside or any(move.at in case.inside for move in done):
                    return
            failed.append(line(case, f"no move within its {case.forced} at {case.inside}: {moves}"))

    async with application.client() as client, sightings(client) as seen:
        await two_run(client)
        chosen = movable(ASKED, known)
        await asyncio.gather(*(one(case, client, seen) for case in chosen))
        await client.idle()
    assert not failed, report(failed)
    assert ONLY or len(committed) > len(chosen) // 4, (outcomes, len(committed), len(chosen))
    assert ONLY or outcomes["committed"] > sum(outcomes.values()) // 4, outcomes


def refused(moves: Sequence[Moved]) -> list[str]:
    """The outcomes of orders that were refused. A busy machine may have a move aborted, which changes no answer."""
    return [move.outcome for move in moves if move.outcome not in ("committed", "aborted", ENDED)]


# --- killed -------------------------------------------------------------------------------------------


async def test_the_death_of_a_replica_changes_no_answer(application: Application) -> None:
    """The last test of this application: it does not wait for the replica's successor."""
    known = await unmoved(application, ASKED)
    draw = random.Random(f"{SEED}/killed")
    async with application.client() as client:
        await two_run(client)
        long = [case for case in movable(ASKED, known) if (known[case.number].output_tokens or 0) >= 40]
        rounds = [case for case in ASKED if case.course is Course.ROUNDS]
        adapted = [case for case in long if case.asked["model"] in ADAPTERS]
        sample = [*draw.sample(long, min(KILLED, len(long))), *adapted[: KILLED // 4], *rounds[: KILLED // 4]]
        asking = [asyncio.create_task(ask(client.http, case, f"killed-{case.number}")) for case in sample]
        doomed = await busiest(client, asking)
        os.kill(doomed["pids"][1], signal.SIGKILL)
        answers = await asyncio.gather(*asking)
    failed: list[str] = []
    for case, answer in zip(sample, answers, strict=True):
        found: list[Difference] = differences(known[case.number], answer, MOVED_NOISE)
        failed += [line(case, f"its replica may have been killed: {difference}") for difference in found]
    assert not failed, report(failed)


async def busiest(client: Client, asking: Sequence["asyncio.Task[ServerAnswer]"]) -> dict[str, Any]:
    """The replica with the most requests, once it decodes."""
    while not all(task.done() for task in asking):
        found = max(await client.running(), key=lambda replica: len(replica["requests"]))
        if any(request["phase"] == "decode" for request in found["requests"]):
            return found
    raise AssertionError("all answers came before the replica was killed")
