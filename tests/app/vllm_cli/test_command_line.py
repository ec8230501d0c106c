"""vLLM's parser, run for Mell: the given flags as plain values that give vLLM's engine the same arguments."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.configuration.vllm_source import engine_arguments
from app.settings import Settings
from app.vllm_cli.flags import ENGINE, option
from app.vllm_cli.translation import Flags, Host, translate

pytestmark = pytest.mark.slow

Parse = Callable[..., tuple[Flags, argparse.Namespace]]
MODE_3 = {"mode": 3, "pass_config": {"fuse_norm_quant": True}}
HOST = Host(True, lambda name: None)


@pytest.fixture(scope="module")
def parse() -> Parse:
    from app.vllm_cli import command_line

    return lambda *arguments: command_line.parse(arguments)


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("m", {"model_tag": "m"}),
        ("m --max_model_len 8k", {"model_tag": "m", "max_model_len": 8000}),
        ("m -tp 2 -dp=3", {"model_tag": "m", "tensor_parallel_size": 2, "data_parallel_size": 3}),
        (
            "m --port 8000 --seed 0 --pipeline-parallel-size 1 --no-enable-lora",
            {"model_tag": "m", "enable_lora": False},
        ),
        ("m --dtype auto --no-enforce-eager", {"model_tag": "m", "dtype": "auto", "enforce_eager": False}),
        ("m --no-enable-prefix-caching", {"model_tag": "m", "enable_prefix_caching": False}),
        ("m -cc.mode 3 -cc.pass_config.fuse_norm_quant true", {"model_tag": "m", "compilation_config": MODE_3}),
        (
            'm --lora-modules a=/a {"name":"b","path":"/b","base_model_name":"m"}',
            {
                "model_tag": "m",
                "lora_modules": [{"name": "a", "path": "/a"}, {"name": "b", "path": "/b", "base_model_name": "m"}],
            },
        ),
        ('m --hf-overrides {"a":1}', {"model_tag": "m", "hf_overrides": {"a": 1}}),
        ("m --api-key a b", {"model_tag": "m", "api_key": ["a", "b"]}),
        ("m --offload-params b a", {"model_tag": "m", "offload_params": ["b", "a"]}),
        ("m --hf-token", {"model_tag": "m", "hf_token": True}),
        ("m --config=a.yaml", {"model_tag": "m", "config": "a.yaml"}),
        ("--model m", {"model_tag": "m"}),
        ("", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_given_flags_differ_from_defaults(line: str, flags: dict[str, Any], parse: Parse) -> None:
    found, _ = parse(*line.split())
    assert found == flags


def test_mells_own_flags(parse: Parse) -> None:
    flags, own = parse("m", "--min-replicas", "2", "--max-replicas=3", "--dry-run")
    assert flags == {"model_tag": "m"}
    assert (own.min_replicas, own.max_replicas, own.dry_run, own.write) == (2, 3, True, None)


def test_flags_in_a_file_of_vllm(parse: Parse, tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    held = {"model": "m", "max-model-len": 512, "compilation-config": {"mode": 3}, "enable-lora": True, "port": 9000}
    file.write_text(yaml.safe_dump(held))
    flags, _ = parse("--config", str(file), "--port", "9001")
    assert flags == {
        "model": "m",
        "max_model_len": 512,
        "compilation_config": {"mode": 3},
        "enable_lora": True,
        "port": 9001,
    }


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("m --no-such-flag", SystemExit),
        ("m --max-model-len many", SystemExit),
        ("m --dry-run --write a.yaml", SystemExit),
        ("m --enable-auto-tool-choice", TypeError),
        ("m --enable-log-outputs", TypeError),
        ("m --chat-template no-such-file", ValueError),
    ],
)
def test_what_vllm_refuses_is_refused(line: str, error: type[BaseException], parse: Parse) -> None:
    with pytest.raises(error):
        parse(*line.split())


def test_help_shows_both_kinds_of_flags(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as shown:
        parse("--help=replicas")
    assert shown.value.code == 0 and "--max-replicas" in capsys.readouterr().out


SAMPLES = {
    "attention_config": '{"flash_attn_version": 2}',
    "compilation_config": '{"mode": 3, "max_cudagraph_capture_size": 1k}',
    "eplb_config": '{"window_size": 10}',
    "ir_op_priority": '{"rms_norm": ["native"]}',
    "kernel_config": '{"enable_jit_warmup": false}',
    "profiler_config": '{"profiler": "cuda"}',
    "gpu_memory_utilization": "0.5",
    "quantization_config": '{"linear": {"weight": "fp8_per_token"}}',
    "reasoning_config": '{"reasoning_start_str": "<a>"}',
    "speculative_config": '{"method": "ngram"}',
    "structured_outputs_config": '{"backend": "xgrammar"}',
    "watermark": "0.5",
}


def sample(action: argparse.Action) -> list[str]:
    """A flag with a value that is not vLLM's default."""
    flag = option(action.dest)
    if isinstance(action, argparse.BooleanOptionalAction):
        return [option(action.dest, False) if action.default else flag]
    if action.nargs == 0:
        return [flag]
    if action.dest in SAMPLES:
        return [flag, SAMPLES[action.dest]]
    if action.choices:
        return [flag, next(str(choice) for choice in action.choices if choice not in (None, action.default))]
    for text in ("3", "0.5", "a", '{"a": {}}', "{}"):
        try:
            assert callable(action.type)
            plain: Any = [text] if action.nargs else yaml.safe_load(text)
            if engine_arguments()[action.dest].accepts(plain) and action.type(text) not in (None, action.default):
                return [flag, text]
        except (argparse.ArgumentTypeError, ValueError):
            continue
    raise AssertionError(f"no sample of a value for {flag}")


def test_engines_have_the_arguments_that_vllm_would_give_them(parse: Parse) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from app.vllm_cli.command_line import make_parser
    from deployments.engine.arguments import engine_args

    outer, inner = make_parser()
    given = [word for action in inner._actions if action.dest in ENGINE for word in sample(action)]
    theirs = AsyncEngineArgs.from_cli_args(outer.parse_args(["serve", "m", *given]))
    flags, _ = parse("m", *given)
    args = yaml.safe_load(yaml.safe_dump(translate(flags, HOST).args))
    Settings.model_validate(args)
    assert args["engine_kwargs"].keys() == ENGINE
    ours = engine_args("m", args["engine_kwargs"])
    others = [name for name in ENGINE if getattr(ours, name) != getattr(theirs, name)]
    assert others == ["mm_processor_cache_gb"], "the cache of media is the ingress's"
    assert [name for name in ENGINE if isinstance(getattr(theirs, name), type(getattr(ours, name))) is False] == []
