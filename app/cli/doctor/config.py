"""Validation of a file with Serve's configuration, by the checks that precede the start of any replica."""

from collections.abc import Iterator
from pathlib import Path

import pydantic

from app.configuration.documents import DocumentError, ServeConfig, read_documents, serve_configs
from app.configuration.files import missing_files
from app.configuration.ray_llm import LlmConfigsRefused, as_settings
from app.configuration.surroundings import refused_entries, refused_whole
from app.settings import Settings, check_installed, describe_errors
from deployments.replica.imports import CPU_BUILD, is_installed


def examine_file(file: Path) -> tuple[list[str], list[str]]:
    """The errors in the file and the notes on members without effect, one line each."""
    try:
        found, errors = serve_configs(read_documents(file))
    except DocumentError as error:
        return [str(error)], []
    notes: list[str] = []
    for config in found:
        errors += [f"{config.where}{line}" for line in _in_config(config, notes)]
    return errors, notes


def _in_config(config: ServeConfig, notes: list[str]) -> Iterator[str]:
    yield from refused_entries(config.application)
    args = config.application.get("args")
    if args is not None and not isinstance(args, dict):
        yield "args: must be a mapping"
        return
    try:
        made = as_settings(args or {}, has_gpus=not is_installed(CPU_BUILD))
        settings = Settings.model_validate(made.settings)
    except LlmConfigsRefused as error:
        yield from error.lines
        return
    except pydantic.ValidationError as error:
        yield from describe_errors(error)
        return
    notes += made.notes
    yield from refused_whole(config.whole, settings.ingress.port)
    yield from missing_files(settings)
    try:
        check_installed(settings)
    except ValueError as error:
        yield f"args: {error}"
