"""Formats of structured output, for vLLM's backends, and parameters beside them, for the tiny model."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.serial_utils import MsgpackEncoder

EOS = 2
CALL = {
    "type": "object",
    "properties": {"on": {"enum": ["a", "b"]}, "no": {"type": "integer"}, "so": {"type": "boolean"}},
    "required": ["on", "no"],
    "additionalProperties": False,
}
SHORT = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}
_TAGGED = {"structures": [{"begin": "<t>", "schema": SHORT, "end": "</t>"}], "triggers": ["<t>"]}
_ONLY_CALL = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": CALL}}

FORMATS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "xgrammar": {
        "json": {"json": CALL},
        "array": {"json": SHORT},
        "json_object": {"json_object": True},
        "regex": {"regex": "(ab|cd|ef){1,9}"},
        "choice": {"choice": ["yes", "no", "yesterday"]},
        "grammar": {"grammar": 'root ::= ("a" | "b" root "c")'},
        "structural_tag": {"structural_tag": json.dumps(_TAGGED)},
        "only a call": {"structural_tag": json.dumps(_ONLY_CALL)},
    },
    "guidance": {
        "json": {"json": CALL},
        "array": {"json": SHORT},
        "json_object": {"json_object": True},
        "regex": {"regex": "(ab|cd|ef){1,9}"},
        "choice": {"choice": ["yes", "no", "yesterday"]},
        "grammar": {"grammar": 'start: "a" | "b" start "c"'},
        "structural_tag": {"structural_tag": json.dumps(_TAGGED)},
    },
    "outlines": {
        "json": {"json": CALL},
        "array": {"json": SHORT},
        "regex": {"regex": "(ab|cd|ef){1,9}"},
        "choice": {"choice": ["yes", "no", "yesterday"]},
    },
}
"""Short and nested ones, so that most outputs pass the end of the format.

There is none of lm-format-enforcer: the release that vLLM 0.32.0 demands does not work with it (docs/limits.md).
"""

BESIDE: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "ends ignored": {"ignore_eos": True},
    "ends ignored, at least": {"ignore_eos": True, "min_tokens": 30},
    "at least": {"min_tokens": 30},
    "ends not allowed": {"allowed_token_ids": [token for token in range(512) if token != EOS]},
    "few allowed": {"allowed_token_ids": [EOS, *range(64, 130)]},
    "banned": {"bad_words": ["a", "true"]},
    "stops": {"stop_token_ids": [70, 71, 90]},
    "stops, ends ignored": {"stop_token_ids": [70, 71, 90], "ignore_eos": True},
    "stops, at least": {"stop_token_ids": [70, 71, 90], "min_tokens": 20},
    "end wanted": {"logit_bias": {EOS: 100.0}},
    "end wanted and ignored": {"logit_bias": {EOS: 100.0}, "ignore_eos": True},
    "end unwanted": {"logit_bias": {EOS: -100.0}},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5},
}
"""Parameters that choose among the tokens that the format allows, or what an end is."""


def sampling_of(
    config: VllmConfig, tokenizer: Any, backend: str, form: Mapping[str, Any], max_tokens: int, **beside: Any
) -> dict[str, Any]:
    """Sampling parameters as vLLM's frontend sends them, which is configured to use `backend` ("auto": it chooses).

    They lack `max_tokens`.
    """
    sampling = SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**form), **beside)
    sampling.update_from_generation_config({"eos_token_id": EOS}, EOS)
    sampling.update_from_tokenizer(tokenizer)
    sampling.verify(config.model_config, None, StructuredOutputsConfig(backend=backend), tokenizer)
    (encoded,) = MsgpackEncoder().encode(sampling)
    decoded: dict[str, Any] = msgspec.msgpack.decode(encoded)
    del decoded["max_tokens"]
    return decoded
