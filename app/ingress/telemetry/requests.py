"""Metrics of an ingress's requests, and one log line per request.

with telemetry.begin("completions") as observer:      # the request has arrived; an exception in here is the outcome
    observer.key = ...                                # name of the client's API key, once authenticated
    observer.model = ...                              # the request's model, once the body is read
    observer.service_class = ...                      # its class, then, too
    observer.accepted(id, label, tokens, prompts)     # the body is valid
    timer = observer.timer()                          # one choice of the answer runs
    timer.step()                                      # the tokens of one engine step are passed on
    observer.choice(choice)                           # each choice, once the client stops reading
    observer.answered(completion_tokens, finishes)    # progress of the answer when the client stops reading
    observer.failed(error)                            # an error sent to the client as an event
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from itertools import product
from types import TracebackType
from typing import Any, Protocol, Self

from prometheus_client import Counter, Gauge
from starlette.requests import ClientDisconnect

from app.ingress.errors import ApiError
from app.ingress.telemetry.tracing import NO_TRACER, Tracer
from deployments.metrics import instruments
from deployments.metrics.exposition import Family, expose
from policies.cost.latencies import ClassCounts, ServiceTimes
from policies.precedence import DEFAULT_CLASS

log = logging.getLogger("ray.serve.mell.request")

CLIENT_CLOSED = "client_closed"
INTERNAL_ERROR = "internal_error"
CLIENT_CLOSED_STATUS = 499
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
"""Buckets of vLLM's `vllm:time_to_first_token_seconds`."""
_ITL_S = (
    *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
"""Buckets of vLLM's `vllm:inter_token_latency_seconds`, and two smaller ones."""


class ObservedChoice(Protocol):
    """The part of one choice of an answer that the log line of its request shows."""

    @property
    def tokens(self) -> Sequence[int]:
        """Output tokens so far."""
        ...

    @property
    def moves(self) -> int:
        """Migrations so far."""
        ...

    @property
    def resubmissions(self) -> int:
        """Submissions to another replica after a loss so far."""
        ...


class RequestTelemetry:
    """Metrics, log lines and traces of one ingress's requests. `clock` gives seconds; `tracer` traces every request.

    `models` are the ids of the models. `decode` turns tokens of a model into text; if it is given, log lines include
    prompts and answers. `classes` are the names of the service classes. With `keeps_times`, their times are kept for a
    comparison with a service level.
    """

    def __init__(
        self,
        *models: str,
        decode: Callable[[str, Sequence[int]], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = NO_TRACER,
        classes: Iterable[str] = (DEFAULT_CLASS,),
        keeps_times: bool = False,
    ) -> None:
        self.sole_model = models[0] if len(models) == 1 else ""
        """The model of all requests; empty if there are several."""
        self.decode = decode
        self.clock = clock
        self.tracer = tracer
        registry = self._registry = instruments.LabelledRegistry()
        self.requests = Counter(
            "mell_requests", "Requests that ended.", ["endpoint", "outcome", "class", "model"], registry=registry
        )
        self.running = Gauge("mell_requests_running", "Requests that have not ended.", registry=registry)
        self.prompt_tokens = Counter(
            "mell_request_prompt_tokens",
            "Prompt tokens of ended requests that got an output.",
            ["model"],
            registry=registry,
        )
        self.completion_tokens = Counter(
            "mell_request_completion_tokens", "Output tokens of ended requests.", ["model"], registry=registry
        )
        self.ttft = instruments.TokenHistogram(
            "mell_request_ttft_seconds",
            "From a request's arrival until its first tokens are passed on.",
            registry,
            _TTFT_S,
            ("class", "model"),
        )
        self.itl = instruments.TokenHistogram(
            "mell_request_itl_seconds",
            "Between two steps of an answer as they are passed on.",
            registry,
            _ITL_S,
            ("class", "model"),
        )
        self.second = instruments.TokenHistogram(
            "mell_request_second_token_seconds",
            "Between the first two steps of an answer as they are passed on.",
            registry,
            _ITL_S,
            ("class", "model"),
        )
        self.keeps_times = keeps_times
        self._times: dict[str, dict[str, ServiceTimes]] = {model: {} for model in models}
        for labels in product(classes, models):  # A series begins at zero, so that its first increase is seen.
            self.ttft.labels(*labels)
            self.itl.labels(*labels)
            self.second.labels(*labels)
        for model in models:
            self.prompt_tokens.labels(model)
            self.completion_tokens.labels(model)
        self.lost = instruments.Counter(
            "mell_requests_lost", "Requests under way that could not be continued.", registry, ["model"]
        )
        for model in models:
            self.lost.inc(0.0, model)

    def begin(self, endpoint: str) -> "RequestObserver":
        """Start observing a request on its arrival; leaving the observer's `with` block ends the request."""
        return RequestObserver(self, endpoint)

    def times(self, model: str, name: str) -> ServiceTimes | None:
        """The times of a service class's requests since the start, to be added to; None if they are not kept."""
        return self._times[model].setdefault(name, ServiceTimes()) if self.keeps_times else None

    def class_counts(self, model: str) -> ClassCounts:
        """The times of all requests of a model since the start; none if they are not kept."""
        return {name: times.counts for name, times in self._times[model].items()}

    def expose(self, replica: str) -> tuple[Family, ...]:
        """All metrics, labelled with `replica`, this ingress replica's id."""
        return expose(self._registry, {"replica": replica})


class RequestObserver:
    """One request, from its arrival to its end. Its outcome is `client_closed` until another one is set."""

    def __init__(self, telemetry: RequestTelemetry, endpoint: str) -> None:
        self.key: str | None = None
        self.service_class = DEFAULT_CLASS
        self.model = telemetry.sole_model
        """The id of the request's model; empty as long as it is not known."""
        self.began = telemetry.clock()
        self.ttft_s: float | None = None
        self._telemetry = telemetry
        self._endpoint = endpoint
        self._id: str | None = None
        self._label: str | None = None
        self._prompt_tokens = 0
        self._prompts: Callable[[], Sequence[Sequence[int]]] = tuple
        self._choices: list[ObservedChoice] = []
        self._completion_tokens = 0
        self._outcome, self._status = CLIENT_CLOSED, CLIENT_CLOSED_STATUS

    def accepted(self, id: str, label: str, prompt_tokens: int, prompts: Callable[[], Sequence[Sequence[int]]]) -> None:
        """The request is valid; `prompts` gives the token ids of each distinct prompt, `prompt_tokens` in all."""
        self._id, self._label = id, label
        self._prompt_tokens, self._prompts = prompt_tokens, prompts

    def choice(self, choice: ObservedChoice) -> None:
        """Add a choice of the answer to the log line."""
        self._choices.append(choice)

    def timer(self) -> "StepTimer":
        """Start timing the steps of one choice of the answer."""
        return StepTimer(self._telemetry, self)

    def answered(self, completion_tokens: int, finishes: Sequence[str | None]) -> None:
        """Set the answer's token count and finish reasons, one per choice, None for an unfinished choice.

        The answer is complete if every choice has a finish reason.
        """
        self._completion_tokens = completion_tokens
        reasons = {reason for reason in finishes if reason is not None}
        if reasons and None not in finishes:
            self._outcome, self._status = "+".join(sorted(reasons)), 200

    def served(self) -> None:
        """The request succeeded without generating text."""
        self._outcome, self._status = "ok", 200

    def failed(self, error: ApiError) -> None:
        """The request ends with `error`."""
        self._outcome = error.code or str(error.body()["error"]["type"])
        self._status = error.status

    def __enter__(self) -> Self:
        self._telemetry.running.inc()
        self._trace = self._telemetry.tracer.begin(self._endpoint)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        match error:
            case ApiError():
                self.failed(error)
            case ClientDisconnect() | OSError():
                pass  # Both mean that the client disconnected.
            case Exception():
                self._outcome, self._status = INTERNAL_ERROR, 500
        self._count()
        line = self._line()
        self._trace.end(line)
        log.info("request %s: %s", line["id"], line["outcome"], extra={"request": line})

    def _count(self) -> None:
        telemetry = self._telemetry
        telemetry.running.dec()
        telemetry.requests.labels(self._endpoint, self._outcome, self.service_class, self.model).inc()
        if self._completion_tokens:
            telemetry.completion_tokens.labels(self.model).inc(self._completion_tokens)
        if self.ttft_s is not None or self._status == HTTPStatus.OK:
            telemetry.prompt_tokens.labels(self.model).inc(self._prompt_tokens)

    def _line(self) -> dict[str, Any]:
        line: dict[str, Any] = {
            "id": self._id,
            "label": self._label,
            "endpoint": self._endpoint,
            "key": self.key,
            "class": self.service_class,
            "model": self.model or None,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 6),
            "duration_s": round(self._telemetry.clock() - self.began, 6),
            "moves": sum(choice.moves for choice in self._choices),
            "resubmissions": sum(choice.resubmissions for choice in self._choices),
            "outcome": self._outcome,
            "status": self._status,
        }
        if (trace_id := self._trace.id) is not None:
            line["trace_id"] = trace_id
        if (decode := self._telemetry.decode) is not None:
            line["prompts"] = [decode(self.model, prompt) for prompt in self._prompts()]
            line["texts"] = [decode(self.model, choice.tokens) for choice in self._choices]
        return line


class StepTimer:
    """Times the steps of one choice. `step` is the only telemetry call per token."""

    def __init__(self, telemetry: RequestTelemetry, observer: RequestObserver) -> None:
        self._clock = telemetry.clock
        labels = observer.service_class, observer.model
        self._observe = telemetry.itl.labels(*labels).observe
        self._first = telemetry.ttft.labels(*labels).observe
        self._second = telemetry.second.labels(*labels).observe
        self._has_second = False
        self._times = telemetry.times(observer.model, observer.service_class)
        self._observer = observer
        self._last: float | None = None

    def step(self) -> None:
        """Record that the tokens of one engine step are passed on now."""
        now = self._clock()
        if self._last is not None:
            self._observe(now - self._last)
            if not self._has_second:
                self._second(now - self._last)
                self._has_second = True
            if self._times is not None:
                self._times.itl.add(now - self._last)
        elif self._observer.ttft_s is None:
            self._observer.ttft_s = now - self._observer.began
            self._first(self._observer.ttft_s)
            if self._times is not None:
                self._times.ttft.add(self._observer.ttft_s)
        self._last = now
