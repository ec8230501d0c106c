"""Settings for flags, each valid for Mell; and flags that are refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import Settings
from app.vllm_cli.document import render
from app.vllm_cli.flags import IGNORED, REFUSED, option
from app.vllm_cli.translation import FlagsRefused, Host, Translation, translate

SHIPPED = Path(__file__).parents[3] / "serve_config.yaml"
FILES = {"./model": "/here/model", "chat.jinja": "/here/chat.jinja", "parser.py": "/here/parser.py"}
CPU, GPU = Host(False, FILES.get), Host(True, FILES.get)
BOUNDS = {"min_replicas": 1, "max_replicas": 1}
PLAIN = {
    "model_loading_config": {"model_id": "m", "model_source": "m"},
    "deployment_config": {"num_cpus": 0.1, "autoscaling_config": BOUNDS},
    "ingress": {"host": "0.0.0.0", "port": 8000},
}


def on(host: Host, flags: Mapping[str, Any], **replicas: int) -> Translation:
    return translate({"model_tag": "m", **flags}, host, **replicas)


def test_a_model_alone() -> None:
    assert on(CPU, {}).args == PLAIN


def test_a_model_on_gpus() -> None:
    args = on(GPU, {"tensor_parallel_size": 2}).args
    assert args["engine_kwargs"] == {"tensor_parallel_size": 2}
    assert args["deployment_config"] == {"num_gpus": 2, "autoscaling_config": BOUNDS}
    assert args["migration"] == {"transport": "cuda_ipc"}
    assert Settings.model_validate(args).gpus == 2


MODEL, ENGINE, REPLICAS, INGRESS = "model_loading_config", "engine_kwargs", "deployment_config", "ingress"
TABLE: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"model_tag": "./model"}, MODEL, {"model_id": "./model", "model_source": "/here/model"}),
    ({"model_tag": None, "model": "x"}, MODEL, {"model_id": "x", "model_source": "x"}),
    ({"served_model_name": ["a"]}, MODEL, {"model_id": "a"}),
    ({"served_model_name": ["a", "b"]}, ENGINE, {"served_model_name": ["a", "b"]}),
    ({"tool_call_parser": "hermes", "enable_auto_tool_choice": True}, MODEL, {"tool_call_parser": "hermes"}),
    ({"tool_call_parser": "hermes"}, INGRESS, {"frontend_kwargs": {"tool_call_parser": "hermes"}}),
    ({"tool_parser_plugin": "parser.py"}, INGRESS, {"frontend_kwargs": {"tool_parser_plugin": "/here/parser.py"}}),
    (
        {"lora_modules": [{"name": "a", "path": "./model"}, {"name": "b", "path": "org/b"}], "enable_lora": True},
        INGRESS,
        {"frontend_kwargs": {"lora_modules": [{"name": "a", "path": "/here/model"}, {"name": "b", "path": "org/b"}]}},
    ),
    ({"enable_lora": True, "max_lora_rank": 64}, ENGINE, {"enable_lora": True, "max_lora_rank": 64}),
    ({"chat_template": "{{ a }}"}, INGRESS, {"frontend_kwargs": {"chat_template": "{{ a }}"}}),
    ({"response_role": "bot"}, INGRESS, {"frontend_kwargs": {"response_role": "bot"}}),
    ({"max_model_len": 512, "tokenizer": "t"}, ENGINE, {"max_model_len": 512, "tokenizer": "t"}),
    ({"reasoning_parser_plugin": "parser.py"}, ENGINE, {"reasoning_parser_plugin": "/here/parser.py"}),
    ({"dtype": "auto", "block_size": 64}, ENGINE, {"dtype": "auto", "block_size": 64}),
    ({"compilation_config": {"mode": 3}}, ENGINE, {"compilation_config": {"mode": 3}}),
    ({"hf_token": True}, ENGINE, {"hf_token": True}),
    ({"data_parallel_size": 4}, REPLICAS, {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}}),
    ({"shutdown_timeout": 20}, REPLICAS, {"graceful_shutdown_timeout_s": 20}),
    ({"host": "127.0.0.1", "port": 9000}, INGRESS, {"host": "127.0.0.1", "port": 9000}),
    ({"api_server_count": 2}, INGRESS, {"num_replicas": 2}),
    ({"enable_log_requests": True, "enable_log_outputs": True}, INGRESS, {"log_text": True}),
    ({"allowed_media_domains": ["a.org"]}, INGRESS, {"allowed_media_domains": ["a.org"]}),
    ({"allowed_origins": ["*"]}, INGRESS, {"allowed_origins": ["*"]}),
    (
        {"allowed_origins": ["https://a.org"], "allowed_methods": ["GET"], "allowed_headers": ["x"]},
        INGRESS,
        {"allowed_origins": ["https://a.org"], "allowed_methods": ["GET"], "allowed_headers": ["x"]},
    ),
    ({"allow_credentials": True}, INGRESS, {"allow_credentials": True}),
    ({"enable_tokenizer_info_endpoint": True}, INGRESS, {"frontend_kwargs": {"enable_tokenizer_info_endpoint": True}}),
    ({"root_path": "/llm"}, INGRESS, {"root_path": "/llm"}),
    ({"middleware": ["a.B", "c.d"]}, INGRESS, {"middleware": ["a.B", "c.d"]}),
    ({"otlp_traces_endpoint": "http://o:1"}, INGRESS, {"otlp_traces_endpoint": "http://o:1"}),
]


@pytest.mark.parametrize(("flags", "section", "settings"), TABLE, ids=[", ".join(flags) for flags, _, _ in TABLE])
def test_a_flag_becomes_a_setting(flags: dict[str, Any], section: str, settings: dict[str, Any]) -> None:
    args = on(CPU, flags).args
    assert {name: args[section].get(name) for name in settings} == settings
    Settings.model_validate(args)


def test_certificates_become_settings_with_absolute_names() -> None:
    flags = {"ssl_certfile": "parser.py", "ssl_keyfile": "k.pem", "ssl_ca_certs": "c", "ssl_cert_reqs": 2}
    ingress = on(CPU, {**flags, "ssl_ciphers": "AES"}).args[INGRESS]
    assert ingress.items() >= {**flags, "ssl_certfile": "/here/parser.py", "ssl_ciphers": "AES"}.items()


def test_a_template_in_a_file_is_a_setting_of_the_model() -> None:
    args = on(CPU, {"chat_template": "chat.jinja"}).args
    assert args[MODEL]["chat_template"] == "/here/chat.jinja" and "frontend_kwargs" not in args[INGRESS]


@pytest.mark.parametrize(
    ("flags", "given", "bounds"),
    [
        ({}, {"min_replicas": 2}, (2, 2)),
        ({}, {"max_replicas": 3}, (1, 3)),
        ({}, {"min_replicas": 2, "max_replicas": 3}, (2, 3)),
        ({"data_parallel_size": 4}, {"min_replicas": 2}, (2, 4)),
        ({}, {"min_replicas": 0, "max_replicas": 0}, (0, 0)),
    ],
)
def test_the_number_of_replicas(flags: dict[str, Any], given: dict[str, int], bounds: tuple[int, int]) -> None:
    scaling = on(CPU, flags, **given).args[REPLICAS]["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == bounds


def test_mells_own_defaults_are_left_out() -> None:
    flags = {"dtype": "float32", "block_size": 32, "enforce_eager": True}
    assert on(CPU, flags).args == PLAIN
    assert on(GPU, flags).args[ENGINE] == flags


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_flag_is_named_with_the_way_out(name: str) -> None:
    with pytest.raises(FlagsRefused) as refused:
        on(CPU, {name: "x"})
    assert refused.value.lines == [f"{option(name)}: {REFUSED[name]}"]


def test_experts_over_ranks_are_refused_in_one_line() -> None:
    ranks = {"data_parallel_size": 8, "data_parallel_size_local": 4, "all2all_backend": "x"}
    with pytest.raises(FlagsRefused) as refused:
        on(GPU, {"enable_expert_parallel": True, "grpc": True, **ranks})
    line, other = refused.value.lines
    assert line.startswith("--all2all-backend, --data-parallel-size, --data-parallel-size-local: with")
    assert "write --tensor-parallel-size 8 instead" in line and other.startswith("--grpc")


def test_experts_within_a_replica_are_passed_on() -> None:
    args = on(GPU, {"enable_expert_parallel": True, "tensor_parallel_size": 8}).args
    assert args[ENGINE] == {"enable_expert_parallel": True, "tensor_parallel_size": 8}


def test_the_workers_of_a_replica_are_processes_anyway() -> None:
    assert on(GPU, {"distributed_executor_backend": "mp"}).args == on(GPU, {}).args


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"model_tag": None}, "name a model"),
        ({"hf_token": "hf_x"}, "HF_TOKEN"),
        ({"data_parallel_backend": "x"}, "--data-parallel-backend x"),
        ({"distributed_executor_backend": "ray"}, "--distributed-executor-backend ray: the workers"),
    ],
)
def test_a_value_is_refused(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(FlagsRefused, match=named) as refused:
        on(CPU, flags)
    assert len(refused.value.lines) == 1 and "hf_x" not in str(refused.value)


def test_all_refused_flags_are_reported() -> None:
    with pytest.raises(FlagsRefused) as refused:
        on(CPU, {"uds": "x", "headless": True, "data_parallel_size": 2}, max_replicas=3)
    assert [line.split(":")[0] for line in refused.value.lines] == ["--headless", "--uds", "--data-parallel-size"]


@pytest.mark.parametrize(
    "flags",
    [{"data_parallel_backend": "ray"}],
)
def test_what_mell_does_anyway_changes_nothing(flags: dict[str, Any]) -> None:
    assert on(CPU, flags) == on(CPU, {})


def test_a_pooling_model_is_one_of_the_engines() -> None:
    flags = {"runner": "pooling", "convert": "embed", "pooler_config": {"pooling_type": "MEAN"}}
    assert on(CPU, flags).args[ENGINE] == flags


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_an_ignored_flag_is_noted(name: str) -> None:
    found = on(CPU, {name: True})
    assert found.args == PLAIN and found.notes == [f"{option(name)} has no effect: {IGNORED[name]}"]


def test_api_keys_are_in_no_setting() -> None:
    found = on(CPU, {"api_key": ["secret"]})
    assert found.api_keys == ["secret"] and found.args == PLAIN


@pytest.mark.parametrize("host", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_file_holds_the_settings(host: Host) -> None:
    flags = {
        "served_model_name": ["a", "b"],
        "compilation_config": {"mode": 3, "cudagraph_capture_sizes": [1, 2]},
        "chat_template": "{% if a %}\n# b: 'c'\n{% endif %}",
        "revision": "1.0",
        "data_parallel_size": 4,
    }
    found = on(host, flags)
    text = render(found)
    (application,) = yaml.safe_load(text)["applications"]
    assert application["args"] == found.args
    assert all(f"  # {comment}\n" in text for comment in found.comments.values()) and len(found.comments) > 2


def test_the_file_has_serves_own_settings_as_shipped() -> None:
    shipped, written = (yaml.safe_load(text) for text in (SHIPPED.read_text(), render(on(CPU, {}))))
    (theirs,), (ours,) = shipped.pop("applications"), written.pop("applications")
    assert written == shipped
    assert (ours.pop("import_path"), theirs.pop("import_path")) == ("mell:build_app", "app.main:build_app")
    assert {**ours, "args": None} == {**theirs, "args": None}
