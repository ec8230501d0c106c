"""What an ingress replica is configured with."""

from dataclasses import dataclass

from app.ingress.access.keys import ApiKey


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """Times in seconds; `max_context` is None when the model's own limit applies.

    `api_keys` are those that stand in no file. Of `max_prompt_tokens`, `max_requests` and `request_timeout_s`, None is
    no limit. Without `otlp_traces_endpoint` nothing is traced.
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
