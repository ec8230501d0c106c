"""POST /v1/chat/completions: its prompts, and the shape of its answers."""

from app.ingress.errors import ApiError
from app.ingress.openai.answers.choice import Shape
from app.ingress.openai.answers.logprobs import chat_logprobs
from app.ingress.openai.calling import calling
from app.ingress.openai.generation import Endpoint
from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import ChatRequest, parse_chat
from app.ingress.openai.sampling import Prompt


def prompts(request: ChatRequest, model: Model) -> tuple[Prompt]:
    """The one prompt that the model's chat template makes of messages and tools; it writes the special tokens itself.

    Raises:
        ApiError: 400 when there is no template, or it refuses the messages.
    """
    messages = [message.fields() for message in request.messages]
    text = model.template().render(messages, [tool.fields() for tool in request.tools or ()])
    ids = model.encode(text, special=False)
    if not ids:
        raise ApiError(400, "messages: the chat template makes nothing of them", param="messages", code="invalid_value")
    return (Prompt(ids),)


CHAT = Endpoint(
    id_prefix="chatcmpl",
    parse=parse_chat,
    prompts=prompts,
    shape=Shape(
        whole="chat.completion",
        chunk="chat.completion.chunk",
        said=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
        logprobs=chat_logprobs,
        before='"delta":{"content":',
        after="}",
        opening='"delta":{"role":"assistant","content":""}',
    ),
    default_tokens=None,
    calling=calling,
)
