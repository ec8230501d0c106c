"""docs/compatibility.md from requirements/supported.toml and requirements/contract.toml."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from app.compatibility.contract import NO_START, ContractPart, parts
from app.compatibility.supported import VersionPair, pairs

PAGE = Path(__file__).parents[1] / "compatibility.md"

_INTRO = """\
# Compatibility

<!-- Made by `python -m docs.make`; edit `requirements/supported.toml`, `requirements/contract.toml` and
`docs/make/compatibility.py` instead. -->

Mell changes no file of vLLM or Ray, and uses interfaces of both that are not for users: they change from one version to
the next. So a version of Mell supports pairs of versions.
"""

_STATES = """\
- **tests**: `make test` passes with it.
- **contract**: the facts in `requirements/contract.toml` were compared with the files of both libraries, and hold but
  for the parts that are lost. They are names, parameters, the order of a message's members and the order of calls. The
  results of functions are not compared: such a pair may start and be wrong.

`mell doctor` compares the installed libraries, and names the parts that are lost. A start with another pair than the
tested one does the same, and writes them to its log. It is refused if Mell needs one of them, or if the settings ask
for it. `make contract VLLM=0.33.0 RAY=2.60.0` compares versions that are not installed. pip downloads them; that takes
neither a GPU nor torch.
"""

_PARTS = """\
## Parts

The facts by the part of Mell that needs them. A name of an internal module is imported by one module of Mell.
[limits.md](limits.md#unpatched) lists what Mell rewrites and replaces in vLLM at run time.
"""

_OWN_WAYS = """\
## vLLM's own ways that Mell does not use

| vLLM has | Since | Mell |
|---|---|---|
| hints about KV in requests (`kv_hints`) | 0.31 | removes them: of vLLM's parts, only tiers of storage read them |
| `RetryableRequestError`, for requests that a paused engine rejects | 0.33 | never pauses an engine |
| `restore_kv_caches` of connectors, for engines that sleep | 0.33 | refuses `enable_sleep_mode` |
"""


def page() -> str:
    """The text of docs/compatibility.md."""
    pair_rows = (_pair_row(pair) for pair in pairs())
    return "\n".join(
        [
            _INTRO,
            _table(("vLLM", "Ray", "State", "Lost parts", "Note"), pair_rows),
            _STATES,
            _PARTS,
            _table(("Part", "Without it", "Facts", "In"), map(_part_row, parts())),
            _OWN_WAYS,
        ]
    )


def _pair_row(pair: VersionPair) -> Iterator[str]:
    lost = "; ".join(pair.lost) or "none"
    yield from (pair.contract[0], pair.contract[1], pair.state, lost, pair.note)


def _part_row(part: ContractPart) -> Iterator[str]:
    effect = part.lost or NO_START
    yield from (part.title, effect, str(len(part.facts)), ", ".join(f"`{path}`" for path in part.used_by))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * (lines[0].count(" | ") + 1) + "|", *lines[1:], ""])
