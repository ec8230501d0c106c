"""Every flag of `vllm serve` by its name in vLLM's parser: passed on, placed, without effect, or refused.

A test compares these tables with the parser of the installed vLLM, so that a new version's flags are noticed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def _words(text: str) -> list[str]:
    return text.split()


FRONTEND_ARGUMENTS = frozenset(
    {
        "anthropic_disabled_thinking_effort",
        "chat_template",
        "chat_template_content_format",
        "cohere_format",
        "cohere_is_reasoning_model",
        "default_chat_template_kwargs",
        "enable_auto_tool_choice",
        "enable_force_include_usage",
        "enable_per_request_metrics",
        "enable_prompt_tokens_details",
        "enable_tokenizer_info_endpoint",
        "exclude_tools_when_tool_choice_none",
        "fingerprint_mode",
        "fingerprint_value",
        "log_error_stack",
        "lora_modules",
        "response_role",
        "return_tokens_as_token_ids",
        "sse_keep_alive_interval",
        "tool_call_parser",
        "tool_parser_plugin",
        "tool_strict_level",
        "trust_request_chat_template",
        "trust_request_mm_kwargs",
    }
)
"""The arguments of vLLM's API server that concern texts and answers. Mell's settings have the place of all others."""

PLACED: Mapping[str, str] = {
    "model": "`model_loading_config.model_source`",
    "model_tag": "`model_loading_config.model_source`",
    "served_model_name": "`model_loading_config.model_id`; further names: `engine_kwargs.served_model_name`",
    "chat_template": "`model_loading_config.chat_template`; a template in the flag itself: `ingress.frontend_kwargs`",
    "tool_call_parser": "`model_loading_config.tool_call_parser`",
    "enable_auto_tool_choice": "part of `model_loading_config.tool_call_parser`",
    "tensor_parallel_size": "`engine_kwargs.tensor_parallel_size`, and as many GPUs per replica",
    "data_parallel_size": "`deployment_config.autoscaling_config.max_replicas`",
    "shutdown_timeout": "`deployment_config.graceful_shutdown_timeout_s`",
    "host": "`ingress.host`; without the flag all addresses, as in vLLM",
    "port": "`ingress.port`",
    "api_server_count": "`ingress.num_replicas`",
    "api_key": "a list of digests: `ingress.api_keys_file`, or `MELL_API_KEYS` in the environment",
    "enable_log_outputs": "`ingress.log_text`, prompts included",
    "allowed_media_domains": "`ingress.allowed_media_domains`; without the flag none",
    "root_path": "`ingress.root_path`",
    "middleware": "`ingress.middleware`; around Mell's routes, too",
    "ssl_certfile": "`ingress.ssl_certfile`",
    "ssl_keyfile": "`ingress.ssl_keyfile`",
    "ssl_ca_certs": "`ingress.ssl_ca_certs`",
    "ssl_cert_reqs": "`ingress.ssl_cert_reqs`",
    "ssl_ciphers": "`ingress.ssl_ciphers`",
    "allowed_origins": "`ingress.allowed_origins`; never for `/mell`",
    "allowed_methods": "`ingress.allowed_methods`",
    "allowed_headers": "`ingress.allowed_headers`",
    "allow_credentials": "`ingress.allow_credentials`; refused with `--allowed-origins '[\"*\"]'`",
    "otlp_traces_endpoint": "`ingress.otlp_traces_endpoint`",
    "hf_token": "`engine_kwargs.hf_token` for the token of the Hugging Face login; a token belongs into `HF_TOKEN`",
    "data_parallel_backend": "`ray` and `mp` are the same, since Mell's replicas are Ray actors",
    "distributed_executor_backend": "`mp` is what Mell does: the workers of a replica are its own processes",
}
"""Flags with a place of their own in Mell's settings, and that place."""

ENGINE = frozenset(
    _words(
        # the model and its files
        "tokenizer tokenizer_mode trust_remote_code dtype seed hf_config_path revision code_revision "
        "tokenizer_revision max_model_len quantization quantization_config allow_deprecated_quantization "
        "enforce_eager max_logprobs logprobs_mode use_fp64_gumbel disable_sliding_window disable_cascade_attn "
        "config_format hf_overrides model_class_overrides generation_config override_generation_config model_impl "
        "logits_processors language_model_only runner convert pooler_config "
        "load_format download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size model_loader_extra_config ignore_patterns use_tqdm_on_load "
        "pt_load_map_location reasoning_parser reasoning_parser_plugin reasoning_config structured_outputs_config "
        "speculative_config spec_method spec_model spec_tokens "
        # images, audio and video
        "disable_chunked_mm_input interleave_mm_strings limit_mm_per_prompt media_io_kwargs mm_device_do_normalize "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin "
        "mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm mm_processor_cache_gb "
        "mm_processor_kwargs skip_mm_profiling "
        # its KV cache, and other states
        "block_size gpu_memory_utilization kv_cache_memory_bytes kv_cache_dtype num_gpu_blocks_override "
        "enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval kv_cache_dtype_skip_layers "
        "kv_sharing_fast_prefill swa_bounded_replay mamba_backend mamba_ssu_algorithm "
        "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds mamba_cache_dtype mamba_ssm_cache_dtype "
        "mamba_block_size prefix_match_unit mamba_cache_mode enable_mamba_shared_prefix_checkpoint "
        "replayssm_buffer_len use_replayssm disable_hybrid_kv_cache_manager "
        # LoRA adapters
        "enable_lora max_loras max_lora_rank max_cpu_loras lora_dtype lora_target_modules fully_sharded_loras "
        "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels "
        # weights outside the GPU
        "offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group "
        "offload_prefetch_step offload_params "
        # kernels and compilation
        "attention_backend attention_config gdn_prefill_backend kda_prefill_backend kda_decode_backend "
        "cudagraph_capture_sizes max_cudagraph_capture_size compilation_config optimization_level performance_mode "
        "ir_op_priority enable_flashinfer_autotune moe_backend linear_backend sparse_indexer_topk_backend "
        "kernel_config engram_config additional_config "
        # the workers of one replica
        "numa_bind numa_bind_nodes numa_bind_cpus distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "disable_custom_all_reduce worker_cls max_parallel_loading_workers enable_expert_parallel "
        "enable_ep_weight_filter expert_placement_strategy enable_eplb eplb_config enable_hc_sp "
        "enable_batch_sharded_sampling enable_shm_tensor_arena "
        # the engine's scheduler
        "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive scheduling_policy enable_chunked_prefill "
        "scheduler_reserve_full_isl watermark prefill_schedule_interval async_scheduling max_num_queued_reqs "
        "max_num_queued_tokens "
        # the texts
        "stream_interval renderer_num_workers "
        # its own log lines and metrics
        "show_hidden_metrics_for_version kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics "
        "enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode "
        "profiler_config "
        "jit_monitor_verbose fail_on_environ_validation custom_histogram_buckets per_request_spec_decode_metrics"
    )
)
"""Flags that become `engine_kwargs` of the same name."""

FRONTEND = frozenset(FRONTEND_ARGUMENTS - PLACED.keys())
"""Flags that become `ingress.frontend_kwargs` of the same name."""

_LOGGED = "Mell logs one line per request"
_MEDIA_CACHE = "Mell's ingress caches media in its own process, and sends them along with their requests"
_FORM = "it has a log format of its own"

IGNORED: Mapping[str, str] = {
    "aggregate_engine_logging": f"{_LOGGED}, and {_FORM}",
    "disable_access_log_for_endpoints": f"{_LOGGED}, and none for health checks and metrics",
    "disable_fastapi_docs": "Mell has no such pages",
    "disable_log_stats": "Mell's scheduler and metrics need the statistics of the engines",
    "disable_uvicorn_access_log": _LOGGED,
    "enable_flash_late_interaction": "Mell scores every document of its own, on any replica",
    "enable_log_deltas": "Mell logs whole texts only",
    "enable_log_requests": _LOGGED,
    "enable_offline_docs": "Mell has no such pages; GET /openapi.json describes all calls",
    "enable_ssl_refresh": "Mell always loads changed certificates",
    "enable_server_load_tracking": "`/load` always counts",
    "enable_request_id_headers": "Mell returns the X-Request-Id that a client sends",
    "mm_processor_cache_type": _MEDIA_CACHE,
    "mm_shm_cache_max_object_size_mb": _MEDIA_CACHE,
    "uvicorn_log_level": f"{_LOGGED}, and {_FORM}",
}
"""Flags without effect, since Mell does what they ask for or has nothing to change, and the reason."""

_LANGUAGE = "adapters are of the language model, and chosen by the model's name in a request: remove it"
_CLIENTS_OF_TOKENS = "Mell's clients send and receive text: remove it"
_EXTRA_OUTPUTS = "Mell's answers do not carry this output: remove it"
_HEADS = "Mell bounds the head of a request itself (64 KiB, 20 s): remove it"
_LOGS = "Mell logs through Ray Serve: write its logging_config into the configuration (--write FILE)"
_MEDIA = "Mell's ingress decodes media, caches them and sends them along with their requests: remove it"
_NODES = "Ray knows the nodes: start Ray on each, and write --max-replicas for the replicas on all of them"
_HOST_MEMORY = "write cache: {dram_gib: N} into the configuration: host memory of one replica, in GiB"
_ONE_SOURCE = "Mell's own connector moves the KV cache: remove it"
_PARALLEL = "only --tensor-parallel-size splits a replica: write it, or more replicas with --max-replicas"
_PER_REPLICA = "every replica reads the events of its own engine: remove it"
_PLACING = "Mell distributes requests over its replicas itself: write --data-parallel-size or --max-replicas only"
OWN_PROCESSES = "the workers of a replica are its own processes, and replicas are Ray actors: remove it"
"""The reason against workers that are Ray's."""
_WHOLE_MODEL = "every replica has the whole model, encoders included: remove it"
_SLEEP = "Mell frees GPUs by closing replicas: write --min-replicas 1 and a higher --max-replicas"

_REFUSED: Mapping[str, Sequence[str]] = {
    _CLIENTS_OF_TOKENS: _words("enable_prompt_embeds enable_scale_out skip_tokenizer_init tokens_only"),
    _EXTRA_OUTPUTS: _words("aux_output_config enable_return_routed_experts enable_trace_replay return_sampling_mask"),
    _HEADS: _words("h11_max_header_count h11_max_incomplete_event_size"),
    _LANGUAGE: _words("default_mm_loras enable_tower_connector_lora"),
    _LOGS: _words("log_config_file log_level logging_config"),
    _MEDIA: _words("mm_ipc_gpu_memory_gb mm_processor_device mm_tensor_ipc"),
    _WHOLE_MODEL: _words("ec_manager_config ec_transfer_config mm_encoder_only"),
    _NODES: _words("headless master_addr master_port nnodes node_rank"),
    _HOST_MEMORY: _words("kv_offloading_backend kv_offloading_size"),
    _ONE_SOURCE: ["kv_transfer_config"],
    _PARALLEL: _words(
        "cp_kv_cache_interleave_size dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate "
        "decode_context_parallel_size pipeline_parallel_size prefill_context_parallel_size"
    ),
    _PER_REPLICA: ["kv_events_config"],
    _PLACING: _words(
        "all2all_backend data_parallel_address data_parallel_external_lb data_parallel_hybrid_lb "
        "data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port data_parallel_size_local "
        "data_parallel_start_rank data_parallel_supervisor_port dbo_decode_token_threshold dbo_prefill_token_threshold "
        "disable_nccl_for_dp_synchronization dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_sync_interval elastic_ep_max_dp_size enable_dbo enable_elastic_ep "
        "ubatch_size"
    ),
    _SLEEP: _words(
        "enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode sleep_mode_offload_cudagraph "
        "sleep_preserve_parameter_names"
    ),
    "write it with a space, --config FILE: vLLM does not read --config=FILE": ["config"],
    "spans of requests need --otlp-traces-endpoint only: remove it": ["collect_detailed_traces"],
    "Ray assigns the GPUs: set CUDA_VISIBLE_DEVICES in the environment": ["device_ids"],
    "diffusion models are not served: remove it": ["diffusion_config"],
    "requests have no other form than vLLM's own: remove it": ["io_processor_plugin"],
    OWN_PROCESSES: ["ray_workers_use_nsight"],
    "Mell serves HTTP: remove it": ["grpc", "grpc_port"],
    "Mell logs texts whole with --enable-log-outputs, and not at all without: remove it": ["max_log_len"],
    "Mell continues the requests of a failed replica on others: remove it": [
        "enable_fault_tolerance",
        "fault_tolerance_config",
    ],
    "Mell moves requests through vLLM's own scheduler: remove it": ["scheduler_cls"],
    "clients bring media along as data:, or name addresses of --allowed-media-domains: remove it": [
        "allowed_local_media_path"
    ],
    "clients run tools themselves: remove it": ["tool_server"],
    "embeddings of the wrong shape end an engine: remove it": ["enable_mm_embeds"],
    "the positions of a pruned video are not in its KV cache, by which requests move: remove it": [
        "video_pruning_method",
        "video_pruning_rate",
    ],
    "write --host and --port: Mell listens on TCP": ["uds"],
    "texts are not marked: remove it": ["watermark_config"],
    "engines keep the weights that they started with: remove it": ["weight_transfer_config"],
    "Mell extends vLLM's workers itself: remove it": ["worker_extension_cls"],
}

REFUSED: Mapping[str, str] = {name: reason for reason, names in _REFUSED.items() for name in names}
"""Flags that Mell cannot serve with, and what to write instead; a default value is accepted."""


@dataclass(frozen=True, slots=True)
class RemovedFlag:
    """A flag that vLLM had before the version `since`, and what to write `instead`."""

    since: str
    instead: str

    @property
    def reason(self) -> str:
        """The sentence for messages."""
        return f"vLLM removed it in {self.since}: {self.instead}"


_BEFORE_TABLES = "0.8"
"""The version of flags that 0.8.5, the oldest release compared, no longer has."""

_SPECULATION = "write --spec-method, --spec-model and --spec-tokens, or --speculative-config"
_GUIDED = "write --structured-outputs-config '{%s}'"
_EPLB = "write --eplb-config '{\"%s\": ...}'"
_GONE = "remove it"

_REMOVED: Mapping[tuple[str, str], Sequence[str]] = {
    ("0.28", "scales of the KV cache are the checkpoint's: remove it"): ["calculate_kv_scales"],
    ("0.28", _GONE): ["override_attention_dtype"],
    ("0.27", "--long-prefill-token-threshold bounds long prompts: remove it"): _words(
        "max_long_partial_prefills max_num_partial_prefills"
    ),
    ("0.19", _GONE): ["disable_frontend_multiprocessing"],
    ("0.18", f"engines compute preempted requests again; for cached KV, {_HOST_MEMORY}"): ["swap_space"],
    ("0.18", _GONE): ["use_gpu_for_pooling_score"],
    ("0.17", f"{_LOGGED}: remove it"): ["disable_log_requests"],
    ("0.17", "write --logits-processors"): ["logits_processor_pattern"],
    ("0.13", "write --cudagraph-capture-sizes"): ["cuda_graph_sizes"],
    ("0.13", "write --mm-processor-cache-gb 0"): ["disable_mm_preprocessor_cache"],
    ("0.13", "write --mm-encoder-tp-mode data"): ["enable_multimodal_encoder_data_parallel"],
    ("0.13", "remove it for texts; for other tasks write --runner pooling, and --convert if the model generates"): [
        "task"
    ],
    ("0.12", _EPLB % "log_balancedness"): ["eplb_log_balancedness"],
    ("0.12", _EPLB % "step_interval"): ["eplb_step_interval"],
    ("0.12", _EPLB % "window_size"): ["eplb_window_size"],
    ("0.12", _EPLB % "num_redundant_experts"): ["num_redundant_experts"],
    ("0.12", _GUIDED % '"backend": "xgrammar"'): ["guided_decoding_backend"],
    ("0.12", _GUIDED % '"disable_fallback": true'): ["guided_decoding_disable_fallback"],
    ("0.12", _GUIDED % '"disable_any_whitespace": true'): ["guided_decoding_disable_any_whitespace"],
    ("0.12", _GUIDED % '"disable_additional_properties": true'): ["guided_decoding_disable_additional_properties"],
    ("0.12", "write --pooler-config"): ["override_pooler_config"],
    ("0.12", _GONE): _words("lora_extra_vocab_size num_lookahead_slots"),
    ("0.11.1", "write --hf-overrides '{\"rope_parameters\": {...}}'"): _words("rope_scaling rope_theta"),
    ("0.11.1", _GONE): ["enable_lora_bias"],
    ("0.11", "write --max-cudagraph-capture-size, in requests, or remove it"): ["max_seq_len_to_capture"],
    ("0.11", _GONE): _words("disable_async_output_proc preemption_mode scheduler_delay_factor"),
    ("0.10.2", "write --additional-config"): ["override_neuron_config"],
    ("0.10.2", "an engine plans every step: remove it"): _words("multi_step_stream_outputs num_scheduler_steps"),
    ("0.10", "LoRA adapters have replaced prompt adapters: write --enable-lora and --lora-modules"): _words(
        "enable_prompt_adapter max_prompt_adapter_token max_prompt_adapters prompt_adapters"
    ),
    ("0.10", "vLLM's build decides: remove it"): ["device"],
    ("0.10", "--reasoning-parser suffices: remove it"): ["enable_reasoning"],
    ("0.10", "that is the default; --exclude-tools-when-tool-choice-none is the contrary: remove it"): [
        "expand_tools_even_if_tool_choice_none"
    ],
    ("0.10", "write --lora-modules"): ["qlora_adapter_name_or_path"],
    ("0.10", _GONE): _words(
        "long_lora_scaling_factors tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type "
        "use_v2_block_manager"
    ),
    (_BEFORE_TABLES, _SPECULATION): _words(
        "ngram_prompt_lookup_max ngram_prompt_lookup_min num_speculative_tokens spec_decoding_acceptance_method "
        "speculative_disable_by_batch_size speculative_draft_tensor_parallel_size speculative_max_model_len "
        "speculative_model speculative_model_quantization"
    ),
    (_BEFORE_TABLES, f"{OWN_PROCESSES}"): _words("engine_use_ray worker_use_ray"),
}

REMOVED: Mapping[str, RemovedFlag] = {
    name: RemovedFlag(since, instead) for (since, instead), names in _REMOVED.items() for name in names
}
"""Flags of earlier versions of vLLM. The versions are those of the first release whose command line lacks the flag."""


def why_refused(name: str, value: object) -> str | None:
    """The reason why `engine_kwargs` must not have an argument with this value, and what to write instead; or None.

    Values that switch an argument off are accepted.
    """
    if name in REMOVED:
        return as_settings(REMOVED[name].reason)
    if name in FRONTEND_ARGUMENTS:
        return _OF_FRONTENDS.get(name, f"write ingress.frontend_kwargs.{name} instead")
    reason = {**REFUSED, **_OF_ENGINES}.get(name)
    if reason is None or value in (None, False) or (value == 1 and name in _SIZES):
        return None
    if name == "distributed_executor_backend" and value == "mp":
        return None
    return as_settings(reason)


def as_settings(sentence: str) -> str:
    """A sentence with flags, with the names of `engine_kwargs` instead."""
    return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), sentence)


def experts_over_ranks(arguments: Mapping[str, Any]) -> int | None:
    """The GPUs of one model whose experts are spread over data-parallel ranks; None for any other model.

    Such ranks are no copies of the model: each has a share of the experts only.
    """
    ranks = [arguments.get(name) or 1 for name in ("data_parallel_size", "data_parallel_size_local")]
    if not arguments.get("enable_expert_parallel") or not all(isinstance(n, int) for n in ranks):
        return None
    workers: int = arguments.get("tensor_parallel_size") or 1
    return max(ranks) * workers if max(ranks) > 1 else None


EXPERTS_TOO = (*_REFUSED[_PLACING], "data_parallel_size")
"""The arguments that go when a model with experts over its ranks becomes one replica."""


def whole_experts(gpus: int) -> str:
    """The correction for one model with its experts spread over this number of GPUs."""
    return (
        f"with --enable-expert-parallel the ranks are one model on {gpus} GPUs, not copies of it: write "
        f"--tensor-parallel-size {gpus} instead, and --enable-expert-parallel as it is, for a replica with its experts "
        f"on {gpus} GPUs of one node"
    )


_FLAG = re.compile(r"--([a-z][a-z-]*)")
_SIZES = frozenset(
    _words(
        "data_parallel_size decode_context_parallel_size nnodes pipeline_parallel_size prefill_context_parallel_size"
    )
)
_OF_ENGINES: Mapping[str, str] = {
    "allowed_media_domains": "write ingress.allowed_media_domains instead",
    "data_parallel_size": "write deployment_config.autoscaling_config.max_replicas instead",
    "distributed_executor_backend": OWN_PROCESSES,
    "mm_processor_cache_type": f"{_MEDIA_CACHE}: remove it",
    "mm_shm_cache_max_object_size_mb": f"{_MEDIA_CACHE}: remove it",
    "model": "write model_loading_config.model_source instead",
}
"""Arguments of engines whose flags `mell serve` accepts."""
_OF_FRONTENDS: Mapping[str, str] = {
    "chat_template": "write model_loading_config.chat_template instead",
    "enable_auto_tool_choice": "it is part of model_loading_config.tool_call_parser: remove it",
    "tool_call_parser": "write model_loading_config.tool_call_parser instead",
}
"""The places of frontends' arguments that are not in `ingress.frontend_kwargs`."""

PATHS = (
    "chat_template",
    "download_dir",
    "hf_config_path",
    "mm_encoder_fp8_scale_path",
    "mm_encoder_fp8_scale_save_path",
    "reasoning_parser_plugin",
    "spec_model",
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "tokenizer",
    "tool_parser_plugin",
)
"""Flags that may name a file or folder; replicas have another working directory."""


def removed_flags(arguments: Sequence[str]) -> list[str]:
    """The removed ones among the flags of a command line or of vLLM's configuration file, one line each."""
    lines = []
    for argument in arguments:
        name = argument.partition("=")[0].partition(".")[0].removeprefix("--").replace("-", "_")
        known = name if name in REMOVED else name.removeprefix("no_")
        if argument.startswith("--") and known in REMOVED:
            lines.append(f"{option(name)}: {REMOVED[known].reason}")
    return lines


def option(name: str, value: object = None) -> str:
    """The flag of a name as it is written; `value` False: its negation."""
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
