"""A machine that can compile, and ones that cannot."""

import sysconfig
from pathlib import Path

import pytest

from deployments.replica.compiling import lacks_for_compiling


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler in a folder of its own, on a machine with Python's header."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    program = tmp_path / "g++"
    program.touch(mode=0o755)
    return program


def test_a_compiler_and_the_header_suffice(compiler: Path) -> None:
    assert lacks_for_compiling({"PATH": str(compiler.parent)}) is None
    assert lacks_for_compiling({"PATH": "/none", "CXX": str(compiler)}) is None


def test_what_is_missing_is_named(compiler: Path) -> None:
    assert lacks_for_compiling({"PATH": "/none"}) == "C++ compiler (g++)"
    assert lacks_for_compiling({"PATH": str(compiler.parent), "CXX": "clang++"}) == "C++ compiler (clang++)"
    (compiler.parent / "Python.h").unlink()
    assert lacks_for_compiling({"PATH": str(compiler.parent)}) == f"file {compiler.parent / 'Python.h'}"
