"""Ray Serve LLM's configuration (`llm_configs`, Ray 2.60) as Mell's settings, as a pure mapping.

Every member has one of three fates: a setting of Mell, no effect (with a note), or a refusal that names what to write.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from app.vllm_cli.flags import FRONTEND_ARGUMENTS

CONFIGS = "llm_configs"
_GUIDE = "docs/coming-from.md lists all members"

_SERVES_ITSELF = "Mell sets it: it has no effect"
_SCALING = "the scheduler decides the number of replicas by their KV caches"
_PLACING = "the scheduler places requests"
_BOUNDED = "ingress.max_requests bounds requests"
_ROLLING = "Mell's deployments have their own"
_LORA = (
    "write engine_kwargs.enable_lora: true, and the adapters into the entry's frontend_kwargs.lora_modules, or load "
    "them at run time (ingress.allow_runtime_lora_updating)"
)
_ENVIRONMENT = "write it beside args, as runtime_env of the application: {env_vars: ...}"
_GPUS = "write engine_kwargs.tensor_parallel_size: every worker has one GPU"

_IGNORED_SCALING = (
    "target_ongoing_requests",
    "metrics_interval_s",
    "look_back_period_s",
    "smoothing_factor",
    "upscale_smoothing_factor",
    "downscale_smoothing_factor",
    "upscaling_factor",
    "downscaling_factor",
    "upscale_delay_s",
    "downscale_delay_s",
    "downscale_to_zero_delay_s",
    "aggregation_function",
    "policy",
)
_IGNORED_DEPLOYMENT: Mapping[str, str] = {
    "name": _ROLLING,
    "max_ongoing_requests": _BOUNDED,
    "max_queued_requests": _BOUNDED,
    "backpressure_config": _BOUNDED,
    "request_router_config": _PLACING,
    "graceful_shutdown_wait_loop_s": _ROLLING,
    "rolling_update_percentage": _ROLLING,
    "max_surge_percent": _ROLLING,
    "user_config": "Mell has none",
    "logging_config": "write logging_config beside applications",
}
_REFUSED_DEPLOYMENT: Mapping[str, str] = {
    "deployment_actors": "Mell has no actors of deployments: remove it",
    "gang_scheduling_config": "a replica of Mell is one process group of one node: remove it",
    "max_replicas_per_node": "Ray places replicas where their GPUs are: remove it",
    "placement_group_bundles": _GPUS,
    "placement_group_bundle_label_selector": _GPUS,
    "placement_group_fallback_strategy": _GPUS,
    "placement_group_strategy": _GPUS,
    "version": "Serve makes the version: remove it",
}
_SAME_DEPLOYMENT = ("graceful_shutdown_timeout_s", "health_check_period_s", "health_check_timeout_s")
"""Members of `deployment_config` that Mell has by the same name."""
_AUTO_MAXIMUM = 100
"""Serve's maximum for `num_replicas: auto`."""
_STREAMING_FORMATS = frozenset({"runai_streamer", "runai_streamer_sharded", "tensorizer"})
"""The formats by which vLLM itself reads a model from an object store."""


class LlmConfigsRefused(ValueError):
    """Members with which Mell cannot serve; `lines` has one line per member, with the form to write instead.

    `accepted` has the settings of the other members.
    """

    def __init__(self, lines: list[str], accepted: "Args") -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
        self.accepted = accepted


@dataclass(frozen=True, slots=True)
class Args:
    """The settings that an application's `args` stand for, and lines on members without effect."""

    settings: dict[str, Any]
    notes: tuple[str, ...] = ()


def as_settings(args: Mapping[str, Any], has_gpus: bool, read: Callable[[str], str] | None = None) -> Args:
    """The settings of `args`, which stay as they are without `llm_configs`.

    `has_gpus`: the installed build of vLLM is the one for GPUs, which is Ray Serve LLM's default.
    `read` reads a file that stands in the place of an entry.

    Raises:
        LlmConfigsRefused: Mell cannot serve with a member.
    """
    if CONFIGS not in args:
        return Args(dict(args))
    made = _Mapping(args, has_gpus, read or (lambda path: Path(path).read_text("utf-8")))
    found = Args({name: section for name, section in made.settings.items() if section}, tuple(made.notes))
    if made.refusals:
        raise LlmConfigsRefused(made.refusals, found)
    return found


def has_model(settings: Mapping[str, Any]) -> bool:
    """True for settings in which every model has a name."""
    models = settings.get(CONFIGS, [settings])
    return bool(models) and all("model_id" in model.get("model_loading_config", {}) for model in models)


class _Mapping:
    """The mapping of `args`: Ray's LLMServingArgs, with sections of Mell's own settings beside them.

    One model has its sections at the top of the settings, several have theirs in the entries of `llm_configs`.
    """

    def __init__(self, args: Mapping[str, Any], has_gpus: bool, read: Callable[[str], str]) -> None:
        self.settings: dict[str, Any] = {}
        self.refusals: list[str] = []
        self.notes: list[str] = []
        self._has_gpus = has_gpus
        self._read = read
        own = {name: value for name, value in args.items() if name not in OF_SERVING_ARGS}
        self._sleeps = self._section("memory", args.get("memory")).get("budget_mib") is not None
        entries = self._mapped(args[CONFIGS])
        for name in sorted(own.keys() & (OF_ENTRY | (OWN_ENTRY if len(entries) > 1 else frozenset()))):
            self.refusals.append(f"{name}: write it into {CONFIGS}, where the model is")
        ingress = self._ingress(args, entries)
        if len(entries) == 1:
            self.settings = entries[0].alone()
        elif entries:
            self.settings = {CONFIGS: [entry.in_list() for entry in entries]}
        if entries and all(entry.on_gpus for entry in entries):
            # Between replicas of one machine, as those of a Ray Serve LLM begin; docs/coming-from.md has the others.
            self.settings["migration"] = {"transport": "cuda_ipc"}
        sections = {name: value for name, value in own.items() if name not in OF_ENTRY and name != "ingress"}
        of_models = self.settings.pop("scheduler", {}), self.settings.pop("ingress", {})
        self.settings |= sections
        if of_models[0]:
            self.settings["scheduler"] = {**of_models[0], **self._section("scheduler", own.get("scheduler"))}
        # Ray Serve LLM's clients connect to Serve's own proxy, whose port Mell's ingress would otherwise take.
        self.settings["ingress"] = {
            "port": None,
            **of_models[1],
            **ingress,
            **self._section("ingress", own.get("ingress")),
        }

    def _mapped(self, entries: Any) -> list["_MappedModel"]:
        if not isinstance(entries, list) or not entries:
            self.refusals.append(f"{CONFIGS}: write a list of models")
            return []
        made = []
        for number, given in enumerate(entries):
            if (found := self._entry(number, given)) is not None:
                mapped = _MappedModel(found, self._has_gpus, self._sleeps)
                made.append(mapped)
                where = f"{CONFIGS}.{number}." if len(entries) > 1 else ""
                self.refusals += [f"{where}{line}" for line in mapped.refusals]
                self.notes += [f"{where}{line}" for line in mapped.notes]
        return made

    def _entry(self, number: int, given: Any) -> dict[str, Any] | None:
        entry = given
        if isinstance(given, str):
            try:
                entry = yaml.safe_load(self._read(given))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                self.refusals.append(f"{CONFIGS}.{number}: {given} cannot be read: {error}")
                return None
        if not isinstance(entry, dict):
            self.refusals.append(f"{CONFIGS}.{number}: write a mapping with model_loading_config")
            return None
        return entry

    def _ingress(self, args: Mapping[str, Any], entries: Sequence["_MappedModel"]) -> dict[str, Any]:
        """The settings of the ingress, by its own members and by the largest number in an entry."""
        numbers = [entry.ingress_replicas for entry in entries if entry.ingress_replicas is not None]
        section: dict[str, Any] = {"num_replicas": max(numbers)} if numbers else {}
        ingress = self._section("ingress_cls_config", args.get("ingress_cls_config"))
        if any(ingress.values()):
            self.refusals.append(
                "ingress_cls_config: Mell's ingress is its own: write ingress.middleware for code around it"
            )
        for name, value in self._section("ingress_deployment_config", args.get("ingress_deployment_config")).items():
            if name == "num_replicas" and value != "auto" and value is not None:
                section["num_replicas"] = value
            elif name in ("num_replicas", "autoscaling_config"):
                self._note(f"ingress_deployment_config.{name}", "write ingress: {num_replicas: N} into args")
            else:
                self._note(f"ingress_deployment_config.{name}", _SERVES_ITSELF)
        return section

    def _section(self, where: str, value: Any) -> dict[str, Any]:
        """A section's members, none of a missing one."""
        if value is not None and not isinstance(value, dict):
            self.refusals.append(f"{where}: write a mapping")
        return value if isinstance(value, dict) else {}

    def _note(self, where: str, reason: str) -> None:
        self.notes.append(f"{where} has no effect: {reason}")


class _MappedModel:
    """The mapping of one entry. A model that `sleeps` may have no replica awake.

    `ingress_replicas` is the number of processes of the ingress, which models share.
    """

    def __init__(self, entry: dict[str, Any], has_gpus: bool, sleeps: bool) -> None:
        self.settings: dict[str, Any] = {"engine_kwargs": {}, "deployment_config": {}}
        self.refusals: list[str] = []
        self.notes: list[str] = []
        self.ingress_replicas: Any = None
        self._has_gpus = has_gpus
        self._sleeps = sleeps
        self._frontend: dict[str, Any] = {}
        self._take_entry(entry)
        self._own = {name: entry[name] for name in OWN_ENTRY if name in entry}

    @property
    def on_gpus(self) -> bool:
        """True if the model's replicas have GPUs."""
        gpus = self.settings["deployment_config"].get("num_gpus")
        return bool(self.settings.get("accelerator_type") is not None or gpus)

    def alone(self) -> dict[str, Any]:
        """The settings with this as the only model."""
        own = dict(self._own)
        settings = {**self.settings, **{name: own.pop(name) for name in _SAME_ENTRY if name in own}}
        if frontend := self._frontend_kwargs():
            settings["ingress"] = {"frontend_kwargs": frontend}
        if "slo" in own:
            settings["scheduler"] = {"slo": own["slo"]}
        return settings

    def in_list(self) -> dict[str, Any]:
        """The entry as one of several in Mell's own settings."""
        settings = {**self.settings, **self._own}
        if frontend := self._frontend_kwargs():
            settings["frontend_kwargs"] = frontend
        return {name: section for name, section in settings.items() if section}

    def _frontend_kwargs(self) -> Any:
        given = self._own.get("frontend_kwargs")
        return {**self._frontend, **given} if isinstance(given, dict) else given or self._frontend

    def _take_entry(self, entry: dict[str, Any]) -> None:
        for name in entry:
            if name not in OF_ENTRY and name not in OWN_ENTRY:
                self._refuse(name, f"Ray Serve LLM has no such member; {_GUIDE}")
        self._take_model(self._section("model_loading_config", entry.get("model_loading_config")))
        self._take_engine(self._section("engine_kwargs", entry.get("engine_kwargs")))
        self._take_accelerator(entry)
        self._take_deployment(self._section("deployment_config", entry.get("deployment_config")))
        self._take_experiments(self._section("experimental_configs", entry.get("experimental_configs")))
        if entry.get("llm_engine", "vLLM") != "vLLM":
            self._refuse("llm_engine", "Mell's engines are vLLM's: write vLLM, or remove it")
        if entry.get("server_cls") is not None:
            self._refuse("server_cls", "Mell's engines are replicas of its own class: remove it")
        if entry.get("runtime_env"):
            self._refuse("runtime_env", _ENVIRONMENT)
        if entry.get("lora_config"):
            self._refuse("lora_config", _LORA)
        if self._section("callback_config", entry.get("callback_config")).get("callback_class"):
            self._refuse("callback_config", "Mell calls nothing back while a model starts: remove it")
        if "log_engine_metrics" in entry:
            self._note("log_engine_metrics", "the metrics of engines are always at /metrics")

    def _take_model(self, model: dict[str, Any]) -> None:
        section: dict[str, Any] = {}
        for name, value in model.items():
            where = f"model_loading_config.{name}"
            match name:
                case "model_id":
                    section[name] = value
                case "model_source":
                    self._take_source(where, value, section)
                case "tokenizer_source":
                    if value is not None:
                        self.settings["engine_kwargs"]["tokenizer"] = value
                case "chat_template" | "tool_call_parser":  # Mell's own, for those who add them
                    section[name] = value
                case _:
                    self._refuse(where, f"Ray Serve LLM has no such member; {_GUIDE}")
        if not section.get("model_id"):
            self._refuse("model_loading_config.model_id", "write the model's name in the API")
        self.settings["model_loading_config"] = section

    def _take_source(self, where: str, source: Any, section: dict[str, Any]) -> None:
        if isinstance(source, dict):
            bucket = source.get("bucket_uri")
            self._refuse(where, f"download {bucket or 'the model'} to a folder of every node, and write the folder")
        else:
            section["model_source"] = source

    def _take_engine(self, kwargs: dict[str, Any]) -> None:
        source = self.settings["model_loading_config"].get("model_source")
        if isinstance(source, str) and "://" in source and kwargs.get("load_format") not in _STREAMING_FORMATS:
            self._refuse(
                "model_loading_config.model_source",
                f"download {source} to a folder of every node, and write the folder; or write "
                "engine_kwargs.load_format: runai_streamer",
            )
        frontend: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name == "distributed_executor_backend":
                if value not in (None, "mp"):
                    self._note(f"engine_kwargs.{name}", "the workers of a replica are its own processes")
            elif name == "disable_log_stats" or name == "enable_log_requests":
                self._note(f"engine_kwargs.{name}", "Mell logs one line per request, and needs the statistics")
            elif name in FRONTEND_ARGUMENTS:
                frontend[name] = value
            else:
                self.settings["engine_kwargs"][name] = value
        if frontend.pop("enable_auto_tool_choice", False) and "tool_call_parser" in frontend:
            self.settings["model_loading_config"].setdefault("tool_call_parser", frontend.pop("tool_call_parser"))
        self._frontend = frontend

    def _take_accelerator(self, entry: dict[str, Any]) -> None:
        kind = self._section("accelerator_config", entry.get("accelerator_config")).get("kind")
        bundles = self._bundles(self._section("placement_group_config", entry.get("placement_group_config")))
        if bundles:
            shares = {bundle.get("GPU", 0) for bundle in bundles}
            if kind is None:
                kind = "cpu" if shares == {0} else "gpu"
            if kind == "gpu" and shares != {1}:
                self._refuse("placement_group_config", _GPUS)
            elif cpus := sum(bundle.get("CPU", 0) for bundle in bundles):
                self.settings["deployment_config"]["num_cpus"] = cpus
                self._note(
                    "placement_group_config", "a replica is on one node; its CPUs are deployment_config.num_cpus"
                )
        if kind == "tpu":
            self._refuse("accelerator_config", "Mell's engines run on GPUs, or on CPUs: write kind: gpu")
        elif kind not in (None, "cpu", "gpu"):
            self._refuse("accelerator_config.kind", f"is {kind!r}: write gpu or cpu")
        accelerator = entry.get("accelerator_type")
        if accelerator is not None:
            # Ray's names for it: an A10 is an A10G.
            self.settings["accelerator_type"] = "A10G" if accelerator == "A10" else accelerator
            if kind == "cpu":
                self._refuse("accelerator_type", "the replicas have CPUs: remove it")
        elif kind == "gpu" or (kind is None and self._has_gpus and entry.get("engine") != "paced"):
            self.settings["deployment_config"]["num_gpus"] = self._workers

    @property
    def _workers(self) -> int:
        """The number of workers of a replica; the settings refuse what is no number."""
        workers = self.settings["engine_kwargs"].get("tensor_parallel_size", 1)
        return workers if isinstance(workers, int) else 1

    def _bundles(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """The resources of each worker, all of them numbers; none if they are refused."""
        bundles = self._given_bundles(group)
        for name, amount in [item for bundle in bundles for item in bundle.items()]:
            if type(amount) not in (int, float):
                self._refuse(f"placement_group_config, {name}", f"is {amount!r}: write a number")
                return []
        return bundles

    def _given_bundles(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        workers = self._workers
        if "bundle_per_worker" in group:
            return [self._section("placement_group_config.bundle_per_worker", group["bundle_per_worker"])] * workers
        bundles = group.get("bundles") or []
        if not isinstance(bundles, list):
            self._refuse("placement_group_config.bundles", "write a list of mappings")
            return []
        if bundles and len(bundles) != workers:
            self._refuse("placement_group_config.bundles", _GPUS)
            return []
        return [self._section("placement_group_config.bundles", bundle) for bundle in bundles]

    def _take_deployment(self, config: dict[str, Any]) -> None:
        section = self.settings["deployment_config"]
        for name, value in config.items():
            where = f"deployment_config.{name}"
            if name in _SAME_DEPLOYMENT:
                section[name] = float(value) if isinstance(value, int) else value
            elif name in _IGNORED_DEPLOYMENT:
                self._note(where, _IGNORED_DEPLOYMENT[name])
            elif name == "ray_actor_options":
                self._take_actor_options(where, self._section(where, value))
            elif name in _OWN_DEPLOYMENT:
                section[name] = value
            elif name not in ("num_replicas", "autoscaling_config"):
                self._refuse(where, _REFUSED_DEPLOYMENT.get(name, f"Ray Serve LLM has no such member; {_GUIDE}"))
        section["autoscaling_config"] = self._scaling(config)

    def _take_actor_options(self, where: str, options: dict[str, Any]) -> None:
        for name, value in options.items():
            match name:
                case "num_cpus":
                    self.settings["deployment_config"]["num_cpus"] = value
                case "runtime_env":
                    if value:
                        self._refuse(f"{where}.{name}", _ENVIRONMENT)
                case "num_gpus" | "accelerator_type":
                    if value:
                        self._refuse(f"{where}.{name}", "write accelerator_type beside engine_kwargs")
                case _:
                    self._refuse(f"{where}.{name}", "Mell reserves CPUs and GPUs only: remove it")

    def _scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        """The bounds on the number of replicas: a fixed number, or those of Serve's autoscaler."""
        count = config.get("num_replicas")
        given = self._section("deployment_config.autoscaling_config", config.get("autoscaling_config"))
        if type(count) is int and count > 0:
            return {"min_replicas": count, "max_replicas": count}
        if count not in (None, "auto"):
            self._refuse("deployment_config.num_replicas", f"is {count!r}: write a positive whole number, or auto")
        scaling: dict[str, Any] = {"max_replicas": _AUTO_MAXIMUM} if count == "auto" else {}
        for name, value in given.items():
            where = f"deployment_config.autoscaling_config.{name}"
            if name in ("min_replicas", "max_replicas", "initial_replicas"):
                least = 0 if name == "min_replicas" and self._sleeps else 1
                if value == 0 and least:
                    why = "a replica starts" if name != "min_replicas" else "without memory.budget_mib none sleeps"
                    self._note(where, f"{why}: 1 is the minimum")
                if value is not None:
                    scaling[name] = value or least
            elif name in _IGNORED_SCALING:
                self._note(where, _SCALING)
            else:
                self._refuse(where, f"Ray Serve has no such member; {_GUIDE}")
        return scaling

    def _take_experiments(self, experiments: dict[str, Any]) -> None:
        for name, value in experiments.items():
            where = f"experimental_configs.{name}"
            if name == "num_ingress_replicas":
                self.ingress_replicas = value
            elif name == "num_router_replicas":
                self._refuse(where, "write ingress: {num_replicas: N} into args")
            else:
                self._note(where, "Mell has no such part")

    def _section(self, where: str, value: Any) -> dict[str, Any]:
        """A section's members, none of a missing one."""
        if value is not None and not isinstance(value, dict):
            self._refuse(where, "write a mapping")
        return value if isinstance(value, dict) else {}

    def _refuse(self, where: str, reason: str) -> None:
        self.refusals.append(f"{where}: {reason}")

    def _note(self, where: str, reason: str) -> None:
        self.notes.append(f"{where} has no effect: {reason}")


OF_SERVING_ARGS = frozenset({CONFIGS, "ingress_cls_config", "ingress_deployment_config"})
_OWN_DEPLOYMENT = frozenset({"num_cpus", "num_gpus", "placement", "standby", "engine_silence_s"})
"""Mell's own members of `deployment_config`, for those who add them."""
_SAME_ENTRY = ("engine", "cache", "disaggregation")
OWN_ENTRY = frozenset({*_SAME_ENTRY, "slo", "frontend_kwargs"})
"""Mell's own members of an entry."""
OF_ENTRY = frozenset(
    {
        "accelerator_config",
        "accelerator_type",
        "callback_config",
        "deployment_config",
        "engine_kwargs",
        "experimental_configs",
        "llm_engine",
        "log_engine_metrics",
        "lora_config",
        "model_loading_config",
        "placement_group_config",
        "runtime_env",
        "server_cls",
    }
)
