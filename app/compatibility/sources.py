"""The Python files of a library as syntax trees. Nothing is imported, so a library of another version can be read."""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef

_DEEPEST = 6
"""The longest chain of re-exports or base classes that is followed."""


class SourceTree:
    """The packages in a folder such as `site-packages`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parsed: dict[Path, ast.Module] = {}

    def has_name(self, module: str, name: str) -> bool:
        """True if `from module import name` finds something."""
        return self._has_name(module, name, _DEEPEST)

    def _has_name(self, module: str, name: str, depth: int) -> bool:
        if self._file(f"{module}.{name}") is not None:
            return True
        tree = self._module(module)
        if tree is None:
            return False
        if name in _top_level(tree):
            return True
        if _is_generated(module) and _mentions(tree, name):
            return True
        return depth > 0 and any(
            self._has_name(source, name, depth - 1) for source, names in self._imports(module, tree) if "*" in names
        )

    def function(self, module: str, path: str) -> Function | None:
        """The function of a module, or the method `Class.method`, also of a base class."""
        owner, _, name = path.rpartition(".")
        for body in self._bodies(module, owner):
            for node in body:
                if isinstance(node, Function) and node.name == name:
                    return node
        return None

    def fields(self, module: str, name: str) -> list[ast.AnnAssign]:
        """The annotated members of a class, those of base classes first; none if there is no such class."""
        found: list[ast.AnnAssign] = []
        for each in reversed(list(self._classes(module, name, _DEEPEST))):
            found += [
                node for node in each.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            ]
        return found

    def has_class(self, module: str, name: str) -> bool:
        """True if the module has, or imports, a class of that name."""
        return next(self._classes(module, name, _DEEPEST), None) is not None

    def has_member(self, module: str, name: str, member: str) -> bool:
        """True if a class or one of its base classes defines a member, or sets it on `self`."""
        return any(member in _members(each) for each in self._classes(module, name, _DEEPEST))

    def _bodies(self, module: str, owner: str) -> Iterator[list[ast.stmt]]:
        """The statements among which a function is: those of a module, or of a class and its base classes."""
        if owner:
            yield from (each.body for each in self._classes(module, owner, _DEEPEST))
        elif (tree := self._module(module)) is not None:
            yield list(_statements(tree.body))

    def _classes(self, module: str, name: str, depth: int) -> Iterator[ast.ClassDef]:
        """A class, and its base classes as far as their files are found."""
        tree = self._module(module)
        if tree is None:
            return
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield node
                for base in node.bases if depth else ():
                    yield from self._classes(module, _head(base), depth - 1)
                return
        for source, names in self._imports(module, tree):
            if depth and (name in names or "*" in names):
                yield from self._classes(source, names.get(name, name), depth - 1)

    def _imports(self, module: str, tree: ast.Module) -> Iterator[tuple[str, dict[str, str]]]:
        """The modules from which a module imports names: these names, and theirs over there."""
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if node.level:
                    above = module.split(".")
                    file = self._file(module)
                    cut = node.level - (file is not None and file.name == "__init__.py")
                    source = ".".join([*above[: len(above) - cut], *filter(None, [node.module])])
                yield source, {each.asname or each.name: each.name for each in node.names}

    def _module(self, module: str) -> ast.Module | None:
        file = self._file(module)
        if file is None:
            return None
        if file not in self._parsed:
            self._parsed[file] = ast.parse(file.read_text("utf-8"))
        return self._parsed[file]

    def _file(self, module: str) -> Path | None:
        path = self._folder.joinpath(*module.split("."))
        return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@functools.cache
def installed(package: str) -> SourceTree | None:
    """The installed files of a package, None if it is not installed."""
    found = importlib.util.find_spec(package)
    return SourceTree(Path(found.origin).parents[1]) if found is not None and found.origin else None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that are carried out when a body is, also those under a condition."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, inner, []))
        for handler in getattr(node, "handlers", ()):
            yield from _statements(handler.body)


def _top_level(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in _statements(tree.body):
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((each.asname or each.name).split(".")[0] for each in node.names)
        found.update(_assigned(node))
    if "__getattr__" in found:  # Its names are in tables and comparisons.
        texts = (each.value for each in ast.walk(tree) if isinstance(each, ast.Constant))
        found.update(text for text in texts if isinstance(text, str))
    return found


def _assigned(node: ast.stmt) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _members(owner: ast.ClassDef) -> set[str]:
    found = {node.name for node in owner.body if isinstance(node, Function)}
    for statement in owner.body:
        found.update(_assigned(statement))
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _head(node.value) == "self":
            found.add(node.attr)
    return found


def _head(node: ast.expr) -> str:
    """The name of a base class, also of a generic one (`Base[T]`); empty for other expressions."""
    match node:
        case ast.Subscript(inner):
            return _head(inner)
        case ast.Name(name):
            return name
    return ""


def _is_generated(module: str) -> bool:
    """True for a module by Protocol Buffers, which makes its names of an encoded description."""
    return module.endswith("_pb2")


def _mentions(tree: ast.Module, name: str) -> bool:
    values = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return any(isinstance(value, bytes) and name.encode() in value for value in values)
