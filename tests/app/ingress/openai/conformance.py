"""Whether a response is what the OpenAPI document says of it."""

import json
from typing import Any

import httpx
from pydantic import BaseModel

from app.ingress.openai.description.described import Error
from app.ingress.openai.description.openapi import document
from app.ingress.openai.description.operations import EVENTS, JSON, OPERATIONS, Operation
from tests.app.ingress.fakes import events

BY_ID = {operation.id: operation for operation in OPERATIONS}


def check(operation: Operation, response: httpx.Response) -> None:
    """Assert that status, media type and body are documented, and that nothing is in the body that is not."""
    documented = document()["paths"][operation.path][operation.method.lower()]["responses"]
    status = str(response.status_code)
    assert status in documented, f"{operation.id} does not document {status}: {response.text[:300]}"
    kind = response.headers["content-type"]
    media_type = EVENTS if kind.startswith(EVENTS) else kind
    assert media_type in documented[status]["content"], f"{operation.id} does not document {kind} with {status}"
    if response.status_code >= 400:
        fits(Error, response.json(), whole=False)
    elif media_type == EVENTS:
        assert operation.answer.chunk is not None
        *chunks, done = events(response)
        assert done == "[DONE]"
        for chunk in chunks:
            fits(Error if "error" in chunk else operation.answer.chunk, chunk)
    elif operation.answer.model is not None:
        fits(operation.answer.model, response.json())
    elif media_type == JSON:
        assert isinstance(response.json(), dict)


def fits(model: type[BaseModel], value: Any, whole: bool = True) -> None:
    """Assert that the model describes the value; `whole`: with every member of it."""
    described = model.model_validate_json(json.dumps(value), strict=True).model_dump(mode="json", exclude_unset=True)
    assert described == value or not whole
