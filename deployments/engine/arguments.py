"""vLLM's arguments: of an engine, with Mell's connector unless its model pools, and of a frontend."""

from collections.abc import Mapping
from typing import Any

from vllm.config import (
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    PoolerConfig,
    ProfilerConfig,
    ReasoningConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from migration.kv.pool import DECLARED

OWNED = (
    "kv_events_config",
    "kv_transfer_config",
    "worker_extension_cls",
    "distributed_executor_backend",
    "model",
)
"""The arguments that Mell sets."""

USAGE = UsageContext.OPENAI_API_SERVER
"""vLLM's defaults depend on it, so that of vLLM's own server: on an H100, 8,192 tokens per step instead of 2,048."""


def engine_args(
    model: str, engine_kwargs: Mapping[str, Any], dram_gib: float = 0.0, declared: float | None = None
) -> AsyncEngineArgs:
    """vLLM's arguments for an engine with Mell's connector and worker extension.

    `dram_gib` is the size of its tier of host memory, in all workers; 0: none. `declared` makes its KV pool elastic:
    the largest number of blocks, divided by the number at its start; None: the pool keeps its size.

    Raises:
        ValueError: `engine_kwargs` has an argument that Mell sets itself.
    """
    if owned := [name for name in OWNED if name in engine_kwargs]:
        raise ValueError(f"engine_kwargs: Mell sets {', '.join(owned)}; remove it")
    # Several workers are processes of this replica. Inside a placement group vLLM would make them actors of their own.
    executor = "mp" if engine_kwargs.get("tensor_parallel_size", 1) > 1 else None
    return AsyncEngineArgs(
        model=model,
        distributed_executor_backend=executor if declared is None else "migration.kv.executor.ElasticExecutor",
        worker_extension_cls="migration.kv.worker.MellWorker",
        kv_transfer_config=_connector(dram_gib, declared),
        **({} if declared is None else {"worker_cls": "migration.kv.pair.worker.PairWorker"}),
        # Every request brings its media along, whatever other requests this engine has had.
        **{**_with_objects(engine_kwargs), "mm_processor_cache_gb": 0.0},
    )


def _connector(dram_gib: float, declared: float | None) -> KVTransferConfig:
    """The choice of Mell's connector: with a tier of host memory, or without. An elastic pool has no tier."""
    if not dram_gib:
        return KVTransferConfig(
            kv_connector="MellConnector",
            kv_connector_module_path="migration.kv.connector",
            kv_role="kv_both",
            kv_connector_extra_config={} if declared is None else {DECLARED: declared},
        )
    return KVTransferConfig(
        kv_connector="TieredConnector",
        kv_connector_module_path="migration.kv.host.tiered",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "HostTierSpec",
            "spec_module_path": "migration.kv.host.host_tier",
            "cpu_bytes_to_use": int(dram_gib * (1 << 30)),
            # A conversation's next turn begins with the output of this one.
            "offload_prompt_only": False,
        },
    )


def engine_config(
    model: str,
    engine_kwargs: Mapping[str, Any],
    events: str | None = None,
    dram_gib: float = 0.0,
    declared: float | None = None,
) -> VllmConfig:
    """vLLM's configuration of an engine, which publishes the changes of its prefix cache, if it has one, at `events`.

    `dram_gib` is the size of its tier of host memory; 0: none. `declared` as in `engine_args`.

    A pooling model's engine has no connector, since its requests never move: beside one, vLLM's scheduler fails if the
    model has no KV cache.

    Raises:
        ValueError: `engine_kwargs` has an argument that Mell sets itself, no engine of Mell runs the model, or its pool
            should be elastic and cannot be.
    """
    config = engine_args(model, engine_kwargs, dram_gib, declared).create_engine_config(USAGE)
    if declared is not None:
        _check_elastic(config)
    if not is_pooling(config):
        check_model(config.model_config)
        if events is not None and config.cache_config.enable_prefix_caching:
            # Nobody asks for old events: no more than one is kept.
            config.kv_events_config = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=events, buffer_steps=1
            )
        return config
    args = engine_args(model, engine_kwargs)
    args.kv_transfer_config = None
    return args.create_engine_config(USAGE)


def _check_elastic(config: VllmConfig) -> None:
    """Raise ValueError for an engine whose KV pool cannot change its size."""
    if is_pooling(config):
        raise ValueError("memory.budget_mib: a pooling model's KV pool keeps its size; remove budget_mib")
    if config.use_v2_model_runner:
        raise ValueError(
            "memory.budget_mib: vLLM's second model runner keeps block tables where blocks cannot change their places; "
            "remove budget_mib, or set VLLM_USE_V2_MODEL_RUNNER=0"
        )


def is_pooling(config: VllmConfig) -> bool:
    """True for a model that pools, and generates no text."""
    runner: str = config.model_config.runner_type
    return runner == "pooling"


def check_model(model: ModelConfig) -> None:
    """Raise ValueError for a model that vLLM does not run with Mell's connector, or that revises its tokens."""
    if model.is_encoder_decoder:
        raise ValueError(
            "model_loading_config.model_source: the model has an encoder and a decoder (Whisper, BART); vLLM runs such "
            "models without a KV connector only: serve it by vllm serve"
        )
    if model.is_diffusion:
        raise ValueError(
            "model_loading_config.model_source: the model revises its tokens (diffusion); Mell serves models that "
            "generate one after another: serve it by vllm serve"
        )


_OBJECTS: Mapping[str, Any] = {
    "pooler_config": PoolerConfig,
    "profiler_config": ProfilerConfig,
    "reasoning_config": ReasoningConfig,
    "structured_outputs_config": StructuredOutputsConfig,
}
"""The arguments that vLLM's command line makes objects of, and its engine does not."""


def _with_objects(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _OBJECTS[name](**value) if name in _OBJECTS and isinstance(value, Mapping) else value
        for name, value in kwargs.items()
    }


_OF_FRONTENDS = (
    "code_revision",
    "config_format",
    "convert",
    "custom_histogram_buckets",
    "disable_chunked_mm_input",
    "disable_sliding_window",
    "dtype",
    "download_dir",
    "enable_chunked_prefill",
    "enable_lora",
    "enable_prefix_caching",
    "generation_config",
    "hf_config_path",
    "hf_overrides",
    "hf_token",
    "interleave_mm_strings",
    "language_model_only",
    "limit_mm_per_prompt",
    "logits_processors",
    "logprobs_mode",
    "max_cpu_loras",
    "max_logprobs",
    "max_lora_rank",
    "max_loras",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "max_num_seqs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_hasher_algorithm",
    "mm_processor_cache_gb",
    "mm_processor_kwargs",
    "model_class_overrides",
    "model_impl",
    "override_generation_config",
    "per_request_spec_decode_metrics",
    "pooler_config",
    "prefix_caching_hash_algo",
    "reasoning_config",
    "reasoning_parser",
    "reasoning_parser_plugin",
    "renderer_num_workers",
    "revision",
    "runner",
    "served_model_name",
    "show_hidden_metrics_for_version",
    "speculative_config",
    "stream_interval",
    "structured_outputs_config",
    "tokenizer",
    "tokenizer_mode",
    "tokenizer_revision",
    "trust_remote_code",
)
"""The arguments on which the making and the checking of requests depends: an image's tensors have the model's `dtype`,
and the names of a prompt's KV blocks are made by `prefix_caching_hash_algo`."""


def of_frontends(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments on which the making and the checking of requests depends."""
    return {name: engine_kwargs[name] for name in _OF_FRONTENDS if name in engine_kwargs}


def frontend_args(model: str, engine_kwargs: Mapping[str, Any]) -> AsyncEngineArgs:
    """vLLM's arguments for a process that makes requests for engines with these arguments, and has no device.

    Arguments of devices do not count, and neither does the model's quantization, which vLLM checks against the device.
    """
    kwargs = _with_objects(of_frontends(engine_kwargs))
    overrides = {**kwargs.pop("hf_overrides", {}), "quantization_config": None}
    made = AsyncEngineArgs(model=model, hf_overrides=overrides, **kwargs)
    # As for one of several servers: a processed item is in this process's cache, and goes along with every request.
    made._api_process_count = 2
    return made
