"""The errors of calls.

ClientError
├── NoAnswer           the connection broke, or a time-out passed
│   └── NobodyListens  no connection could be made
├── ErrorAnswer        the server refused or failed: any status but 2xx
└── BadAnswer          the answer does not conform to the API, or a stream ended without `[DONE]`
"""

import json
from typing import Any


class ClientError(Exception):
    """A failed call; `kind` is short, for counting, and `message` is the server's if it sent one."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class NoAnswer(ClientError):
    """The server sent no answer or an incomplete one. `kind` is the name of httpx's error."""


class NobodyListens(NoAnswer):
    """No connection could be made."""


class ErrorAnswer(ClientError):
    """An error status. `document` is the body, or one in OpenAI's shape if the body is not a JSON object."""

    def __init__(self, status: int, reason: str, body: bytes) -> None:
        found = _document(body)
        message = message_in(found) or f"HTTP {status} {reason}: {body[:200].decode(errors='replace')}".rstrip(": ")
        super().__init__(f"HTTP {status}", message)
        self.status = status
        self.document: dict[str, Any] = found if isinstance(found, dict) else {"error": {"message": message}}


class BadAnswer(ClientError):
    """An answer that does not conform to the API."""


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
