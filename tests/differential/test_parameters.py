"""The corpus has every parameter that vLLM's server takes, but for some that are named here."""

from collections.abc import Mapping

import pytest
from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from tests.differential.bodies import CHATS, COMPLETIONS, MESSAGES, RESPONSES
from tests.differential.cases import Course, corpus

pytestmark = pytest.mark.slow
"""Importing vLLM takes seconds."""

REQUESTS: Mapping[str, type[BaseModel]] = {
    COMPLETIONS: CompletionRequest,
    CHATS: ChatCompletionRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: AnthropicMessagesRequest,
}

LEFT_ASIDE: Mapping[str, str] = {
    "kv_transfer_params": "private: it names places in an engine",
    "ec_transfer_params": "private: it names places in an engine",
    "vllm_xargs": "private: it reaches the connector",
    "session_id": "private: Mell sets it",
    "request_id": "an identifier, which every case has as X-Request-Id",
    "mm_payload": "of render endpoints",
    "return_mm_kwargs": "of render endpoints",
    "return_token_offsets": "of render endpoints",
    "mm_processor_kwargs": "of multimodal models",
    "media_io_kwargs": "of multimodal models",
    "routed_experts_prompt_start": "of mixtures of experts",
    "watermarking": "needs a setting of the engine",
    "prompt_embeds": "needs a setting of the engine",
    "chat_template": "refused unless a setting allows it: an odd request",
    "suffix": "refused: an odd request",
    "prompt": "refused in responses: an odd request",
    "background": "needs stored responses: an odd request",
    "previous_response_id": "needs stored responses: an odd request",
    "previous_input_messages": "of gpt-oss",
    "enable_response_messages": "of gpt-oss",
    "thinking_token_budget": "forced with chats",
    "logprob_token_ids": "an odd request: vLLM's sampler has its tokens replace the likeliest of the whole batch",
}


@pytest.mark.parametrize("path", REQUESTS)
def test_every_parameter_is_asked(path: str) -> None:
    cases = [case for case in corpus(20240607, 150) if case.path == path and case.course is not Course.ODD]
    asked = {name for case in cases for name in case.asked}
    assert asked <= REQUESTS[path].model_fields.keys()
    assert REQUESTS[path].model_fields.keys() - asked <= LEFT_ASIDE.keys()


@pytest.mark.parametrize("path", REQUESTS)
def test_vllm_accepts_what_has_to_be_answered(path: str) -> None:
    for case in corpus(20240607, 150):
        if case.path == path and case.course is not Course.ODD:
            REQUESTS[path].model_validate(case.body)
