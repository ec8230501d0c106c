"""The part of the corpus that vLLM's Rust frontend has, moved and with a kill. Skipped where there is no `vllm-rs`."""

import pytest

from tests.app.frontend.rust.conftest import REAL
from tests.differential.bodies import CHATS, COMPLETIONS, MODEL
from tests.differential.cases import Case, Course
from tests.integration import test_7_differential as corpus
from tests.integration.application import Application

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


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus's tests ask the supported requests only."""
    monkeypatch.setattr(corpus, "ASKED", [case for case in corpus.ASKED if supported(case)])


async def test_moves_change_no_answer(rusty: Application) -> None:
    await corpus.test_moves_change_no_answer(rusty)


async def test_the_death_of_a_replica_changes_no_answer(rusty: Application) -> None:
    await corpus.test_the_death_of_a_replica_changes_no_answer(rusty)
