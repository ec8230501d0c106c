"""Admission of requests: API keys, their limits, and the number of requests that the ingress answers at a time."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.ingress.access.classes import ONE_CLASS, ClassChooser
from app.ingress.access.keys import ApiKey, InvalidKeys, KeyFile, check_classes, check_models, find
from app.ingress.access.limits import Exceeded, Meter
from app.ingress.access.seats import Seats
from app.ingress.asgi import TrackedSend, within
from app.ingress.errors import RETRY_S, ApiError
from app.ingress.telemetry.requests import RequestObserver
from policies.precedence import DEFAULT_CLASS

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class FirstTokenDeadlines:
    """Refuses requests whose first token would come later than `factor` times what the service level allows; None:
    refuses none. `ttft_s` are the level's times by class, in seconds, and `soonest_s` is the time to a first token that
    begins now. Classes without a level are never refused.
    """

    factor: float | None = None
    ttft_s: Callable[[], Mapping[str, float]] = dict
    soonest_s: Callable[[], float] = lambda: 0.0

    def check(self, service_class: str) -> None:
        """Raises ApiError 503, with the time until a request would be in time."""
        ttft_s = None if self.factor is None else self.ttft_s().get(service_class)
        if self.factor is None or ttft_s is None:
            return
        deadline_s = self.factor * ttft_s
        if (late_s := self.soonest_s() - deadline_s) > 0:
            message = f"the first token would come later than {deadline_s:g} s; try again"
            raise _saturated(message, max(RETRY_S, late_s))


NO_DEADLINES = FirstTokenDeadlines()


class Gate:
    """Admits requests. Without keys every client is admitted; `max_requests` None means no limit.

    The usage of keys is counted per ingress process.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey] = (),
        max_requests: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        chooser: ClassChooser = ONE_CLASS,
        models: Collection[str] = (),
    ) -> None:
        """`models` are the ids of all models, which a reloaded key may list."""
        self._clock = clock
        self._chooser = chooser
        self._models = models
        self._seats = Seats(max_requests, chooser.classes.ranks, max(1, len(models)))
        self._keys: tuple[ApiKey, ...] = ()
        self._meters: dict[str, Meter] = {}
        self.replace_keys(keys)

    @property
    def running(self) -> int:
        """The number of admitted requests that have not ended."""
        return self._seats.taken

    def replace_keys(self, keys: Iterable[ApiKey]) -> None:
        """Make `keys` the valid keys. A key keeps the usage of the previous key with the same name."""
        self._keys = tuple(keys)
        self._meters = {key.name: self._meters.get(key.name, Meter()) for key in self._keys}
        for key in self._keys:
            self._meters[key.name].limit(key.limits, self._clock())

    def reload(self, file: KeyFile) -> None:
        """Load the keys of `file` if it has changed. An invalid file is logged and changes nothing."""
        try:
            keys = file.changed()
            check_classes(keys or (), self._chooser.classes.names, file.path)
            check_models(keys or (), self._models, file.path)
        except InvalidKeys as error:
            log.error("the API keys remain unchanged: %s", error)
            return
        if keys is not None:
            self.replace_keys(keys)
            log.info("%d API keys loaded", len(keys))

    def authenticate(self, given: str | None) -> ApiKey | None:
        """The API key whose text is `given`, None if no keys are configured. Raises ApiError 401."""
        if not self._keys:
            return None
        if given is None:
            message = "this call requires an API key: Authorization: Bearer <key>, or x-api-key on /v1/messages"
            raise ApiError(401, message, code="invalid_api_key")
        if (key := find(self._keys, given)) is None:
            raise ApiError(401, "the API key is not valid", code="invalid_api_key")
        return key

    def admit(self, given: str | None) -> "Admission":
        """Admit a request with the API key `given` until its admission's `with` block ends.

        Raises:
            ApiError: 401 without a valid key, 503 if the ingress is saturated, 429 if a limit of the key is reached.
                The refused request is not counted.
        """
        key = self.authenticate(given)
        meter = self._meters[key.name] if key is not None else Meter()
        if not self._seats.take():
            raise _saturated(f"{self.running} requests are running; try again")
        if exceeded := meter.begin(self._clock()):
            self._seats.leave(None)
            raise _too_many(exceeded)
        return Admission(meter, self._seats, self._clock, self._chooser, key)


class Admission:
    """An admitted request, until its `with` block ends."""

    def __init__(
        self,
        meter: Meter,
        seats: Seats,
        clock: Callable[[], float],
        chooser: ClassChooser = ONE_CLASS,
        key: ApiKey | None = None,
    ) -> None:
        self.key = key.name if key is not None else None
        """The name of the client's key."""
        self.service_class = DEFAULT_CLASS
        """The class of the request, once it is assigned to one."""
        self._model = ""
        self._allowed = key.classes if key is not None else ()
        self.models = key.models if key is not None else ()
        """The ids of the models that the key may use, none: all of them."""
        self._meter = meter
        self._seats = seats
        self._rank: int | None = None
        self._clock = clock
        self._chooser = chooser
        self._charged = 0
        self.used = 0
        """Tokens that the request has used; the final charge to its key."""

    def name_model(self, model: str) -> None:
        """The request is one to the model with this id, which its key may use."""
        self._model = model

    def assign(self, header: str | None, tier: Any, deadlines: FirstTokenDeadlines = NO_DEADLINES) -> None:
        """Assign the request to its class, by the values of `classes.HEADER` and `classes.MEMBER`.

        `deadlines` are those of its model.

        Raises:
            ApiError: 400 for an unknown class, 403 for one that the key may not use, 503 if the ingress is too full for
                the rank of the class, or a first token would be late for it.
        """
        self.service_class = self._chooser.choose(header, tier, self._allowed)
        deadlines.check(self.service_class)
        rank = self._chooser.classes.rank(self.service_class)
        if not self._seats.assign(rank, self._model):
            raise _saturated(f"{self._seats.taken} requests are running, too many for this class or model; try again")
        self._rank = rank

    def charge(self, tokens: int) -> None:
        """Charge the request's maximum token usage to the key, until the actual usage is known. Raises ApiError 429."""
        if exceeded := self._meter.charge(tokens, self._clock()):
            raise _too_many(exceeded)
        self._charged = tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._meter.settle(self._charged, self.used, self._clock())
        self._meter.end()
        self._seats.leave(self._rank, self._model)


def may_use(allowed: Collection[str], model: str) -> bool:
    """True if a key that lists these models, none: all, may use the one with this id."""
    return not allowed or model in allowed


def check_allowed(allowed: Collection[str], model: str) -> None:
    """Raise ApiError 403 if a key that lists these models may not use the one with this id."""
    if not may_use(allowed, model):
        message = f"model: this API key may not use {model!r}, only {', '.join(allowed)}"
        raise ApiError(403, message, param="model", code="model_not_allowed")


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A call inside `AdmissionLayer`; `sent` is the progress of its answer."""

    admission: Admission
    observer: RequestObserver
    sent: TrackedSend

    def name_model(self, model: str) -> None:
        """See `Admission.name_model`."""
        self.observer.model = model
        self.admission.name_model(model)

    def assign(self, header: str | None, tier: Any, deadlines: FirstTokenDeadlines) -> None:
        """See `Admission.assign`."""
        self.admission.assign(header, tier, deadlines)
        self.observer.service_class = self.admission.service_class


class AdmissionLayer:
    """ASGI layer around an application: calls need admission, are observed, and have a total time limit of `timeout_s`.

    `key` reads the API key from a call's headers; `ending` is the end of an event stream that exceeds its time.
    """

    def __init__(
        self,
        app: ASGIApp,
        gate: Gate,
        timeout_s: float | None,
        begin: Callable[[], RequestObserver],
        key: Callable[[Headers], str | None],
        ending: Callable[[ApiError, TrackedSend], bytes],
    ) -> None:
        self._app = app
        self._gate = gate
        self._timeout_s = timeout_s
        self._begin = begin
        self._key = key
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the call and pass it on; the application finds it with `admitted`.

        Raises:
            ApiError: the call is refused or late, and nothing was sent yet.
        """
        with self._begin() as observer, self._gate.admit(self._key(Headers(scope=scope))) as admission:
            observer.key = admission.key
            sent = TrackedSend(send)
            scope = {**scope, _ADMITTED: AdmittedCall(admission, observer, sent)}
            if late := await within(self._timeout_s, self._app, scope, receive, sent, self._ending):
                observer.failed(late)


_ADMITTED = "mell.admitted"


def admitted(scope: Scope) -> AdmittedCall:
    """The call of a scope that has passed `AdmissionLayer`."""
    call: AdmittedCall = scope[_ADMITTED]
    return call


def _saturated(message: str, retry_after_s: float = RETRY_S) -> ApiError:
    return ApiError(503, message, code="saturated", retry_after_s=retry_after_s)


def _too_many(exceeded: Exceeded) -> ApiError:
    wait_s = RETRY_S if exceeded.wait_s is None else exceeded.wait_s
    message = f"this API key is limited to {exceeded.limit}"
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)
