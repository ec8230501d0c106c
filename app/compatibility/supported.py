"""The pairs of versions of vLLM and Ray that are supported, from requirements/supported.toml."""

import functools
import tomllib
from dataclasses import dataclass
from enum import StrEnum

from app.installation import REQUIREMENTS

SUPPORTED = REQUIREMENTS / "supported.toml"
"""The file of pairs, which an installed Mell has as well."""


class PairState(StrEnum):
    """The checks that a pair has passed: all TESTS, or only the CONTRACT, the comparison of the libraries' files."""

    TESTS = "tests"
    CONTRACT = "contract"


@dataclass(frozen=True, slots=True)
class VersionPair:
    """A pair of versions: `vllm` and `ray` are the first two numbers of each, such as 0.32.

    `contract` are the exact versions whose files were compared. `lost` are the titles of parts that are lost with it.
    """

    vllm: str
    ray: str
    state: PairState
    contract: tuple[str, str]
    lost: tuple[str, ...]
    note: str

    def is_of(self, vllm: str, ray: str) -> bool:
        """True for full versions of this pair."""
        return minor(vllm) == self.vllm and minor(ray) == self.ray


def minor(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version.split(".")[:2])


@functools.cache
def pairs() -> tuple[VersionPair, ...]:
    """The supported pairs, the recommended one first."""
    tables = tomllib.loads(SUPPORTED.read_text("utf-8"))["pair"]
    return tuple(
        VersionPair(
            minor(table["vllm"]),
            minor(table["ray"]),
            PairState(table["state"]),
            (table["vllm"], table["ray"]),
            tuple(table.get("lost", ())),
            table["note"],
        )
        for table in tables
    )


def pair_of(vllm: str, ray: str) -> VersionPair | None:
    """The supported pair of full versions, None if they are none."""
    return next((pair for pair in pairs() if pair.is_of(vllm, ray)), None)


def describe(vllm: str, ray: str) -> tuple[bool, str]:
    """True if full versions have passed Mell's tests together; and a sentence on their state."""
    pair, names = pair_of(vllm, ray), f"vLLM {minor(vllm)} with Ray {minor(ray)}"
    if pair is None:
        known = ", ".join(f"{each.vllm} with {each.ray}" for each in pairs())
        return False, f"{names} is not supported: {known} are"
    if pair.state is PairState.TESTS:
        return True, f"{names} passes Mell's tests"
    return False, f"{names}: only their files were compared with Mell's needs, see docs/compatibility.md"
