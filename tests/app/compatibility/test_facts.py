"""Facts about a small library, and about one that differs in each of them."""

from pathlib import Path

import pytest

from app.compatibility.facts import Fact
from app.compatibility.sources import SourceTree

LIBRARY = {
    "lib/__init__.py": "from lib.public import *\n\ndef __getattr__(name):\n    return {'lazy': 1}[name]\n",
    "lib/public.py": "from lib.inner.base import Base as Renamed\n\nif True:\n    FLAG, other = 1, 2\n",
    "lib/inner/__init__.py": "",
    "lib/inner/base.py": """
class Base:
    def __init__(self, config, role=None):
        self._kept = config

    def hook(self, request, *rest, wanted=1, **words): ...
""",
    "lib/inner/engine.py": """
from .base import Base as Parent

class Message(Struct, array_like=True):
    first: int
    second: str = ""
    third: int = 0

class Engine(Parent[int]):
    limit: int = 1

    def add(self, name, value, priority=0, *, tag): ...

    def step(self):
        if self.ready():
            self.other.begin()
        self.store.begin()
        self.store.end()

def build(args, tasks=None): ...
""",
    "lib/made_pb2.py": "DESCRIPTOR = pool.AddSerializedFile(b'\\n\\x08Language')\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    for name, text in LIBRARY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return SourceTree(tmp_path)


ENGINE = "lib.inner.engine"


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("lib", "inner"),
        ("lib", "FLAG"),
        ("lib", "lazy"),
        ("lib", "Renamed"),
        ("lib", "Renamed._kept"),
        ("lib.made_pb2", "Language"),
        (ENGINE, "Parent"),
        (ENGINE, "build"),
        (ENGINE, "Engine.limit"),
        (ENGINE, "Engine.step"),
        (ENGINE, "Engine._kept"),
        (ENGINE, "Engine.hook"),
        (ENGINE, "Message[first, second]"),
        (ENGINE, "Message(first=_, third=_)"),
        (ENGINE, "Message(first)"),
        (ENGINE, "Engine(config, role=_)"),
        (ENGINE, "Engine.add(name, value, tag=_)"),
        (ENGINE, "Engine.hook(request, unknown=_)"),
        (ENGINE, "build(args, tasks)"),
        (ENGINE, "def Engine.add(self, name, value, priority, *, tag)"),
        (ENGINE, "def Engine.hook(self, request, *rest, wanted, **words)"),
        (ENGINE, "Engine.step: ready < store.begin < end"),
        (ENGINE, "Engine.none | build"),
    ],
)
def test_a_fact_holds(tree: SourceTree, module: str, text: str) -> None:
    assert Fact((module,), text).holds(tree)
    assert Fact(("lib.gone", module), text).holds(tree), "one of two places is enough"
    assert not Fact(("lib.gone",), text).holds(tree)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("lib", "outer"),
        ("lib.public", "lazy"),
        ("lib.made_pb2", "Tongue"),
        (ENGINE, "Base"),
        (ENGINE, "Engine.none"),
        (ENGINE, "Gone.limit"),
        (ENGINE, "Message[second, first]"),
        (ENGINE, "Message[first, second, third, fourth]"),
        (ENGINE, "Message(second=_)"),
        (ENGINE, "Message(first=_, fourth=_)"),
        (ENGINE, "Message(second)"),
        (ENGINE, "Engine(role=_)"),
        (ENGINE, "Engine.add(name, value)"),
        (ENGINE, "Engine.add(value, name, tag=_)"),
        (ENGINE, "Engine.add(name, value, tag=_, more=_)"),
        (ENGINE, "build(args, tasks, more)"),
        (ENGINE, "def Engine.add(self, name, value, *, tag)"),
        (ENGINE, "def Engine.none(self)"),
        (ENGINE, "Engine.step: store.end < store.begin"),
        (ENGINE, "Engine.step: store.begin < store.close"),
        (ENGINE, "Engine.none: a < b"),
        (ENGINE, "Engine.none | Engine.gone"),
    ],
)
def test_a_fact_does_not_hold(tree: SourceTree, module: str, text: str) -> None:
    assert not Fact((module,), text).holds(tree)


@pytest.mark.parametrize("text", ["a +", "a + b", "1"])
def test_another_notation_is_an_error(tree: SourceTree, text: str) -> None:
    with pytest.raises(ValueError, match=r"is no statement about|is not in the notation"):
        Fact((ENGINE,), text).holds(tree)


@pytest.mark.parametrize(
    ("text", "name"), [("Name", "Name"), ("Class.method(a)", "Class"), ("def Class.m(self)", "Class"), ("C[a, b]", "C")]
)
def test_a_fact_is_about_a_name(text: str, name: str) -> None:
    assert Fact(("lib",), text).name == name
