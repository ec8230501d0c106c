"""POST /v1/completions: its prompts, and the shape of its answers."""

from app.ingress.errors import ApiError
from app.ingress.openai.answers.choice import Shape
from app.ingress.openai.answers.logprobs import completion_logprobs
from app.ingress.openai.generation import Endpoint
from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import CompletionRequest, parse_completion
from app.ingress.openai.sampling import Prompt

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of the completions endpoint."""


def prompts(request: CompletionRequest, model: Model) -> tuple[Prompt, ...]:
    """The prompts' token ids. Raises ApiError 400 when one has none, or unknown ones."""
    return tuple(_prompt(prompt, model, bool(request.echo)) for prompt in request.prompts)


def _prompt(prompt: str | list[int], model: Model, echo: bool) -> Prompt:
    """As in vLLM, a text is echoed as it was written, and token ids as their text with the special tokens."""
    if not isinstance(prompt, str):
        model.check_ids("prompt", prompt)
        return Prompt(tuple(prompt), model.tokenizer.decode(prompt, skip_special_tokens=False) if echo else "")
    ids = model.encode(prompt, special=True)
    if not ids:
        raise ApiError(400, "the prompt is empty", param="prompt", code="invalid_value")
    return Prompt(ids, prompt if echo else "")


COMPLETIONS = Endpoint(
    id_prefix="cmpl",
    parse=parse_completion,
    prompts=prompts,
    shape=Shape(
        whole="text_completion",
        chunk="text_completion",
        said=lambda text: {"text": text},
        logprobs=completion_logprobs,
        before='"text":',
    ),
    default_tokens=DEFAULT_MAX_TOKENS,
)
