"""Configuration of an ingress replica."""

from enum import StrEnum
from typing import Any

from app.ingress.access.keys import ApiKey
from app.settings import IngressSettings, served_names
from policies.precedence import NO_CLASSES, ServiceClasses


class Tenancy(StrEnum):
    """The calls that share cached KV of equal prompts: all, those with the same API key, or none."""

    ALL = "all"
    KEY = "key"
    CALL = "call"


class IngressConfig(IngressSettings):
    """The ingress's settings, with the values that it needs of the other sections; times in seconds.

    `engine_kwargs` are the arguments of its engines. `chat_template` is the template itself.
    `api_keys` are the keys from the environment; `api_keys_file` names a file with others. `service_classes` are the
    scheduler's. `tenancy`: the calls that share cached KV. `has_level`: the scheduler compares the times that clients
    get with a service level.
    """

    model_id: str
    model_source: str
    engine_kwargs: dict[str, Any]
    initial_replicas: int
    grace_s: float
    refresh_s: float
    chat_template: str | None = None
    tool_call_parser: str | None = None
    api_keys: tuple[ApiKey, ...] = ()
    service_classes: ServiceClasses = NO_CLASSES
    tenancy: Tenancy = Tenancy.ALL
    has_level: bool = False

    @property
    def model_names(self) -> frozenset[str]:
        """The names of the model without an adapter."""
        return served_names(self.model_id, self.engine_kwargs)
