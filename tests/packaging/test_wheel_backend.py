"""The rules by which the tree's packages are renamed in the wheel."""

from pathlib import Path

import pytest

from deploy.wheel_backend import NotRenamed, check_imports, renamed_source


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with two packages: one with a module and a program, one with a module of the same name as a setting."""
    for name in ("app/main.py", "app/cli/__main__.py", "app/cli/__init__.py", "migration/transport/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("source", "renamed"),
    [
        ("from app.main import a\n", "from mell.app.main import a\n"),
        ("from app import main\n", "from mell.app import main\n"),
        ("def f():\n    import app.main as m\n", "def f():\n    import mell.app.main as m\n"),
        ("from app.main import (\n    a,\n)\n", "from mell.app.main import (\n    a,\n)\n"),
        ("PATH = 'app.main:build'\n", "PATH = 'mell.app.main:build'\n"),
        ("PATHS = ['app.main', 'app.main.build']\n", "PATHS = ['mell.app.main', 'mell.app.main.build']\n"),
        ("PROGRAM = 'app.cli'\n", "PROGRAM = 'mell.app.cli'\n"),
        ('"""Run `python -m app.cli FILE`."""\n', '"""Run `python -m mell.app.cli FILE`."""\n'),
    ],
)
def test_modules_get_the_prefix(source: str, renamed: str, tree: Path) -> None:
    assert renamed_source(source, tree) == renamed


@pytest.mark.parametrize(
    "source",
    [
        "import application\nfrom . import app\nfrom apps import app\n",
        "comments = {'migration.transport': 1, 'migration.slots': 2}\n",
        "raise ValueError('app.main is not there')\n",
        "app.main()\n",
        '"""From app.main it is.\n\nfrom app import this, as well.\n"""\n',
        "FLAGS = '-m apple'\n",
    ],
)
def test_all_else_stays(source: str, tree: Path) -> None:
    assert renamed_source(source, tree) == source


@pytest.mark.parametrize("source", ["import app.main\n", "import os, app.main as m\n"])
def test_imports_that_bind_a_package_are_refused(source: str, tree: Path) -> None:
    with pytest.raises(NotRenamed, match=r"line 1: write from app\.main import"):
        renamed_source(source, tree)


@pytest.mark.parametrize("source", ["from app.main import a\n", "from mell.app.other import a\n"])
def test_an_import_must_find_its_module(source: str, tree: Path) -> None:
    (tree / "mell").mkdir()
    with pytest.raises(NotRenamed, match="is not in the package mell"):
        check_imports(source, tree)
    check_imports("import os\nfrom collections import abc\nfrom . import x\n", tree)
