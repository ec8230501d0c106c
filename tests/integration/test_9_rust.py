"""The part of the corpus that vLLM's Rust frontend has: beside its Python one, moved, and with a kill.

Skipped where there is no `vllm-rs`.
"""

import pytest

from tests.app.frontend.rust.conftest import REAL
from tests.differential.answers import ServerAnswer
from tests.differential.bodies import CHATS, COMPLETIONS, MODEL
from tests.differential.cases import Case, Course
from tests.differential.cases import corpus as corpus_of
from tests.differential.comparison import Difference, differences
from tests.integration import test_7_differential as corpus
from tests.integration.application import Application
from tests.integration.asking import ask_all
from tests.integration.conftest import Stage
from tests.integration.rust_departures import RUST_DEPARTURES, without_departures

pytestmark = REAL


def supported(case: Case) -> bool:
    """True for a request that the page of frontends says it takes."""
    if case.course is not Course.STEPS or case.path not in (COMPLETIONS, CHATS) or case.asked["model"] != MODEL:
        return False
    prompt = case.asked.get("prompt", "")
    several = case.choices > 1 or not (isinstance(prompt, str) or isinstance(prompt[0], int))
    truncated = bool(case.asked.get("echo")) and "truncate_prompt_tokens" in case.asked
    # The program shows as many of the likeliest tokens as the engine's arrays have: as the batch's other requests want.
    batched = case.path == COMPLETIONS and case.asked.get("logprobs") == 0
    return not (several or truncated or batched or "spaces_between_special_tokens" in case.asked)


COMPARED = [case for case in corpus_of(corpus.SEED, 400) if supported(case)]
"""Requests with every difference between the frontends."""


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus's tests ask the supported requests only."""
    monkeypatch.setattr(corpus, "ASKED", [case for case in corpus.ASKED if supported(case)])


@pytest.fixture(scope="module")
def pythons(stage: Stage) -> dict[int, ServerAnswer]:
    """The answers of vLLM's own server to `COMPARED`, by case."""
    return corpus.answers_of_vllm(stage, COMPARED)


async def test_answers_are_vllms_but_for_the_departures(pythons: dict[int, ServerAnswer], rusty: Application) -> None:
    given = await ask_all(rusty.url, COMPARED)

    def found(case: Case, but: str = "") -> list[Difference]:
        want, got = (without_departures(case, answers[case.number], but) for answers in (pythons, given))
        return differences(want, got, corpus.NOISE)

    async with rusty.client() as client:
        failed = [
            corpus.line(case, str(difference))
            for case in COMPARED
            if found(case) and not await corpus.is_tie(client, case, pythons[case.number])
            for difference in found(case)[:3]
        ]
    assert not failed, corpus.report(failed)
    needless = [kind for kind in RUST_DEPARTURES if not any(found(case, kind) for case in COMPARED)]
    assert not needless, "the frontends agree in these by now"


async def test_moves_change_no_answer(rusty: Application) -> None:
    await corpus.test_moves_change_no_answer(rusty)


async def test_the_death_of_a_replica_changes_no_answer(rusty: Application) -> None:
    await corpus.test_the_death_of_a_replica_changes_no_answer(rusty)
