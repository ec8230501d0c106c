"""The OpenAPI 3.1 document, which FastAPI makes of Mell's own routes and of those of vLLM's application."""

from collections.abc import Iterable
from copy import copy
from typing import Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from app.ingress.http.control import CONTROL, ROUTES, SERVICE
from app.ingress.http.operation import OperatorOperation
from app.versions import VERSION

_TAGS = {
    SERVICE: "For probes, monitoring and client generators; open to every client.",
    CONTROL: "Replicas, migrations and adapters, for operators.",
}
_API_KEY, _ADMIN_KEY = "apiKey", "adminKey"
_KEYS = {
    _API_KEY: "An API key; without `ingress.api_keys_file` and `MELL_API_KEYS`, none is needed.",
    _ADMIN_KEY: "The admin key (`ingress.admin_key`, `ingress.admin_key_file`, `MELL_ADMIN_KEY`); without one, the "
    "calls are open on loopback only.",
}


def document(api: Iterable[APIRoute] = ()) -> dict[str, Any]:
    """The document of Mell's own routes and of `api`, open routes of vLLM's application."""
    described = get_openapi(
        title="Mell",
        version=VERSION,
        description="A large language model on several engines, between which running requests move.",
        license_info={"name": "Apache 2.0", "identifier": "Apache-2.0"},
        servers=[{"url": "/"}],
        tags=[{"name": name, "description": text} for name, text in _TAGS.items()],
        routes=[
            *(_described(route, _API_KEY) for route in api),
            *(_described(route, _ADMIN_KEY if isinstance(route, OperatorOperation) else None) for route in ROUTES),
        ],
    )
    described["components"]["securitySchemes"] = {
        name: {"type": "http", "scheme": "bearer", "description": text} for name, text in _KEYS.items()
    }
    return described


def _described(route: APIRoute, key: str | None) -> APIRoute:
    """A copy of a route for the document: without HEAD, which is as GET, and with the key that it may need."""
    described = copy(route)
    described.methods = route.methods - {"HEAD"}
    if key is not None:
        # With the empty requirement: which keys are needed is a matter of configuration.
        described.openapi_extra = {"security": [{key: []}, {}]}
    return described
