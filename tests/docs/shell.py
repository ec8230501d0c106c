"""The commands of a shell block, and checks of one without running it."""

import argparse
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

from tests.docs.markdown import ROOT

_NUMBERS = {"N": "1", "S": "1"}
"""Placeholders that stand for numbers."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a curl command."""

    method: str
    url: str
    body: str | None


def commands(block: str) -> list[list[str]]:
    """The commands of a block as words, without comments, prompts and redirections."""
    joined = block.replace("\\\n", " ")
    lines = (shlex.split(line, comments=True) for line in joined.splitlines())
    return [line[: line.index(">>")] if ">>" in line else line for line in lines if line]


def request(curl: Sequence[str]) -> Request:
    """The request of a curl command. Raises SystemExit for options that are unknown here."""
    parser = argparse.ArgumentParser(prog="curl")
    parser.add_argument("url")
    parser.add_argument("-X", dest="method")
    parser.add_argument("-d", dest="body")
    parser.add_argument("-H", dest="headers", action="append")
    parser.add_argument("-N", action="store_true")
    given = parser.parse_args(curl[1:])
    return Request(given.method or ("GET" if given.body is None else "POST"), given.url, given.body)


class _Parsed(Exception):
    """The options were accepted."""


def accepts(module: str, options: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `python -m module` parse the options, and do nothing with them. Raises SystemExit if it refuses them."""
    assert _parses(module), f"{module} does not parse its options with argparse: it would do what it does"
    parse = argparse.ArgumentParser.parse_known_args

    def parse_only(
        parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: object = None
    ) -> NoReturn:
        _, unknown = parse(parser, args)
        if unknown:
            parser.error(f"not known: {unknown}")
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [module, *(_NUMBERS.get(option, option) for option in options)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(_Parsed):
            runpy.run_module(module, run_name="__main__")


def _parses(module: str) -> bool:
    """True if the module, or one of its package, uses argparse."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(module)
    origin = Path(spec.origin)
    sources = origin.parent.glob("*.py") if origin.name == "__init__.py" else [origin]
    return any("argparse" in source.read_text() for source in sources)


def makes(words: Sequence[str]) -> None:
    """Check that the Makefile has a command's targets and variables."""
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        known = rf"\$\({name}\)" if is_variable else rf"(?m)^{re.escape(name)}:"
        assert re.search(known, makefile), f"the Makefile has no {name}"
