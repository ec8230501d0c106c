"""`Cluster` is the only writer of the fields of replicas and requests."""

import ast
from collections.abc import Iterator
from dataclasses import fields

from policies.cluster.replica import Replica, Request
from tests.style.sources import modules, read

FIELDS = {field.name for kind in (Replica, Request) for field in fields(kind)}
WRITER = "policies/cluster/cluster.py"
OTHERS = {"self", "self.routing", "learned", "node"}
"""Objects of other types that have fields of the same names."""


def written(source: str) -> Iterator[str]:
    """The attributes with names of such fields that a source sets on other objects than `OTHERS`."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in FIELDS):
            continue
        if ast.unparse(node.value) not in OTHERS:
            yield ast.unparse(node)


def test_only_the_cluster_writes_fields_of_replicas_and_requests() -> None:
    policies = [module for module in modules() if module.startswith("policies/") and module != WRITER]
    assert {module: found for module in policies if (found := list(written(read(module))))} == {}


def test_writes_are_found() -> None:
    assert list(written("replica.load += 1\nrequest.replica, other.id = a, b\n")) == [
        "replica.load",
        "request.replica",
        "other.id",
    ]
    assert not list(written("self.load = replica.load\nreplica.unknown = 1\n"))
    assert list(written(read(WRITER)))
