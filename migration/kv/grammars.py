"""The grammars of structured outputs in an engine: each by the backend of its request, and behind the output so far.

The frontend chooses a backend for each request. vLLM's engine, however, makes the backend of its first request with a
structured output and compiles all later ones with that: engines would differ by what came first, and a request that
moves would follow another grammar, or be ended, since its output does not follow that one. Here, an engine has the
backends side by side.

vLLM compiles a grammar in a thread, and schedules the request once it is there. In that thread, the grammar of a moved
request accepts the output so far (`history.replay`).
"""

import copy
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from migration.kv import history

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import StructuredOutputBackend

log = logging.getLogger(__name__)

_BITS = 32
"""The tokens per member of a bitmask."""


class GrammarBackends:
    """vLLM's backends of structured outputs side by side, each made with its first request. Any thread may call."""

    def __init__(self, config: "VllmConfig", tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._vocabulary: int = config.model_config.get_vocab_size()
        self._width = -(-self._vocabulary // _BITS)
        self._made: dict[str, tuple[StructuredOutputBackend, int]] = {}
        """The backends, and the width of their bitmasks."""
        self._making = threading.Lock()

    def compile(self, request: "Request") -> StructuredOutputGrammar:
        """The grammar of a request with a structured output. Raises whatever its backend raises."""
        structured = request.structured_output_request
        assert structured is not None
        backend, width = self._backend(structured.params._backend)
        kind, text = structured.structured_output_key
        stops = request.sampling_params.all_stop_token_ids
        # A copy, since guidance keeps what it compiles in its backend, where another thread may replace it.
        grammar = copy.copy(backend).compile_grammar(kind, text, stop_token_ids=stops)
        return grammar if width == self._width else FittedGrammar(grammar, width)

    def _backend(self, name: str) -> "tuple[StructuredOutputBackend, int]":
        with self._making:
            if name not in self._made:
                made = _class_of(name)(self._config, tokenizer=self._tokenizer, vocab_size=self._vocabulary)
                self._made[name] = made, made.allocate_token_bitmask(1).shape[1]
            return self._made[name]

    def allocate_token_bitmask(self, count: int) -> torch.Tensor:
        """The bitmask for `count` positions, which vLLM makes once: for the model's vocabulary."""
        return torch.full((count, self._width), -1, dtype=torch.int32, pin_memory=torch.cuda.is_available())

    def destroy(self) -> None:
        """Destroy all backends."""
        for backend, _ in self._made.values():
            backend.destroy()


def _class_of(name: str) -> "Callable[..., StructuredOutputBackend]":
    """vLLM's backend of that name. Imported by need, as in vLLM: most engines use one of them."""
    match name:
        case "xgrammar":
            from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend as found
        case "guidance":
            from vllm.v1.structured_output.backend_guidance import GuidanceBackend as found
        case "outlines":
            from vllm.v1.structured_output.backend_outlines import OutlinesBackend as found
        case "lm-format-enforcer":
            from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend as found
        case _:
            raise ValueError(f"there is no backend {name!r} of structured outputs")
    made: Callable[..., StructuredOutputBackend] = found
    return made


class FittedGrammar(StructuredOutputGrammar):
    """A grammar whose backend counts more or fewer tokens than the model has. No other token is allowed."""

    def __init__(self, grammar: StructuredOutputGrammar, width: int) -> None:
        """`width` is that of the backend's bitmasks."""
        self._grammar = grammar
        self._own = torch.full((1, width), -1, dtype=torch.int32)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See `StructuredOutputGrammar.accept_tokens`."""
        return bool(self._grammar.accept_tokens(request_id, tokens))

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """See `StructuredOutputGrammar.validate_tokens`."""
        return list(self._grammar.validate_tokens(tokens))

    def rollback(self, num_tokens: int) -> None:
        """See `StructuredOutputGrammar.rollback`."""
        self._grammar.rollback(num_tokens)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """See `StructuredOutputGrammar.fill_bitmask`."""
        self._own.fill_(-1)
        self._grammar.fill_bitmask(self._own, 0)
        width = min(bitmask.shape[1], self._own.shape[1])
        bitmask[batch_index].zero_()
        bitmask[batch_index, :width] = self._own[0, :width]

    def is_terminated(self) -> bool:
        """See `StructuredOutputGrammar.is_terminated`."""
        return bool(self._grammar.is_terminated())

    def reset(self) -> None:
        """See `StructuredOutputGrammar.reset`."""
        self._grammar.reset()


_grammar_init = StructuredOutputManager.grammar_init


def compile_by_request() -> None:
    """Have this process's engine compile each grammar by the backend of its request, behind the output so far."""
    StructuredOutputManager.grammar_init = _init_with_backends
    StructuredOutputManager._create_grammar = _create_behind_output


def _init_with_backends(manager: StructuredOutputManager, request: "Request") -> None:
    if manager.backend is None and request.structured_output_request is not None:
        manager.backend = GrammarBackends(manager.vllm_config, manager.tokenizer)
    _grammar_init(manager, request)


def _create_behind_output(manager: StructuredOutputManager, request: "Request") -> StructuredOutputGrammar:
    try:
        grammar = manager.backend.compile(request)
        history.replay(request, grammar, manager)
    except Exception as error:
        # vLLM fails the request, without the reason.
        log.warning("request %s: no grammar: %s", request.request_id, error)
        raise
    return grammar
