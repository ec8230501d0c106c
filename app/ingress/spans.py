"""Traces by OpenTelemetry: one span per request, and under it one per replica that it lived on.

Names follow OpenTelemetry's semantic conventions for HTTP servers and, as far as they go, for generative AI
(`gen_ai.*`, not stable yet); what only Mell knows is `mell.*`. No text of a prompt or an answer is in them.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from app.ingress.conversation import Conversation
from app.ingress.journey import By, End, Journey, Stay
from app.ingress.traces import INCOMING
from policies.model import ReplicaId, RequestId

_REQUEST: ContextVar["RequestSpan | None"] = ContextVar("request_span", default=None)
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}
_OF_LINE = {
    "id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "status": "http.response.status_code",
    "label": "mell.label",
    "key": "mell.key",
    "moves": "mell.moves",
    "resubmissions": "mell.resubmissions",
    "outcome": "mell.outcome",
}
"""What of a request's log line is in its span, and how it is called there."""

FLUSHING = "mell-flushing-traces"
"""The name of the thread that sends the last spans."""


def batched(endpoint: str) -> SpanProcessor:
    """Sends spans to a collector, in batches and from a thread of its own; what cannot be sent is dropped.

    The protocol is gRPC or, if OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says so, HTTP: as in vLLM (tracing/otel.py).

    Raises:
        ValueError: that variable asks for another one.
    """
    exporter: SpanExporter
    match os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, "grpc"):
        case "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

            exporter = OverGrpc(endpoint=endpoint)
        case "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

            exporter = OverHttp(endpoint=endpoint)
        case other:
            raise ValueError(f"{OTEL_EXPORTER_OTLP_TRACES_PROTOCOL} is {other!r}: write grpc or http/protobuf")
    return BatchSpanProcessor(exporter)


class Spans:
    """Implements `Tracer`. Spans go to `processor`, as those of the ingress `instance`; `clock` tells ns since 1970.

    What is kept is up to the caller's trace or, without one, all (unless OTEL_TRACES_SAMPLER says otherwise).
    """

    def __init__(
        self, processor: SpanProcessor, model: str, instance: str, clock: Callable[[], int] = time.time_ns
    ) -> None:
        named = Resource.create({"service.name": "mell", "service.instance.id": instance})
        # What the environment says of the service has precedence.
        resource = named.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("mell")
        self._model = model
        self._clock = clock
        self._journeys: dict[RequestId, Journey] = {}

    def begin(self, endpoint: str) -> "RequestSpan":
        """See `Tracer.begin`."""
        scope = INCOMING.get()
        name, caller, attributes = endpoint, Context(), {}
        if scope is not None:
            name, caller, attributes = f"{scope['method']} {scope['path']}", _caller(scope), _http(scope)
        if operation := _OPERATIONS.get(endpoint):
            attributes["gen_ai.operation.name"] = operation
            attributes["gen_ai.provider.name"] = "mell"
            attributes["gen_ai.request.model"] = self._model
        began = self._clock()
        span = self._tracer.start_span(name, caller, SpanKind.SERVER, attributes, start_time=began)
        return RequestSpan(span, began, self._clock)

    def opened(self, conversation: Conversation) -> None:
        """See `Tracer.opened`."""
        request = _REQUEST.get()
        if request is not None:
            choice = request.next_choice()
            self._journeys[conversation.id] = Journey(lambda stay: self._tell(request, conversation.id, choice, stay))

    def hosted(self, conversation: Conversation, by: By, index: int) -> None:
        """See `Tracer.hosted`."""
        if journey := self._journeys.get(conversation.id):
            now = self._clock()
            journey.hosted(conversation.host, conversation.cursor.hop, by, index, now)
            journey.took(conversation.cursor.next_index, now)

    def took(self, conversation: Conversation) -> None:
        """See `Tracer.took`."""
        if journey := self._journeys.get(conversation.id):
            journey.took(conversation.cursor.next_index, self._clock())

    def lost(self, conversation: Conversation, reason: str) -> None:
        """See `Tracer.lost`."""
        if journey := self._journeys.get(conversation.id):
            journey.lost(reason, conversation.submitted, self._clock())

    def closed(self, conversation: Conversation) -> None:
        """See `Tracer.closed`."""
        if journey := self._journeys.pop(conversation.id, None):
            journey.closed(conversation.cursor.finish, self._clock())

    async def close(self, within_s: float) -> None:
        """See `Tracer.close`."""
        # A collector that cannot be reached holds the thread for longer than there is time.
        flushing = threading.Thread(target=self._provider.shutdown, name=FLUSHING, daemon=True)
        flushing.start()
        await asyncio.to_thread(flushing.join, within_s)

    def _tell(self, request: "RequestSpan", id: RequestId, choice: int, stay: Stay) -> None:
        at: dict[str, Any] = {"mell.request.id": id, "mell.choice": choice, "mell.replica": stay.replica}
        if stay.reason is not None:
            at["mell.reason"] = stay.reason
        if stay.end == End.REFUSED:
            request.span.add_event("refused", at, stay.ended)
            return
        at |= {"mell.hop": stay.hop, "mell.by": str(stay.by), "mell.tokens": stay.tokens, "mell.end": str(stay.end)}
        if stay.pause_s is not None:
            at["mell.pause_s"] = stay.pause_s
        span = self._tracer.start_span(
            "replica", set_span_in_context(request.span), attributes=at, start_time=stay.began
        )
        if stay.first is not None:
            span.add_event("first_token", timestamp=stay.first)
        if stay.end == End.LOST:
            span.set_status(StatusCode.ERROR, stay.reason)
        span.end(stay.ended)
        if stay.before is not None:
            request.span.add_event(str(stay.by), _arrival(at, stay.before), stay.began)


class RequestSpan:
    """Implements `Trace`: the span of a request that is the current one of its context until it ends."""

    def __init__(self, span: Span, began: int, clock: Callable[[], int]) -> None:
        self.span = span
        self._began = began
        self._clock = clock
        self._choices = 0
        self._token = _REQUEST.set(self)

    @property
    def id(self) -> str:
        """See `Trace.id`."""
        return format_trace_id(self.span.get_span_context().trace_id)

    def next_choice(self) -> int:
        """The index of a choice that begins: they begin in their order."""
        self._choices += 1
        return self._choices - 1

    def end(self, line: Mapping[str, Any]) -> None:
        """See `Trace.end`."""
        _REQUEST.reset(self._token)
        span, status, outcome = self.span, line["status"], line["outcome"]
        span.set_attributes({name: line[key] for key, name in _OF_LINE.items() if line[key] is not None})
        if status >= 400:
            span.set_attribute("error.type", outcome)
        elif line["endpoint"] in _OPERATIONS:
            span.set_attribute("gen_ai.response.finish_reasons", outcome.split("+"))
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        if line["ttft_s"] is not None:
            span.add_event("first_token", timestamp=self._began + int(line["ttft_s"] * 1e9))
        span.end(self._clock())


def _arrival(at: Mapping[str, Any], before: ReplicaId) -> dict[str, Any]:
    """What the event of an arrival on another replica says, of what the span there says."""
    kept = ("mell.request.id", "mell.choice", "mell.hop", "mell.pause_s")
    return {"mell.source": before, "mell.target": at["mell.replica"], **{name: at[name] for name in kept if name in at}}


def _caller(scope: Scope) -> Context:
    """Where the trace comes from, by W3C's headers; an empty context if they name none."""
    headers = Headers(scope=scope)
    carrier = {name: headers.getlist(name) for name in ("traceparent", "tracestate")}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _http(scope: Scope) -> dict[str, Any]:
    """Only routes without parameters are traced: their paths are their names."""
    return {
        "http.request.method": scope["method"],
        "http.route": scope["path"],
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
    }
