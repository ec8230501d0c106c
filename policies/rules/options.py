"""A policy's options: fields of its dataclass with a default, a description and a range, which users set as text.

Only fields that are numbers, booleans or enums are options.
"""

import math
from dataclasses import Field, dataclass, fields
from enum import Enum
from typing import Any, ClassVar, Protocol, get_type_hints

Value = bool | int | float | Enum

HEADROOM = "Seconds of every request's growth that a placement keeps free on its replica."
"""The description of `headroom_s` in every policy."""


class Configured(Protocol):
    """An instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def about(doc: str, *, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    """The metadata of a field that is an option: its description and, for a number, its range, ends included."""
    return {"doc": doc, "least": least, "most": most}


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name, type, default, description and range."""

    name: str
    type: type[Value]
    default: Value
    doc: str
    least: float | None = None
    most: float | None = None

    def read(self, text: str) -> Value:
        """Parse a value. Raises `ValueError` for text that is no allowed value; its message lists the allowed ones."""
        try:
            value = _read(self.type, text)
        except (KeyError, ValueError):
            value = None
        if value is None or (isinstance(value, int | float) and not self._in_range(value)):
            raise ValueError(f"{self.name} must be {self.allowed}, not {text!r}")
        return value

    @property
    def allowed(self) -> str:
        """The allowed values, as text."""
        if issubclass(self.type, bool):
            return "true or false"
        if issubclass(self.type, Enum):
            return " or ".join(str(member.value) for member in self.type)
        words = ["a whole number" if issubclass(self.type, int) else "a number"]
        if self.least is not None:
            words.append(f"of at least {self.least:g}")
        if self.most is not None:
            words.append(f"{'and' if self.least is not None else 'of'} at most {self.most:g}")
        return " ".join(words)

    def _in_range(self, value: float) -> bool:
        above = self.least is None or value >= self.least
        return math.isfinite(value) and above and (self.most is None or value <= self.most)


def options_of(instance: Configured) -> tuple[Option, ...]:
    """The options of a dataclass; the instance's values are the defaults."""
    hints = get_type_hints(type(instance))
    return tuple(
        Option(
            name=f.name,
            type=hints[f.name],
            default=getattr(instance, f.name),
            doc=f.metadata.get("doc", ""),
            least=f.metadata.get("least"),
            most=f.metadata.get("most"),
        )
        for f in fields(instance)
        if isinstance(hints[f.name], type) and issubclass(hints[f.name], bool | int | float | Enum)
    )


def _read(kind: type[Value], text: str) -> Value:
    if issubclass(kind, bool):
        return {"true": True, "false": False}[text]
    if issubclass(kind, Enum):
        return {str(member.value): member for member in kind}[text]
    return kind(text)
