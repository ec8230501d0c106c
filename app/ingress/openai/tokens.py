"""POST /tokenize and /detokenize, in the shapes of vLLM's server."""

from typing import Any

from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import DetokenizeRequest, TokenizeRequest


def tokenize(request: TokenizeRequest, model: Model) -> dict[str, Any]:
    """The token ids of a text or a chat: what a completion of it would have for a prompt.

    Raises:
        ApiError: 404 for another model, 400 for a chat that cannot be rendered.
    """
    model.check_name(request.model)
    if request.messages is not None:
        messages = [message.fields() for message in request.messages]
        tools = [tool.fields() for tool in request.tools or ()]
        text = model.template().render(messages, tools, request.add_generation_prompt)
    else:
        text = request.prompt or ""
    special = request.messages is None if request.add_special_tokens is None else request.add_special_tokens
    ids = model.encode(text, special)
    return {
        "count": len(ids),
        "max_model_len": model.max_context,
        "tokens": ids,
        "token_strs": [model.tokenizer.id_to_token(token) for token in ids] if request.return_token_strs else None,
    }


def detokenize(request: DetokenizeRequest, model: Model) -> dict[str, Any]:
    """The text of token ids, special tokens included.

    Raises:
        ApiError: 404 for another model, 400 for an id that is not in the vocabulary.
    """
    model.check_name(request.model)
    model.check_ids("tokens", request.tokens)
    return {"prompt": model.tokenizer.decode(request.tokens, skip_special_tokens=False)}
