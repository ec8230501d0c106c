"""Configuration of an ingress replica."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from app.adapters import listed_adapters
from app.ingress.access.keys import ApiKey
from app.settings import IngressSettings, served_names
from migration.protocol.core_messages import Adapter
from policies.precedence import NO_CLASSES, ServiceClasses


class Tenancy(StrEnum):
    """The calls that share cached KV of equal prompts: all, those with the same API key, or none."""

    ALL = "all"
    KEY = "key"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model, as an ingress serves it under `model_id`.

    `engine_kwargs` are the arguments of its engines, `frontend_kwargs` those of its server application.
    `chat_template` is the template itself. `tenancy`: the calls that share cached KV. `has_level`: the scheduler
    compares the times that clients get with a service level.
    """

    model_id: str
    model_source: str
    engine_kwargs: dict[str, Any]
    initial_replicas: int
    frontend_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    tool_call_parser: str | None = None
    tenancy: Tenancy = Tenancy.ALL
    has_level: bool = False

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters of the configuration."""
        return listed_adapters(self.frontend_kwargs.get("lora_modules") or ())

    @property
    def names(self) -> frozenset[str]:
        """The names of the model without an adapter."""
        return served_names(self.model_id, self.engine_kwargs)

    @property
    def all_names(self) -> frozenset[str]:
        """Its names, and those of the adapters of the configuration."""
        return self.names.union(adapter.lora_name for adapter in self.adapters)


class IngressConfig(IngressSettings):
    """The ingress's settings and its `models`, with the values that it needs of the other sections; times in seconds.

    `api_keys` are the keys from the environment; `api_keys_file` names a file with others. `service_classes` are the
    scheduler's.
    """

    models: tuple[ModelConfig, ...]
    grace_s: float
    refresh_s: float
    api_keys: tuple[ApiKey, ...] = ()
    service_classes: ServiceClasses = NO_CLASSES
