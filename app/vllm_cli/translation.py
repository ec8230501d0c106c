"""From the flags of `vllm serve` to Mell's settings, as a pure mapping."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from app.settings import CPU_ENGINE
from app.vllm_cli.flags import (
    ENGINE,
    EXPERTS_TOO,
    FRONTEND,
    IGNORED,
    OWN_PROCESSES,
    PATHS,
    REFUSED,
    experts_over_ranks,
    option,
    whole_experts,
)

Flags = Mapping[str, Any]
"""The given flags whose values differ from vLLM's defaults, by their names in vLLM's parser."""

TRANSPORT = "between replicas of one machine; nccl: also of several"
"""The comment on `migration.transport: cuda_ipc`."""

MELL_DEFAULTS = frozenset(CPU_ENGINE)
"""Flags for which Mell has defaults of its own: vLLM's default is passed on, too, if it is given."""


class FlagsRefused(ValueError):
    """Flags that Mell cannot serve with; `lines` has one line per flag, with what to write instead.

    `names` are those that Mell could serve without.
    """

    def __init__(self, lines: list[str], names: Set[str] = frozenset()) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
        self.names = names


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as the settings see it. `gpus`: vLLM's build is the one for GPUs.

    `locate` gives the absolute path of an existing file or folder, None if there is none.
    """

    gpus: bool
    locate: Callable[[str], str | None]

    def path(self, name: str) -> str:
        """The absolute path of what exists, else the name itself, as that of a model on a hub."""
        return self.locate(name) or name


@dataclass(frozen=True, slots=True)
class Translation:
    """Mell's configuration for a command line of vLLM.

    `args` are the settings, by section; `comments` explain settings, by path; `notes` are lines on ignored flags.
    `api_keys` are the keys themselves, which no file may hold.
    """

    args: dict[str, Any]
    comments: dict[str, str]
    notes: list[str]
    api_keys: list[str]


def translate(
    flags: Flags, host: Host, min_replicas: int | None = None, max_replicas: int | None = None
) -> Translation:
    """Mell's settings for vLLM's flags. Values are not validated; settings with a default are left out.

    Raises:
        FlagsRefused: Mell cannot serve with one of the flags.
    """
    if refusals := list(_refusals(flags, max_replicas)):
        raise FlagsRefused([line for _, line in refusals], {name for names, _ in refusals for name in names})
    comments: dict[str, str] = {}
    at_least = 1 if min_replicas is None else min_replicas
    at_most = max(at_least, flags.get("data_parallel_size", 1)) if max_replicas is None else max_replicas
    args = {
        "model_loading_config": _model(flags, host),
        "engine_kwargs": _engine(flags, host),
        "deployment_config": _deployment(flags, host, at_least, at_most, comments),
        "migration": _migration(host, comments),
        "ingress": _ingress(flags, host, comments),
    }
    notes = [f"{option(name, flags[name])} has no effect: {IGNORED[name]}" for name in IGNORED if name in flags]
    return Translation({name: held for name, held in args.items() if held}, comments, notes, flags.get("api_key", []))


def join(translations: Sequence[Translation]) -> Translation:
    """The configuration of several models: of each what is its own, and what is common of the first.

    Raises:
        FlagsRefused: a later model has a flag of the server.
    """
    first = translations[0]
    if len(translations) == 1:
        return first
    refused: list[str] = []
    for made in translations[1:]:
        others = {name: value for name, value in made.args["ingress"].items() if name not in OF_MODEL}
        given = [name for name, value in others.items() if value != DEFAULT_ADDRESS.get(name)]
        name = made.args["model_loading_config"]["model_id"]
        refused += [
            f"{option(_FLAGS.get(each, each))}: write it with the first model, before --, and not with {name}"
            for each in given
        ]
        if made.api_keys:
            refused.append(f"--api-key: write it with the first model, before --, and not with {name}")
    if refused:
        raise FlagsRefused(refused)
    common = {name: held for name, held in first.args["ingress"].items() if name not in OF_MODEL}
    args: dict[str, Any] = {"llm_configs": [_as_entry(made.args) for made in translations]}
    args |= {name: first.args[name] for name in ("migration",) if name in first.args} | {"ingress": common}
    comments = {name: text for name, text in first.comments.items() if name.split(".")[0] in args}
    notes = [note for made in translations for note in made.notes]
    return Translation(args, comments, notes, first.api_keys)


def _as_entry(args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one of several models."""
    own = ("model_loading_config", "engine_kwargs", "deployment_config")
    return {name: args[name] for name in own if name in args} | {
        name: value for name, value in args["ingress"].items() if name in OF_MODEL
    }


OF_MODEL = ("frontend_kwargs",)
"""The settings of the ingress that each of several models has for itself."""

_FLAGS: Mapping[str, str] = {"num_replicas": "api_server_count", "log_text": "enable_log_outputs"}
"""The flags of settings of the ingress with another name."""

DEFAULT_ADDRESS: Mapping[str, Any] = {"host": "0.0.0.0", "port": 8000}
"""The address without flags for it."""


def _refusals(flags: Flags, max_replicas: int | None) -> Iterator[tuple[list[str], str]]:
    """The names of refused flags, and the line on them."""
    if not _model_name(flags):
        yield [], "name a model: mell serve MODEL"
    gpus = experts_over_ranks(flags)
    together = sorted(flags.keys() & set(EXPERTS_TOO)) if gpus is not None else []
    if gpus is not None:
        yield together, f"{', '.join(option(name, flags[name]) for name in together)}: {whole_experts(gpus)}"
    for name in sorted((REFUSED.keys() & flags.keys()).difference(together)):
        yield [name], f"{option(name, flags[name])}: {REFUSED[name]}"
    if (backend := flags.get(name := "distributed_executor_backend", "mp")) != "mp":
        yield [name], f"{option(name)} {backend}: {OWN_PROCESSES}"
    if isinstance(flags.get(name := "hf_token"), str):
        yield [name], f"{option(name)}: set HF_TOKEN in the environment instead, so that no file has the token"
    if (backend := flags.get(name := "data_parallel_backend", "mp")) not in ("mp", "ray"):
        yield [name], f"{option(name)} {backend}: Mell's replicas are Ray actors: remove it"
    if (name := "data_parallel_size") in flags and max_replicas is not None:
        yield [name], f"{option(name)}: --max-replicas is the same bound: remove one of them"


def _model_name(flags: Flags) -> str | None:
    name: str | None = flags.get("model_tag") or flags.get("model")
    return name


def _model(flags: Flags, host: Host) -> dict[str, Any]:
    name = _model_name(flags)
    assert name is not None
    section = {"model_id": flags.get("served_model_name", [name])[0], "model_source": host.path(name)}
    if template := _template_file(flags, host):
        section["chat_template"] = template
    if _calls_tools(flags):
        section["tool_call_parser"] = flags["tool_call_parser"]
    return section


def _template_file(flags: Flags, host: Host) -> str | None:
    """The file of the chat template; None without one, or for a template in the flag itself."""
    return host.locate(flags["chat_template"]) if "chat_template" in flags else None


def _calls_tools(flags: Flags) -> bool:
    """True if the model chooses its tools; else a parser is for named tools only."""
    return "tool_call_parser" in flags and bool(flags.get("enable_auto_tool_choice"))


def _engine(flags: Flags, host: Host) -> dict[str, Any]:
    passed = _passed(flags, ENGINE | {"tensor_parallel_size", "hf_token"}, host)
    if len(names := flags.get("served_model_name", [])) > 1:
        passed["served_model_name"] = names
    defaults = {} if host.gpus else CPU_ENGINE
    return {name: value for name, value in passed.items() if name not in defaults or value != defaults[name]}


def _passed(flags: Flags, names: Set[str], host: Host) -> dict[str, Any]:
    return {name: host.path(value) if name in PATHS else value for name, value in flags.items() if name in names}


def _deployment(flags: Flags, host: Host, at_least: int, at_most: int, comments: dict[str, str]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    if host.gpus:
        section["num_gpus"] = flags.get("tensor_parallel_size", 1)
        comments["deployment_config.num_gpus"] = "of one replica"
    else:
        section["num_cpus"] = 0.1
        comments["deployment_config.num_cpus"] = "the replicas share the machine"
    if "shutdown_timeout" in flags:
        section["graceful_shutdown_timeout_s"] = flags["shutdown_timeout"]
    section["autoscaling_config"] = {"min_replicas": at_least, "max_replicas": at_most}
    comments["deployment_config.autoscaling_config.max_replicas"] = (
        "with two or more, running requests move between them" if at_most == 1 else "opened and closed by the scheduler"
    )
    return section


def _migration(host: Host, comments: dict[str, str]) -> dict[str, Any]:
    if not host.gpus:
        return {}
    comments["migration.transport"] = TRANSPORT
    return {"transport": "cuda_ipc"}


def _ingress(flags: Flags, host: Host, comments: dict[str, str]) -> dict[str, Any]:
    section: dict[str, Any] = {
        "host": flags.get("host") or DEFAULT_ADDRESS["host"],
        "port": flags.get("port", DEFAULT_ADDRESS["port"]),
    }
    if "host" not in flags:
        comments["ingress.host"] = "all addresses, as in vLLM; 127.0.0.1: this machine only"
    if "api_server_count" in flags:
        section["num_replicas"] = flags["api_server_count"]
    if flags.get("enable_log_outputs"):
        section["log_text"] = True
    section |= {name: host.path(flags[name]) if name in PATHS else flags[name] for name in _SAME if name in flags}
    if kwargs := _frontend(flags, host):
        section["frontend_kwargs"] = kwargs
    return section


_SAME = (
    "allowed_media_domains",
    "allowed_origins",
    "allowed_methods",
    "allowed_headers",
    "allow_credentials",
    "middleware",
    "otlp_traces_endpoint",
    "root_path",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_ciphers",
    "ssl_keyfile",
)
"""Flags that are settings of the ingress by the same name."""


def _frontend(flags: Flags, host: Host) -> dict[str, Any]:
    """The arguments of vLLM's server application; a template and a parser may have their place with the model."""
    kwargs = _passed(flags, FRONTEND, host)
    if "chat_template" in flags and _template_file(flags, host) is None:
        kwargs["chat_template"] = flags["chat_template"]
    if "tool_call_parser" in flags and not _calls_tools(flags):
        kwargs["tool_call_parser"] = flags["tool_call_parser"]
    if "lora_modules" in kwargs:
        modules = kwargs["lora_modules"]
        kwargs["lora_modules"] = [{**module, "path": host.path(module["path"])} for module in modules]
    return kwargs
