"""Fingerprints of the code of a run: a changed fingerprint makes the run stale.

A fingerprint covers every module reachable by imports from the simulation and from the run's policy, without other
policies, as a syntax tree without documentation: a changed comment makes no run stale.
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from policies.rules.registry import POLICIES

ROOT = Path(__file__).parents[3]
OURS = ("simulator", "benchmarks.evaluation", "migration", "policies")
START = "benchmarks.evaluation.runs.perform"


@cache
def fingerprint(policy: str) -> str:
    """The digest of the code that determines a run of the policy with this specification."""
    name = policy.partition(":")[0]
    digest = hashlib.sha256()
    for module in sorted(reached(START) | reached(type(POLICIES[name]).__module__)):
        digest.update(f"{module}\n{_code(module)}\n".encode())
    return digest.hexdigest()


@cache
def reached(start: str) -> frozenset[str]:
    """The project's modules that `start` imports, directly or indirectly, and `start` itself."""
    found: set[str] = set()
    coming = [start]
    while coming:
        module = coming.pop()
        if module not in found:
            found.add(module)
            coming += _imported(module)
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
    """The syntax tree of a module's source without documentation."""
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
    """Removes documentation: expression statements that are strings."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node
