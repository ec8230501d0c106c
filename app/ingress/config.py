"""Configuration of an ingress replica."""

from dataclasses import dataclass

from app.ingress.access.keys import ApiKey


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """Configuration of an ingress replica; times in seconds. `max_context` None means the model's own limit.

    `api_keys` are the keys from the environment; `api_keys_file` names a file with others. `max_prompt_tokens`,
    `max_requests` and `request_timeout_s` None mean no limit. Without `otlp_traces_endpoint`, tracing is disabled.
    """

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
    tool_call_parser: str | None = None
    api_keys_file: str | None = None
    api_keys: tuple[ApiKey, ...] = ()
    max_requests: int | None = None
    max_prompt_tokens: int | None = None
    request_timeout_s: float | None = None
    log_text: bool = False
    otlp_traces_endpoint: str | None = None
