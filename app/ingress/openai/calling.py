"""From the tools of a chat to what its engine is told, and to how its answers are read.

A call that the client demands is JSON of a known form: the engine is held to it. One that the model may make comes in
the model's own manner, for which it takes a parser of vLLM (`answers.tool_parser`). With a parser, demanded calls
come in that manner, too.
"""

import json

from app.ingress.errors import ApiError
from app.ingress.openai.answers.calls import Calling, ListReading, NamedReading
from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import ChatRequest
from app.ingress.openai.requests.tools import NamedTool, schema_of_calls
from app.ingress.openai.sampling import Structured

STOP, TOOL_CALLS = "stop", "tool_calls"


def calling(request: ChatRequest, model: Model) -> Calling | None:
    """None when no tool may be called.

    Raises:
        ApiError: 400 when calls could not be told from text, or what the tools define cannot be.
    """
    if request.tools is None or request.tool_use == "none":
        return None
    if model.parser is not None:
        return model.parser(request)
    if isinstance(request.tool_use, NamedTool):
        return _named(request, request.tool_use.function.name)
    if request.tool_use == "auto":
        raise ApiError(
            400,
            'tool_choice: "auto", the default with tools, wants a parser of the model\'s calls: set '
            'model_loading_config.tool_call_parser, or ask for "none", "required" or a function by its name',
            param="tool_choice",
            code="unsupported_parameter",
        )
    schema = schema_of_calls(request.tools, request.calls_in_parallel)
    return Calling(
        lambda prompt: ListReading(), Structured("json", json.dumps(schema)), TOOL_CALLS, request.calls_in_parallel
    )


def _named(request: ChatRequest, name: str) -> Calling:
    """As in vLLM, an answer to whoever names the function ends with "stop"."""
    function = next(tool.function for tool in request.tools or () if tool.function.name == name)
    structured = Structured("json", json.dumps(function.schema_of_arguments))
    return Calling(lambda prompt: NamedReading(name), structured, STOP)
