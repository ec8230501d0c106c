"""Arguments that vLLM would refuse: unknown ones, values of the wrong type, and parsers that do not exist.

The settings import this module, so that every error is reported at once.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from app.configuration.vllm_source import engine_arguments, parsers
from app.vllm_cli.flags import why_refused

_PLUGINS = "vllm.general_plugins"


def refused_arguments(engine_kwargs: Mapping[str, Any]) -> Iterator[str]:
    """The arguments that Mell or vLLM would refuse, one line each, with what to write."""
    known = engine_arguments()
    for name, value in sorted(engine_kwargs.items()):
        where = f"engine_kwargs.{name}"
        if (reason := why_refused(name, value)) is not None:
            yield f"{where}: {reason}"
        elif name in known:
            yield from _refused_value(where, name, value)
        elif known:
            yield f"{where}: vLLM's engine has no such argument{did_you_mean(name, known)}"


def _refused_value(where: str, name: str, value: Any) -> Iterator[str]:
    expected = engine_arguments()[name]
    if not expected.accepts(value):
        meant = did_you_mean(value, expected.choices) if isinstance(value, str) else ""
        yield f"{where} is {value!r}: write {expected.words}{meant}"
    elif isinstance(value, dict) and expected.members:
        # vLLM takes either spelling of this one.
        dashes = "-" if name == "speculative_config" else "_"
        given = {str(member).replace(dashes, "_") for member in value}
        for member in sorted(given - expected.members):
            yield f"{where}.{member}: there is no such member{did_you_mean(member, expected.members)}"


def refused_parsers(
    engine_kwargs: Mapping[str, Any],
    frontend_kwargs: Mapping[str, Any],
    tool_call_parser: str | None,
    of_frontend: str = "ingress.frontend_kwargs",
) -> Iterator[str]:
    """The parsers that vLLM does not have, unless a plugin may bring them, one line each.

    `of_frontend` is the place of `frontend_kwargs` in the settings.
    """
    if any(not plugin.value.startswith("vllm.") for plugin in entry_points(group=_PLUGINS)):
        return
    outputs = engine_kwargs.get("structured_outputs_config")
    outputs = outputs if isinstance(outputs, Mapping) else {}
    tools, reasoning = "tool_call_parser", "reasoning_parser"
    named: list[tuple[str, str, Any]] = []
    if not frontend_kwargs.get("tool_parser_plugin"):
        named.append((f"model_loading_config.{tools}", tools, tool_call_parser))
        named.append((f"{of_frontend}.{tools}", tools, frontend_kwargs.get(tools)))
    if not engine_kwargs.get("reasoning_parser_plugin") and not outputs.get("reasoning_parser_plugin"):
        named.append((f"engine_kwargs.{reasoning}", reasoning, engine_kwargs.get(reasoning)))
        named.append((f"engine_kwargs.structured_outputs_config.{reasoning}", reasoning, outputs.get(reasoning)))
    for where, argument, name in named:
        known = parsers(argument)
        if known and name and name not in known:
            meant = did_you_mean(str(name), known) or f"; there are {', '.join(known)}"
            yield f"{where}: vLLM has no parser {name!r}{meant}"


def did_you_mean(name: str, known: Iterable[object]) -> str:
    """The end of a message with the known name that is closest; empty if none is close."""
    by_lower = {str(each).lower(): str(each) for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""
