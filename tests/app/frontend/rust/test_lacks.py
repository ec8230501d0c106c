"""What vLLM's Rust frontend lacks, as docs/frontend.md lists it."""

import re
from typing import Any

from tests.app.frontend.rust.conftest import REAL, real_binary, rust
from tests.docs.markdown import ROOT

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SHORT = {"prompt": "Hi", "max_tokens": 2}
USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

LACKS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "`/v1/responses`, `/v1/messages`, `/v1/messages/count_tokens`": [
        (path, {}) for path in ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
    ],
    "`/v1/chat/completions/batch`, `/generative_scoring`": [
        (path, {}) for path in ("/v1/chat/completions/batch", "/generative_scoring")
    ],
    "embeddings, pooling, scores": [(path, {}) for path in ("/v1/embeddings", "/pooling", "/score")],
    "`n` above 1": [(COMPLETIONS, {**SHORT, "n": 2}), (CHATS, {"messages": USER, "n": 2})],
    "several prompts in a completion": [
        (COMPLETIONS, {**SHORT, "prompt": prompt}) for prompt in (["a", "b"], [[5], [6]])
    ],
    "a message with an empty text": [(CHATS, {"messages": [{"role": "user", "content": ""}]})],
    "beam search": [(COMPLETIONS, {**SHORT, "use_beam_search": True})],
    "`suffix`": [(COMPLETIONS, {**SHORT, "suffix": "x"})],
    "`spaces_between_special_tokens`": [(COMPLETIONS, {**SHORT, "spaces_between_special_tokens": False})],
    "`echo` with `truncate_prompt_tokens`": [(COMPLETIONS, {**SHORT, "echo": True, "truncate_prompt_tokens": 1})],
    "tools without `tool_call_parser`": [(CHATS, {"messages": USER, "tools": [TOOL], "tool_choice": "auto"})],
}
"""The requests of each row of the table."""


def listed() -> dict[str, int]:
    """The statuses in the table of the page, by request."""
    section = (ROOT / "docs" / "frontend.md").read_text().partition("## The Rust frontend")[2]
    return {row: int(status) for row, status in re.findall(r"^\| (.*) \| (\d{3}) \|$", section, re.MULTILINE)}


def test_the_table_has_every_request() -> None:
    assert listed().keys() == LACKS.keys()


@REAL
async def test_the_frontend_answers_as_the_table_says() -> None:
    """A version that has more is to be used."""
    async with rust(real_binary() or "") as api:
        answered = {
            row: {(await api.post(path, **body)).status_code for path, body in requests}
            for row, requests in LACKS.items()
        }
    assert answered == {row: {status} for row, status in listed().items()}
