"""The application's settings: the validated `args` of `serve_config.yaml`. Unknown keys are errors.

Names follow ray.serve.llm where it has them (model_loading_config, engine_kwargs, accelerator_type,
deployment_config.autoscaling_config).
"""

import os
import re
import ssl
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from app.adapters import listed_adapters, read_modules
from app.configuration.engine_arguments import did_you_mean, refused_arguments, refused_parsers
from app.configuration.vllm_source import accelerator_types
from app.ingress.access.classes import TIERS
from app.ingress.access.keys import KeyFile, check_classes, check_models
from app.ingress.access.operators import ADMIN_VARIABLE, read_admin_key
from app.installation import INSTALL_CPU, INSTALL_CUDA
from app.shipped import SHIPPED
from app.vllm_cli.flags import FRONTEND_ARGUMENTS, as_settings, experts_over_ranks, whole_experts
from deployments.config import (
    ON_GPU,
    ON_HOST,
    CacheSettings,
    Caching,
    Disaggregation,
    DisaggregationSettings,
    MemorySettings,
    MigrationSettings,
    NodePlacement,
    PairingSettings,
    SchedulerSettings,
    ServiceLevelSettings,
    SettingsSection,
)
from deployments.engine.pace import read_pace
from deployments.replica.imports import CPU_BUILD, is_installed
from migration.protocol.core_messages import Adapter
from policies.cost.service import ReplicaSpeed, unreachable
from policies.decision.limits import Mode

CPU_ENGINE: Mapping[str, Any] = {"dtype": "float32", "block_size": 32, "enforce_eager": True}
"""The engine settings of vLLM's CPU build, unless `engine_kwargs` has others."""

CPU_LORA: Mapping[str, Any] = {
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
}
"""Further ones with `enable_lora`: with adapters of the output layer, an engine ended under requests with several
parameters, by vLLM's source because of `prompt_logprobs`."""

CPU_ENV: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # oneDNN keeps compiled kernels for each batch size. With its default of 1,024 kernels, a worker's memory grows
    # for an hour or more (docs/where-time-goes.md). 512 kernels suffice for up to 64 decoding requests and 38 sizes of
    # prefills.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",
    # Functions that torch fails to compile run uncompiled. Otherwise the engine would end.
    "TORCHDYNAMO_SUPPRESS_ERRORS": "1",
}
"""The environment of vLLM's CPU build."""


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelLoadingSettings(SettingsSection):
    """The served model and its name."""

    model_id: str = Field("mell-tiny", min_length=1, description="Model name in the API.")
    model_source: str | None = Field(
        None,
        min_length=1,
        description="Folder or hub name of the model; null: the `model_id`, if it is a hub name (`owner/name`), or a "
        "model that Mell brings along, `smollm2-135m` (SmolLM2-135M-Instruct) or `mell-tiny` (random weights).",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="File with a Jinja chat template, read at the start; null: the tokenizer's own template.",
    )
    tool_call_parser: str | None = Field(
        None,
        min_length=1,
        description="Name of vLLM's parser for the model's tool calls (`hermes`, `llama3_json`, ...); null: chats with "
        '`tool_choice: "auto"` are refused.',
    )

    @field_validator("chat_template")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None:
            _read(value)
        return value

    @property
    def source(self) -> str | None:
        """Folder or hub name of the model, None for one that is made locally. Folders have their absolute name."""
        name = self.model_source
        if name is None and self.model_id not in SHIPPED:
            name = self.model_id if _HUB_NAME.fullmatch(self.model_id) or Path(self.model_id).exists() else None
        return str(Path(name).absolute()) if name is not None and Path(name).exists() else name

    def read_chat_template(self) -> str | None:
        """The text of the chat template, None without one."""
        return _read(self.chat_template) if self.chat_template is not None else None


def _read(path: str) -> str:
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


class AutoscalingSettings(SettingsSection):
    """Bounds on the number of engine replicas."""

    min_replicas: int = Field(
        1,
        ge=0,
        description="Minimum number of replicas; 0, with `memory.budget_mib`: a model without requests sleeps.",
    )
    initial_replicas: int | None = Field(
        None, ge=1, description="Replicas at the start; null: `min_replicas`, but at least 1."
    )
    max_replicas: int = Field(1, ge=1, description="Maximum number of replicas.")
    target_ongoing_requests: float | None = Field(
        None,
        gt=0,
        description="Target number of requests per replica for Serve's own autoscaler, which excludes "
        "`scheduler.mode: act`; null: the scheduler decides the number of replicas.",
    )
    upscale_delay_s: float = Field(30.0, ge=0, description="Delay before Serve's own autoscaler adds replicas.")
    downscale_delay_s: float = Field(600.0, ge=0, description="Delay before Serve's own autoscaler removes replicas.")

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
        """Number of replicas at the start."""
        return self.initial_replicas if self.initial_replicas is not None else max(1, self.min_replicas)


class DeploymentSettings(SettingsSection):
    """Resources and health checks of the engine replicas."""

    autoscaling_config: AutoscalingSettings = Field(
        default_factory=AutoscalingSettings, description="Number of replicas."
    )
    num_cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves for one replica.")
    placement: NodePlacement = Field(default_factory=NodePlacement, description="Nodes for the engine replicas.")
    num_gpus: float = Field(0.0, ge=0, description="GPUs of one replica; 0: the CPU build of vLLM.")
    graceful_shutdown_timeout_s: float = Field(
        60.0, gt=0, description="Time for running requests to finish or move when a replica stops."
    )
    health_check_period_s: float = Field(2.0, gt=0, description="Interval of Serve's health checks.")
    health_check_timeout_s: float = Field(
        10.0, gt=0, description="A replica without an answer to its health check for this time is replaced."
    )
    standby: bool = Field(
        False,
        description="Keep a process with vLLM imported on every node of a replica, for the next replica there: that "
        "starts sooner, and the process takes host memory, see operations.md.",
    )
    engine_silence_s: float = Field(
        30.0,
        gt=0,
        description="An engine that has requests but generates no token for this time counts as hung; its replica "
        "is replaced.",
    )


class IngressSettings(SettingsSection):
    """The HTTP side: address, limits, access and logs."""

    former: ClassVar = {"frontend": "remove it; vLLM's own server application is the only one"}

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0: all addresses.")
    port: int | None = Field(
        8000, ge=1, le=65535, description="Port to listen on; null: requests come through Serve's own HTTP proxy."
    )
    num_replicas: int = Field(1, ge=1, description="Number of ingress processes; those on one node share the port.")
    placement: NodePlacement = Field(
        default_factory=NodePlacement,
        description="Nodes for the ingress processes; without one, nodes without GPUs are preferred.",
    )
    keep_alive_s: float | None = Field(
        None,
        gt=0,
        description="Time after which an idle connection of a client is closed; null: vLLM's "
        "`VLLM_HTTP_TIMEOUT_KEEP_ALIVE` in the environment, or 60. Keep it above that of a reverse proxy.",
    )
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Largest request body, in bytes.")
    max_choices: int = Field(128, ge=1, description="Maximum number of choices of one request (prompts times `n`).")
    allowed_media_domains: list[str] = Field(
        default_factory=list,
        description="Domains of the addresses of images, audio and video in requests; of all other domains, and of "
        "files, none is fetched.",
    )
    max_media: int = Field(
        32,
        ge=1,
        description="Maximum number of images and audio clips of one request, and of all requests whose media one "
        "ingress process decodes at a time; others wait. A video counts as 32.",
    )
    max_image_pixels: int = Field(1 << 25, ge=1, description="Largest image, in pixels: width times height.")
    max_media_bytes: int = Field(
        4 << 30,
        ge=1 << 20,
        description="Maximum size of the processed media of all running requests of one ingress process, in bytes; "
        "further requests with media get 503. Several models have equal shares.",
    )
    place_timeout_s: float = Field(
        0.5, gt=0, description="Longest wait for the scheduler before the ingress places a request itself."
    )
    no_replica_timeout_s: float = Field(
        120.0,
        ge=0,
        description="Longest wait of a request for a replica that takes it, new or under way; then 503, or an error at "
        "the end of its stream.",
    )
    max_engine_losses: int = Field(
        2,
        ge=1,
        description="Number of engines that may die with one request on board, which then ends with an error, since it "
        "may be the cause.",
    )
    lease_s: float = Field(
        10.0, gt=0, description="Time after which replicas end the requests of an ingress that does not read them."
    )
    replica_silence_s: float = Field(
        10.0,
        ge=2,
        description="Time without a word from a replica after which its requests continue elsewhere; a living replica "
        "sends one every second.",
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longest prompt, in tokens; null: the model's context."
    )
    max_requests: int | None = Field(
        2048,
        ge=1,
        description="Maximum number of concurrent requests of one ingress process; further ones get 503. null: no "
        "limit.",
    )
    refuse_late: float | None = Field(
        None,
        ge=1,
        description="Refuse requests with 503 while even the shortest prompt would have its first token later than "
        "this multiple of `ttft_p99_s`, of its class or of `slo`; null: requests wait.",
    )
    request_timeout_s: float | None = Field(
        None, gt=0, description="Time limit of a request, from its arrival to its last token; then 504. null: no limit."
    )
    api_keys_file: str | None = Field(
        None,
        min_length=1,
        description="File with the API keys of clients and their limits, see operations.md; without it and "
        "`MELL_API_KEYS` the API is open to every client.",
    )
    service_tiers: dict[str, str] = Field(
        default_factory=dict,
        description="Service classes of the values of `service_tier` in requests (`auto`, `default`, `flex`, `scale`, "
        "`priority`, `standard_only`), see api.md; others have the class of the same name, if there is one.",
    )
    admin_key: str | None = Field(
        None,
        min_length=8,
        description="Bearer key for the /mell routes; without it, `admin_key_file` and `MELL_ADMIN_KEY` they are open "
        "on loopback only.",
    )
    admin_key_file: str | None = Field(
        None,
        min_length=1,
        description="File with that key instead, which is read again when it changes, see operations.md.",
    )
    frontend_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the server application, with the names of `vllm serve`, see frontend.md.",
    )
    root_path: str = Field(
        "",
        description="Path before all routes, such as `/llm`, that a reverse proxy leaves in place.",
    )
    ssl_certfile: str | None = Field(
        None, min_length=1, description="File with the server's certificate chain; null: plain HTTP."
    )
    ssl_keyfile: str | None = Field(
        None, min_length=1, description="File with its private key; null: it is in `ssl_certfile`."
    )
    ssl_ca_certs: str | None = Field(
        None, min_length=1, description="File with the authorities of clients' certificates; null: none."
    )
    ssl_cert_reqs: Literal[0, 1, 2] = Field(
        0, description="Certificates of clients: 0 not asked for, 1 checked if there is one, 2 required."
    )
    ssl_ciphers: str | None = Field(None, min_length=1, description="Ciphers in OpenSSL's form; null: Python's.")
    middleware: list[str] = Field(
        default_factory=list,
        description="Import paths of ASGI middleware classes, or of functions, around all routes.",
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="Origins whose web pages may call the API, never /mell: `https://chat.example.com`; `*`: all.",
    )
    allowed_methods: list[str] = Field(
        default_factory=lambda: ["*"], description="Methods of these pages' calls; `*`: all."
    )
    allowed_headers: list[str] = Field(
        default_factory=lambda: ["*"], description="Headers of these pages' calls; `*`: all."
    )
    allow_credentials: bool = Field(
        False, description="These pages' calls may have cookies, which a reverse proxy may want."
    )
    allow_runtime_lora_updating: bool = Field(
        False,
        description="Open `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` to callers with `admin_key`, see "
        "frontend.md.",
    )
    log_text: bool = Field(
        False,
        description="Include prompts and answers in the log lines of requests; off by default for the clients' "
        "privacy.",
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        min_length=1,
        description="Collector for OpenTelemetry traces, such as `http://127.0.0.1:4317`, see metrics.md; null: no "
        "traces.",
    )

    @field_validator("frontend_kwargs")
    @classmethod
    def _are_of_the_frontend(cls, value: dict[str, Any]) -> dict[str, Any]:
        return _read_frontend_kwargs(value)

    @field_validator("service_tiers")
    @classmethod
    def _are_tiers(cls, value: dict[str, str]) -> dict[str, str]:
        if others := sorted(value.keys() - TIERS):
            raise ValueError(f"remove {', '.join(others)}; the service tiers are {', '.join(TIERS)}")
        return value

    @field_validator("allowed_media_domains")
    @classmethod
    def _are_domains(cls, value: list[str]) -> list[str]:
        for domain in value:
            if not _DOMAIN.fullmatch(domain):
                raise ValueError(f"{domain!r} is no domain: write its name alone, such as images.example.com")
        return [domain.lower() for domain in value]

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin: write https://HOST or https://HOST:PORT, without a path")
        return value

    @field_validator("root_path")
    @classmethod
    def _is_path(cls, value: str) -> str:
        if not _PATH.fullmatch(value):
            raise ValueError(f"{value!r} is no path: write /NAME, without / at the end")
        return value

    @field_validator("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    @classmethod
    def _are_files(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not Path(value).is_file():
            raise ValueError(f"{value} is no file")
        return str(Path(value).absolute())  # replicas have another working directory

    @field_validator("middleware")
    @classmethod
    def _are_import_paths(cls, value: list[str]) -> list[str]:
        for path in value:
            if not all(map(str.isidentifier, path.split("."))) or "." not in path:
                raise ValueError(f"{path!r} is no import path: write MODULE.NAME")
        return value

    @model_validator(mode="after")
    def _prefixed_here(self) -> Self:
        if self.root_path and self.port is None:
            raise ValueError("root_path: Serve's HTTP proxy has route_prefix of the application instead; remove it")
        return self

    @model_validator(mode="after")
    def _usable_certificates(self) -> Self:
        others = [name for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers") if getattr(self, name) is not None]
        if self.ssl_certfile is None:
            if others or self.ssl_cert_reqs:
                raise ValueError(f"{(others or ['ssl_cert_reqs'])[0]}: set ssl_certfile as well")
            return self
        if self.port is None:
            raise ValueError("ssl_certfile: Serve's HTTP proxy has no TLS: set port, or remove ssl_certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("ssl_cert_reqs: set ssl_ca_certs, the authorities of clients' certificates")
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ssl_ca_certs)
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            if self.ssl_ciphers is not None:
                context.set_ciphers(self.ssl_ciphers)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"the files or ciphers of ssl_... cannot be loaded: {error}") from None
        return self

    @model_validator(mode="after")
    def _safe_credentials(self) -> Self:
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError("allow_credentials: every web page could use its reader's cookies: list allowed_origins")
        return self

    @model_validator(mode="after")
    def _has_one_admin_key(self) -> Self:
        if self.admin_key is not None and self.admin_key_file is not None:
            raise ValueError("admin_key and admin_key_file: remove one of them")
        return self

    @property
    def has_admin_key(self) -> bool:
        """True if operators need a key, of the settings or of the environment."""
        return (self.admin_key or self.admin_key_file or os.environ.get(ADMIN_VARIABLE)) is not None

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not _is_http_url(value):
            raise ValueError(f"{value!r} is not the URL of a collector: write http://HOST:PORT or https://HOST:PORT")
        return value

    @field_validator("api_keys_file")
    @classmethod
    def _has_keys(cls, value: str | None) -> str | None:
        if value is None:
            return None
        KeyFile(value).read()
        return str(Path(value).absolute())  # replicas have another working directory

    @field_validator("admin_key_file")
    @classmethod
    def _has_key(cls, value: str | None) -> str | None:
        if value is None:
            return None
        read_admin_key(value)
        return str(Path(value).absolute())


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[a-z0-9._-]+)(:[0-9]+)?|null")
"""An origin as browsers send it: in lower case, without a path."""
_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*")
_DOMAIN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in url
    except ValueError:
        return False


def _read_frontend_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's server application, with the entries of `lora_modules` as objects. Raises ValueError."""
    if others := sorted(value.keys() - FRONTEND_ARGUMENTS):
        known = ", ".join(sorted(FRONTEND_ARGUMENTS))
        raise ValueError(f"remove {', '.join(others)}; there are {known}")
    if value.get("lora_modules"):
        return value | {"lora_modules": read_modules(value["lora_modules"])}
    return value


class ModelSections(SettingsSection):
    """The sections of one model."""

    model_loading_config: ModelLoadingSettings = Field(default_factory=ModelLoadingSettings, description="The model.")
    engine: Literal["vllm", "paced"] = Field(
        "vllm",
        description="Engine: `vllm` or, to try out policies, `paced`: noise without a model, at the pace set in "
        "`engine_kwargs`.",
    )
    accelerator_type: str | None = Field(
        None, description="Ray's name of the GPU type; implies `num_gpus`, with a GPU for every worker of a replica."
    )
    engine_kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments for vLLM's engine.")
    deployment_config: DeploymentSettings = Field(
        default_factory=DeploymentSettings, description="Replicas and resources."
    )
    cache: CacheSettings = Field(default_factory=CacheSettings, description="KV caches.")
    disaggregation: DisaggregationSettings = Field(
        default_factory=DisaggregationSettings, description="Prefill and decoding on different replicas."
    )

    @field_validator("accelerator_type")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        known = accelerator_types()
        if value is not None and value not in known and (meant := did_you_mean(value, known)):
            raise ValueError(f"Ray has no GPU type {value!r}{meant}")
        return value

    @field_validator("engine_kwargs")
    @classmethod
    def _without_what_is_done_anyway(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {name: held for name, held in value.items() if (name, held) != ("distributed_executor_backend", "mp")}

    @property
    def model_id(self) -> str:
        """The model's name in the settings, and in the API unless `served_model_name` has others."""
        return self.model_loading_config.model_id

    @property
    def workers(self) -> int:
        """Number of workers of one replica, each of which holds a shard of the model."""
        workers: int = self.engine_kwargs.get("tensor_parallel_size", 1)
        return workers

    @property
    def gpus(self) -> float:
        """Number of GPUs of one replica."""
        return self.deployment_config.num_gpus or (float(self.workers) if self.accelerator_type else 0.0)

    @property
    def prefill_replicas(self) -> int:
        """The number of replicas that are for prefills alone, in mode auto their maximum; 0: none."""
        settings, least = self.disaggregation, self.deployment_config.autoscaling_config.min_replicas
        match settings.mode:
            case Disaggregation.OFF:
                return 0
            case Disaggregation.STATIC:
                return settings.prefill_replicas or 1
            case Disaggregation.AUTO:
                return settings.prefill_replicas or least - 1

    @property
    def caching(self) -> Caching:
        """The replicas that keep the KV of ended requests for others: all, without prefill replicas."""
        return self.disaggregation.caching if self.prefill_replicas else Caching.FULL

    @model_validator(mode="after")
    def _makes_an_engine(self) -> Self:
        for name in ("block_size", "max_model_len", "tensor_parallel_size"):
            value = self.engine_kwargs.get(name, 1)
            if name == "max_model_len" and value in (-1, "auto"):
                raise ValueError(
                    f"engine_kwargs.{name} is {value!r}: Mell has to know the length before an engine has measured its "
                    "memory: write it in tokens, or remove it for that of the model"
                )
            if type(value) is not int or value < 1:
                raise ValueError(f"engine_kwargs.{name} is {value!r}: write a positive whole number, or remove it")
        block_size = self.engine_kwargs.get("block_size")
        on_cpu = not self.gpus and self.engine == "vllm"
        if on_cpu and block_size is not None and block_size % 32:
            raise ValueError(f"engine_kwargs.block_size is {block_size}: on CPU write a multiple of 32")
        loading = self.model_loading_config
        if self.engine == "vllm" and loading.source is None and loading.model_id not in SHIPPED:
            raise ValueError(
                f"model_loading_config.model_id is {loading.model_id}: write model_source, too, the folder or the hub "
                f"name of the model (Mell brings along only {', '.join(sorted(SHIPPED))})"
            )
        if self.deployment_config.standby and self.engine == "paced":
            raise ValueError("deployment_config.standby: a paced engine imports nothing; remove it")
        self._check_engine()
        self._check_tier()
        return self

    def _check_engine(self) -> None:
        """Raise ValueError for arguments that an engine of Mell must not have, or workers that do not fit the GPUs."""
        if self.engine == "vllm":
            if (gpus := experts_over_ranks(self.engine_kwargs)) is not None:
                raise ValueError(f"engine_kwargs.data_parallel_size: {as_settings(whole_experts(gpus))}")
            if lines := list(refused_arguments(self.engine_kwargs)):
                raise ValueError("\n".join(lines))
        if self.gpus and self.gpus != self.workers and max(self.gpus, self.workers) > 1:
            raise ValueError(
                f"deployment_config.num_gpus is {self.gpus:g} and engine_kwargs.tensor_parallel_size {self.workers}, "
                "but every worker has one GPU: write the same number in both"
            )

    def _check_tier(self) -> None:
        """Raise ValueError for a tier of host memory that no engine could have."""
        if not self.cache.dram_gib:
            return
        if self.engine == "paced":
            raise ValueError("cache.dram_gib: a paced engine has no tier of host memory; remove it")
        if self.engine_kwargs.get("enable_prefix_caching") is False:
            raise ValueError(
                "cache.dram_gib: its blocks are found by the prefix cache; set enable_prefix_caching: true"
            )


class ModelSettings(ModelSections):
    """One of several models, with all that is its own.

    Requests choose it by their `model`; each model has a deployment of its own, `Engine-<model_id>`. The sections are
    those of a sole model, and its members from Ray Serve LLM are read as there. Nothing is merged from elsewhere: YAML
    has anchors. With one entry, `model_id` and all sections may as well stand under `args` themselves.

    With `llm_configs`, some defaults are those of Ray Serve LLM: without `ingress.port`, clients connect to Serve's own
    proxy, and with vLLM's CUDA build a replica without `num_gpus` has a GPU for every worker.
    """

    slo: ServiceLevelSettings = Field(
        default_factory=ServiceLevelSettings, description="The model's service level, as `scheduler.slo`."
    )
    frontend_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the model's server application, as `ingress.frontend_kwargs`.",
    )
    weight: float = Field(
        1.0,
        ge=0.001,
        le=1000,
        description="Part of `memory.budget_mib` that each replica of the model gets beyond what it needs, in "
        "proportion to the weights of other models' replicas; where all need more than there is, likewise.",
    )

    @field_validator("frontend_kwargs")
    @classmethod
    def _are_of_the_frontend(cls, value: dict[str, Any]) -> dict[str, Any]:
        return _read_frontend_kwargs(value)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters of the configuration."""
        return listed_adapters(self.frontend_kwargs.get("lora_modules") or ())

    @property
    def names(self) -> frozenset[str]:
        """The names of the model itself in the API."""
        return served_names(self.model_id, self.engine_kwargs)


_OF_MODELS: Mapping[str, str] = {"scheduler": "slo", "ingress": "frontend_kwargs"}
"""The members of common sections that each of several models has for itself."""


class Settings(ModelSections):
    """All settings under `args`."""

    memory: MemorySettings = Field(default_factory=MemorySettings, description="KV pools that change their sizes.")
    pairing: PairingSettings = Field(
        default_factory=PairingSettings, description="Pairs of replicas that share their layers in a burst."
    )
    migration: MigrationSettings = Field(default_factory=MigrationSettings, description="Migrations.")
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings, description="Scheduling.")
    ingress: IngressSettings = Field(default_factory=IngressSettings, description="HTTP side.")
    llm_configs: list[ModelSettings] = Field(
        default_factory=list,
        description="Models behind one port, each with its sections; empty: the sections here are those of the only "
        "one.",
    )

    @model_validator(mode="before")
    @classmethod
    def _has_one_place_for_a_model(cls, values: object) -> object:
        if not isinstance(values, Mapping) or not values.get("llm_configs"):
            return values
        if twice := [name for name in ModelSections.model_fields if name in values]:
            raise ValueError(f"{', '.join(twice)}: with llm_configs, write it into the entry of its model")
        for section, name in _OF_MODELS.items():
            if isinstance(values.get(section), Mapping) and name in values[section]:
                raise ValueError(f"{section}.{name}: with llm_configs, write {name} into the entry of its model")
        return values

    @cached_property
    def models(self) -> tuple[ModelSettings, ...]:
        """The models."""
        if self.llm_configs:
            return tuple(self.llm_configs)
        values: dict[str, Any] = {name: getattr(self, name) for name in ModelSections.model_fields}
        values |= {"slo": self.scheduler.slo, "frontend_kwargs": self.ingress.frontend_kwargs}
        return (ModelSettings.model_construct(None, **values),)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_classes()
        self._check_keys()
        for number, model in enumerate(self.models):
            try:
                self._check_model(model)
            except ValueError as error:
                if not self.llm_configs:
                    raise
                lines = [f"llm_configs.{number}: {line}" for line in str(error).splitlines()]
                raise ValueError("\n".join(lines)) from None
        self._check_names()
        return self

    def _check_memory(self, model: ModelSettings) -> None:
        """Raise ValueError for an engine whose KV pool cannot change its size."""
        if self.memory.budget_mib is None:
            return
        if model.gpus:
            raise ValueError("memory.budget_mib: KV pools change their sizes on CPU only; remove it")
        for name in _SIZES_OF_POOLS:
            if name in model.engine_kwargs:
                raise ValueError(f"engine_kwargs.{name}: memory.budget_mib decides on the KV pool; remove one of them")
        if "worker_cls" in model.engine_kwargs:
            raise ValueError("engine_kwargs.worker_cls: memory.budget_mib has workers of its own; remove one of them")
        if model.cache.dram_gib:
            raise ValueError(
                "cache.dram_gib: a tier of host memory finds KV blocks by ids, which change with memory.budget_mib; "
                "remove one of them"
            )

    def _check_pairing(self, model: ModelSettings) -> None:
        """Raise ValueError if the scheduler may pair replicas that cannot be paired."""
        mode, place = self.pairing.mode, "pairing.mode"
        if mode is Mode.OFF:
            return
        if self.memory.budget_mib is None:
            raise ValueError(f"{place} is {mode}: replicas pair within memory.budget_mib only; set it, or write off")
        if all(each.deployment_config.autoscaling_config.max_replicas < 2 for each in self.models):
            raise ValueError(
                f"{place} is {mode}: a pair has two replicas of a model; raise autoscaling_config.max_replicas, or "
                "write off"
            )
        if model.deployment_config.autoscaling_config.max_replicas < 2:
            return
        if model.disaggregation.mode is Disaggregation.STATIC:
            raise ValueError(
                f"{place} is {mode}: replicas for prefills or for decoding alone do not pair (disaggregation.mode); "
                "write off"
            )
        if model.engine == "paced" and int(model.engine_kwargs.get("num_layers", 0)) < 2:
            raise ValueError(
                f"{place} is {mode}: a paced engine has no layers to give without engine_kwargs.num_layers; set it, or "
                "write off"
            )
        if model.workers > 1:
            raise ValueError(
                f"{place} is {mode}: layers of several workers are not given (engine_kwargs.tensor_parallel_size); "
                "write off"
            )
        for name, reason in _UNPAIRABLE.items():
            if model.engine_kwargs.get(name):
                raise ValueError(f"{place} is {mode}, and engine_kwargs.{name} is set: {reason}; remove one of them")
        if model.engine_kwargs.get("enforce_eager") is False:
            raise ValueError(
                f"{place} is {mode}: a compiled model's layers cannot be given; remove engine_kwargs.enforce_eager"
            )

    def _check_names(self) -> None:
        """Raise ValueError if two models have a name, or an adapter's name, in common, or one deployment."""
        owners: dict[str, str] = {}
        ids = [model.model_id for model in self.models]
        if doubled := sorted({id for id in ids if ids.count(id) > 1}):
            raise ValueError(f"llm_configs: several entries have the model_id {', '.join(doubled)}: give each its own")
        if alike := sorted(id for id in ids if list(map(plain, ids)).count(plain(id)) > 1):
            raise ValueError(f"llm_configs: the model_ids {', '.join(alike)} differ in signs only: change one")
        for model in self.models:
            adapters = {adapter.lora_name for adapter in model.adapters}
            for name in sorted({model.model_id} | model.names | adapters):
                if (owner := owners.setdefault(name, model.model_id)) != model.model_id:
                    raise ValueError(f"llm_configs: {name} is a name of {owner} and of {model.model_id}: change one")

    def _check_keys(self) -> None:
        """Raise ValueError for keys in the file with classes or models that do not exist."""
        if (path := self.ingress.api_keys_file) is not None:
            keys = KeyFile(path).read()
            check_classes(keys, self.scheduler.service_classes.names, path)
            check_models(keys, [model.model_id for model in self.models], path)

    def _check_model(self, model: ModelSettings) -> None:
        """Raise ValueError for a model that does not fit the common sections."""
        if self.migration.transport in ON_GPU and not model.gpus:
            raise ValueError(f"migration.transport is {self.migration.transport}: without GPUs write {ON_HOST[0]}")
        by_serve = model.deployment_config.autoscaling_config.target_ongoing_requests is not None
        if by_serve and self.scheduler.mode is Mode.ACT:
            raise ValueError(
                "autoscaling_config.target_ongoing_requests: both Serve and Mell would scale; remove it, or write "
                "scheduler.mode: off"
            )
        if by_serve and not model.deployment_config.autoscaling_config.min_replicas:
            raise ValueError(
                "autoscaling_config.min_replicas is 0: Serve would stop the last replica, and no request starts one; "
                "write 1, or remove target_ongoing_requests"
            )
        if not model.deployment_config.autoscaling_config.min_replicas and self.memory.budget_mib is None:
            raise ValueError(
                "autoscaling_config.min_replicas is 0: replicas without requests sleep with memory.budget_mib only; "
                "set it, or write 1"
            )
        if model.engine == "paced":
            self._check_service(model)
        levels = [model.slo.level, *self.scheduler.service_classes.levels.values()]
        if self.ingress.refuse_late is not None and not any(level and level.ttft_p99_s for level in levels):
            place = "slo" if self.llm_configs else "scheduler.slo"
            raise ValueError(f"ingress.refuse_late: set ttft_p99_s in {place} or in a class, too")
        self._check_frontend(model)
        self._check_disaggregation(model)
        self._check_memory(model)
        self._check_pairing(model)

    def _check_frontend(self, model: ModelSettings) -> None:
        """Raise ValueError for parsers that vLLM lacks, and for adapters that no engine could load."""
        loading, kwargs = model.model_loading_config, model.frontend_kwargs
        place = "frontend_kwargs" if self.llm_configs else "ingress.frontend_kwargs"
        for name in ("chat_template", "tool_call_parser"):
            if name in kwargs and getattr(loading, name) is not None:
                raise ValueError(f"{name} is in model_loading_config and in {place}: remove one")
        if model.engine == "vllm" and (
            lines := list(refused_parsers(model.engine_kwargs, kwargs, loading.tool_call_parser, place))
        ):
            raise ValueError("\n".join(lines))
        modules = {adapter.lora_name for adapter in model.adapters}
        if modules and model.engine_kwargs.get("enable_lora") is not True:
            raise ValueError(f"{place}.lora_modules: write engine_kwargs.enable_lora: true, too")
        self._check_updating()
        if taken := sorted(model.names & modules):
            raise ValueError(f"{place}.lora_modules: {', '.join(taken)} is the name of the model")

    def _check_updating(self) -> None:
        """Raise ValueError if nobody may load adapters at run time, or no engine could."""
        updating = "ingress.allow_runtime_lora_updating"
        if not self.ingress.allow_runtime_lora_updating:
            return
        if not self.ingress.has_admin_key:
            raise ValueError(f"{updating}: its calls name folders of the engines' machines; set ingress.admin_key, too")
        if not any(model.engine_kwargs.get("enable_lora") is True for model in self.models):
            raise ValueError(f"{updating}: write engine_kwargs.enable_lora: true, too")

    def _check_service(self, model: ModelSettings) -> None:
        """Raise ValueError for a level of the pool or of a class that no paced engine meets, even with one request."""
        levels = {"slo" if self.llm_configs else "scheduler.slo": model.slo.level}
        levels |= {f"scheduler.classes.{name}": each.level for name, each in self.scheduler.classes.items()}
        for name, level in levels.items():
            if level is None:
                continue
            pace = read_pace(model.engine_kwargs)
            if reasons := unreachable(level, ReplicaSpeed(pace.costs, 0.0, pace.max_num_batched_tokens)):
                raise ValueError(f"{name} cannot be met: {'; '.join(reasons)}")

    def _check_disaggregation(self, model: ModelSettings) -> None:
        """Raise ValueError for prefill replicas that nobody could assign, or from which no request could move."""
        if model.disaggregation.mode is Disaggregation.OFF:
            return
        if self.scheduler.mode is not Mode.ACT:
            raise ValueError("disaggregation.mode: the scheduler moves the requests on; write scheduler.mode: act")
        least = model.deployment_config.autoscaling_config.min_replicas
        if model.disaggregation.mode is Disaggregation.AUTO and least < 2:
            raise ValueError(
                f"disaggregation.mode: autoscaling_config.min_replicas is {least}, and auto takes the replicas for "
                "prefills from the minimum: raise it"
            )
        if model.prefill_replicas >= least:
            raise ValueError(
                f"disaggregation.prefill_replicas is {model.prefill_replicas}, and autoscaling_config.min_replicas "
                f"{least}: the others decode, so raise the minimum"
            )
        if model.engine_kwargs.get("enable_prefix_caching") is False:
            raise ValueError("disaggregation.mode: requests move by KV; set enable_prefix_caching: true")

    def _check_classes(self) -> None:
        """Raise ValueError for classes that do not exist, or for ranks or models without room in `max_requests`."""
        classes, ingress = self.scheduler.service_classes, self.ingress
        for tier, name in ingress.service_tiers.items():
            if name not in classes.names:
                known = ", ".join(classes.names)
                raise ValueError(f"ingress.service_tiers.{tier}: there is no class {name!r}; the classes are {known}")
        if ingress.max_requests is not None and ingress.max_requests < len(classes.ranks):
            raise ValueError(f"ingress.max_requests is below the number of ranks, {len(classes.ranks)}: raise it")
        if ingress.max_requests is not None and ingress.max_requests < len(self.models):
            raise ValueError(f"ingress.max_requests is below the number of models, {len(self.models)}: raise it")


_UNPAIRABLE = {
    "enable_lora": "replicas with LoRA adapters are not paired",
    "speculative_config": "replicas that decode speculatively are not paired",
}
"""The engine's arguments with which no replica is paired, and the reason."""
_SIZES_OF_POOLS = ("gpu_memory_utilization", "kv_cache_memory_bytes")
"""The engine's arguments that decide on the memory of its KV pool."""


def served_names(model_id: str, engine_kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The names of the model in the API."""
    names = engine_kwargs.get("served_model_name") or model_id
    return frozenset([names] if isinstance(names, str) else names)


def plain(model_id: str) -> str:
    """The model's id in the name of its deployment: Serve's names have no slashes."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", model_id)


def describe_errors(error: ValidationError) -> list[str]:
    """The errors, one line for each setting: its path and the reason."""
    found: dict[str, list[str]] = {}
    for each in error.errors():
        path = each["loc"] if each["type"] == "extra_forbidden" else _setting(each["loc"])
        meant = did_you_mean(str(path[-1]), _members(path[:-1])) if each["type"] == "extra_forbidden" else ""
        found.setdefault(".".join(map(str, path)) or "args", []).append(_explain(each, meant))
    lines = [(path, line) for path, reasons in found.items() for line in ", or ".join(reasons).splitlines()]
    return [f"{path}: {line}" for path, line in lines]


def _setting(place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The path of the setting at an error's place, which may go on with one of several types of its value."""
    kind: Any = Settings
    for depth, part in enumerate(place):
        if get_origin(kind) in (dict, list) and issubclass(section := get_args(kind)[-1], SettingsSection):
            kind = section
        elif isinstance(kind, type) and issubclass(kind, SettingsSection):
            kind = kind.model_fields[str(part)].annotation
        else:
            return place[:depth]
    return place


def _members(path: tuple[int | str, ...]) -> Collection[str]:
    """The names of the settings of a section."""
    kind: Any = Settings
    for part in path:
        inner = get_origin(kind) in (dict, list)
        kind = get_args(kind)[-1] if inner else kind.model_fields[str(part)].annotation
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, SettingsSection) else ()


def _explain(error: Any, meant: str) -> str:
    if error["type"] == "extra_forbidden":
        return f"no such setting{meant or ';'} docs/configuration.md lists all settings"
    own = error["type"] == "value_error"
    return str(error["ctx"]["error"] if own else error["msg"])


def has_gpu_build() -> bool:
    """True unless the CPU build of vLLM is installed."""
    return not is_installed(CPU_BUILD)


def check_installed(settings: Settings) -> None:
    """Compare the settings with the installed build of vLLM. Raises ValueError with the correction."""
    cpu_build = is_installed(CPU_BUILD)
    for model in settings.models:
        if model.gpus and cpu_build:
            raise ValueError(f"the settings ask for GPUs but the CPU build of vLLM is installed: run {INSTALL_CUDA}")
        if model.engine == "vllm" and not model.gpus and not cpu_build and is_installed("vllm"):
            raise ValueError(
                f"the CUDA build of vLLM is installed: set deployment_config.num_gpus: 1, or run {INSTALL_CPU}"
            )


ACCELERATOR = "accelerator_type:"
"""The beginning of Ray's resource for a type of GPU."""


def check_nodes(settings: Settings, nodes: Collection[Mapping[str, float]]) -> None:
    """Compare the settings with the resources of each node of the cluster. Raises ValueError with the correction.

    A cluster without any GPU may get nodes later, when replicas wait for them.
    """
    with_gpus = [node for node in nodes if node.get("GPU", 0.0) > 0]
    largest = max((node["GPU"] for node in with_gpus), default=0.0)
    types = {name.removeprefix(ACCELERATOR) for node in with_gpus for name in node if name.startswith(ACCELERATOR)}
    for model in settings.models:
        if 0 < largest < model.gpus:
            raise ValueError(
                f"a replica has {model.gpus:g} GPUs (engine_kwargs.tensor_parallel_size) and must fit on one node, but "
                f"no node has more than {largest:g}: write tensor_parallel_size: {largest:g}"
            )
        kind = model.accelerator_type
        if kind is not None and types and kind not in types:
            raise ValueError(f"accelerator_type is {kind}, but the cluster's GPUs are {', '.join(sorted(types))}")
