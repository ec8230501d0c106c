"""Why a call has no answer.

ClientError
├── NoAnswer           the connection broke, or a time-out passed
│   └── NobodyListens  no connection could be made
├── ErrorAnswer        the server refused or failed: any status but 2xx
└── BadAnswer          the answer is not of this API, or a stream ended without `[DONE]`
"""

import json
from typing import Any


class ClientError(Exception):
    """A failed call: `kind` is short enough to count by, `message` is the server's own where it sent one."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class NoAnswer(ClientError):
    """The server did not answer, or not to the end. `kind` is the name of httpx's error."""


class NobodyListens(NoAnswer):
    """No connection could be made."""


class ErrorAnswer(ClientError):
    """An error status. `document` is the body, or one in OpenAI's shape where the body is not a JSON object."""

    def __init__(self, status: int, reason: str, body: bytes) -> None:
        found = _document(body)
        message = message_in(found) or f"HTTP {status} {reason}: {body[:200].decode(errors='replace')}".rstrip(": ")
        super().__init__(f"HTTP {status}", message)
        self.status = status
        self.document: dict[str, Any] = found if isinstance(found, dict) else {"error": {"message": message}}


class BadAnswer(ClientError):
    """An answer that is not of this API."""


def message_in(document: object) -> str | None:
    """The message of an error document in any of the usual shapes, OpenAI's or FastAPI's; None without one."""
    match document:
        case {"error": {"message": str(text)}} | {"error": str(text)} | {"message": str(text)} | {"detail": str(text)}:
            return text
        case _:
            return None


def _document(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return None
