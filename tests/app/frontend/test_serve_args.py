"""From Mell's settings to the arguments of vLLM's server."""

import pytest

from app.frontend.app import serve_args
from tests.app.frontend.conftest import config


def test_arguments_are_those_of_vllm_serve() -> None:
    template = "{% for message in messages %}{{ message.content }}\u2713{% endfor %}"
    made = config({"tool_call_parser": "hermes"}, response_role="bot", chat_template=template)
    args, vllm_config = serve_args(made.model_copy(update={"engine_kwargs": {"stream_interval": 3}}))
    assert (args.response_role, args.tool_call_parser, args.enable_auto_tool_choice) == ("bot", "hermes", True)
    assert args.chat_template == template and args.served_model_name == ["mell-tiny"]
    assert vllm_config.scheduler_config.stream_interval == 3 and not vllm_config.model_config.enable_prompt_embeds


def test_a_model_that_generates_no_text_is_refused() -> None:
    pooling = config().model_copy(update={"engine_kwargs": {"runner": "pooling"}})
    with pytest.raises(ValueError, match="generates no text"):
        serve_args(pooling)


def test_an_invalid_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="fingerprint_mode"):
        serve_args(config(fingerprint_mode="unknown"))
