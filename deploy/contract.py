"""Compares versions of vLLM and Ray, which need not be installed, with requirements/contract.toml.

    python -m deploy.contract vllm==0.33.0 ray==2.60.0

pip downloads their wheels, by its own settings; of these, the Python files are kept in Mell's cache. Nothing of them is
imported: that takes neither a GPU nor torch. Ends with status 0 if just those parts are lost that
requirements/supported.toml names, or if no index can be reached; with 1 if others are, or an argument is wrong.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from app.compatibility.contract import LIBRARIES, NO_START, LostPart, lost_parts, parts
from app.compatibility.sources import SourceTree
from app.compatibility.supported import VersionPair, pairs
from app.tinymodel import cache_root

_PYTHON = "3.12"
_PLATFORMS = ("manylinux_2_35_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_NO_SUCH = "No matching distribution found"
_NONE_AT_ALL = "(from versions: none)"


class NoIndex(Exception):
    """pip reaches no index of packages; the message is its last line."""


class NoVersion(Exception):
    """The index has no wheel of this version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the given versions; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.contract", description=__doc__)
    parser.add_argument("requirements", nargs="+", metavar="vllm==VERSION|ray==VERSION")
    given = dict(each.partition("==")[::2] for each in parser.parse_args(arguments).requirements)
    if unknown := [name for name, version in given.items() if name not in LIBRARIES or not version]:
        parser.error(f"write vllm==VERSION or ray==VERSION instead of {', '.join(unknown)}")
    try:
        trees = {name: files_of(name, version) for name, version in given.items()}
    except NoIndex as error:
        print(f"not compared: pip reaches no index of packages ({error})")
        return 0
    except NoVersion as error:
        print(error, file=sys.stderr)
        return 1
    lost = lost_parts(trees)
    print("\n".join(report(given, lost)))
    expected = expected_losses(given)
    found = {each.part.title for each in lost}
    return 0 if any(found == titles for titles in expected) else 1


def expected_losses(given: dict[str, str]) -> list[set[str]]:
    """The titles that may be lost with these versions: those of each supported pair with them, or else none."""
    fitting = [pair for pair in pairs() if all(_version(pair, name) == version for name, version in given.items())]
    return [set(pair.lost) for pair in fitting] or [set()]


def _version(pair: VersionPair, library: str) -> str:
    return pair.contract[LIBRARIES.index(library)]


def report(given: dict[str, str], lost: Sequence[LostPart]) -> list[str]:
    """The lines of the report."""
    names = " with ".join(f"{name} {version}" for name, version in given.items())
    facts = [fact for part in parts() for fact in part.facts if fact.modules[0].split(".")[0] in given]
    broken = sum(len(each.broken) for each in lost)
    lines = [f"{names}: {len(facts) - broken} of {len(facts)} facts hold"]
    for each in lost:
        lines += [f"{each.part.title}: {each.part.lost or NO_START}", *(f"  {fact}" for fact in each.broken)]
        lines.append(f"  used by {', '.join(each.part.used_by)}")
    return lines


def files_of(name: str, version: str) -> SourceTree:
    """The Python files of a version, which are downloaded once. Raises NoIndex and NoVersion."""
    folder = cache_root() / "contract" / f"{name}-{version}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
            unpack(_download(name, version, Path(partial)), Path(partial) / "files")
            shutil.move(Path(partial) / "files", folder)
    return SourceTree(folder)


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack the Python files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])


def _download(name: str, version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:"]
    command += ["--retries", "1", "--python-version", _PYTHON, "--dest", str(folder)]
    command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    ended = subprocess.run([*command, f"{name}=={version}"], capture_output=True, text=True)
    if ended.returncode == 0:
        return next(folder.glob("*.whl"))
    if _NO_SUCH in ended.stderr and _NONE_AT_ALL not in ended.stderr:
        raise NoVersion(f"the index has no wheel of {name} {version}")
    raise NoIndex((ended.stderr.strip().splitlines() or ["pip failed"])[-1])


if __name__ == "__main__":
    sys.exit(main())
