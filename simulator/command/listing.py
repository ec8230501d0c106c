"""The list of policies and their options, as text to print."""

from collections.abc import Iterator
from enum import Enum

from policies.rules.options import Option, Value
from policies.rules.registry import POLICIES, options


def render_policies() -> str:
    """Every policy with its description and its options."""
    return "\n".join(line for name in POLICIES for line in _policy(name))


def _policy(name: str) -> Iterator[str]:
    first, _, _ = (type(POLICIES[name]).__doc__ or "").partition("\n\n")
    yield f"{name}: {' '.join(first.split())}"
    for option in options()[name]:
        yield f"  {_option(option)}"


def _option(option: Option) -> str:
    return f"{option.name}={_text(option.default)} ({option.allowed}) {option.doc}".rstrip()


def _text(value: Value) -> str:
    match value:
        case bool():
            return str(value).lower()
        case Enum():
            return str(value.value)
    return str(value)
