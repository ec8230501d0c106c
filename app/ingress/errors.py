"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


@dataclass
class ApiError(Exception):
    """An error response; `details` are members beside OpenAI's four, `retry_after_s` becomes a header."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    retry_after_s: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Its headers: Retry-After in whole seconds, rounded up, and WWW-Authenticate with a 401."""
        retry = {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        return {**retry, **({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})}

    def event(self) -> bytes:
        """The error as a server-sent event."""
        return f"data: {json.dumps(self.body())}\n\n".encode()

    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        kind = _TYPES.get(self.status, "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
                **self.details,
            }
        }
