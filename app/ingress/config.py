"""What an ingress replica is configured with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """Times in seconds; `max_context` is None when the model's own limit applies."""

    model_id: str
    model_source: str
    max_context: int | None
    initial_replicas: int
    host: str
    port: int | None
    shares_port: bool
    grace_s: float
    max_body_bytes: int
    place_timeout_s: float
    no_replica_timeout_s: float
    refresh_s: float
    admin_key: str | None
    chat_template: str | None = None
