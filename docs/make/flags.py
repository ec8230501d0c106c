"""docs/vllm-flags.md from the table of vLLM's flags."""

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from app.vllm_cli.flags import ENGINE, FRONTEND, IGNORED, PLACED, REFUSED, REMOVED, option

PAGE = Path(__file__).parents[1] / "vllm-flags.md"

_WIDTH = 120

_INTRO = """\
# vLLM's flags in Mell

<!-- Made by `python -m docs.make`; edit `app/vllm_cli/flags.py` instead. -->

`mell serve MODEL` takes the flags of `vllm serve MODEL` of vLLM 0.32 ([cli.md](cli.md#mell-serve-model)). vLLM's own
parser reads them, so spellings (`--max_model_len 8k`, `-tp 2`, `--compilation-config.mode 3`), `--config FILE` and
errors are vLLM's. A flag with vLLM's default value changes nothing. This page lists every flag; the settings are those
of [configuration.md](configuration.md).
"""

_ENGINE = """\
## To the engines

As `engine_kwargs`, with underscores. The values are vLLM's; [engine_kwargs](configuration.md#engine_kwargs) describes
the checks.
"""

_FRONTEND = """\
## To vLLM's server application

As `ingress.frontend_kwargs`, with underscores ([frontend.md](frontend.md#arguments)).
"""


_REMOVED = """\
## Removed by vLLM

Flags of earlier versions, which recipes still have. The message names the first release without the flag, and what to
write instead; `engine_kwargs` with these names are refused likewise.
"""


def page() -> str:
    """The text of docs/vllm-flags.md."""
    placed = {option(name): place for name, place in PLACED.items() if name != "model_tag"}
    ignored = {option(name): reason for name, reason in IGNORED.items()}
    parts = [
        _INTRO,
        "## With a setting of their own\n\n" + _table(("Flag", "Setting"), _coded(placed)),
        _ENGINE + "\n" + _list(ENGINE),
        _FRONTEND + "\n" + _list(FRONTEND),
        "## Without effect\n\n" + _table(("Flag", "Reason"), _coded(ignored)),
        "## Refused\n\nThe message has the flag and this sentence.\n\n" + _table(("Flags", "Sentence"), _by_reason()),
        _REMOVED + "\n" + _table(("Flag", "Gone since", "Instead"), _removed()),
    ]
    return "\n".join(parts)


def _by_reason() -> Iterable[tuple[str, str]]:
    reasons = sorted(set(REFUSED.values()))
    for reason in reasons:
        names = sorted(name for name, own in REFUSED.items() if own == reason)
        yield ", ".join(f"`{option(name)}`" for name in names), reason


def _removed() -> Iterable[tuple[str, ...]]:
    for name, flag in sorted(REMOVED.items()):
        yield f"`{option(name)}`", flag.since, flag.instead


def _coded(rows: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return ((f"`{flag}`", text) for flag, text in sorted(rows.items()))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:], ""])


def _list(names: Iterable[str]) -> str:
    return (
        textwrap.fill(", ".join(f"`{option(name)}`" for name in sorted(names)), _WIDTH, break_on_hyphens=False) + "\n"
    )
