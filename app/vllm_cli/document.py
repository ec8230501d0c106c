"""The text of a serve_config.yaml with comments."""

from collections.abc import Iterable, Iterator, Mapping
from textwrap import indent
from typing import Any

import yaml

from app.configuration.documents import IMPORT_PATH
from app.installation import start_with
from app.vllm_cli.translation import Translation

_OPEN = "autoscaling_config"
"""The only section within a section."""


def render(translation: Translation) -> str:
    """The file of `mell serve` as text."""
    models = translation.args.get("llm_configs", [translation.args])
    names = " -- ".join(str(model["model_loading_config"]["model_source"]) for model in models)
    head = f"Mell's configuration for `{'mell' if len(models) > 1 else 'vllm'} serve {names}`, made by `mell serve`."
    whole = whole_of(translation)
    return render_config([head], whole, whole["applications"][0], comments_of(translation))


def whole_of(translation: Translation) -> dict[str, Any]:
    """Serve's configuration with the settings."""
    application = {"name": "mell", "import_path": IMPORT_PATH, "route_prefix": "/", "args": translation.args}
    return {
        "proxy_location": "Disabled",
        "logging_config": {"encoding": "JSON", "enable_access_log": False},
        "applications": [application],
    }


def comments_of(translation: Translation) -> dict[str, str]:
    """The comments on the settings, and on Serve's own members."""
    return {"proxy_location": "clients connect to the ingress itself", **translation.comments}


def render_config(
    head: Iterable[str], whole: Mapping[str, Any], application: Mapping[str, Any], comments: Mapping[str, str]
) -> str:
    """A configuration of Serve as text, with a setting of Mell's per line.

    `head` are the lines of the comment above, `application` is that of `whole` with Mell's settings, and `comments`
    explain settings by their path.
    """
    lines = [f"# {line}".rstrip() for line in head]
    lines.append(f"# docs/configuration.md lists all settings. Start: {start_with('FILE')}")
    lines += _lines({name: value for name, value in whole.items() if name != "applications"}, "", "", comments)
    lines += ["", "applications:"]
    for each in whole["applications"]:
        if each is application:
            lines += _application(each, comments)
        else:
            lines.append(indent(yaml.safe_dump([each], sort_keys=False, allow_unicode=True), "  ").rstrip())
    return "".join(f"{line}\n" for line in lines)


def _application(application: Mapping[str, Any], comments: Mapping[str, str]) -> Iterator[str]:
    args = application.get("args") or {}
    dash = "- "
    for name, value in application.items():
        if name != "args":
            yield f"  {dash}{name}: {_inline(value)}"
            dash = "  "
    yield "    args:" if args else "    args: {}"
    yield from _lines(args, "", " " * 6, comments)


def _lines(section: Mapping[str, Any], path: str, margin: str, comments: Mapping[str, str]) -> Iterator[str]:
    for name, value in section.items():
        here = f"{path}{name}"
        comment = f"  # {comments[here]}" if here in comments else ""
        if isinstance(value, dict) and value and (not path or name == _OPEN):
            yield f"{margin}{name}:{comment}"
            yield from _lines(value, f"{here}.", f"{margin}  ", comments)
        elif name == "llm_configs":
            yield f"{margin}{name}:{comment}"
            for entry in value:
                lines = list(_lines(entry, "", f"{margin}    ", {}))
                yield f"{margin}  - {lines[0].lstrip()}"
                yield from lines[1:]
        else:
            yield f"{margin}{name}: {_inline(value)}{comment}"


def _inline(value: Any) -> str:
    """A value in one line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").strip()
