"""The base of everything that clients send as JSON."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

NotEmpty = Annotated[str, Field(min_length=1)]


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    # Pydantic reads NaN and infinity, and looks for them only where it expects numbers.
    json.dumps(value, allow_nan=False)
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_finite)]
"""Any object, in which, as in all JSON, NaN and infinity are no numbers."""


class Strict(BaseModel):
    """A body or a part of one: unknown members are refused, values are not converted between types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
