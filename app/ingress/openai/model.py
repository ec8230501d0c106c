"""The served model, as far as the ingress knows it: its name, its tokens and how a chat becomes a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.ingress.errors import ApiError
from app.ingress.openai.answers.calls import Calling
from app.ingress.openai.core_requests import CoreRequests
from app.ingress.openai.requests.schema import ChatRequest
from app.ingress.openai.requests.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Model:
    """`tokenizer` is a `tokenizers.Tokenizer`; `chat` is None for a model without a chat template.

    `requests` makes the requests for its engines. `parser` says how the model calls tools in its own manner, if that is
    known; it may raise ApiError.
    """

    id: str
    tokenizer: Any
    vocab_size: int
    max_context: int
    created: int
    requests: CoreRequests
    chat: ChatTemplate | None = None
    parser: Callable[[ChatRequest], Calling] | None = None

    def entry(self) -> dict[str, Any]:
        """OpenAI's model object."""
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "mell",
            "max_model_len": self.max_context,
            "vocab_size": self.vocab_size,
        }

    def check_name(self, asked: str | None) -> None:
        """Raises ApiError 404 when another model is asked for."""
        if asked not in (None, self.id):
            raise ApiError(404, f"the model {asked!r} does not exist", param="model", code="model_not_found")

    def check_ids(self, param: str, ids: list[int] | tuple[int, ...]) -> None:
        """Raises ApiError 400 unless all are ids of the vocabulary."""
        if bad := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ApiError(
                400,
                f"{param}: token id {bad[0]} is not in [0, {self.vocab_size})",
                param=param,
                code="invalid_value",
            )

    def encode(self, text: str, special: bool) -> tuple[int, ...]:
        """Token ids of a text; `special`: with what the tokenizer puts around a text, such as a beginning."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def template(self) -> ChatTemplate:
        """The chat template. Raises ApiError 400 when there is none."""
        if self.chat is None:
            raise ApiError(
                400,
                "the model has no chat template: set model_loading_config.chat_template, or use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        return self.chat
