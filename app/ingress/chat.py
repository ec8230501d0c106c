"""POST /v1/chat/completions: its prompts, and the shape of its answers."""

from app.ingress.answer import Shape
from app.ingress.errors import ApiError
from app.ingress.generation import Endpoint
from app.ingress.model import Model
from app.ingress.schema import ChatRequest, parse_chat


def prompt_tokens(request: ChatRequest, model: Model) -> tuple[int, ...]:
    """Token ids of the messages by the model's chat template, which writes the special tokens itself.

    Raises:
        ApiError: 400 when there is no template, or it refuses the messages.
    """
    prompt = model.template().render([message.fields() for message in request.messages])
    ids = model.encode(prompt, special=False)
    if not ids:
        raise ApiError(400, "messages: the chat template makes nothing of them", param="messages", code="invalid_value")
    return ids


CHAT = Endpoint(
    id_prefix="chatcmpl",
    parse=parse_chat,
    tokens=prompt_tokens,
    shape=Shape(
        whole="chat.completion",
        chunk="chat.completion.chunk",
        said=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
        before='"delta":{"content":',
        after="}",
        opening='"delta":{"role":"assistant","content":""}',
    ),
    default_tokens=None,
)
