"""Virtual environments with Mell's wheel, for tests that use it as its users do. Nothing is downloaded."""

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.style.sources import ROOT

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
_OFFLINE = ["--no-deps", "--no-index"]


def build_wheel(folder: Path) -> Path:
    """The wheel of this tree, built by its backend as by `pip wheel --no-deps .`."""
    return folder / _built("build_wheel", folder)


def build_sdist(folder: Path) -> Path:
    """The source distribution of this tree."""
    return folder / _built("build_sdist", folder)


def wheel_of(sdist: Path, folder: Path) -> Path:
    """The wheel that pip builds of a source distribution."""
    subprocess.run([*_PIP, "wheel", *_OFFLINE, "--no-build-isolation", "-w", folder, sdist], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _built(hook: str, folder: Path) -> str:
    code = f"import wheel_backend; print(wheel_backend.{hook}({str(folder)!r}))"
    built = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "deploy", capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return built.stdout.splitlines()[-1]


def install(wheel: Path, folder: Path) -> Path:
    """The folder of the programs of a new virtual environment that has the wheel, and nothing that it asks for."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    subprocess.run([*_PIP, "--python", folder / "bin" / "python", "install", *_OFFLINE, wheel], check=True)
    return folder / "bin"


def add_dependencies(programs: Path) -> None:
    """Add what the wheel asks for without an extra, from the environment of the tests."""
    packages = site_packages(programs)
    (metadata,) = packages.glob("mell_serve-*.dist-info/METADATA")
    asked = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
    for entry in {entry for name in _with_dependencies(asked, {}) for entry in _entries(name)}:
        (packages / entry.name).symlink_to(entry)


def add_everything(programs: Path) -> None:
    """Add all packages of the environment of the tests, and Serve's command."""
    (site_packages(programs) / "tests.pth").write_text(sysconfig.get_path("purelib"))
    serve = programs / "serve"
    serve.write_text(f"#!{programs / 'python'}\nfrom ray.serve.scripts import cli\n\ncli()\n")
    serve.chmod(0o755)


def site_packages(programs: Path) -> Path:
    """The folder of the packages of a virtual environment."""
    code = "import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))"
    asked = subprocess.run([programs / "python", "-c", code], capture_output=True, text=True, check=True)
    return Path(json.loads(asked.stdout))


def _with_dependencies(asked: list[str], found: dict[str, None]) -> dict[str, None]:
    """The names of the distributions that these requirements and, in turn, theirs are met by."""
    for requirement in map(Requirement, asked):
        if requirement.name in found or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        found[requirement.name] = None
        _with_dependencies(distribution(requirement.name).requires or [], found)
    return found


def _entries(name: str) -> Iterator[Path]:
    """What a distribution has in its folder of packages, at the top."""
    try:
        made = distribution(name)
    except PackageNotFoundError:
        raise AssertionError(f"the wheel asks for {name}, which no lock file has") from None
    root = Path(str(made.locate_file("")))
    for top in {file.parts[0] for file in made.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        yield root / top
