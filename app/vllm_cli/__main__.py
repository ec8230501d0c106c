"""`mell serve MODEL [FLAGS] [-- MODEL [FLAGS]]...`: serve models by the flags of `vllm serve`.

The flags of the server stand with the first model. All become a configuration, which is shown on standard error and
started as by `make serve`. With `--dry-run` it is printed instead, with `--write FILE` written.
"""

import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pydantic
import yaml

from app.cli.programs import python
from app.configuration.files import missing_files
from app.ingress.access.keys import VARIABLE, digest
from app.installation import missing, start_with
from app.settings import Settings, check_installed, describe_errors
from app.tinymodel import cache_root
from app.vllm_cli.document import render
from app.vllm_cli.flags import removed_flags
from app.vllm_cli.translation import FlagsRefused, Host, Translation, join, translate
from deployments.processes.importing import IS_INSTALLED, ROOT, importing
from deployments.replica.imports import CPU_BUILD, is_installed

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""The environment in which nothing that is started reports home."""


def main(arguments: Sequence[str]) -> None:
    """Run the command; a start does not return. Exits with status 1 for flags with which Mell cannot serve."""
    if lines := removed_flags([*arguments, *flags_in_file(arguments)]):
        fail(lines)
    try:
        from app.vllm_cli.command_line import parse  # imports vLLM, in seconds
    except ModuleNotFoundError as error:
        fail([missing(error)])
    try:
        host = Host(not is_installed(CPU_BUILD), locate)
        parsed = [parse(of_model) for of_model in split_models(arguments)]
        files = [own.write for _, own in parsed if own.write is not None]
        made = [translate(flags, host, each.min_replicas, each.max_replicas) for flags, each in parsed]
        translation = join(made)
        check(translation.args)
        keys = api_keys(translation, os.environ)
        if files:
            write(translation, keys, Path(files[0]).absolute())
        elif any(own.dry_run for _, own in parsed):
            say(
                [
                    *translation.notes,
                    *(f"the keys are in {name}={shlex.quote(value)}" for name, value in variables(keys).items()),
                ]
            )
            print(render(translation), end="")
        else:
            start(translation, keys)
    except FlagsRefused as refused:
        fail(refused.lines)
    except (ValueError, TypeError, OSError) as error:
        fail([str(error)])


def split_models(arguments: Sequence[str]) -> list[list[str]]:
    """The arguments of each model, which `--` separates."""
    models: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--":
            models.append([])
        else:
            models[-1].append(argument)
    return models


def fail(lines: Iterable[str]) -> NoReturn:
    """Exit with status 1."""
    raise SystemExit("\n".join(f"mell serve: {line}" for line in lines))


def flags_in_file(arguments: Sequence[str]) -> list[str]:
    """The flags in vLLM's configuration file, if one is given that can be read; vLLM reports all others."""
    for flag, file in pairwise(arguments):
        if flag == "--config":
            try:
                held = yaml.safe_load(Path(file).read_text("utf-8"))
            except (OSError, ValueError, yaml.YAMLError):
                return []
            return [f"--{name}" for name in held] if isinstance(held, dict) else []
    return []


def locate(name: str) -> str | None:
    """The absolute path of an existing file or folder, None if there is none."""
    return str(Path(name).absolute()) if os.path.exists(name) else None


def check(args: Mapping[str, Any]) -> None:
    """Validate settings as a start does, before anything starts. Raises FlagsRefused, ValueError."""
    try:
        settings = Settings.model_validate(args)
    except pydantic.ValidationError as error:
        raise FlagsRefused(describe_errors(error)) from None
    check_installed(settings)
    if lines := list(missing_files(settings)):
        raise FlagsRefused(lines)


def api_keys(translation: Translation, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """The entries of the given API keys, those of vLLM's environment variable included, without the keys themselves.

    Raises:
        ValueError: there are keys in Mell's environment variable as well.
    """
    if VARIABLE in environment:
        if translation.api_keys:
            raise ValueError(f"--api-key: {VARIABLE} holds API keys as well: remove one of them")
        return []
    # As in vLLM: the flag comes before the variable, and an empty key is none.
    given = filter(None, translation.api_keys or [environment.get("VLLM_API_KEY", "")])
    return [{"name": f"key-{number}", "sha256": digest(key)} for number, key in enumerate(given, 1)]


def variables(keys: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The environment variable that holds the keys' entries; empty without keys."""
    return {VARIABLE: json.dumps(keys)} if keys else {}


def write(translation: Translation, keys: Sequence[Mapping[str, str]], file: Path) -> None:
    """Write the configuration and, beside it, the digests of the API keys. Raises FileExistsError."""
    listed = file.with_suffix(".keys.yaml")
    for path in (file, listed):
        if path.exists():
            raise FileExistsError(f"{path} exists: remove it, or write another file")
    if keys:
        ingress = {**translation.args["ingress"], "api_keys_file": str(listed)}
        translation = replace(translation, args={**translation.args, "ingress": ingress})
        with open(listed, "x", opener=_private) as opened:
            yaml.safe_dump(list(keys), opened, sort_keys=False)
    with file.open("x") as opened:
        opened.write(render(translation))
    say([*translation.notes, f"start it with: {start_with(file)}"])


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def start(translation: Translation, keys: Sequence[Mapping[str, str]]) -> NoReturn:
    """Replace this process by the launcher. The last configuration of each port stays in Mell's cache folder."""
    text = render(translation)
    file = cache_root() / "serve" / f"{translation.args['ingress']['port']}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    say([*translation.notes, f"starts with {file}:"])
    print(text, file=sys.stderr, flush=True)
    # Ray starts `python` by name in places, so this environment's has to come first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if not IS_INSTALLED:
        os.chdir(ROOT)  # Ray's workers import from the working directory first, where the user may have an `app.py`
    environment = importing({**os.environ, **_QUIET, **variables(keys), "PATH": path})
    os.execve(sys.executable, python("-m", "app.serve", str(file)), environment)


def say(lines: Iterable[str]) -> None:
    """Print lines to standard error."""
    for line in lines:
        print(f"mell serve: {line}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
