"""The policies by name, and the parser of policy texts: `load_balance:drain=true,spare=0.1`.

A policy's module is imported when its name is looked up: a service imports only the policy that it is set to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Protocol

from policies.rules.options import Configured, Option, Value, options_of
from policies.rules.policy import Policy


class ConfigurablePolicy(Policy, Configured, Protocol):
    """A policy whose options can be set."""


_MAKERS: Mapping[str, tuple[str, str]] = {
    "best_fit": ("policies.rules.best_fit", "BestFit"),
    "worst_fit": ("policies.rules.worst_fit", "WorstFit"),
    "load_balance": ("policies.rules.load_balance", "LoadBalance"),
    "mell": ("policies.rules.mell.policy", "mell"),
    "mell_repaired": ("policies.rules.mell.policy", "mell_repaired"),
    "pack": ("policies.rules.pack.policy", "Pack"),
}
"""The module of every policy's class, and the name of a class or function there that makes it, by the policy's name."""


class _Policies(Mapping[str, ConfigurablePolicy]):
    def __getitem__(self, name: str) -> ConfigurablePolicy:
        return _default(name)

    def __contains__(self, name: object) -> bool:
        return name in _MAKERS

    def __iter__(self) -> Iterator[str]:
        return iter(_MAKERS)

    def __len__(self) -> int:
        return len(_MAKERS)


@cache
def _default(name: str) -> ConfigurablePolicy:
    module, maker = _MAKERS[name]
    made: ConfigurablePolicy = getattr(import_module(module), maker)()
    return made


POLICIES: Mapping[str, ConfigurablePolicy] = _Policies()
"""Every policy by name, with its default options."""


def policy(spec: str) -> Policy:
    """Parse `name` or `name:option=value,option=value` into a policy.

    Raises `ValueError` for an unknown name or option or a value out of range; the message lists the allowed ones.
    """
    name, colon, settings = spec.partition(":")
    if name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}, only {', '.join(POLICIES)}")
    return replace(POLICIES[name], **_values(name, settings.split(",") if colon else []))


def sets_headroom(rule: Policy) -> bool:
    """True if the headroom of a rule differs from the default of its policy."""
    alike = [POLICIES[name] for name, (module, _) in _MAKERS.items() if module == type(rule).__module__]
    return all(rule.headroom_s != each.headroom_s for each in alike)


def options() -> dict[str, tuple[Option, ...]]:
    """Every policy's options with their defaults and descriptions, for `--help` and the documentation."""
    return {name: options_of(choice) for name, choice in POLICIES.items()}


def _values(name: str, settings: list[str]) -> dict[str, Value]:
    options = {o.name: o for o in options_of(POLICIES[name])}
    values: dict[str, Value] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"{name}: {setting!r} is not of the form option=value")
        if key not in options:
            raise ValueError(f"{name} has no option {key!r}, only {', '.join(options)}")
        if key in values:
            raise ValueError(f"{name}: {key} is given twice")
        try:
            values[key] = options[key].read(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return values
