"""Cost files: their valid and invalid contents."""

import ast
import json
import pickle
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from simulator.costs import costs as module
from simulator.costs.costs import (
    IDEAL,
    ComputeCosts,
    Costs,
    LinkCosts,
    MigrationCosts,
    PathChoice,
    read_costs,
    shipped_costs,
    write_costs,
)
from simulator.errors import BadInput
from tests.simulator.physics import COMPUTE, MIGRATION


def written(folder: Path, content: object, name: str = "costs.json") -> str:
    """A cost file with that content."""
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_ideal_is_a_name_and_costs_nothing() -> None:
    assert read_costs("ideal") is IDEAL
    assert Costs(slots=True, preemption=True, startup_s=0.0, compute=None, migration=None) == IDEAL


@pytest.mark.parametrize("name", shipped_costs())
def test_shipped_costs_have_a_provenance_for_each_figure(name: str) -> None:
    costs = read_costs(name)
    assert (costs.name, costs.slots, costs.startup_s) == (name, False, 30.0)
    assert costs.compute and costs.migration
    assert costs.provenance.keys() >= {"compute.linear", "compute.context_s", "migration.intra", "migration.kv_bytes"}


def test_the_shipped_costs_are_those_of_the_papers_testbed_and_of_a_fast_one() -> None:
    assert shipped_costs() == ["a100-40g-13b-pcie", "a100-80g-14b-200gb", "h100-8b-nvlink", "rtx4090-7b-pcie"]


def test_a_written_file_reads_as_the_same_costs(tmp_path: Path) -> None:
    costs = Costs("mine", {"a": "measured"}, False, False, 3.0, COMPUTE, MIGRATION)
    write_costs(costs, tmp_path / "costs.json")
    assert read_costs(str(tmp_path / "costs.json")) == costs


def test_yaml_reads_as_json_does(tmp_path: Path) -> None:
    text = """
    name: mine
    slots: false
    compute: {linear: [[1, 0.01], [100, 0.02]], chunk_tokens: 512}
    migration: {intra: {bytes_per_s: 25.0e+9}, inter: {bytes_per_s: 1250000000}, kv_bytes: 819200, path: tokens}
    """
    assert read_costs(written(tmp_path, text, "costs.yaml")) == Costs(
        "mine",
        slots=False,
        compute=ComputeCosts(((1, 0.01), (100, 0.02)), chunk_tokens=512),
        migration=MigrationCosts(LinkCosts(25e9), LinkCosts(1.25e9), 819200, PathChoice.TOKENS),
    )


LINKS = {"intra": {"bytes_per_s": 1.0}, "inter": {"bytes_per_s": 1.0}, "kv_bytes": 1}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"startup": 30}, "startup: Unexpected"),
        ({"compute": {"linear": [[1, 0.1]], "overhead": 1}}, "compute.overhead: Unexpected"),
        ({"migration": LINKS | {"intra": {"bytes_per_s": 1.0, "speed": 2}}}, "migration.intra.speed: Unexpected"),
        ({"startup_s": -1}, "startup_s: "),
        ({"startup_s": "30"}, "startup_s: "),
        ({"slots": 1}, "slots: "),
        ({"compute": {}}, "compute.linear: "),
        ({"compute": {"linear": []}}, "compute.linear: "),
        ({"compute": {"linear": [[1, 0.0]]}}, "compute.linear.0.1: "),
        ({"compute": {"linear": [[2, 0.1], [1, 0.2]]}}, "tokens must rise"),
        ({"compute": {"linear": [[1, 0.2], [2, 0.1]]}}, "seconds must not fall"),
        ({"compute": {"linear": [[1, 0.2]], "watermark": 1.0}}, "compute.watermark: "),
        ({"migration": LINKS | {"path": "carrier pigeon"}}, "migration.path: "),
        ({"migration": LINKS | {"inter": {"bytes_per_s": 0}}}, "migration.inter.bytes_per_s: "),
        ("[1, 2", "costs.json are wrong"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, content: object, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint.replace(".", r"\.")):
        read_costs(written(tmp_path, content))


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "just words", ""], ids=["broken", "list", "words", "empty"])
def test_yaml_that_holds_no_costs_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match="are wrong"):
        read_costs(written(tmp_path, text, "costs.yaml"))


def test_a_name_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(BadInput, match="By name there are ideal, a100-40g-13b-pcie"):
        read_costs("b200")


def test_costs_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps(read_costs("h100-8b-nvlink"))) == read_costs("h100-8b-nvlink")


@pytest.mark.parametrize("kind", [ComputeCosts, LinkCosts, MigrationCosts, Costs])
def test_every_field_is_documented(kind: type[Costs]) -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
    documented = {
        one.target.id
        for one, after in pairwise(body)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(after, ast.Expr)
    }
    assert {each.name for each in fields(kind)} <= documented
