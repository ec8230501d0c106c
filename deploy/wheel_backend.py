"""Builds the wheel and the source distribution: a build backend (PEP 517) around that of setuptools.

A wheel with the top-level packages of the source tree would take their names from its users: in a folder with an
`app.py`, `import app` is not Mell's. So a wheel has the single package `mell`, with the five packages of the tree below
it. The backend writes that package into a temporary folder, and setuptools builds it there:

- An import of `policies.model` imports `mell.policies.model`.
- A text that is the path of a module, as in import paths of Ray and vLLM, gets the same prefix: the whole of a string,
  with or without an attribute of the module (`"deployments.serve.routing:TargetRouter"`), or the words after `-m`.
  The name of a package alone is none, unless it runs as a program: `"migration.transport"` is a setting.

What is written is checked: every import of Mell's own finds its module. Modules stay as they are otherwise, with the
lines of the tree.
"""

import ast
import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("app", "deployments", "migration", "policies", "simulator")
NAME = "mell"

_FILES = ("LICENSE", "README.md", "pyproject.toml")
_REQUIREMENTS = ("contract.toml", "cpu.lock", "cuda.lock", "supported.toml")
_UNWANTED = shutil.ignore_patterns("__pycache__", "*.py[cod]")
_MODULE = rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)"
_QUOTED = re.compile(rf"""(?<=["'])({_MODULE}+)(:\w+)?(?=["'])""")
_RUN = re.compile(rf"(?<=-m )({_MODULE}*)")
_BACKEND = re.compile(r"^build-backend = .*\nbackend-path = .*\n", re.MULTILINE)


class NotRenamed(Exception):
    """A module of the tree has a form that cannot be renamed, or its renamed form imports what is not there."""


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel into a folder, and return its name, as PEP 517 has it."""
    return _build("build_wheel", wheel_directory, config_settings)


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """Build a distribution with the sources of the wheel, which setuptools alone can build."""
    return _build("build_sdist", sdist_directory, config_settings)


def _build(hook: str, directory: str, settings: dict[str, Any] | None) -> str:
    """Run a hook of setuptools for the project with the single package, which must be the working directory."""
    from setuptools import build_meta  # type: ignore[import-untyped, unused-ignore]

    folder = os.path.abspath(directory)
    with tempfile.TemporaryDirectory() as project, contextlib.chdir(project):
        write_project(ROOT, Path(project))
        return str(getattr(build_meta, hook)(folder, settings))


def write_project(tree: Path, project: Path) -> None:
    """Write the project that setuptools builds into an empty folder. Raises NotRenamed."""
    for name in _FILES:
        shutil.copy(tree / name, project)
    described = project / "pyproject.toml"
    described.write_text(_BACKEND.sub('build-backend = "setuptools.build_meta"\n', described.read_text("utf-8")))
    package = project / NAME
    shutil.copytree(tree / NAME, package, ignore=_UNWANTED)
    for name in PACKAGES:
        shutil.copytree(tree / name, package / name, ignore=_UNWANTED)
    (package / "requirements").mkdir()
    for name in _REQUIREMENTS:
        shutil.copy(tree / "requirements" / name, package / "requirements")
    for module in package.rglob("*.py"):
        text = module.read_text("utf-8")
        try:
            renamed = renamed_source(text, tree)
            check_imports(renamed, project)
        except NotRenamed as error:
            raise NotRenamed(f"{module.relative_to(package)}: {error}") from None
        module.write_text(renamed, "utf-8")


def renamed_source(text: str, tree: Path) -> str:
    """The source of a module with its own project's modules below `mell`. Raises NotRenamed."""
    lines = text.splitlines(keepends=True)
    for node in _imports(text):
        for name in filter(_is_own, _imported(node)):
            statement = f"{'from' if isinstance(node, ast.ImportFrom) else 'import'} {name}"
            binds_package = isinstance(node, ast.Import) and (len(node.names) > 1 or node.names[0].asname is None)
            line = lines[node.lineno - 1]
            if binds_package or statement not in line:
                raise NotRenamed(f"line {node.lineno}: write from {name} import ..., or import {name} as ...")
            lines[node.lineno - 1] = line.replace(name, f"{NAME}.{name}", 1)

    def prefixed(found: re.Match[str]) -> str:
        is_path = _is_program(found[1], tree) if found.re is _RUN else _is_import_path(found[0], tree)
        return f"{NAME}.{found[0]}" if is_path else found[0]

    return _RUN.sub(prefixed, _QUOTED.sub(prefixed, "".join(lines)))


def check_imports(text: str, project: Path) -> None:
    """Raise NotRenamed if a module imports one of Mell's that is not in the folder, or by its name in the tree."""
    for node in _imports(text):
        for name in _imported(node):
            if _is_own(name) or (name.split(".")[0] == NAME and not _is_module(name, project)):
                raise NotRenamed(f"line {node.lineno}: {name} is not in the package {NAME}")


def _imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a module, inner ones included."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The names of the modules that a node imports by their whole names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if node.level == 0 else []


def _is_own(name: str) -> bool:
    return name.split(".")[0] in PACKAGES


def _is_file(name: str, tree: Path) -> bool:
    return tree.joinpath(*name.split(".")).with_suffix(".py").is_file()


def _is_module(name: str, tree: Path) -> bool:
    return _is_file(name, tree) or _is_file(f"{name}.__init__", tree)


def _is_program(name: str, tree: Path) -> bool:
    return _is_file(name, tree) or _is_file(f"{name}.__main__", tree)


def _is_import_path(text: str, tree: Path) -> bool:
    """True for the name of a module, of a package that runs as a program, or of an attribute of a module."""
    name, colon, _ = text.partition(":")
    return _is_file(name, tree) if colon else _is_program(name, tree) or _is_file(name.rpartition(".")[0], tree)
