"""The engine core that the Rust frontend connects to: what vLLM's Python frontend does to a request before its ADD.

The Rust frontend names a request after the call's X-Request-Id, so that finds the call. It does not check structured
outputs, and chooses another backend than vLLM's Python frontend: vLLM's own check here refuses invalid ones before an
engine compiles them, and chooses the backend.
"""

from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config

from app.frontend.app import prompt_namer, ready_response
from app.frontend.core import ClusterCore
from app.frontend.rust.process import Listeners
from app.ingress.streams.streams import Streams
from migration.protocol.core_messages import CoreRequest
from migration.protocol.request import IngressId
from policies.precedence import NO_CLASSES, ServiceClasses


class RustCore(ClusterCore):
    """Takes the requests of one process."""

    def __init__(
        self,
        streams: Streams,
        ingress: IngressId,
        listeners: Listeners,
        config: VllmConfig,
        max_prompt_tokens: int | None,
        classes: ServiceClasses = NO_CLASSES,
    ) -> None:
        namer = prompt_namer(config)
        super().__init__(streams, ingress, ready_response(config), 0, listeners.folder, classes=classes, namer=namer)
        self._config = config
        self._max_prompt_tokens = max_prompt_tokens

    def call_id(self, request: CoreRequest) -> str:
        """The X-Request-Id of the call: the Rust frontend puts the name of its endpoint before it."""
        return (request.external_req_id or "").partition("-")[2]

    def completed(self, request: CoreRequest) -> CoreRequest:
        """See `ClusterCore.completed`."""
        limit, tokens = self._max_prompt_tokens, len(request.prompt_token_ids or ())
        if limit is not None and tokens > limit:
            raise ValueError(f"the prompt has {tokens} tokens, and the limit is {limit}")
        sampling = request.sampling
        if (structured := sampling.get("structured_outputs")) is None:
            return request
        checked = self._checked(structured)
        return msgspec.structs.replace(request, sampling_params={**sampling, "structured_outputs": checked})

    def _checked(self, structured: dict[str, Any]) -> dict[str, Any]:
        """The structured outputs with vLLM's choice of a backend. Raises ValueError."""
        given = {name: value for name, value in structured.items() if not name.startswith("_")}
        config = self._config
        tokenizer = cached_tokenizer_from_config(config.model_config)
        try:
            params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
            params.verify(config.model_config, None, config.structured_outputs_config, tokenizer)
        except VLLMClientError as error:
            raise ValueError(str(error)) from error
        assert params.structured_outputs is not None
        chosen = {
            "_backend": params.structured_outputs._backend,
            "_backend_was_auto": params.structured_outputs._backend_was_auto,
        }
        return {**given, **chosen}
