"""Fingerprints of the code that a run goes through: when they change, it has to be run again.

They are of every module that can be reached by imports from the simulation and from the run's policy, other policies
left out, as syntax trees without documentation: a comment does not make a result stale.
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from policies.rules.registry import POLICIES

ROOT = Path(__file__).parents[2]
OURS = ("app.simulator", "benchmarks.evaluation", "migration", "policies")
START = "benchmarks.evaluation.perform"
REGISTRY = "policies.rules.registry"
"""It imports every policy; what is imported from there is not followed."""


@cache
def fingerprint(policy: str) -> str:
    """A digest of all that decides the outcome of a run of the policy with that specification."""
    name = policy.partition(":")[0]
    digest = hashlib.sha256()
    for module in sorted(reached(START) | reached(type(POLICIES[name]).__module__)):
        digest.update(f"{module}\n{_code(module)}\n".encode())
    return digest.hexdigest()


@cache
def reached(start: str) -> frozenset[str]:
    """The modules of ours that are imported from this one on, itself included."""
    found: set[str] = set()
    coming = [start]
    while coming:
        module = coming.pop()
        if module not in found:
            found.add(module)
            coming += () if module == REGISTRY else _imported(module)
    return frozenset(found)


def _imported(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith(OURS) and _file(name))


def bare(source: str) -> str:
    """What of a module's source decides what it does."""
    return ast.dump(_Bare().visit(ast.parse(source)))


@cache
def _code(module: str) -> str:
    return bare(_source(module))


@cache
def _source(module: str) -> str:
    path = _file(module)
    if path is None:
        raise ValueError(f"there is no module {module}")
    return path.read_text()


def _file(module: str) -> Path | None:
    stem = ROOT / module.replace(".", "/")
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


class _Bare(ast.NodeTransformer):
    """Takes away what only documents: strings that stand alone."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node
