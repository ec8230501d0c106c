"""Whether a serve_config.yaml would be taken: what is looked at before any replica starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import yaml

from app.settings import Settings, check_installed, describe_errors

_IMPORT_PATH = "app.main:build_app"


def mistakes_in(file: Path) -> list[str]:
    """What is wrong with the file, one line each."""
    try:
        document = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [f"cannot be read: {error}"]
    return list(_in_document(document))


def _in_document(document: Any) -> Iterator[str]:
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list):
        yield "applications: there is no list of them"
        return
    found = [a for a in applications if isinstance(a, dict) and a.get("import_path") == _IMPORT_PATH]
    if len(found) != 1:
        yield f"applications: one has to have import_path: {_IMPORT_PATH}, and {len(found)} have"
    for application in found:
        yield from _in_application(application)


def _in_application(application: dict[str, Any]) -> Iterator[str]:
    # Deployments find each other by it.
    if application.get("name") != "mell":
        yield f"name: it is {application.get('name')!r}, write mell"
    try:
        check_installed(Settings.model_validate(application.get("args") or {}))
    except pydantic.ValidationError as error:
        yield from describe_errors(error)
    except ValueError as error:
        yield f"args: {error}"
