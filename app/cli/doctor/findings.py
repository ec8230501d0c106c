"""What a check finds."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is. With a PROBLEM Mell does not serve, or not as configured; a WARNING may be meant so."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was seen, and what to do about it: `remedy` is empty where all is well."""

    name: str
    level: Level
    message: str
    remedy: str = ""


def ok(name: str, message: str) -> Finding:
    """All is well."""
    return Finding(name, Level.OK, message)


def warning(name: str, message: str, remedy: str) -> Finding:
    """It may be meant so."""
    return Finding(name, Level.WARNING, message, remedy)


def problem(name: str, message: str, remedy: str) -> Finding:
    """It has to be put right."""
    return Finding(name, Level.PROBLEM, message, remedy)
