"""The configuration of an ingress, with what every one needs."""

from typing import Any

from app.ingress.config import IngressConfig, ModelConfig


def ingress_config(**settings: Any) -> IngressConfig:
    """A valid configuration with these settings beside the defaults."""
    needed: dict[str, Any] = {
        "models": (ModelConfig("tiny", "", {}, 1),),
        "grace_s": 1.0,
        "refresh_s": 1.0,
    }
    return IngressConfig(**needed, **settings)
