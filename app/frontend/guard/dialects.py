"""The APIs of the open routes by their errors and keys, and the layers that answer errors as an API's clients expect.

vLLM's application answers most errors in OpenAI's shape on every route, and an exception within a stream of responses
breaks the connection off.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.frontend.calls import CURRENT, ApiCall
from app.ingress.access.admission import admitted
from app.ingress.access.keys import bearer
from app.ingress.errors import ApiError
from app.ingress.telemetry.requests import CLIENT_CLOSED_STATUS

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API's errors, as JSON bodies and as ends of event streams, and the API key in its headers.

    `ending` also gets the number of the events before it. `translated`: errors of vLLM's application, too, have to be
    put into `body`.
    """

    body: Callable[[ApiError], Mapping[str, Any]]
    ending: Callable[[ApiError, int], bytes]
    key: Callable[[Headers], str | None]
    translated: bool = False


def _bearer(headers: Headers) -> str | None:
    return bearer(headers.get("authorization"))


def _anthropic_key(headers: Headers) -> str | None:
    return headers.get("x-api-key") or _bearer(headers)


_ANTHROPIC_TYPES = {413: "request_too_large", 503: "overloaded_error"}
"""Anthropic's error types where they differ from OpenAI's."""


def _anthropic_body(error: ApiError) -> dict[str, Any]:
    kind = error.body()["error"]["type"]
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if kind == "server_error" else kind)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _responses_event(error: ApiError, events: int) -> dict[str, Any]:
    """OpenAI's event of an error, and the member `error`, for which its clients raise an exception."""
    own = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": events}
    return {"type": "error", **own, **error.body()}


def _event(body: Mapping[str, Any]) -> bytes:
    return _ERROR_EVENT + f"\ndata: {json.dumps(body)}\n\n".encode()


_ERROR_EVENT = b"event: error"

_DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""

OPENAI = Dialect(ApiError.body, lambda error, _: error.event() + _DONE, _bearer)
RESPONSES = Dialect(ApiError.body, lambda error, events: _event(_responses_event(error, events)), _bearer)
ANTHROPIC = Dialect(_anthropic_body, lambda error, _: _event(_anthropic_body(error)), _anthropic_key, translated=True)


class DialectErrors:
    """Answers an ApiError of the layers below in a dialect."""

    def __init__(self, app: ASGIApp, dialect: Dialect) -> None:
        self._app = app
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on. Other exceptions are raised."""
        try:
            await self._app(scope, receive, send)
        except ApiError as error:
            await JSONResponse(self._dialect.body(error), error.status, error.headers)(scope, receive, send)
        except ClientDisconnect:
            # The status is for the log only: the client is gone.
            await Response(status_code=CLIENT_CLOSED_STATUS)(scope, receive, send)


class ApplicationErrors:
    """Puts the errors of vLLM's application into a dialect, those within event streams included."""

    def __init__(self, app: ASGIApp, dialect: Dialect) -> None:
        self._app = app
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an admitted call on. Raises ApiError: the application's, or 500 for an exception before the answer."""
        call, sent = CURRENT.get(), admitted(scope).sent
        if self._dialect.translated:
            send = _TranslatedSend(send, self._dialect, call)
        try:
            await self._app(scope, receive, send)
        except (ApiError, ClientDisconnect, OSError):
            raise
        except Exception as error:
            streaming = sent.is_event_stream and not sent.complete
            failure = _failure(call)
            if failure is None or not streaming:
                log.exception("vLLM's application failed")
                failure = _mistake()
            if call is not None:
                call.failure = failure
            if sent.status is None:
                raise failure from error
            if not streaming:
                raise
            ending = self._dialect.ending(failure, sent.chunks)
            await send({"type": "http.response.body", "body": ending, "more_body": False})


def _failure(call: ApiCall | None) -> ApiError | None:
    """The error of a call, as far as it comes from its requests for engines."""
    if call is not None and call.failure is None and any(request.finish == "error" for request in call.requests):
        return ApiError(500, "the answer cannot be completed")
    return call.failure if call is not None else None


def _mistake() -> ApiError:
    return ApiError(500, "internal error", code="internal_error")


class _TranslatedSend:
    """Passes an answer on, its errors put into a dialect. Bodies of errors are held back until they are complete."""

    def __init__(self, send: Send, dialect: Dialect, call: ApiCall | None) -> None:
        self._send = send
        self._dialect = dialect
        self._call = call
        self._refused: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] >= 400:
                self._refused = message
                return
        elif self._refused is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._refuse(self._refused)
            return
        elif message.get("body", b"").startswith(_ERROR_EVENT):
            error = _failure(self._call) or _mistake()
            message = {**message, "body": self._dialect.ending(error, 0)}
        await self._send(message)

    async def _refuse(self, start: Message) -> None:
        status = start["status"]
        body = json.dumps(self._dialect.body(ApiError(status, _message(self._body, status)))).encode()
        own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        kept = [(name, value) for name, value in start["headers"] if name not in (b"content-type", b"content-length")]
        await self._send({**start, "headers": [*kept, *own]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _message(body: bytes, status: int) -> str:
    """The message of an error's body in OpenAI's or Anthropic's shape; of another body, the status in words."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return HTTPStatus(status).phrase
