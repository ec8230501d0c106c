"""The versions that lock files pin; pure."""

from collections.abc import Iterable


def pins(lines: Iterable[str]) -> dict[str, str]:
    """Versions by name, of a lock file's lines."""
    pairs = (line.split("#")[0].strip().partition("==") for line in lines)
    return {name.lower(): version for name, equals, version in pairs if equals}
