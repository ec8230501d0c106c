"""The flags given to `mell serve`, read by vLLM's own parser."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from vllm.engine.arg_utils import _expand_json_human_readable_numbers
from vllm.exceptions import VLLMError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from app.vllm_cli.arguments import make_arg_parser, validate_parsed_serve_args
from app.vllm_cli.help import DESCRIPTION, EPILOG, USAGE, add_own_options
from app.vllm_cli.translation import MELL_DEFAULTS, Flags


def parse(arguments: Sequence[str]) -> tuple[Flags, argparse.Namespace]:
    """vLLM's flags, and Mell's own (`min_replicas`, `max_replicas`, `write`, `dry_run`).

    Exits with status 2 for what vLLM's parser does not accept, with 0 after showing help.

    Raises:
        ValueError, TypeError, OSError: vLLM does not accept a combination of flags, or a file that they name.
    """
    outer, inner = make_parser()
    parsed = outer.parse_args(["serve", *arguments])
    try:
        validate_parsed_serve_args(parsed)
    except VLLMError as error:
        raise ValueError(str(error)) from None
    defaults = {action.dest: action.default for action in inner._actions}
    given = vars(_parse_given(arguments))
    changed = {
        name: value
        for name, value in given.items()
        if name in MELL_DEFAULTS or name not in defaults or getattr(parsed, name) != defaults[name]
    }
    if modules := changed.get("lora_modules"):
        changed["lora_modules"] = [_without_defaults(module) for module in modules]
    own = argparse.Namespace(**{name: getattr(parsed, name) for name in OWN})
    return {name: value for name, value in changed.items() if name not in (*OWN, "subparser")}, own


OWN = ("min_replicas", "max_replicas", "write", "dry_run")
"""Mell's own flags."""


def make_parser() -> tuple[FlexibleArgumentParser, FlexibleArgumentParser]:
    """A parser of `serve` and its flags, as in vLLM's command line, and its part for the flags."""
    outer = FlexibleArgumentParser(prog="mell")
    inner = outer.add_subparsers(dest="subparser").add_parser(
        "serve",
        description=DESCRIPTION,
        usage=USAGE,
        epilog=EPILOG,
    )
    add_own_options(inner)
    make_arg_parser(inner)
    return outer, inner


def _parse_given(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags that are given, as plain values that YAML can hold."""
    outer, inner = make_parser()
    for action in inner._actions:
        action.default = argparse.SUPPRESS
        if action.type is not None:
            action.type = _plain(action.type)
    return outer.parse_args(["serve", *arguments])  # type: ignore[no-any-return]


def _without_defaults(value: Any) -> dict[str, Any]:
    """The members of a dataclass object that differ from their defaults."""
    members = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    return {name: given for name, (given, default) in members.items() if given != default}


def _plain(parse_value: Any) -> Callable[[str], Any]:
    """A type of argparse like `parse_value`, with JSON as it is written instead of vLLM's objects."""

    def parse_plain(text: str) -> Any:
        value = parse_value(text)
        return json.loads(_expand_json_human_readable_numbers(text)) if dataclasses.is_dataclass(value) else value

    return parse_plain
