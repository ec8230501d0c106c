"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, Self

from migration.protocol.ports import Loss, LossKind

RETRY_S = 1.0
"""Retry-After where the time is not known after which a call could succeed."""

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
    """An error response; `details` are members beside OpenAI's four, `retry_after_s` becomes a header.

    An error that is `final` asks clients not to repeat the call by themselves, as theirs do after a 503.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    retry_after_s: float | None = None
    final: bool = False

    @classmethod
    def of(cls, loss: Loss) -> Self:
        """The error of a request that replicas do not serve."""
        match loss.kind:
            case LossKind.INVALID:
                return cls(400, loss.text)
            case LossKind.UNAVAILABLE:
                after_s = RETRY_S if loss.retry_after_s is None else loss.retry_after_s
                return cls(503, loss.text, code="unavailable", retry_after_s=after_s)
            case LossKind.SUSPECT:
                return cls(503, loss.text, code="engines_lost", final=True)
            case LossKind.INTERNAL:
                return cls(500, loss.text)

    @property
    def headers(self) -> dict[str, str]:
        """Its headers: Retry-After in whole seconds, rounded up, and WWW-Authenticate with a 401.

        A final error has the header by which OpenAI's and Anthropic's clients do not repeat the call.
        """
        headers = {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.final:
            headers["X-Should-Retry"] = "false"
        return headers

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
