"""The base of everything that clients send as JSON."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NotEmpty = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """A body or a part of one: unknown members are refused, values are not converted between types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
