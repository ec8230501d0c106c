"""The models behind the guard, and the choice of one by the name in a call."""

from collections.abc import Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.types import ASGIApp, Message, Scope

from app.frontend.guard.bodies import BodyLimits
from app.ingress.access.admission import FirstTokenDeadlines, check_allowed, may_use
from app.ingress.config import Tenancy
from app.ingress.errors import ApiError


class GuardedModel(Protocol):
    """A model for the layers of the guard. `tenancy` are its calls that share cached KV."""

    @property
    def id(self) -> str:
        """The model's name in the settings."""
        ...

    @property
    def names(self) -> Collection[str]:
        """Its names in calls, those of its adapters included."""
        ...

    @property
    def app(self) -> ASGIApp:
        """vLLM's application of the model."""
        ...

    @property
    def limits(self) -> BodyLimits:
        """The limits of its calls."""
        ...

    @property
    def tenancy(self) -> Tenancy:
        """The calls that share cached KV."""
        ...

    @property
    def deadlines(self) -> FirstTokenDeadlines:
        """The refusals of calls whose first token would be late."""
        ...


Model = TypeVar("Model", bound=GuardedModel)


class GuardedModels(Generic[Model]):
    """The models of an ingress, at least one."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.all = tuple(models)

    def called(self, name: Any, allowed: Collection[str] = ()) -> Model:
        """The model of a call with that `model`; a sole model has all calls, and its application judges their names.

        `allowed` are the ids of the models that the call's key may use, none: all. Refusals name no others.

        Raises:
            ApiError: 400 without a name, 403 for a model that is not allowed, 404 for a name that no model has.
        """
        model = self.all[0] if len(self.all) == 1 else self.named(name, allowed=allowed)
        check_allowed(allowed, model.id)
        return model

    def named(self, name: Any, param: str = "model", allowed: Collection[str] = ()) -> Model:
        """The model with that name, or with that adapter. A sole model needs no name.

        Raises:
            ApiError: 400 and 404 as `called`; `param` has the name.
        """
        if name is None:
            if len(self.all) == 1:
                return self.all[0]
            message = f"{param}: name one of the models {', '.join(self._names(allowed))}"
            raise ApiError(400, message, param=param, code="missing_model")
        if not isinstance(name, str):
            raise ApiError(400, f"{param}: must be a text", param=param, code="invalid_value")
        for model in self.all:
            if name in model.names:
                return model
        # As vLLM answers it.
        message = f"The model `{name}` does not exist. Valid aliases: {', '.join(self._names(allowed))}."
        raise ApiError(404, message, param=param, details={"type": "NotFoundError", "code": 404})

    def _names(self, allowed: Collection[str]) -> list[str]:
        return sorted(name for model in self.all if may_use(allowed, model.id) for name in model.names)


async def list_models(models: Sequence[GuardedModel], scope: Scope) -> dict[str, Any]:
    """The body of `/v1/models` of all these models: their entries, in the order of the settings.

    A model whose application has not started yet has none.
    """
    listed = [await _list(model.app, scope) for model in models]
    return {"object": "list", "data": [entry for entries in listed for entry in entries]}


async def _list(app: ASGIApp, scope: Scope) -> list[Any]:
    body = b""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal body
        body += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except ApiError:
        return []
    entries: list[Any] = msgspec.json.decode(body)["data"]
    return entries
