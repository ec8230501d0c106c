"""Checks of request bodies that vLLM's frontend would accept, or would be brought down by.

They bound the work of one request before vLLM reads it: the shape of its JSON, its choices and inputs, and what the
samplers of engines hold. Members that operators and Mell set are refused or dropped. All else is vLLM's to judge.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from app.frontend.guard.constraints import check_constraints
from app.frontend.guard.dialects import RESPONSES
from app.frontend.guard.encoding import decode_json, encode_json
from app.frontend.guard.items import check_items
from app.frontend.guard.media import MEDIA_CHARGE_TOKENS, check_media
from app.frontend.guard.routes import NOT_STORED, OpenRoute, RouteTask
from app.ingress.access.classes import MEMBER
from app.ingress.asgi import read_label
from app.ingress.errors import ApiError

MAX_DEPTH = 64
"""Nesting of objects and lists: deeper ones exhaust the stack of validators and templates."""
MAX_VALUES = 20_000
"""Members and elements over all objects and lists; lists of token ids do not count."""
MAX_LENGTH = 2048
"""Members or elements of one object or list, token ids aside. OpenAI's API has as many inputs for embeddings.

vLLM's validators collect every error of every element, for each type that it could have, at 3 KB an error.
"""
MAX_SALT_CHARACTERS = 256
"""Of `cache_salt`: it becomes a part of the first block's name."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024

_HALF = re.compile("[\ud800-\udfff]")
"""A text with it cannot be sent to an engine."""

_MAX_LENGTHS = {
    "stop_token_ids": 120,
    "logit_bias": 1024,
    "allowed_token_ids": 1024,
    "logprob_token_ids": 1024,
    "label_token_ids": 1024,
}
"""Longer ones fail inside an engine, where they end it (vllm/v1/worker/gpu/sample/logit_bias.py). An engine adds the
model's own ids to the first."""

MAX_COMPARISONS = 10_000
"""For the detection of repetitions: patterns of up to 140 tokens twice, or 99 three times. They take a millisecond."""
_PATTERNS = {"max_pattern_size": 0, "min_pattern_size": 1, "min_count": 0}

_PRIVATE = ("kv_transfer_params", "ec_transfer_params")
"""Members for the connectors of engines, which are Mell's: a client must name neither paths nor blocks."""

DEFAULT_CHARGE_TOKENS = 256
"""Provisional charge for an answer without a length: about that of a usual answer."""
_COMPLETION_TOKENS = 16
"""vLLM's default length of a completion."""
_BYTES_PER_TOKEN = 4
"""Of usual text. The estimate is corrected at the end of the request."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The operator's limits: choices and items of media of one request, tokens of one prompt, domains of addresses."""

    choices: int
    prompt_tokens: int
    media: int = 32
    media_domains: Collection[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class CheckedBody:
    """A body that may reach vLLM. `max_tokens` is the provisional charge for it, `media` its number of media items.

    `service_tier` and `session` are the client's, unchecked.
    """

    content: bytes
    max_tokens: int
    media: int
    service_tier: Any = None
    session: Any = None


def check_body(content: bytes, route: OpenRoute, limits: BodyLimits) -> CheckedBody:
    """Read and check a body. The result is encoded anew, so vLLM reads what was checked.

    Raises:
        ApiError: 400 for a body that is refused.
    """
    return check_members(decode_body(content), content, route, limits)


def check_members(body: dict[str, Any], content: bytes, route: OpenRoute, limits: BodyLimits) -> CheckedBody:
    """As `check_body`, for a body whose members are read."""
    _check_shape(body, content)
    if _LONG_NUMBER.search(content) or b"\0" in content:  # UTF-16 has a zero between two digits.
        _check_numbers(body)
    _check_types(body, route)
    _drop_private(body)
    _check_salt(body)
    _check_sampling(body)
    check_constraints(body)
    if route.dialect is RESPONSES:
        _refuse_stored(body)
        check_items(body.get("input"))
    tokens, choices = 0, 0
    if route.task is RouteTask.GENERATE:
        prompts, tokens = _count_prompts(body, route.inputs, limits)
        choices = _check_choices(body, route.inputs, prompts, limits)
    elif route.task is RouteTask.POOL:
        tokens = _count_input_tokens(body.get("input"))
    encoded = encode_json(body)
    use = check_media(body, encoded, limits.media_domains, limits.media, pooling=route.task is RouteTask.POOL)
    if use.named:
        encoded = encode_json(body)
    asked = tokens or (len(encoded) - use.characters) // _BYTES_PER_TOKEN + use.items * MEDIA_CHARGE_TOKENS
    charge = asked + choices * _answer_tokens(body, route)
    return CheckedBody(encoded, charge, use.items, body.get(MEMBER), body.get("prompt_cache_key"))


def invalid(param: str, reason: str, code: str = "invalid_value") -> ApiError:
    """400: the member `param` is refused."""
    return ApiError(400, f"{param}: {reason}", param=param, code=code)


# --- JSON -----------------------------------------------------------------------------------------------


def decode_body(content: bytes) -> dict[str, Any]:
    """The members of a body, as they are. Raises ApiError 400 for one that is no object of JSON."""
    try:
        body = decode_json(content)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {_shortened(error)}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_body")
    return body


def _shortened(error: ValueError) -> str:
    # The text of a UnicodeDecodeError has the whole body.
    return f"it is not {error.encoding}" if isinstance(error, UnicodeDecodeError) else str(error)[:200]


def _too_deep() -> ApiError:
    return ApiError(400, f"the body has more than {MAX_DEPTH} levels of objects and lists", code="invalid_json")


def _check_shape(body: dict[str, Any], content: bytes) -> None:
    """Bound depth and number of values. Few brackets and commas bound both without a look at the values."""
    if content.count(b"[") + content.count(b"{") <= MAX_DEPTH and content.count(b",") < MAX_LENGTH:
        return
    values, depth = 0, 0
    level: list[Any] = [body]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        below: list[Any] = []
        for container in level:
            members = container.values() if isinstance(container, dict) else container
            kinds = set(map(type, members))
            if kinds == {int} and isinstance(container, list) and depth <= _TOKENS_DEPTH and min(container) >= 0:
                continue
            values += len(container)
            if len(container) > MAX_LENGTH or values > MAX_VALUES:
                most = f"{MAX_LENGTH} members or elements each, and {MAX_VALUES} in all"
                raise ApiError(400, f"the body's objects and lists may have {most}", code="invalid_body")
            if kinds & {dict, list}:
                below.extend(each for each in members if isinstance(each, dict | list))
        level = below


_TOKENS_DEPTH = 3
"""The depth of a list of token ids in a list of prompts."""

_LONG_NUMBER = re.compile(rb"[0-9]{19}")


def _check_numbers(body: dict[str, Any]) -> None:
    """Refuse whole numbers of more than 64 bits, which requests for engines cannot hold."""
    for name, member in body.items():
        pending = [member]
        while pending:
            value = pending.pop()
            if isinstance(value, dict):
                pending.extend(value.values())
            elif isinstance(value, list):
                pending.extend(value)
            elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise invalid(name, "a number has more than 64 bits")


_TYPES: Mapping[str, type] = {
    "messages": list,
    "tools": list,
    "structured_outputs": dict,
    "stream_options": dict,
    "vllm_xargs": dict,
}
"""Types of members that vLLM's validators take for granted, or that the checks here read."""

_CONVERTED: Mapping[str, TypeAdapter[Any]] = {"stream": TypeAdapter(bool), "n": TypeAdapter(int)}
"""Members that the checks here, and vLLM's validators before others, read: as vLLM converts `1`, `"true"` or `2.0`."""


def _check_types(body: dict[str, Any], route: OpenRoute) -> None:
    for name, kind in _TYPES.items():
        value = body.get(name)
        if value is not None and not isinstance(value, kind):
            raise invalid(name, f"must be {_NAMES[kind]}")
    for name, adapter in _CONVERTED.items():
        if body.get(name) is not None:
            try:
                body[name] = adapter.validate_python(body[name])
            except ValidationError as error:
                raise invalid(name, error.errors()[0]["msg"]) from None
    chats = body.get("messages") or ()
    if route.inputs == "messages":
        if not all(isinstance(chat, list) and _are_objects(chat) for chat in chats):
            raise invalid("messages", "must be a list of lists of objects")
    elif not _are_objects(chats):
        raise invalid("messages", "must be a list of objects")
    if not _are_objects(body.get("tools") or ()):
        raise invalid("tools", "must be a list of objects")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and "function" in choice and not all(map(_is_named, body.get("tools") or ())):
        raise invalid("tools", "each must have a function with a name")


def _are_objects(values: Iterable[Any]) -> bool:
    return all(isinstance(value, dict) for value in values)


def _is_named(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


_NAMES: Mapping[Any, str] = {list: "a list", dict: "an object"}


# --- members that are not the client's --------------------------------------------------------------------


def _drop_private(body: dict[str, Any]) -> None:
    """Refuse members for connectors; drop and bound those by which vLLM would route or name the request."""
    extra = body.get("vllm_xargs") or {}
    for name in _PRIVATE:
        if body.pop(name, None) is not None or name in extra:
            raise invalid(name, "cannot be set by a client", "unsupported_parameter")
    extra.pop("session_id", None)
    body.pop("session_id", None)
    if (name := body.pop("request_id", None)) is not None:
        # vLLM repeats it in every chunk of the answer.
        if not isinstance(name, str):
            raise invalid("request_id", "must be a text")
        if label := read_label(name):
            body["request_id"] = label


def _refuse_stored(body: dict[str, Any]) -> None:
    """Refuse a response that needs a stored one, or is stored to be read later."""
    for name in ("background", "previous_response_id"):
        if body.get(name):
            raise invalid(name, NOT_STORED, "unsupported_parameter")


def _check_salt(body: dict[str, Any]) -> None:
    salt = body.get("cache_salt")
    if isinstance(salt, str) and len(salt) > MAX_SALT_CHARACTERS:
        raise invalid("cache_salt", f"at most {MAX_SALT_CHARACTERS} characters")


# --- bounds -----------------------------------------------------------------------------------------------


def _check_sampling(body: dict[str, Any]) -> None:
    for name in ("stop", "stop_sequences", "bad_words"):
        stops = body.get(name)
        stops = [stops] if isinstance(stops, str) else stops
        if not isinstance(stops, list):
            continue
        if any(isinstance(stop, str) and _HALF.search(stop) for stop in stops):
            raise invalid(name, "half of a surrogate pair is no text, and no answer has it")
        if name == "bad_words":
            continue  # vLLM bounds them.
        if len(stops) > MAX_STOPS:
            raise invalid(name, f"at most {MAX_STOPS} strings")
        if any(isinstance(stop, str) and len(stop) > MAX_STOP_CHARACTERS for stop in stops):
            raise invalid(name, f"at most {MAX_STOP_CHARACTERS} characters each")
    for name, most in _MAX_LENGTHS.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise invalid(name, f"at most {most}")
    _check_repetition(body.get("repetition_detection"), body.get("n"))


def _check_repetition(params: Any, n: Any) -> None:
    """Bound the comparisons of a token that detect a repetition, over all choices, in the loop of an engine.

    vLLM compares, after each token and in Python, `min_count` - 1 patterns of each size, as far as they agree.
    """
    if not isinstance(params, dict):
        return
    try:
        most, least, count = (int(params.get(name) or default) for name, default in _PATTERNS.items())
    except (TypeError, ValueError):
        return  # vLLM refuses it.
    comparisons = (most - least + 1) * (most + least) // 2 * (count - 1) * max(1, n or 1)
    if most > 0 and comparisons > MAX_COMPARISONS:
        reason = f"up to {comparisons:,} comparisons per token, from the sizes of patterns, min_count and n"
        raise invalid("repetition_detection", f"{reason}; at most {MAX_COMPARISONS:,}")


def _count_prompts(body: dict[str, Any], name: str, limits: BodyLimits) -> tuple[int, int]:
    """The number of prompts in the member `name`, and of their tokens where the client gives token ids."""
    prompt = body.get(name)
    embeddings = body.get("prompt_embeds")
    others = len(embeddings) if isinstance(embeddings, list) else 0
    if not isinstance(prompt, list) or not prompt:
        return max(1, others), 0
    kinds = set(map(type, prompt))
    if float in kinds:
        prompt = body[name] = _as_token_ids(prompt)
        kinds = set(map(type, prompt))
    if kinds == {int}:
        _check_prompt(name, prompt, limits)
        return 1 + others, len(prompt)
    if kinds == {str} or name == "messages":
        return len(prompt) + others, 0
    if kinds == {list}:
        prompt[:] = map(_as_token_ids, prompt)
    if kinds != {list} or any(set(map(type, each)) - {int} for each in prompt):
        raise invalid(name, "must be a text, a list of token ids, or a list of texts or of such lists")
    for each in prompt:
        _check_prompt(name, each, limits)
    return len(prompt) + others, sum(map(len, prompt))


def _as_token_ids(values: list[Any]) -> list[Any]:
    """The values, with whole numbers for floating-point ones that are whole: some clients write all numbers so."""
    if float not in set(map(type, values)):
        return values
    return [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]


def _count_input_tokens(given: Any) -> int:
    """The number of tokens in a pooling model's inputs where the client gives token ids.

    A list has texts, token ids or messages, or lists of either of the latter. vLLM's validators would make numbers of
    other values, and engines fail at token ids below zero.
    """
    if not isinstance(given, list):
        return 0
    inputs = [given] if set(map(type, given)) == {int} else given
    kinds = set(map(type, inputs))
    if len(kinds) > 1 or kinds - {str, dict, list}:
        raise invalid("input", _INPUTS)
    total = 0
    for each in inputs if kinds == {list} else ():
        kinds = set(map(type, each))
        if kinds == {int}:
            _check_tokens("input", each)
            total += len(each)
        elif kinds - {dict}:
            raise invalid("input", _INPUTS)
    return total


_INPUTS = "must be a text, a list of token ids or of messages, or a list of such"


def _check_prompt(name: str, prompt: list[int], limits: BodyLimits) -> None:
    if len(prompt) > limits.prompt_tokens:
        reason = f"the prompt has {len(prompt)} tokens, and the limit is {limits.prompt_tokens}"
        raise invalid(name, reason, "context_length_exceeded")
    _check_tokens(name, prompt)


def _check_tokens(name: str, tokens: list[int]) -> None:
    if tokens and min(tokens) < 0:
        raise invalid(name, f"{min(tokens)} is not a token id")


def _check_choices(body: dict[str, Any], inputs: str, prompts: int, limits: BodyLimits) -> int:
    n = body.get("n")
    choices = prompts * (1 if n is None else max(1, n))
    if choices > limits.choices:
        param = inputs if prompts > limits.choices else "n"
        raise invalid(param, f"{choices} choices, prompts times n, and the limit is {limits.choices}")
    return choices


def _answer_tokens(body: dict[str, Any], route: OpenRoute) -> int:
    """The length of one answer that the client asks for."""
    if route.inputs == "items":
        return 1
    lengths = [body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    asked = [length for length in lengths if isinstance(length, int) and length > 0]
    if asked:
        return min(asked)
    return _COMPLETION_TOKENS if "prompt" in body else DEFAULT_CHARGE_TOKENS
