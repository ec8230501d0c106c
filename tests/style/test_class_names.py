"""A class name stands for one class of the project."""

from collections import defaultdict
from collections.abc import Iterable

from tests.style.sources import classes, modules, read


def shared(found: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    """The names that occur more than once among (name, module) pairs, with their modules."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for name, module in found:
        by_name[name].append(module)
    return {name: frozenset(where) for name, where in by_name.items() if len(where) > 1}


def test_class_names_are_unique() -> None:
    assert shared((name, module) for module in modules() for name in classes(read(module))) == {}


def test_repeated_and_nested_class_names_are_found() -> None:
    nested = "def f():\n    class A:\n        class B: ...\n"
    assert classes(nested) == ["A", "B"]
    assert shared([("A", "x"), ("B", "x"), ("A", "y")]) == {"A": frozenset({"x", "y"})}
    assert shared([("A", "x"), ("A", "x")]) == {"A": frozenset({"x"})}
