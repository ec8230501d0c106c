"""The project's modules outside of tests, for checks of their names and their text."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "benchmarks", "deploy", "deployments", "mell", "migration", "policies", "simulator")


class Text(NamedTuple):
    """A docstring or a comment, as one line."""

    line: int
    text: str


def modules() -> Iterator[str]:
    """The paths of all modules, relative to the project's folder."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix()


def read(module: str) -> str:
    """The source of a module."""
    return (ROOT / module).read_text()


def classes(source: str) -> list[str]:
    """The names of all classes of a source, also of nested ones."""
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def texts(source: str) -> Iterator[Text]:
    """The docstrings of a source, also those of constants and fields, and its comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(node.lineno, " ".join(node.value.value.split()))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string.lstrip("# "))
