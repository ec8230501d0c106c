"""The policies by name, and how text chooses one and its options: `load_balance:drain=true,spare=0.1`."""

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
"""Every policy under its name, with the options that it has if none are given."""


def policy(spec: str) -> Policy:
    """The policy that `name` or `name:option=value,option=value` stands for.

    Raises `ValueError` for a name, an option or a value that does not exist; the message says what does.
    """
    name, colon, settings = spec.partition(":")
    if name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}, only {', '.join(POLICIES)}")
    return replace(POLICIES[name], **_given(name, settings.split(",") if colon else []))


def options() -> dict[str, tuple[Option, ...]]:
    """Every policy's options with their defaults and meanings, for `--help` and the documentation."""
    return {name: options_of(choice) for name, choice in POLICIES.items()}


def _given(name: str, settings: list[str]) -> dict[str, Value]:
    known = {o.name: o for o in options_of(POLICIES[name])}
    given: dict[str, Value] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"{name}: {setting!r} is not of the form option=value")
        if key not in known:
            raise ValueError(f"{name} has no option {key!r}, only {', '.join(known)}")
        if key in given:
            raise ValueError(f"{name}: {key} is given twice")
        try:
            given[key] = known[key].read(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return given
