"""Validation of a file with Serve's configuration, by the checks that precede the start of any replica."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pydantic

from app.compatibility.contract import lost_here, refused
from app.configuration.documents import DocumentError, ServeConfig, read_documents, serve_configs
from app.configuration.files import missing_files
from app.configuration.ray_llm import LlmConfigsRefused, as_settings, has_model
from app.configuration.surroundings import refused_entries, refused_whole
from app.settings import ACCELERATOR, Settings, check_installed, check_nodes, describe_errors, has_gpu_build


def examine_file(file: Path, gpus: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """The errors in the file and the notes on members without effect, one line each.

    `gpus` are the names of this machine's GPUs by nvidia-smi, if they are all that a cluster would have.
    """
    try:
        found, errors = serve_configs(read_documents(file))
    except DocumentError as error:
        return [str(error)], []
    notes: list[str] = []
    for config in found:
        errors += [f"{config.where}{line}" for line in _in_config(config, gpus, notes)]
    return errors, notes


def _in_config(config: ServeConfig, gpus: Sequence[str], notes: list[str]) -> Iterator[str]:
    yield from refused_entries(config.application)
    args = config.application.get("args")
    if args is not None and not isinstance(args, dict):
        yield "args: must be a mapping"
        return
    try:
        made = as_settings(args or {}, has_gpus=has_gpu_build())
    except LlmConfigsRefused as error:
        yield from error.lines
        made = error.accepted
        if not has_model(made.settings):
            return
    try:
        settings = Settings.model_validate(made.settings)
    except pydantic.ValidationError as error:
        yield from describe_errors(error)
        return
    notes += made.notes
    yield from refused_whole(config.whole, settings.ingress.port)
    yield from missing_files(settings)
    yield from (f"args: {line}" for line in refused(lost_here(), settings))
    kinds = {ACCELERATOR + kind: 1.0 for name in gpus if (kind := gpu_type(name)) is not None}
    try:
        check_installed(settings)
        check_nodes(settings, [{"GPU": float(len(gpus)), **kinds}] if gpus else [])
    except ValueError as error:
        yield f"args: {error}"


_GPU_NAME = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*\d[A-Z0-9]*)")


def gpu_type(name: str) -> str | None:
    """Ray's type of a GPU by its name in nvidia-smi, None for a name of another form."""
    found = _GPU_NAME.search(name)
    return "-".join(found[1].split()) if found else None
