"""Tools of a chat as OpenAI defines them: those that there are, which may or must be called, and earlier calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from app.ingress.errors import ApiError
from app.ingress.openai.requests.strict import JsonObject, NotEmpty, Strict


class Function(Strict):
    """A function that can be called; `parameters` is the JSON schema of its arguments.

    `strict` is for those parsers of vLLM that heed it; a call that is forced follows the schema always.
    """

    name: NotEmpty = Field(description="What the function is called by.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: JsonObject | None = Field(None, description="The JSON schema of its arguments. Unset: any object.")
    strict: bool | None = Field(None, description="For parsers that heed it; a forced call always follows the schema.")

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of its arguments: an object of any kind if nothing else is said, as in vLLM."""
        return self.parameters or {"type": "object", "properties": {}}


class Tool(Strict):
    """A tool; functions are all that there are."""

    type: Literal["function"] = Field(description="Functions are all that there are.")
    function: Function = Field(description="The function.")

    def fields(self) -> dict[str, Any]:
        """What a chat template sees, with the members that vLLM shows it."""
        function = self.function.model_dump()
        if function["strict"] is None:
            del function["strict"]
        return {"type": self.type, "function": function}


class FunctionName(Strict):
    """A function by its name."""

    name: NotEmpty = Field(description="The name of one of the `tools`.")


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"] = Field(description="Functions are all that there are.")
    function: FunctionName = Field(description="Which one.")


class CalledFunction(Strict):
    """A function with its arguments, which are an object in JSON, or should be: models err."""

    name: NotEmpty = Field(description="What was called.")
    arguments: str | None = Field(None, description="Its arguments, in JSON.")


class ToolCall(Strict):
    """A call that the assistant made earlier in the chat."""

    id: NotEmpty = Field(description="What the answer named it.")
    type: Literal["function"] = Field("function", description="Functions are all that there are.")
    function: CalledFunction = Field(description="What was called.")

    def fields(self) -> dict[str, Any]:
        """What a chat template sees: as in vLLM, arguments as an object, which is empty if they are none."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {}
        if not isinstance(arguments, dict):
            arguments = {}
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


Tools = Annotated[list[Tool], Field(min_length=1)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def schema_of_calls(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls, each `{"name", "parameters"}`, in this order; one call unless `parallel`.

    As vLLM makes it (tool_parsers/utils.py, `get_json_schema_from_tools`). Raises ApiError 400 when two tools define
    one name of `$defs` differently.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        arguments = dict(tool.function.schema_of_arguments)
        _add(definitions, arguments.pop("$defs", {}), tool.function.name)
        calls.append(
            {
                "properties": {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": arguments},
                "required": ["name", "parameters"],
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})


def _add(definitions: dict[str, Any], more: Any, tool: str) -> None:
    if not isinstance(more, Mapping):
        raise _wrong(f"the $defs of {tool!r} must be an object")
    for name, schema in more.items():
        if definitions.setdefault(name, schema) != schema:
            raise _wrong(f"$defs of several tools define {name!r}, each in another way")


def _wrong(why: str) -> ApiError:
    return ApiError(400, f"tools: {why}", param="tools", code="invalid_value")
