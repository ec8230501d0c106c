"""The messages of a chat, as OpenAI defines them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from app.ingress.openai.requests.strict import Strict
from app.ingress.openai.requests.tools import ToolCall


def _text(content: Any) -> Any:
    """Text parts become one text, a line each, as in vLLM."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("write a string or a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError('only parts of type "text" are supported')
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('a text part is {"type": "text", "text": "..."}')
    return "\n".join(part["text"] for part in content)


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"] = Field(description="Texts are all that there are.")
    text: str = Field(description="What it says.")


TextParts = Annotated[list[TextPart], Field(min_length=1)]
_UNSUPPORTED: Any = Field(None, description="Not supported: only `null`.")


class ChatMessage(Strict):
    """One message of a chat. Other media are not supported; their members may be null."""

    role: Literal["developer", "system", "user", "assistant", "tool"] = Field(description="Who says it.")
    tool_calls: list[ToolCall] | None = Field(None, description="What an assistant called.")
    content: Annotated[
        str | None,
        BeforeValidator(_text, json_schema_input_type=str | TextParts | None),
        Field(validate_default=True),
    ] = Field(
        None,
        description="A text, or parts of it, a line each. Only an assistant that calls tools may say nothing.",
    )
    name: str | None = Field(None, description="The speaker's name, for the chat template.")
    tool_call_id: str | None = Field(None, description="Which call a tool answers, for the chat template.")

    function_call: None = _UNSUPPORTED
    refusal: None = _UNSUPPORTED
    audio: None = _UNSUPPORTED
    annotations: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="Not supported: only `null` or none."
    )

    @field_validator("tool_calls")
    @classmethod
    def _by_the_assistant(cls, calls: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        if calls and info.data.get("role") not in (None, "assistant"):
            raise ValueError('only messages of the role "assistant" call tools')
        return calls

    @field_validator("content")
    @classmethod
    def _something(cls, content: str | None, info: ValidationInfo) -> str | None:
        if content is None and not info.data.get("tool_calls"):
            raise ValueError("write a string or a list of text parts; only an assistant that calls tools says nothing")
        return content

    def fields(self) -> dict[str, Any]:
        """What a chat template sees. As in vLLM, whoever says nothing says an empty text."""
        fields = self.model_dump(include={"role", "name", "tool_call_id"}, exclude_none=True)
        calls = {"tool_calls": [call.fields() for call in self.tool_calls]} if self.tool_calls else {}
        return {**fields, "content": self.content or "", **calls}


Messages = Annotated[list[ChatMessage], Field(min_length=1)]
