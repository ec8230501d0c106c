"""A class name stands for one class of the project."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from tests.style.sources import classes, modules, read

SHARED: Mapping[str, frozenset[str]] = {
    "Choice": frozenset({"policies/paths/choice.py", "policies/rules/registry.py"}),
    "Chunk": frozenset({"app/simulator/costs/steps.py", "migration/protocol/messages.py"}),
    "Engine": frozenset({"app/simulator/world/engine.py", "deployments/engine/port.py"}),
    "Epoch": frozenset({"app/simulator/outcome/recorder.py", "deployments/scheduler/recording.py"}),
    "Moving": frozenset({"app/simulator/world/moving.py", "migration/protocol/request.py"}),
    "Order": frozenset({"app/simulator/command/order.py", "migration/run/source.py"}),
    "Outcome": frozenset({"app/simulator/world/observer.py", "migration/protocol/record.py"}),
    "Recorder": frozenset({"app/simulator/outcome/recorder.py", "deployments/scheduler/recording.py"}),
    "Run": frozenset({"app/simulator/command/runs.py", "deployments/replica/host.py"}),
    "Trace": frozenset({"app/simulator/workload/workload.py", "policies/cluster/trail.py"}),
}
"""Class names that still stand for several classes, with their modules. Entries may be removed, never added."""


def shared(found: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    """The names that occur more than once among (name, module) pairs, with their modules."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for name, module in found:
        by_name[name].append(module)
    return {name: frozenset(where) for name, where in by_name.items() if len(where) > 1}


def test_class_names_are_unique() -> None:
    found = shared((name, module) for module in modules() for name in classes(read(module)))
    new = {name: sorted(where) for name, where in found.items() if not where <= SHARED.get(name, frozenset())}
    assert new == {}


def test_repeated_and_nested_class_names_are_found() -> None:
    nested = "def f():\n    class A:\n        class B: ...\n"
    assert classes(nested) == ["A", "B"]
    assert shared([("A", "x"), ("B", "x"), ("A", "y")]) == {"A": frozenset({"x", "y"})}
    assert shared([("A", "x"), ("A", "x")]) == {"A": frozenset({"x"})}
