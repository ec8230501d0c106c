"""The policies by name, and the parser of policy texts: `load_balance:drain=true,spare=0.1`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from policies.rules.best_fit import BestFit
from policies.rules.load_balance import LoadBalance
from policies.rules.mell import mell, mell_repaired
from policies.rules.options import Configured, Option, Value, options_of
from policies.rules.pack import Pack
from policies.rules.policy import Policy
from policies.rules.worst_fit import WorstFit


class ConfigurablePolicy(Policy, Configured, Protocol):
    """A policy whose options can be set."""


POLICIES: Mapping[str, ConfigurablePolicy] = {
    "best_fit": BestFit(),
    "worst_fit": WorstFit(),
    "load_balance": LoadBalance(),
    "mell": mell(),
    "mell_repaired": mell_repaired(),
    "pack": Pack(),
}
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
    return all(rule.headroom_s != each.headroom_s for each in POLICIES.values() if type(each) is type(rule))


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
