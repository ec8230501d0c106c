"""From a prompt and its sampling to vLLM's request for an engine core, by vLLM's own code.

vLLM's input processor is the same as in its own server: it refuses what no engine can run, and completes the request
with the model's ends and the compiler of its grammar. It needs the model's configuration, and no device.
"""

import json
from typing import Any, Protocol

from app.ingress.openai.sampling import Sampling, Structured
from migration.protocol.core_messages import Frames


class CoreRequests(Protocol):
    """Makes requests for engine cores."""

    def make(self, prompt: tuple[int, ...], sampling: Sampling) -> Frames:
        """An encoded `EngineCoreRequest`. Raises ValueError for one that no engine can run."""
        ...


class VllmRequests:
    """Implements `CoreRequests` with vLLM's input processor."""

    def __init__(self, config: Any) -> None:
        """`config` is vLLM's, made for a frontend (`deployments.engine.arguments`)."""
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.serial_utils import MsgpackEncoder

        self._processor = InputProcessor(config)
        self._encoder = MsgpackEncoder()

    def make(self, prompt: tuple[int, ...], sampling: Sampling) -> Frames:
        """See `CoreRequests.make`."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input

        try:
            request = self._processor.process_inputs(
                "",
                tokens_input(list(prompt)),
                _sampling_params(sampling),
                supported_tasks=("generate",),
                priority=sampling.priority,
            )
        except VLLMClientError as error:
            raise ValueError(str(error)) from error
        return tuple(bytes(frame) for frame in self._encoder.encode(request))


def _sampling_params(sampling: Sampling) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        logprobs=sampling.logprobs,
        structured_outputs=_structured(sampling.structured),
        detokenize=False,
    )


def _structured(wanted: Structured | None) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    match wanted:
        case None:
            return None
        case Structured("json_object"):
            return StructuredOutputsParams(json_object=True)
        case Structured("choice", value):
            return StructuredOutputsParams(choice=json.loads(value))
        case Structured(kind, value):
            return StructuredOutputsParams(**{kind: value})
