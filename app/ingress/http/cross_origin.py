"""Calls of web pages of other origins (CORS), as vLLM's server allows them. No such page reaches operators' routes."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.settings import IngressSettings

_OPERATORS = ("/mell/", "/v1/load_lora_adapter/", "/v1/unload_lora_adapter/")


def of_operators(path: str) -> bool:
    """True for the paths of operators' routes, which are closed to pages and below a prefix.

    On loopback they may be open without a key, and a page's calls come from its reader's machine, a proxy's from its
    own.
    """
    return f"{path}/".startswith(_OPERATORS)


class CrossOrigin:
    """Middleware: the settings' origins may call all routes but those of operators."""

    def __init__(self, app: ASGIApp, settings: IngressSettings) -> None:
        self._closed = app
        self._open = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the wrapped application, or answer a preflight call."""
        operators = scope["type"] == "http" and of_operators(scope["path"])
        await (self._closed if operators else self._open)(scope, receive, send)
