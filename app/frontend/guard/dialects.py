"""The APIs of the open routes by their errors and keys, and the layers that answer errors as an API's clients expect.

vLLM's application answers most errors in OpenAI's shape on every route, and an exception within a stream of responses
breaks the connection off.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.frontend.calls import CURRENT, ApiCall
from app.ingress.access.admission import admitted
from app.ingress.access.keys import bearer
from app.ingress.asgi import TrackedSend, is_event_stream
from app.ingress.errors import ApiError
from app.ingress.telemetry.requests import CLIENT_CLOSED_STATUS

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API's errors, as JSON bodies and as ends of event streams, and the API key in its headers.

    `ending` also gets the stream so far. `translated`: errors of vLLM's application, too, have to be put into `body`.
    """

    body: Callable[[ApiError], Mapping[str, Any]]
    ending: Callable[[ApiError, TrackedSend], bytes]
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


_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Codes of OpenAI for failed responses, by status; all others are `server_error`."""


def _failed_response(error: ApiError, sent: TrackedSend) -> bytes:
    """OpenAI's last event of a response that fails: the response as the first event has it, and its usage so far."""
    try:
        response: dict[str, Any] = json.loads(sent.first.partition(b"data: ")[2])["response"]
    except (ValueError, KeyError):
        response = {"object": "response", "output": []}
    prompt, output = sent.usage()
    response |= {
        "status": "failed",
        "error": {"code": _FAILURES.get(error.status, "server_error"), "message": error.message},
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output,
        },
    }
    kind = "response.failed"
    return _event(kind, {"type": kind, "sequence_number": sent.chunks, "response": response})


def _event(kind: str, body: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(body)}\n\n".encode()


def openai_ending(error: ApiError) -> bytes:
    """The end of a stream of completions or chats by an error."""
    return error.event() + _DONE


_ERROR_EVENT = b"event: error"

_DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""

OPENAI = Dialect(ApiError.body, lambda error, _: openai_ending(error), _bearer)
RESPONSES = Dialect(ApiError.body, _failed_response, _bearer)
ANTHROPIC = Dialect(
    _anthropic_body, lambda error, _: _event("error", _anthropic_body(error)), _anthropic_key, translated=True
)


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
    """Puts the errors of vLLM's application into a dialect, those within event streams included.

    An event stream begins once a replica has taken its request: before that, a refusal still has its status.
    """

    def __init__(self, app: ASGIApp, dialect: Dialect) -> None:
        self._app = app
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an admitted call on. Raises ApiError: the application's, or 500 for an exception before the answer."""
        call, sent = CURRENT.get(), admitted(scope).sent
        answer = _Answer(send, self._dialect, call, sent)
        try:
            await self._app(scope, receive, answer)
        except (ApiError, ClientDisconnect, OSError):
            raise
        except Exception as error:
            streaming = sent.is_event_stream and not sent.complete
            failure = call.failure if call is not None else None
            if failure is None or not (streaming or answer.held):
                log.exception("vLLM's application failed")
                failure = _mistake()
            if call is not None:
                call.failure = failure
            if sent.status is None:
                raise answer.as_refusal(failure) from error
            if not streaming:
                raise
            ending = self._dialect.ending(failure, sent)
            await send({"type": "http.response.body", "body": ending, "more_body": False})
        if answer.refusal is not None:
            raise answer.refusal
        if answer.held:
            await answer.release()


def _mistake() -> ApiError:
    return ApiError(500, "internal error", code="internal_error")


class _Answer:
    """Passes an answer on. The head of an event stream is held back until a replica has taken a request of the call.

    If a call is refused before that, nothing is sent, and `refusal` is its answer. Errors are put into the dialect, if
    that is `translated`; bodies of such errors are held back until they are complete.
    """

    def __init__(self, send: Send, dialect: Dialect, call: ApiCall | None, sent: TrackedSend) -> None:
        self.held: list[Message] = []
        self.refusal: ApiError | None = None
        self._send = send
        self._dialect = dialect
        self._call = call
        self._sent = sent
        self._begins = True
        self._releasing: asyncio.Task[None] | None = None
        self._refused: Message | None = None
        self._body = b""

    def __call__(self, message: Message) -> Awaitable[None]:
        """Send a message. No coroutine, once the answer has begun: each chunk passes here."""
        if self._begins:
            return self._begin(message)
        return self._translate(message) if self._dialect.translated else self._send(message)

    async def _begin(self, message: Message) -> None:
        """Send a message, unless the call is refused, or may still be."""
        failure = self._call.failure if self._call is not None else None
        if failure is None or failure.status != HTTPStatus.SERVICE_UNAVAILABLE:
            pass
        elif self.held and self._releasing is None:
            self.refusal = self.as_refusal(failure)
            self.held.clear()
        elif message.get("status") == failure.status:
            own = [(name.lower().encode(), value.encode()) for name, value in failure.headers.items()]
            message = {**message, "headers": [*message["headers"], *own]}
        if self.refusal is not None:
            return
        if self._releasing is None and self._may_be_refused(message):
            self.held.append(message)
            return
        if self.held:
            await self.release()
        self._begins = False
        await self(message)

    def as_refusal(self, error: ApiError) -> ApiError:
        """The error in the shape in which vLLM's application would have answered a call without a stream."""
        if self._dialect.translated or error.status != HTTPStatus.SERVICE_UNAVAILABLE:
            return error
        return replace(error, details={"type": HTTPStatus(error.status).phrase, "code": error.status})

    def _may_be_refused(self, message: Message) -> bool:
        """True for an event stream none of whose requests a replica has taken so far."""
        if self._call is None or self._call.requests:
            return False
        if not self.held and not is_event_stream(message):
            return False
        self._call.taken = self._release_soon
        return True

    def _release_soon(self) -> None:
        if self._releasing is None:
            self._releasing = asyncio.create_task(self._send_held())

    async def release(self) -> None:
        """Send what is held back."""
        self._release_soon()
        assert self._releasing is not None
        await self._releasing

    async def _send_held(self) -> None:
        while self.held:
            message = self.held.pop(0)
            await (self._translate(message) if self._dialect.translated else self._send(message))

    async def _translate(self, message: Message) -> None:
        """Send a message, with errors in the dialect."""
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
            error = (self._call.failure if self._call is not None else None) or _mistake()
            message = {**message, "body": self._dialect.ending(error, self._sent)}
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
