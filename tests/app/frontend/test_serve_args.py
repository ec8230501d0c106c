"""From Mell's settings to the arguments of vLLM's server."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig

from app.frontend.app import serve_args
from app.ingress.config import IngressConfig
from app.tinymodel import ensure_tiny_model
from deployments.engine.arguments import engine_config
from tests.app.frontend.conftest import POOLING, config


def arguments(made: IngressConfig, kwargs: dict[str, Any] | None = None) -> tuple[Namespace, VllmConfig]:
    """The arguments of the only model, with other ones of its engines if there are some."""
    (model,) = made.models
    return serve_args(made, model if kwargs is None else replace(model, engine_kwargs=kwargs))


def test_arguments_are_those_of_vllm_serve() -> None:
    template = "{% for message in messages %}{{ message.content }}\u2713{% endfor %}"
    made = config({"tool_call_parser": "hermes"}, response_role="bot", chat_template=template)
    args, vllm_config = arguments(made, {"stream_interval": 3})
    assert (args.response_role, args.tool_call_parser, args.enable_auto_tool_choice) == ("bot", "hermes", True)
    assert args.chat_template == template and args.served_model_name == ["mell-tiny"]
    assert vllm_config.scheduler_config.stream_interval == 3 and not vllm_config.model_config.enable_prompt_embeds


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_images_become_tensors_of_the_engines_type(dtype: str) -> None:
    """vLLM's frontend casts them to the type of its own model configuration: for lack of `dtype`, to 16 bits."""
    kwargs = {"dtype": dtype}
    _, vllm_config = arguments(config(), kwargs)
    engine = engine_config(str(ensure_tiny_model()), kwargs)
    assert vllm_config.model_config.dtype == engine.model_config.dtype == getattr(torch, dtype)


def test_prompts_are_named_as_the_engine_names_its_blocks() -> None:
    kwargs = {"prefix_caching_hash_algo": "sha256_cbor", "enable_prefix_caching": False}
    caches = arguments(config(), kwargs)[1].cache_config, engine_config(str(ensure_tiny_model()), kwargs).cache_config
    assert [c.prefix_caching_hash_algo for c in caches] == ["sha256_cbor"] * 2
    assert [c.enable_prefix_caching for c in caches] == [False] * 2


def test_a_pooling_model_is_served_with_its_settings() -> None:
    _, vllm_config = arguments(config(engine=POOLING | {"pooler_config": {"dimensions": 8}}))
    assert vllm_config.model_config.runner_type == "pooling"
    assert vllm_config.model_config.pooler_config.dimensions == 8


def test_documents_are_scored_by_themselves() -> None:
    """vLLM's default has the engine keep the vectors of a query until those of its documents come to the same one."""
    args, _ = arguments(config(engine=POOLING))
    assert not args.enable_flash_late_interaction


def test_an_invalid_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="fingerprint_mode"):
        arguments(config(fingerprint_mode="unknown"))
