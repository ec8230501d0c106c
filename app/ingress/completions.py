"""POST /v1/completions: its prompts, and the shape of its answers."""

from app.ingress.answer import Shape
from app.ingress.errors import ApiError
from app.ingress.generation import Endpoint
from app.ingress.model import Model
from app.ingress.schema import CompletionRequest, parse_completion

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of the completions endpoint."""


def prompt_tokens(request: CompletionRequest, model: Model) -> tuple[int, ...]:
    """The prompt's token ids. Raises ApiError 400 when there are none, or unknown ones."""
    if not isinstance(request.prompt, str):
        model.check_ids("prompt", request.prompt)
        return tuple(request.prompt)
    ids = model.encode(request.prompt, special=True)
    if not ids:
        raise ApiError(400, "the prompt is empty", param="prompt", code="invalid_value")
    return ids


COMPLETIONS = Endpoint(
    id_prefix="cmpl",
    parse=parse_completion,
    tokens=prompt_tokens,
    shape=Shape(whole="text_completion", chunk="text_completion", said=lambda text: {"text": text}, before='"text":'),
    default_tokens=DEFAULT_MAX_TOKENS,
)
