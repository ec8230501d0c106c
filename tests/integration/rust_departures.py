"""The differences of vLLM's Rust frontend from its Python one, by kind, which are there without Mell as well.

A kind hides what differs of both answers to a case; all of them where the frontends send other requests to engines.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tests.differential.answers import Json, ServerAnswer
from tests.differential.bodies import CHATS
from tests.differential.cases import Case

Hidden = Callable[[Case, Json], Json]
"""What is left of an answer's document without a kind's differences."""

_THINK = "<think>"
"""The beginning of reasoning, which random weights write at times."""


def _without(keep: Callable[[Case, str, Json], bool]) -> Hidden:
    """Hides members by their names and values, wherever they are."""

    def hidden(case: Case, value: Json) -> Json:
        if isinstance(value, dict):
            return {name: hidden(case, member) for name, member in value.items() if keep(case, name, member)}
        return [hidden(case, item) for item in value] if isinstance(value, list) else value

    return hidden


def _whole(differs: Callable[[Case], bool]) -> Hidden:
    """Hides the whole document of some cases."""
    return lambda case, document: None if differs(case) else document


def _whole_characters(case: Case, value: Json) -> Json:
    match value:
        case dict():
            return {name: _whole_characters(case, member) for name, member in value.items()}
        case list():
            return [_whole_characters(case, item) for item in value]
        case str():
            return value.replace("\N{REPLACEMENT CHARACTER}", "")
        case _:
            return value


def _scores(case: Case, value: Json) -> Json:
    """Logprobs without the text of their tokens: the candidates in a chat are their scores, in descending order.

    Those of a completion are left out: the program shows as many as the batch's other requests want.
    """
    if isinstance(value, list):
        return [_scores(case, item) for item in value]
    if not isinstance(value, dict):
        return value
    left = {}
    for name, member in value.items():
        if name != "top_logprobs":
            if name not in ("token", "tokens", "bytes", "text_offset", "decoded_token"):
                left[name] = _scores(case, member)
        elif case.path == CHATS:
            # Under a name whose numbers are compared within the tolerance.
            left["token_logprobs"] = sorted((candidate["logprob"] for candidate in member or ()), reverse=True)
    return left


def _content_is_parts(case: Case) -> bool:
    return any(isinstance(message.get("content"), list) for message in case.asked.get("messages", ()))


def _is_formed(case: Case) -> bool:
    """True for a chat whose text has to follow a grammar, or that has tools."""
    formatted = (case.asked.get("response_format") or {}).get("type", "text") != "text"
    tools = "tools" in case.asked and case.asked.get("tool_choice") != "none"
    return case.path == CHATS and (formatted or tools or "structured_outputs" in case.asked)


def _continues_no_assistant(case: Case) -> bool:
    last = (case.asked.get("messages") or [{}])[-1]
    return bool(case.asked.get("continue_final_message")) and last.get("role") != "assistant"


def _reasoning(case: Case, document: Json) -> Json:
    """Text and reasoning in one, of chats that do not ask for reasoning."""
    if (case.asked.get("chat_template_kwargs") or {}).get("enable_thinking"):
        return document

    def joined(value: Json) -> Json:
        if isinstance(value, list):
            return [joined(item) for item in value]
        if not isinstance(value, dict):
            return value
        members = {name: joined(member) for name, member in value.items() if name != "reasoning"}
        if "content" in members and isinstance(members["content"], str | None):
            text = (members["content"] or "").partition(_THINK)
            members["content"] = text[0] + (text[2] or value.get("reasoning") or "")
        return members

    return joined(document)


RUST_DEPARTURES: Mapping[str, Hidden] = {
    "members without a value": _without(lambda case, name, value: value is not None and value != []),
    "the fingerprint": _without(lambda case, name, value: name != "system_fingerprint"),
    "details of usage": _without(lambda case, name, value: not name.endswith("_tokens_details")),
    "the prompt in streams": _without(
        lambda case, name, value: not (case.streamed and name in ("prompt_text", "prompt_token_ids"))
    ),
    "incomplete characters": _whole_characters,
    "the text of tokens in logprobs": _scores,
    "reasoning that is not asked for": _reasoning,
    "contents of several parts": _whole(_content_is_parts),
    "structured outputs and tools in chats": _whole(_is_formed),
    "tools that must not be called": _whole(lambda case: case.asked.get("tool_choice") == "none"),
    "words to avoid": _whole(lambda case: bool(case.asked.get("bad_words"))),
    "to continue a message that is not the assistant's": _whole(_continues_no_assistant),
}
"""See docs/frontend.md. Every kind is needed: a test fails for one without a difference."""


def without_departures(case: Case, answer: ServerAnswer, but: str = "") -> ServerAnswer:
    """An answer to a case without the differences of all kinds `but` one."""
    document = answer.document
    for kind, hidden in RUST_DEPARTURES.items():
        if kind != but:
            document = hidden(case, document)
    return ServerAnswer(0, "", None) if document is None else replace(answer, document=document)
