"""The service class of a call: that of its header or service tier, or else the first one of its API key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.ingress.errors import ApiError
from policies.precedence import DEFAULT_CLASS, NO_CLASSES, ServiceClasses

HEADER = "X-Mell-Class"
MEMBER = "service_tier"
"""The member of bodies, in the APIs of OpenAI and Anthropic."""

TIERS: Mapping[str, str | None] = {
    "auto": None,
    "default": DEFAULT_CLASS,
    "flex": "flex",
    "scale": "scale",
    "priority": "priority",
    "standard_only": DEFAULT_CLASS,
}
"""The values of `service_tier` in both APIs, and the classes that they name unless the settings differ. None, like the
name of a class that does not exist: the class of a call without a tier. `standard_only` is Anthropic's."""


@dataclass(frozen=True, slots=True)
class ClassChooser:
    """Chooses the class of each call. `tiers` are the operator's classes of service tiers, before those of `TIERS`."""

    classes: ServiceClasses = NO_CLASSES
    tiers: Mapping[str, str] = field(default_factory=dict)

    def choose(self, header: str | None, tier: Any, allowed: Sequence[str]) -> str:
        """The class of a call with these values of `HEADER` and `MEMBER`, of which the first counts.

        `allowed` are the classes of the call's key, none: all of them. Without classes, neither value has an effect.

        Raises:
            ApiError: 400 for an unknown class or tier, 403 for one that the key may not use.
        """
        if not self.classes.by_name:
            return DEFAULT_CLASS
        source, name = (HEADER, header) if header else (MEMBER, self._of_tier(tier))
        if name is None:
            return allowed[0] if allowed else DEFAULT_CLASS
        if name not in self.classes.names:
            raise _unknown(HEADER, name, self.classes.names)
        if allowed and name not in allowed:
            message = f"{source}: this API key may not use the class {name!r}, only {', '.join(allowed)}"
            raise ApiError(403, message, param=source, code="class_not_allowed")
        return name

    def _of_tier(self, tier: Any) -> str | None:
        """The class of a service tier; None for the class of a call without one."""
        if tier is None:
            return None
        if not isinstance(tier, str) or tier not in TIERS:
            raise _unknown(MEMBER, tier, TIERS)
        name = self.tiers.get(tier, TIERS[tier])
        return name if name in self.classes.names else None


ONE_CLASS = ClassChooser()
"""Gives every call the default class."""


def _unknown(source: str, name: Any, known: Sequence[str] | Mapping[str, Any]) -> ApiError:
    shown = repr(name) if len(repr(name)) <= _SHOWN else "the given value"
    message = f"{source}: {shown} is not among {', '.join(known)}"
    return ApiError(400, message, param=source, code="invalid_value")


_SHOWN = 64
"""Characters of a client's value in an error."""
