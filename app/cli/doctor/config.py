"""Validation of a serve_config.yaml, by the checks that precede the start of any replica."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import yaml

from app.settings import Settings, check_installed, describe_errors

_IMPORT_PATH = "app.main:build_app"


def config_errors(file: Path) -> list[str]:
    """The errors in the file, one line each."""
    try:
        document = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [f"cannot be read: {error}"]
    return list(_in_document(document))


def _in_document(document: Any) -> Iterator[str]:
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list):
        yield "applications: must be a list"
        return
    found = [a for a in applications if isinstance(a, dict) and a.get("import_path") == _IMPORT_PATH]
    if len(found) != 1:
        yield f"applications: exactly one must have import_path: {_IMPORT_PATH}, but {len(found)} have"
    for application in found:
        yield from _in_application(application)


def _in_application(application: dict[str, Any]) -> Iterator[str]:
    # Deployments find each other by this name.
    if application.get("name") != "mell":
        yield f"name: is {application.get('name')!r}; write mell"
    try:
        check_installed(Settings.model_validate(application.get("args") or {}))
    except pydantic.ValidationError as error:
        yield from describe_errors(error)
    except ValueError as error:
        yield f"args: {error}"
