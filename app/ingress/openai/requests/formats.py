"""What an answer has to match: OpenAI's `response_format` and vLLM's `structured_outputs`.

Whether a schema or a grammar makes sense, the engine says: it is the one that compiles it.
"""

import json
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, model_validator

from app.ingress.openai.requests.strict import JsonObject, NotEmpty, Strict
from app.ingress.openai.sampling import Kind, Structured


class JsonSchema(Strict):
    """OpenAI's named schema. `name`, `description` and `strict` are accepted; the schema is always followed."""

    name: NotEmpty = Field(description="Accepted, not used.")
    schema_: JsonObject = Field(alias="schema", description="The JSON schema of the answer.")
    description: str | None = Field(None, description="Accepted, not used.")
    strict: bool | None = Field(None, description="Accepted, not used: the schema is always followed.")


class ResponseFormat(Strict):
    """OpenAI's format of an answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="Any text, any JSON object, or a schema.")
    json_schema: JsonSchema | None = Field(None, description='With the type "json_schema", and only then.')

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError('write json_schema with type "json_schema", and only then')
        return self

    @property
    def structured(self) -> Structured | None:
        """What the engine is told; None for any text."""
        if self.json_schema is not None:
            return Structured("json", json.dumps(self.json_schema.schema_))
        return Structured("json_object") if self.type == "json_object" else None


def _schema(value: Any) -> Any:
    """A schema as text, however it was written."""
    return json.dumps(value, allow_nan=False) if isinstance(value, dict) else value


class StructuredOutputs(Strict):
    """vLLM's constraints, of which there must be one."""

    json_: Annotated[NotEmpty, BeforeValidator(_schema, json_schema_input_type=NotEmpty | dict[str, Any])] | None = (
        Field(None, alias="json", description="A JSON schema, as an object or as text.")
    )
    json_object: Literal[True] | None = Field(None, description="Any JSON object.")
    regex: NotEmpty | None = Field(None, description="A regular expression.")
    choice: Annotated[list[NotEmpty], Field(min_length=1)] | None = Field(None, description="One of these texts.")
    grammar: NotEmpty | None = Field(None, description="A grammar in EBNF.")
    structural_tag: NotEmpty | None = Field(None, description="A structural tag of vLLM, in JSON.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("write one of json, json_object, regex, choice, grammar, structural_tag")
        return self

    @property
    def structured(self) -> Structured:
        """What the engine is told."""
        ((kind, value),) = self.model_dump(by_alias=True, exclude_none=True).items()
        told = value if isinstance(value, str) else json.dumps(value)
        return Structured(cast(Kind, kind), "" if kind == "json_object" else told)
