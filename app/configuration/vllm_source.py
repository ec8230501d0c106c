"""The installed vLLM's arguments and parsers, and Ray's types of GPUs, read from their source files.

The import of vLLM takes seconds, in the doctor and in the build of the application alike, and its files suffice here.
Where they are not plain, any value is accepted: the engine itself refuses it later.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ARGUMENTS = "engine/arg_utils.py"
_ENGINE_CLASSES = ("EngineArgs", "AsyncEngineArgs")
_PARSERS = {
    "tool_call_parser": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
}
_MAPPINGS = {"speculative_config": "SpeculativeConfig"}
"""Arguments whose annotation is any mapping, and the class that they make."""
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
_TYPES: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
_LIMITS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}


@dataclass(frozen=True, slots=True)
class Expected:
    """The plain values that an argument may have; `anything` if its annotation is not plain.

    `limits` are those of a number by pydantic's names, `members` those of a mapping.
    """

    types: frozenset[str] = frozenset()
    choices: tuple[Any, ...] = ()
    lists: bool = False
    mappings: bool = False
    anything: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)
    members: frozenset[str] = frozenset()

    def accepts(self, value: Any) -> bool:
        """True if the value is one of them; null always is."""
        if value is None or self.anything:
            return True
        if isinstance(value, dict):
            return self.mappings
        if isinstance(value, list):
            return self.lists
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return True
        fits = any(type(value) in _TYPES[name] for name in self.types)
        return fits and (isinstance(value, str | bool) or all(self._within(name, value) for name in self.limits))

    def _within(self, name: str, value: float) -> bool:
        limit = self.limits[name]
        match name:
            case "gt":
                return value > limit
            case "ge":
                return value >= limit
            case "lt":
                return value < limit
        return value <= limit

    @property
    def words(self) -> str:
        """The form of the values, for messages."""
        limits = " and ".join(f"{_LIMITS[name]} {limit:g}" for name, limit in self.limits.items())
        kinds = [_WORDS[name] for name in sorted(self.types)]
        kinds += ["a list"] * self.lists + ["a mapping"] * self.mappings
        return " or ".join([*map(str, self.choices), *kinds]) + (f", {limits}" if limits else "")


@functools.cache
def engine_arguments() -> Mapping[str, Expected]:
    """The arguments of vLLM's engine by name; none if vLLM is not installed."""
    package = _package()
    if package is None:
        return {}
    classes = _classes(package)
    found: dict[str, Expected] = {}
    for name in _ENGINE_CLASSES:
        for argument in _annotated(_parse(package / _ARGUMENTS), name):
            found[argument.name] = classes.expected(argument)
    return found


@functools.cache
def parsers(argument: str) -> tuple[str, ...]:
    """The names of vLLM's own parsers of `tool_call_parser` or `reasoning_parser`; none if vLLM is not installed."""
    package = _package()
    if package is None:
        return ()
    file, variable = _PARSERS[argument]
    for node in _parse(package / file).body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Dict(keys)) if name == variable:
                return tuple(sorted(str(key.value) for key in keys if isinstance(key, ast.Constant)))
    return ()


def members_of(package: str, folder: str, file: str, name: str) -> frozenset[str]:
    """The public members of a class in a file of an installed package; none without the package."""
    place = _package(package)
    module = _parse(place / folder / file) if place is not None else ast.Module([], [])
    return frozenset(member.name for member in _annotated(module, name) if not member.name.startswith("_"))


@functools.cache
def accelerator_types() -> tuple[str, ...]:
    """The names of Ray's types of accelerators; none if Ray is not installed."""
    package = _package("ray")
    if package is None:
        return ()
    module = _parse(package / "util/accelerators/accelerators.py")
    values = [node.value for node in module.body if isinstance(node, ast.Assign)]
    return tuple(value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str))


def _package(name: str = "vllm") -> Path | None:
    found = importlib.util.find_spec(name)
    return Path(found.origin).parent if found is not None and found.origin else None


@functools.cache
def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


@dataclass(frozen=True, slots=True)
class _Annotated:
    """A member of a class: its annotation, and its value in the class."""

    name: str
    annotation: ast.expr
    value: ast.expr | None


def _annotated(module: ast.Module, name: str) -> Iterator[_Annotated]:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for member in node.body:
                if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    yield _Annotated(member.target.id, member.annotation, member.value)


@dataclass(frozen=True)
class _Classes:
    """vLLM's configuration classes with their members, and its names for literal values."""

    members: Mapping[str, Mapping[str, _Annotated]]
    choices: Mapping[str, ast.expr]

    def expected(self, argument: _Annotated) -> Expected:
        """The values of an engine's argument, whose default is often the member of a configuration class."""
        found = self._read(_unquoted(argument.annotation))
        limits = self._limits(argument.value)
        members = frozenset(self.members.get(_MAPPINGS.get(argument.name, ""), {})) or found.members
        return Expected(found.types, found.choices, found.lists, found.mappings, found.anything, limits, members)

    def _limits(self, default: ast.expr | None) -> Mapping[str, float]:
        if not isinstance(default, ast.Attribute) or not isinstance(default.value, ast.Name):
            return {}
        member = self.members.get(default.value.id, {}).get(default.attr)
        if member is None or not isinstance(member.value, ast.Call):
            return {}
        given = {word.arg: word.value for word in member.value.keywords if word.arg in _LIMITS}
        return {
            str(name): value.value
            for name, value in given.items()
            if isinstance(value, ast.Constant) and isinstance(value.value, int | float)
        }

    def _read(self, node: ast.expr) -> Expected:
        match node:
            case ast.BinOp(left, ast.BitOr(), right):
                return _either(self._read(left), self._read(right))
            case ast.Constant(None):
                return Expected()
            case ast.Constant(value):
                return Expected(choices=(value,))
            case ast.Name(name) if name in _TYPES:
                return Expected(frozenset({name}))
            case ast.Name(name) if name in self.choices:
                return self._read(self.choices[name])
            case ast.Name(name) if name in self.members:
                return Expected(mappings=True, members=frozenset(self.members[name]))
            case ast.Subscript(ast.Name("Literal"), inner):
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                return functools.reduce(_either, map(self._read, parts))
            case ast.Subscript(ast.Name("list")):
                return Expected(lists=True)
            case ast.Subscript(ast.Name("dict")):
                return Expected(mappings=True)
        return Expected(anything=True)


def _unquoted(annotation: ast.expr) -> ast.expr:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value, mode="eval").body
    return annotation


def _either(left: Expected, right: Expected) -> Expected:
    any_members = any(each.mappings and not each.members for each in (left, right))
    return Expected(
        left.types | right.types,
        left.choices + right.choices,
        left.lists or right.lists,
        left.mappings or right.mappings,
        left.anything or right.anything,
        members=frozenset() if any_members else left.members | right.members,
    )


@functools.cache
def _classes(package: Path) -> _Classes:
    members: dict[str, dict[str, _Annotated]] = {}
    choices: dict[str, ast.expr] = {}
    for file in sorted((package / "config").glob("*.py")):
        module = _parse(file)
        for node in module.body:
            match node:
                case ast.ClassDef(name=name) if all(_name(base) in ("", "object") for base in node.bases):
                    members[name] = {member.name: member for member in _annotated(module, name)}
                case ast.Assign(targets=[ast.Name(name)], value=ast.Subscript(ast.Name("Literal")) as value):
                    choices[name] = value
                case ast.AnnAssign(target=ast.Name(name), value=ast.Subscript(ast.Name("Literal")) as value):
                    choices[name] = value
    return _Classes(members, choices)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else "?"
