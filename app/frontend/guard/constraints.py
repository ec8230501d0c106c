"""Bounds of what answers have to match: schemas, expressions and grammars.

vLLM parses them on the event loop, and engines compile them. xgrammar's time for the expressions in a JSON schema grows
with the square of their length with all counted repetitions written out: 5 s for `a{10000}`, and a schema holds many.
(vLLM bounds the time of an expression outside of a schema.)
"""

import re
from collections.abc import Iterator
from typing import Any

from app.frontend.guard.encoding import decode_json, encode_json
from app.ingress.errors import ApiError

MAX_CONSTRAINT_BYTES = 64 << 10
"""Size of a request's schemas, tools aside, expressions and grammars."""
MAX_EXPRESSION = 2000
"""Length of an expression in a schema, with its repetitions written out; several count by the root of their squares."""

_HOLDERS = ("structured_outputs", "response_format", "text", "tools", "output_config")
_TOKENS = re.compile(
    r"""\\. | \[ \^? \]? (?: \\. | [^\]\\] )* \] | \{ (?P<least>[0-9]+) (?: , (?P<most>[0-9]*) )? \} | .""", re.X | re.S
)
"""Of an expression: an escaped character, a class, a counted repetition, or any other character."""


def check_constraints(body: dict[str, Any]) -> None:
    """Refuse constraints that are too large.

    Raises:
        ApiError: 400 that names the member.
    """
    total = 0
    for name in _HOLDERS:
        value = body.get(name)
        if not isinstance(value, dict | list):
            continue
        encoded = encode_json(value)
        if name != "tools" and len(encoded) > MAX_CONSTRAINT_BYTES:
            raise _too_large(name, f"at most {MAX_CONSTRAINT_BYTES} bytes")
        if b"pattern" in encoded:
            total += sum(unrolled(expression) ** 2 for expression in _expressions(value))
            if total > MAX_EXPRESSION**2:
                raise _too_large(name, "its expressions are too long, with counted repetitions written out")


def _too_large(name: str, reason: str) -> ApiError:
    return ApiError(400, f"{name}: {reason}", param=name, code="invalid_value")


def unrolled(expression: str) -> int:
    """The length of a regular expression in characters and classes, with its counted repetitions written out.

    Never more than some multiple of MAX_EXPRESSION; that of an invalid expression is an estimate.
    """
    lengths, last = [0], 0
    for token in _TOKENS.finditer(expression):
        if token["least"] is not None:
            count = max(_count(token["least"]), _count(token["most"] or "0"))
            lengths[-1] += last * max(0, count - 1)
            last *= max(1, count)
        elif token[0] == "(":
            lengths.append(0)
        elif token[0] == ")" and len(lengths) > 1:
            last = lengths.pop()
            lengths[-1] += last
        else:
            last = 1
            lengths[-1] += 1
        if lengths[-1] > MAX_EXPRESSION:
            return 2 * MAX_EXPRESSION
    return sum(lengths)


def _count(digits: str) -> int:
    return int(digits[:6])


def _expressions(value: Any) -> Iterator[str]:
    """The expressions in schemas, also in a schema that is given as text."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, dict):
            if isinstance(pattern := value.get("pattern"), str):
                yield pattern
            if isinstance(patterns := value.get("patternProperties"), dict):
                yield from patterns
            if isinstance(text := value.get("json"), str):
                pending.append(_parsed(text))
            pending.extend(value.values())


def _parsed(text: str) -> Any:
    try:
        return decode_json(text)
    except (ValueError, RecursionError):
        return None
