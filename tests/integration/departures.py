"""The differences from vLLM's server that Mell has on purpose. Everything else is a fault."""

from collections.abc import Mapping
from dataclasses import replace

from tests.differential.answers import ServerAnswer
from tests.differential.bodies import COUNT_TOKENS, MESSAGES
from tests.differential.cases import Case

_EARLIER = "refused before vLLM reads it, with a type and a code of Mell's"
_NOT_STORED = "no response is stored, and no setting changes that"

DEPARTURES: Mapping[str, tuple[int, int, str]] = {
    name: (400, 400, _EARLIER)
    for name in (
        "seed 9223372036854775808",
        "n two",
        "prompt [1, 'a']",
        "prompt ['a', 1]",
        "prompt [-1]",
        "stream perhaps",
        "stream_options 5",
        "messages hello",
        "messages [5]",
        "messages [{'role': 'user', 'content': [{'type': 'image_url', 'image_u",
        "Anthropic's messages hello",
        "too many stop sequences",
    )
} | {
    "in the background": (400, 400, _NOT_STORED),
    "after an unknown response": (404, 400, _NOT_STORED),
    "a badly named response": (404, 400, _NOT_STORED),
    "a bad bias in events": (200, 400, "vLLM's server breaks the connection off; here, no stream begins"),
}
"""The status of vLLM's server, Mell's, and the reason, by the name of an odd case."""

ANTHROPICS = {400: "invalid_request_error", 404: "not_found_error"}
"""Anthropic's types of errors, which Mell answers with vLLM's messages, and vLLM's server does not."""


def expected(case: Case, answer: ServerAnswer) -> ServerAnswer:
    """The answer that Mell has to give where vLLM's server gives `answer`."""
    if case.path not in (MESSAGES, COUNT_TOKENS) or answer.status not in ANTHROPICS or answer.error is None:
        return answer
    error = {"type": ANTHROPICS[answer.status], "message": answer.error["message"]}
    return replace(answer, document={"type": "error", "error": error})
