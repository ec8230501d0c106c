"""The text of a serve_config.yaml with comments."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from app.configuration.documents import IMPORT_PATH
from app.installation import start_with
from app.vllm_cli.translation import Translation

_HEAD = """\
# Mell's configuration for `vllm serve {model}`, made by `mell serve`.
# docs/configuration.md lists all settings. Start: {start}
proxy_location: Disabled  # clients connect to the ingress itself

logging_config:
  encoding: JSON
  enable_access_log: false

applications:
  - name: mell
    import_path: {import_path}
    route_prefix: /
    args:
"""
_INDENT = " " * 6
_OPEN = "autoscaling_config"
"""The only section within a section."""


def render(translation: Translation) -> str:
    """The file as text."""
    model = translation.args["model_loading_config"]["model_source"]
    lines = _lines(translation.args, "", _INDENT, translation.comments)
    return _HEAD.format(model=model, import_path=IMPORT_PATH, start=start_with("FILE")) + "".join(
        f"{line}\n" for line in lines
    )


def _lines(section: Mapping[str, Any], path: str, indent: str, comments: Mapping[str, str]) -> Iterator[str]:
    for name, value in section.items():
        here = f"{path}{name}"
        comment = f"  # {comments[here]}" if here in comments else ""
        if isinstance(value, dict) and (not path or name == _OPEN):
            yield f"{indent}{name}:{comment}"
            yield from _lines(value, f"{here}.", f"{indent}  ", comments)
        else:
            yield f"{indent}{name}: {_inline(value)}{comment}"


def _inline(value: Any) -> str:
    """A value in one line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").strip()
