"""From a configuration of Ray Serve LLM to Mell's own: Serve's file, or Kubernetes manifests with a RayService.

A mapping without output: `app.convert` is the program around it. Members that Mell lacks are left out and named.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from app.configuration.documents import IMPORT_PATH, IMPORT_PATHS, serve_configs
from app.configuration.ray_llm import CONFIGS, Args, LlmConfigsRefused, as_settings, has_model
from app.configuration.surroundings import refused_entries, refused_whole
from app.settings import Settings, describe_errors
from app.vllm_cli.flags import experts_over_ranks, why_refused
from app.vllm_cli.translation import TRANSPORT

_PROXY = "clients connect to Serve's proxy, as before; docs/coming-from.md has the way past it"
_INPUTS = "mell convert takes a configuration of Serve, or a RayService, with ray.serve.llm:build_openai_app"
_ONE_APPLICATION = "and a cluster has one Mell: put the entries of all models into llm_configs of one application"
_REPLACED = ("deployments", "autoscaling_policy", "external_scaler_enabled")
"""The members of an application that `refused_entries` is about."""
_FILES: Mapping[str, tuple[str, ...]] = {
    "model_loading_config": ("chat_template",),
    "ingress": ("api_keys_file", "admin_key_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
}
"""Settings whose files are read when the settings are validated."""
_STAND_IN = "of an absent file"
"""An admin key, for the settings that need one."""


class NotConverted(ValueError):
    """An input without a configuration that Mell could have; `lines` has one line per reason."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@dataclass(frozen=True, slots=True)
class Conversion:
    """Serve's configuration `whole` with Mell's `application`, one of its `applications`.

    `left_out` are lines on members that Mell lacks, with what to write instead; `notes` those on members without
    effect and on what was not looked at. `comments` explain settings, by path.
    """

    whole: dict[str, Any]
    application: Mapping[str, Any]
    comments: Mapping[str, str]
    notes: list[str]
    left_out: list[str]


def convert_documents(documents: list[Any], has_gpus: bool, read: Callable[[str], str]) -> Conversion:
    """The configuration of the documents of a file; Mell's own stays as it is.

    `has_gpus`: replicas without an accelerator have GPUs. `read` reads a file that stands in the place of a model.

    Raises:
        NotConverted: there is no model, there are several applications with one, or the settings would not be valid.
    """
    found, errors = serve_configs(documents)
    if not found:
        hint = "" if any(map(_is_on_path, errors)) else f"; {_INPUTS}"
        raise NotConverted([*errors[:-1], f"{errors[-1]}{hint}"])
    if len(found) > 1:
        raise NotConverted([f"there are {len(found)} configurations with a model: put each into a file of its own"])
    config = found[0]
    entries = config.whole["applications"]
    if models := sum(_is_ray_llm(entry) for entry in entries if entry is not config.application):
        raise NotConverted([f"applications: there are {models + 1} with a model, {_ONE_APPLICATION}"])
    application, made, left_out = _converted(config.application, has_gpus, read)
    settings, absent = checked_settings(made.settings, left_out)
    whole = {name: value for name, value in config.whole.items() if name != "target_capacity"}
    whole["applications"] = [application if entry is config.application else entry for entry in entries]
    port = settings.ingress.port
    if unfit := list(refused_whole(whole, port)):
        raise NotConverted([*left_out, *unfit])
    left_out += refused_whole(config.whole, port)
    others = [line for line in errors if not _is_on_path(line)]
    comments = {} if port is not None else {"ingress.port": _PROXY}
    if settings.migration.transport == "cuda_ipc":
        comments["migration.transport"] = TRANSPORT
    return Conversion(whole, application, comments, [*made.notes, *absent, *others, *_beside(documents)], left_out)


def _is_on_path(line: str) -> bool:
    """True for an error on an import path of Ray Serve LLM."""
    return "import_path is " in line


def _is_ray_llm(entry: Any) -> bool:
    return isinstance(entry, dict) and str(entry.get("import_path")).startswith("ray.serve.llm")


def _converted(
    application: Mapping[str, Any], has_gpus: bool, read: Callable[[str], str]
) -> tuple[dict[str, Any], Args, list[str]]:
    """The application with Mell's settings, these with the notes on them, and the lines on what is left out."""
    args = application.get("args") or {}
    if not isinstance(args, dict):
        raise NotConverted(["args: must be a mapping"])
    left_out = list(refused_entries(application))
    beside = {name: value for name, value in application.items() if name not in (*_REPLACED, "args")}
    if beside["import_path"] not in IMPORT_PATHS:
        beside["import_path"] = IMPORT_PATH
        if CONFIGS not in args:
            raise NotConverted([f"args: there are no {CONFIGS}"])
    if CONFIGS in args:
        args = _without_environment(args, beside)
    try:
        made = as_settings(args, has_gpus, read)
    except LlmConfigsRefused as error:
        made = error.accepted
        left_out += error.lines
    if CONFIGS in args:
        if not has_model(made.settings):
            raise NotConverted(left_out)
        made = Args(_in_order(_without_refused(made.settings, left_out)), made.notes)
    return {**beside, "args": made.settings}, made, left_out


def _without_environment(args: dict[str, Any], application: dict[str, Any]) -> dict[str, Any]:
    """The `args` without the model's `runtime_env`, which becomes that of an application without one."""
    match args[CONFIGS]:
        case [{"runtime_env": dict(environment), **entry}] if environment and not application.get("runtime_env"):
            application["runtime_env"] = environment
            return {**args, CONFIGS: [entry]}
    return args


def _without_refused(settings: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    """The settings without arguments of engines that Mell refuses, of all models."""
    if CONFIGS not in settings:
        return _without_refused_arguments(settings, left_out)
    models = []
    for number, model in enumerate(settings[CONFIGS]):
        lines: list[str] = []
        models.append(_without_refused_arguments(model, lines))
        left_out += [f"{CONFIGS}.{number}.{line}" for line in lines]
    return {**settings, CONFIGS: models}


def _without_refused_arguments(settings: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    """The settings without arguments of engines that Mell refuses, which are added to `left_out`."""
    arguments = settings.get("engine_kwargs", {})
    # A model over several ranks is not the same one without them: the settings refuse it as a whole.
    if settings.get("engine", "vllm") != "vllm" or experts_over_ranks(arguments) is not None:
        return settings
    refused = {name: reason for name, value in arguments.items() if (reason := why_refused(name, value)) is not None}
    left_out += [f"engine_kwargs.{name}: {reason}" for name, reason in refused.items()]
    kept = {name: value for name, value in arguments.items() if name not in refused}
    others = {name: section for name, section in settings.items() if name != "engine_kwargs"}
    return {**others, "engine_kwargs": kept} if kept else others


def _in_order(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings in the order of docs/configuration.md."""
    order = [*Settings.model_fields, *settings]
    return {name: settings[name] for name in sorted(settings, key=order.index)}


def checked_settings(args: Mapping[str, Any], left_out: Sequence[str] = ()) -> tuple[Settings, list[str]]:
    """The validated settings, and a line for each file that this machine lacks and that was not read for that.

    Raises:
        NotConverted: they are not valid; its lines begin with those on what is `left_out`.
    """
    present, absent = _without_absent_files(args)
    try:
        return Settings.model_validate(present), absent
    except pydantic.ValidationError as error:
        raise NotConverted([*left_out, *describe_errors(error)]) from None


def _without_absent_files(args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings without files that this machine lacks, and a line for each of them."""
    present, absent = dict(args), []
    if isinstance(args.get(CONFIGS), list):
        models = [_without_absent_files(model) for model in args[CONFIGS]]
        present[CONFIGS] = [model for model, _ in models]
        absent = [f"{CONFIGS}.{number}.{line}" for number, (_, lines) in enumerate(models) for line in lines]
    for section, names in _FILES.items():
        members = args.get(section)
        if not isinstance(members, dict):
            continue
        missing = [name for name in names if isinstance(members.get(name), str) and not Path(members[name]).exists()]
        absent += [f"{section}.{name}: {members[name]} is not on this machine, and was not read" for name in missing]
        # Each file of a certificate needs the others.
        without_tls = any(name.startswith("ssl_") for name in missing)
        left = {
            name: value
            for name, value in members.items()
            if name not in missing and not (without_tls and name.startswith("ssl_"))
        }
        present[section] = {**left, "admin_key": _STAND_IN} if "admin_key_file" in missing else left
    return present, absent


def _beside(documents: Iterable[Any]) -> Iterator[str]:
    """The parts of manifests that are no configuration of Serve, one line each."""
    for document in documents:
        if not isinstance(document, dict) or "kind" not in document:
            continue
        if document["kind"] == "List" and isinstance(document.get("items"), list):
            yield from _beside(document["items"])
        elif document["kind"] == "RayService":
            for member in document["spec"]:
                if member != "serveConfigV2":
                    pods = ", with an image of Mell in its pods (docs/kubernetes.md)" * (member == "rayClusterConfig")
                    yield f"spec.{member} stays in the RayService{pods}"
        else:
            metadata = document.get("metadata")
            name = metadata.get("name") if isinstance(metadata, dict) else None
            yield f"{document['kind']} {name} stays as it is"
