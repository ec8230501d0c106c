"""What the installed vLLM would refuse is found without it."""

from pathlib import Path
from typing import Any

import pytest

from app.configuration.engine_arguments import refused_arguments, refused_parsers
from app.configuration.files import is_path, missing_files
from app.configuration.vllm_source import accelerator_types, engine_arguments, parsers
from app.settings import Settings


@pytest.mark.parametrize(
    ("kwargs", "lines"),
    [
        ({"max_model_len": 4096, "gpu_memory_utilization": 0.9, "dtype": "bfloat16"}, []),
        ({"seed": None, "enforce_eager": True, "cudagraph_capture_sizes": [1, 2]}, []),
        ({"compilation_config": {"mode": 3}, "speculative_config": {"model": "a/b", "method": "eagle"}}, []),
        ({"speculative_config": {"method": "ngram", "num-speculative-tokens": 3}}, []),
        ({"quantization_config": {"linear": {"weight": "fp8_per_token"}}}, []),
        ({"max_modle_len": 1}, ["engine_kwargs.max_modle_len: vLLM's engine has no such argument; did you mean max_m"]),
        ({"xyzzy": 1}, ["engine_kwargs.xyzzy: vLLM's engine has no such argument"]),
        ({"max_num_seqs": "64"}, ["engine_kwargs.max_num_seqs is '64': write a whole number"]),
        ({"max_num_seqs": True}, ["engine_kwargs.max_num_seqs is True: write a whole number"]),
        ({"max_num_seqs": 6.5}, ["engine_kwargs.max_num_seqs is 6.5: write a whole number"]),
        ({"gpu_memory_utilization": 90}, ["engine_kwargs.gpu_memory_utilization is 90: write a number, more than 0"]),
        ({"enforce_eager": "yes"}, ["engine_kwargs.enforce_eager is 'yes': write true or false"]),
        ({"dtype": "flaot16"}, ["engine_kwargs.dtype is 'flaot16': write auto or half"]),
        ({"tokenizer": ["a"]}, ["engine_kwargs.tokenizer is ['a']: write a text"]),
        ({"compilation_config": {"modes": 3}}, ["engine_kwargs.compilation_config.modes: there is no such member"]),
        ({"swap_space": 4, "tool_call_parser": "x"}, ["engine_kwargs.swap_space: vLLM removed", "engine_kwargs.tool"]),
        ({"enable_prefix_caching": False, "distributed_executor_backend": "mp"}, []),
    ],
)  # fmt: skip
def test_arguments(kwargs: dict[str, Any], lines: list[str]) -> None:
    found = list(refused_arguments(kwargs))
    assert len(found) == len(lines) and all(map(str.startswith, found, lines))


@pytest.mark.parametrize(
    ("engine", "frontend", "tools", "line"),
    [
        ({}, {}, "hermes", None),
        ({"reasoning_parser": "qwen3"}, {"tool_call_parser": "hermes"}, None, None),
        ({}, {}, "hermez", "model_loading_config.tool_call_parser: vLLM has no parser 'hermez'; did you mean hermes?"),
        ({"reasoning_parser": "qwen33"}, {}, None, "engine_kwargs.reasoning_parser: vLLM has no parser 'qwen33'; did"),
        (
            {},
            {"tool_call_parser": "x"},
            None,
            "ingress.frontend_kwargs.tool_call_parser: vLLM has no parser 'x'; there",
        ),
        ({}, {"tool_parser_plugin": "p.py"}, "mine", None),
        ({"reasoning_parser": "mine", "reasoning_parser_plugin": "p.py"}, {}, None, None),
    ],
)
def test_parsers(engine: dict[str, Any], frontend: dict[str, Any], tools: str | None, line: str | None) -> None:
    found = list(refused_parsers(engine, frontend, tools))
    assert [each[: len(line or "")] for each in found] == ([line] if line else [])


@pytest.mark.slow
def test_the_source_says_what_the_import_says() -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert engine_arguments().keys() == {field.name for field in fields(AsyncEngineArgs)}
    assert set(parsers("tool_call_parser")) <= set(ToolParserManager.list_registered())
    assert set(parsers("reasoning_parser")) <= set(ReasoningParserManager.list_registered())
    defaults = {field.name: getattr(AsyncEngineArgs(model="m"), field.name) for field in fields(AsyncEngineArgs)}
    plain = {name: value for name, value in defaults.items() if type(value) in (int, float, bool, str)}
    assert [name for name, value in plain.items() if not engine_arguments()[name].accepts(value)] == []


def test_types_of_gpus_are_rays() -> None:
    assert {"H100", "A10G", "L4"} <= set(accelerator_types())


NAMED = {"model_loading_config": {"model_id": "smollm2-135m"}}


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            {"model_loading_config": {"model_source": "/none/model"}},
            "model_loading_config.model_source: there is no /none",
        ),
        ({"model_loading_config": {"model_source": "./none"}}, "model_loading_config.model_source: there is no ./none"),
        ({"engine_kwargs": {"tokenizer": "/none"}}, "engine_kwargs.tokenizer: there is no /none on this machine"),
        (
            {"engine_kwargs": {"reasoning_parser_plugin": "none.py"}},
            "engine_kwargs.reasoning_parser_plugin: there is no",
        ),
        (
            {"engine_kwargs": {"speculative_config": {"model": "/none"}}},
            "engine_kwargs.speculative_config.model: there",
        ),
        (
            {"ingress": {"frontend_kwargs": {"tool_parser_plugin": "none.py"}}},
            "ingress.frontend_kwargs.tool_parser_plugin",
        ),
        (
            {
                "engine_kwargs": {"enable_lora": True},
                "ingress": {"frontend_kwargs": {"lora_modules": [{"name": "a", "path": "/none"}]}},
            },
            "ingress.frontend_kwargs.lora_modules, a: there is no /none",
        ),
        (
            {"llm_configs": [{}, {"frontend_kwargs": {"tool_parser_plugin": "none.py"}, **NAMED}]},
            "llm_configs.1.frontend_kwargs.tool_parser_plugin: there is no none.py",
        ),
    ],
)
def test_missing_files(args: dict[str, Any], line: str) -> None:
    (found,) = missing_files(Settings.model_validate(args))
    assert found.startswith(line)


def test_files_that_exist_and_models_on_a_hub(tmp_path: Path) -> None:
    for source in (str(tmp_path), "Qwen/Qwen3-8B", "gpt2", "s3://bucket/a/b"):
        assert list(missing_files(Settings.model_validate({"model_loading_config": {"model_source": source}}))) == []
    assert is_path("a/b/c") and not is_path("a/b/c.gguf")
