"""All facts about vLLM and Ray on which Mell relies, by the part that needs them, and the parts that are lost."""

import functools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.compatibility.facts import Fact
from app.compatibility.sources import SourceTree, installed
from app.installation import REQUIREMENTS

CONTRACT = REQUIREMENTS / "contract.toml"
"""The file of facts, which an installed Mell has as well."""

LIBRARIES = ("vllm", "ray")

NO_START = "Mell does not start"
"""The effect of a lost part without which there is no Mell."""

Trees = Mapping[str, SourceTree]
"""The files of libraries, by their names."""


@dataclass(frozen=True, slots=True)
class ContractPart:
    """A part of Mell, and the facts that it needs.

    `used_by` are Mell's modules and folders. `lost` is a sentence on Mell without the part; None if Mell then does not
    start. `setting` is the path of the setting that asks for the part, None without one.
    """

    title: str
    used_by: tuple[str, ...]
    facts: tuple[Fact, ...]
    lost: str | None
    setting: str | None


@dataclass(frozen=True, slots=True)
class LostPart:
    """A part, and the facts that do not hold."""

    part: ContractPart
    broken: tuple[Fact, ...]

    @property
    def effect(self) -> str:
        """A sentence on Mell without the part."""
        return self.part.lost or NO_START

    @property
    def difference(self) -> str:
        """The first of the facts, and the number of the others."""
        others = len(self.broken) - 1
        return f"{self.broken[0]}" + (f", and {others} more" if others else "")


@functools.cache
def parts() -> tuple[ContractPart, ...]:
    """The parts in the contract."""
    tables: dict[str, dict[str, Any]] = tomllib.loads(CONTRACT.read_text("utf-8"))
    return tuple(
        ContractPart(
            title, tuple(table["used_by"]), tuple(_facts(table["facts"])), table.get("lost"), table.get("setting")
        )
        for title, table in tables.items()
    )


def _facts(table: Mapping[str, list[str]]) -> Iterator[Fact]:
    for modules, texts in table.items():
        places = tuple(module.strip() for module in modules.split("|"))
        yield from (Fact(places, text) for text in texts)


def lost_parts(trees: Trees) -> list[LostPart]:
    """The parts for which a fact about one of these libraries does not hold. Facts about others do not count."""
    found: list[LostPart] = []
    for part in parts():
        about = [(fact, trees.get(fact.modules[0].split(".")[0])) for fact in part.facts]
        broken = tuple(fact for fact, tree in about if tree is not None and not fact.holds(tree))
        if broken:
            found.append(LostPart(part, broken))
    return found


@functools.cache
def lost_here() -> tuple[LostPart, ...]:
    """The parts that are lost with the installed libraries. Reads some eighty files, which takes seconds."""
    trees = {library: tree for library in LIBRARIES if (tree := installed(library)) is not None}
    return tuple(lost_parts(trees))


def refused(lost: Iterable[LostPart], settings: Any) -> list[str]:
    """The reasons why Mell does not start with these settings, one line each: what it needs, or what they ask for."""
    return [_why(each) for each in lost if each.part.lost is None or _is_asked_for(settings, each.part.setting)]


def _why(lost: LostPart) -> str:
    asked = lost.part.setting or lost.part.title
    return f"{asked}: the installed versions of vLLM and Ray lack what this needs ({lost.difference})"


def _is_asked_for(settings: Any, path: str | None) -> bool:
    """True if the setting has, for a model or in a common section, a value that is not empty, 0, false or null."""
    section, *names = (path or "").split(".")
    places = (place for place in (settings, *settings.models) if hasattr(place, section))
    return any(_value(getattr(place, section), names) for place in places)


def _value(section: Any, names: Iterable[str]) -> Any:
    """The value of a setting in a section."""
    for name in names:
        section = section.get(name) if isinstance(section, dict) else getattr(section, name)
    return section
