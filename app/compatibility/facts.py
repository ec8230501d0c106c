"""One statement about a module of a library, in a notation like Python's, and its check against the library's files.

name                      the module has the name
Class.member              the class, or a base class, has the member, or sets it on `self`
Class[a, b]               the annotated members of the class begin with these, in this order: the form of a message
call(a, b, c=_)           the function, method or class can be called so: its first parameters have these names, and
                          none that it needs is missing
def Class.method(self, a) the method has exactly these parameters: Mell defines it in its place, and is called so
Class.method: a < x.b     the method calls these in this order, by the first call of each; `x.b` is a call such as
                          `self.x.b()`
one | other               at least one of them holds
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from app.compatibility.sources import Function, SourceTree


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement about one of several modules. `text` is in the notation above."""

    modules: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.modules[0]}: {self.text}"

    @property
    def name(self) -> str:
        """The name in the module that it is about."""
        return re.split(r"\W", self.text.removeprefix("def "), maxsplit=1)[0]

    def holds(self, tree: SourceTree) -> bool:
        """True if it holds in one of the modules. Raises ValueError if `text` has no form of the above."""
        return any(_holds(tree, module, text) for module in self.modules for text in self.text.split(" | "))


def _holds(tree: SourceTree, module: str, text: str) -> bool:
    if text.startswith("def "):
        return _takes_exactly(tree, module, text.removeprefix("def "))
    if ": " in text:
        path, _, order = text.partition(": ")
        return _calls_in_order(tree.function(module, path), [part.strip() for part in order.split("<")])
    match _expression(text):
        case ast.Name(name):
            return tree.has_name(module, name)
        case ast.Attribute(ast.Name(owner), member):
            return tree.has_member(module, owner, member)
        case ast.Subscript(ast.Name(owner), ast.Tuple(members)):
            names = [_named(field) for field in tree.fields(module, owner)]
            return names[: len(members)] == [ast.unparse(member) for member in members]
        case ast.Call() as call:
            return _can_be_called(tree, module, call)
    raise ValueError(f"{text!r} is no statement about {module}")


def _expression(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError(f"{text!r} is not in the notation of facts") from None


def _can_be_called(tree: SourceTree, module: str, call: ast.Call) -> bool:
    path = ast.unparse(call.func)
    given = [ast.unparse(argument) for argument in call.args]
    by_name = {str(word.arg) for word in call.keywords}
    if not tree.has_class(module, path):
        function = tree.function(module, path)
        return function is not None and _accepts(function.args, given, by_name, bound="." in path)
    if (made := tree.function(module, f"{path}.__init__")) is not None:
        return _accepts(made.args, given, by_name, bound=True)
    fields = {_named(field): field.value is None for field in tree.fields(module, path)}
    needed = {name for name, is_needed in fields.items() if is_needed}
    return list(fields)[: len(given)] == given and by_name <= set(fields) and needed <= {*given, *by_name}


def _accepts(taken: ast.arguments, given: list[str], by_name: set[str], bound: bool) -> bool:
    """True if a call with these positional arguments and names fits; a `bound` one brings the first argument along."""
    positional = [each.arg for each in (*taken.posonlyargs, *taken.args)]
    optional = set(positional[len(positional) - len(taken.defaults) :]) if taken.defaults else set()
    if bound and positional and positional[0] in ("self", "cls"):
        positional = positional[1:]
    optional |= {each.arg for each, value in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if value is not None}
    names = {*positional, *(each.arg for each in taken.kwonlyargs)}
    fits = positional[: len(given)] == given and (by_name <= names or taken.kwarg is not None)
    return fits and names - optional <= {*given, *by_name}


def _takes_exactly(tree: SourceTree, module: str, text: str) -> bool:
    path, _, parameters = text.partition("(")
    function = tree.function(module, path)
    if function is None:
        return False
    (wanted,) = ast.parse(f"def f({parameters}: ...").body
    assert isinstance(wanted, ast.FunctionDef)
    return _parameters(function.args) == _parameters(wanted.args)


def _parameters(taken: ast.arguments) -> list[str]:
    rest = [f"*{taken.vararg.arg}"] if taken.vararg else []
    words = [f"{each.arg}=" for each in taken.kwonlyargs] + ([f"**{taken.kwarg.arg}"] if taken.kwarg else [])
    return [each.arg for each in (*taken.posonlyargs, *taken.args)] + rest + words


def _calls_in_order(function: Function | None, wanted: list[str]) -> bool:
    calls = [f".{path}" for path in _calls(function)] if function is not None else []
    places = [next((at for at, path in enumerate(calls) if path.endswith(f".{name}")), None) for name in wanted]
    found = [place for place in places if place is not None]
    return found == sorted(found) and len(found) == len(wanted)


def _calls(function: Function) -> Iterator[str]:
    """The paths of a function's calls, by line."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    for node in sorted(found, key=lambda call: (call.func.end_lineno or 0, call.func.end_col_offset or 0)):
        yield ast.unparse(node.func)


def _named(field: ast.AnnAssign) -> str:
    return ast.unparse(field.target)
