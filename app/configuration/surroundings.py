"""The parts of Serve's configuration around Mell's settings: entries under `deployments`, and Serve's own proxy.

Serve applies an entry of `deployments` after Mell has built its deployments, and replaces what it names as a whole:
`autoscaling_config` loses Mell's policy, `ray_actor_options` environment and GPUs. And for any entry at all, Serve's
controller makes the deployment's configuration anew from text, where it may be unable to import Mell. So there is none.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from policies.model import SOLE_POOL

_SCALING = "write args.deployment_config.autoscaling_config instead; `mell bounds MIN MAX` changes it at run time"
_INGRESS = "write args.ingress.num_replicas instead"
_RESOURCES = (
    "write args.deployment_config.num_cpus, num_gpus and placement, or accelerator_type, instead; environment "
    "variables as runtime_env of the application, beside args"
)
_NODES = "write args.{}.placement instead; environment variables as runtime_env of the application, beside args"
_SET = "Mell sets it: remove it"
_SAME = ("graceful_shutdown_timeout_s", "health_check_period_s", "health_check_timeout_s")
_OF_ENGINE: Mapping[str, str] = {
    "autoscaling_config": _SCALING,
    "num_replicas": _SCALING,
    "ray_actor_options": _RESOURCES,
    "max_ongoing_requests": "write args.ingress.max_requests instead",
    "max_queued_requests": "write args.ingress.max_requests instead",
    "logging_config": "write logging_config beside applications instead",
    **{name: f"write args.deployment_config.{name} instead" for name in _SAME},
}
_OF_INGRESS: Mapping[str, str] = {
    "ray_actor_options": _NODES.format("ingress"),
    "autoscaling_config": _INGRESS,
    "num_replicas": _INGRESS,
    "max_ongoing_requests": "write args.ingress.max_requests instead",
    "max_queued_requests": "write args.ingress.max_requests instead",
    "logging_config": "write logging_config beside applications instead",
    "graceful_shutdown_timeout_s": "write args.deployment_config.graceful_shutdown_timeout_s instead",
}
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "Ingress": _OF_INGRESS,
    "Scheduler": {
        "ray_actor_options": _NODES.format("scheduler"),
        "logging_config": "write logging_config beside applications instead",
    },
    SOLE_POOL: _OF_ENGINE,
}


def refused_entries(application: Mapping[str, Any]) -> Iterator[str]:
    """The members beside `args` that Mell's deployments would not survive, one line each, with what to write."""
    entries = application.get("deployments") or []
    if not isinstance(entries, list):
        yield "deployments: Serve takes a list: remove it, since Mell's deployments need no entry"
        entries = []
    for entry in entries:
        yield from _refused_entry(entry if isinstance(entry, dict) else {})
    if application.get("autoscaling_policy"):
        yield f"autoscaling_policy: {_SET}; {_SCALING}"
    if application.get("external_scaler_enabled"):
        yield f"external_scaler_enabled: Mell's scheduler decides the number of replicas: remove it; {_SCALING}"


def _refused_entry(entry: Mapping[str, Any]) -> Iterator[str]:
    name = entry.get("name")
    if isinstance(name, str) and name.startswith(f"{SOLE_POOL}-"):
        known = _OF_ENGINE
    elif isinstance(name, str) and name in _OPTIONS:
        known = _OPTIONS[name]
    else:
        yield f"deployments: Mell has no deployment {name!r}: remove the entry; there are {', '.join(_OPTIONS)}"
        return
    options = [option for option in entry if option != "name"]
    for option in options:
        yield f"deployments, {name}.{option}: {known.get(option, _SET)}"
    if not options:
        yield f"deployments, {name}: remove the entry"


def refused_proxy(port: int | None, proxy_disabled: bool, proxy_port: int) -> str | None:
    """The reason why the ingress's port does not fit Serve's HTTP proxy; None if it does."""
    if port is None and proxy_disabled:
        return "ingress.port is null, and Serve has no proxy: write a port, or proxy_location: HeadOnly"
    if port == proxy_port and not proxy_disabled:
        return (
            f"ingress.port {port} is the port of Serve's proxy: write proxy_location: Disabled, or ingress.port: null "
            "for requests through the proxy"
        )
    return None


def refused_whole(whole: Mapping[str, Any], port: int | None) -> Iterator[str]:
    """The members of a whole Serve configuration that do not fit, one line each."""
    options = whole.get("http_options")
    options = options if isinstance(options, dict) else {}
    location = whole.get("proxy_location", options.get("location"))
    disabled = location in ("Disabled", "NoServer")
    if reason := refused_proxy(port, disabled, options.get("port", 8000)):
        yield f"proxy_location: {reason}"
    if whole.get("target_capacity") is not None:
        yield f"target_capacity: Mell's scheduler decides the number of replicas: remove it; {_SCALING}"
