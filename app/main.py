"""The composition root: from validated settings to a Serve application."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pydantic
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation, RequestRouterConfig

from app.compatibility.contract import lost_here, refused
from app.compatibility.supported import describe
from app.configuration.documents import IMPORT_PATHS
from app.configuration.files import missing_files
from app.configuration.ray_llm import Args, LlmConfigsRefused, as_settings
from app.configuration.surroundings import refused_entries, refused_proxy
from app.configuration.vllm_source import accelerator_types
from app.ingress.access.keys import VARIABLE, ApiKey, check_classes, check_models, parse_keys
from app.ingress.access.operators import ADMIN_VARIABLE, parse_admin_key
from app.ingress.config import IngressConfig, ModelConfig, Tenancy
from app.settings import (
    CPU_ENGINE,
    CPU_ENV,
    CPU_LORA,
    AutoscalingSettings,
    DeploymentSettings,
    ModelSettings,
    Settings,
    check_installed,
    check_nodes,
    describe_errors,
    has_gpu_build,
    plain,
)
from app.shipped import SHIPPED
from app.tinymodel import cache_root, ensure_tiny_model
from app.versions import installed_version
from deployments.config import (
    Caching,
    Disaggregation,
    EngineConfig,
    Isolation,
    NodePlacement,
    SchedulerConfig,
    Topology,
)
from deployments.serve.environment import MARK
from deployments.serve.internals import controller
from policies.model import SOLE_POOL, PoolId

log = logging.getLogger("ray.serve")

UNLIMITED = 1_000_000_000
"""Serve must never reject a call for its number of ongoing requests: a targeted call has no alternative replica."""

_METRICS_S = 2.0
"""Interval at which replicas report their requests to Serve's own autoscaler."""

_ANY_NUMBER = 10_000
"""Serve's maximum number of replicas where the scheduler has the bounds."""

_RARER = {(_INTERVAL := "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS"): os.environ.get(_INTERVAL, "1000")}
"""Ray Serve's own gauges of a deployment once per second, where it sets them ten times: that was 7 % of the processor
time of a replica with a paced engine and 64 streams. Ray exports them every few seconds."""

_KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"

_ENV = {"VLLM_NO_USAGE_STATS": "1", **_RARER, **MARK}

_ONE_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    **_RARER,
    **MARK,
}
"""Ray Serve's settings for processes that block no event loop: Mell's code, Serve's replica and its router share one.

Otherwise a call and its answer pass through three threads at each end, which also contend for the interpreter's lock.
An engine replica blocks its loop while its engine starts.
"""


def build_app(args: dict[str, Any]) -> serve.Application:
    """The Serve application; `import_path` in serve_config.yaml names this function.

    Raises:
        ValueError: the settings are unknown, contradictory, or do not fit the installed build of vLLM or the cluster.
    """
    made = read_args(args)
    for note in made.notes:
        log.warning("%s", note)
    settings = read_settings(made.settings)
    check_installed(settings)
    _check_surroundings(args, settings)
    _check_versions(settings)
    pools = _pools(settings)
    configs = _engine_configs(settings)
    engines = [
        _engine_deployment(model, pools[model.model_id]).bind(
            config, settings.migration, _topology(settings, pools, model.deployment_config)
        )
        for model, config in zip(settings.models, configs, strict=True)
    ]
    topology = _topology(settings, pools, _most_patient(settings))
    scheduler = _scheduler_deployment(settings).bind(_scheduler_config(settings), topology)
    return _ingress_deployment(settings).bind(_ingress_config(settings, configs), topology, *engines, scheduler)


def _pools(settings: Settings) -> dict[str, PoolId]:
    """The pool of each model, by the model's id."""
    ids = [model.model_id for model in settings.models]
    return {id: SOLE_POOL if len(ids) == 1 else PoolId(f"{SOLE_POOL}-{plain(id)}") for id in ids}


def _topology(settings: Settings, pools: Mapping[str, PoolId], limits: DeploymentSettings) -> Topology:
    return Topology(pools, settings.ingress.lease_s, limits.engine_silence_s, limits.graceful_shutdown_timeout_s)


def _most_patient(settings: Settings) -> DeploymentSettings:
    """The replicas of the model whose requests have the longest time to end."""
    return max(
        (model.deployment_config for model in settings.models), key=lambda config: config.graceful_shutdown_timeout_s
    )


def read_args(args: dict[str, Any]) -> Args:
    """The settings that `args` stand for. Raises ValueError with one line per error."""
    try:
        return as_settings(args or {}, has_gpus=has_gpu_build())
    except LlmConfigsRefused as error:
        raise _refused(error.lines) from None


def read_settings(args: dict[str, Any]) -> Settings:
    """Validate `args`. Raises ValueError with one line per error."""
    try:
        return Settings.model_validate(args or {})
    except pydantic.ValidationError as error:
        raise _refused(describe_errors(error)) from None


def _refused(lines: Iterable[str]) -> ValueError:
    return ValueError("serve_config.yaml, args:\n" + "\n".join(f"  {line}" for line in lines))


def _check_surroundings(args: dict[str, Any], settings: Settings) -> None:
    """Compare the settings with the cluster and with the rest of Serve's configuration. Raises ValueError."""
    lines: list[str] = []
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    if len(nodes) == 1:  # files may be on some nodes only, and this one of several need not be a replica's
        lines += missing_files(settings)
    if nodes:
        lines += _around(args, settings)
    if lines:
        raise _refused(lines)
    check_nodes(settings, nodes)


def _around(args: dict[str, Any], settings: Settings) -> Iterator[str]:
    """The parts of Serve's configuration around `args` that do not fit, as Serve's controller has them."""
    try:
        serve_controller = controller()
    except ValueError:  # the application is built without Serve
        return
    for config in ray.get(serve_controller.get_app_configs.remote()).values():
        if config.import_path in IMPORT_PATHS and config.args == args:
            yield from refused_entries(config.model_dump(exclude_unset=True))
    location, options = ray.get(
        [serve_controller.get_proxy_location.remote(), serve_controller.get_http_config.remote()]
    )
    disabled = location in (None, ProxyLocation.Disabled)
    if reason := refused_proxy(settings.ingress.port, disabled, options.port):
        yield reason


def _check_versions(settings: Settings) -> None:
    """Log the parts of Mell that are lost with versions that are not tested. Raises ValueError if one is needed."""
    is_tested, state = describe(installed_version("vllm"), installed_version("ray"))
    if is_tested:
        return
    log.warning("%s", state)
    lost = lost_here()
    for each in lost:
        log.warning("%s: %s", each.part.title, each.effect)
    if lines := refused(lost, settings):
        raise _refused(lines)


def _engine_configs(settings: Settings) -> list[EngineConfig]:
    """The configurations of the engines of all models, in their order."""
    return [_engine_config(settings, model) for model in settings.models]


def _engine_config(settings: Settings, model: ModelSettings) -> EngineConfig:
    loading = model.model_loading_config
    source = loading.source or str(SHIPPED.get(loading.model_id, ensure_tiny_model)())
    lora = CPU_LORA if model.engine_kwargs.get("enable_lora") else {}
    defaults = {} if model.gpus or model.engine == "paced" else {**CPU_ENGINE, **lora}
    # The model's name in vLLM's metrics.
    named = {} if model.engine == "paced" else {"served_model_name": loading.model_id}
    # Otherwise, a request of a high rank would wait in an engine behind all that came before it.
    ordered = {"scheduling_policy": "priority"} if settings.scheduler.classes else {}
    kwargs = {**named, **defaults, **ordered, **model.engine_kwargs}
    cache = model.cache
    return EngineConfig(
        loading.model_id,
        source,
        kwargs,
        model.engine,
        model.gpus > 0,
        model.deployment_config.standby,
        model.adapters,
        cache.audit_s,
        cache.dram_gib,
        cache.pin_share,
        _pool_config(settings, model).evacuates,
        cache.recompute_s,
        model.caching is Caching.PREFILL,
        None if settings.memory.budget_mib is None else settings.memory.declared,
    )


def _scheduler_config(settings: Settings) -> SchedulerConfig:
    pools, configs = _pools(settings), [_pool_config(settings, model) for model in settings.models]
    if len(configs) == 1:
        return configs[0]
    own = {pools[model.model_id]: config for model, config in zip(settings.models, configs, strict=True)}
    return configs[0].model_copy(update={"pools": own})


def _pool_config(settings: Settings, model: ModelSettings) -> SchedulerConfig:
    """The scheduler's configuration for the pool of a model."""
    scaling = model.deployment_config.autoscaling_config
    return SchedulerConfig(
        **{**dict(settings.scheduler), "slo": model.slo},
        bounds=(scaling.min_replicas, scaling.max_replicas),
        scales=scaling.target_ongoing_requests is None,
        copies=model.cache.copies,
        memory=settings.memory,
        pairing=settings.pairing,
        weight=model.weight,
        prefill_replicas=model.prefill_replicas,
        auto_prefills=model.disaggregation.mode is Disaggregation.AUTO,
        returns=model.caching is Caching.FULL,
    )


def _ingress_config(settings: Settings, engines: Sequence[EngineConfig]) -> IngressConfig:
    """The configuration of an ingress; `engines` are those of its models."""
    return IngressConfig(
        **{**dict(settings.ingress), "keep_alive_s": _keep_alive_s(settings), "admin_key": _admin_key(settings)},
        models=tuple(
            _served_model(settings, model, engine) for model, engine in zip(settings.models, engines, strict=True)
        ),
        api_keys=_listed_keys(settings),
        grace_s=_most_patient(settings).graceful_shutdown_timeout_s,
        refresh_s=settings.scheduler.epoch_s,
        service_classes=settings.scheduler.service_classes,
    )


def _served_model(settings: Settings, model: ModelSettings, engine: EngineConfig) -> ModelConfig:
    loading = model.model_loading_config
    return ModelConfig(
        engine.model_id,
        engine.model_source,
        engine.kwargs,
        model.deployment_config.autoscaling_config.initial,
        model.frontend_kwargs,
        loading.read_chat_template(),
        loading.tool_call_parser,
        _tenancy(settings, model),
        _pool_config(settings, model).terms.has_level,
    )


def _keep_alive_s(settings: Settings) -> float | None:
    """The keep-alive time that is set, here or for vLLM. Raises ValueError if vLLM's is no time."""
    given = os.environ.get(_KEEP_ALIVE)
    if settings.ingress.keep_alive_s is not None or given is None:
        return settings.ingress.keep_alive_s
    if not given.isdecimal() or not int(given):
        raise ValueError(f"{_KEEP_ALIVE} is {given!r}: write a number of seconds")
    return float(given)


def _admin_key(settings: Settings) -> str | None:
    """The admin key of the settings or, if they have none, of the environment. Raises ValueError if that is invalid."""
    ingress, given = settings.ingress, os.environ.get(ADMIN_VARIABLE)
    if given is None or ingress.admin_key is not None or ingress.admin_key_file is not None:
        return ingress.admin_key
    return parse_admin_key(given, ADMIN_VARIABLE)


def _tenancy(settings: Settings, model: ModelSettings) -> Tenancy:
    """The calls that share cached KV. Raises ValueError for those of keys if there are no keys."""
    by_key = model.cache.isolation is Isolation.KEY
    if by_key and settings.ingress.api_keys_file is None and VARIABLE not in os.environ:
        raise ValueError(f"cache.isolation is key: set ingress.api_keys_file or {VARIABLE}, or write shared")
    if model.caching is Caching.NONE:
        return Tenancy.CALL
    return Tenancy.KEY if by_key else Tenancy.ALL


def _listed_keys(settings: Settings) -> tuple[ApiKey, ...]:
    """The keys in the environment. Raises ValueError if the list is invalid or a key file is set as well."""
    listed = os.environ.get(VARIABLE)
    if listed is None:
        return ()
    if settings.ingress.api_keys_file is not None:
        raise ValueError(f"API keys are in {VARIABLE} and in ingress.api_keys_file: remove one of them")
    keys = parse_keys(listed, VARIABLE)
    check_classes(keys, settings.scheduler.service_classes.names, VARIABLE)
    check_models(keys, [model.model_id for model in settings.models], VARIABLE)
    return keys


def _engine_deployment(model: ModelSettings, pool: PoolId) -> Any:
    from deployments.replica.deployment import EngineReplica
    from deployments.replica.standby import HOOK

    config = model.deployment_config
    scaling = config.autoscaling_config
    env = _ENV | ({} if model.gpus else {**CPU_ENV, **_compiled()}) | (HOOK if config.standby else {})
    resources: dict[str, Any] = {
        "num_cpus": config.num_cpus,
        **_placed(config.placement),
        "runtime_env": {"env_vars": env},
    }
    if model.gpus:
        resources["num_gpus"] = model.gpus
        resources["accelerator_type"] = model.accelerator_type
    return serve.deployment(
        EngineReplica,
        name=pool,
        ray_actor_options=resources,
        max_ongoing_requests=UNLIMITED,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.graceful_shutdown_timeout_s,
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=config.health_check_timeout_s,
        request_router_config=RequestRouterConfig(request_router_class="deployments.serve.routing:TargetRouter"),
        autoscaling_config=_autoscaling(scaling),
    )


def _compiled() -> dict[str, str]:
    """The folder of torch's compiled functions. It outlives /tmp: to compile them takes a quarter of a minute."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    return {name: os.environ.get(name) or str(cache_root() / "compiled")}


def _autoscaling(scaling: AutoscalingSettings) -> AutoscalingConfig:
    """The scheduler's wanted number without delay or, with `target_ongoing_requests`, Serve's own policy.

    Serve bounds the scheduler's number nowhere: the scheduler's own bounds may change while it runs.
    """
    by_serve = scaling.target_ongoing_requests is not None
    bounds = {
        "min_replicas": scaling.min_replicas,
        "initial_replicas": scaling.initial,
        "max_replicas": scaling.max_replicas,
    }
    if not by_serve:
        policy = AutoscalingPolicy(policy_function="deployments.serve.scaling:MirrorWanted")
        bounds |= {"min_replicas": min(1, scaling.min_replicas), "max_replicas": _ANY_NUMBER}
        return AutoscalingConfig(**bounds, upscale_delay_s=0, downscale_delay_s=0, policy=policy)
    return AutoscalingConfig(
        **bounds,
        target_ongoing_requests=scaling.target_ongoing_requests,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        metrics_interval_s=_METRICS_S,
        policy=AutoscalingPolicy(policy_function="deployments.serve.scaling:CountRequests"),
    )


def _placed(placement: NodePlacement) -> dict[str, Any]:
    """Ray's options for the nodes of a placement."""
    selector = {"label_selector": placement.labels} if placement.labels else {}
    return {"resources": placement.resources, **selector}


def _light(placement: NodePlacement) -> dict[str, Any]:
    """The options of a process without a part of its own in a node's CPUs."""
    options = {"num_cpus": 0, **_placed(placement), "runtime_env": {"env_vars": _ONE_LOOP}}
    return options if placement.resources or placement.labels else options | _away_from_gpus()


def _away_from_gpus() -> dict[str, Any]:
    """Ray's options that prefer nodes without a GPU: a process without CPUs, too, keeps a node from being given back.

    Ray labels nodes with the type of their GPUs. A node without the label has none of the types.
    """
    selector = {"ray.io/accelerator-type": f"!in({','.join(accelerator_types())})"}
    return {"label_selector": selector, "fallback_strategy": [{"label_selector": {}}]}


def _scheduler_deployment(settings: Settings) -> Any:
    from deployments.scheduler.deployment import EpochScheduler

    return serve.deployment(
        EpochScheduler,
        name="Scheduler",
        num_replicas=1,
        ray_actor_options=_light(settings.scheduler.placement),
        max_ongoing_requests=UNLIMITED,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=5,
        health_check_period_s=1,
        health_check_timeout_s=5,
    )


def _ingress_deployment(settings: Settings) -> Any:
    from app.service.deployment import IngressReplica

    return serve.deployment(
        IngressReplica,
        name="Ingress",
        num_replicas=settings.ingress.num_replicas,
        ray_actor_options=_light(settings.ingress.placement),
        max_ongoing_requests=UNLIMITED,
        # A new ingress listens before the old one stops.
        max_surge_percent=100,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=_most_patient(settings).graceful_shutdown_timeout_s,
        health_check_period_s=2,
    )
