"""OpenTelemetry traces: one span per request, and below it one span per segment of an answer.

Names follow OpenTelemetry's semantic conventions for HTTP servers and, as far as they go, for generative AI
(`gen_ai.*`, not stable yet); Mell's own attributes are `mell.*`. Spans hold no text of prompts or answers.
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

from app.ingress.telemetry.segments import AnswerSegment, SegmentEnd, SegmentTracker
from app.ingress.telemetry.tracing import HTTP_SCOPE
from migration.protocol.reading import Reader, SegmentOrigin
from policies.model import ReplicaId, RequestId

_REQUEST: ContextVar["RequestSpan | None"] = ContextVar("request_span", default=None)
_OPERATIONS = {
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
"""OpenTelemetry's names for the endpoints that it has names for."""
_ATTRIBUTES = {
    "id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "status": "http.response.status_code",
    "label": "mell.label",
    "key": "mell.key",
    "class": "mell.class",
    "moves": "mell.moves",
    "resubmissions": "mell.resubmissions",
    "outcome": "mell.outcome",
}
"""Members of a request's log line, and the span attributes that they become."""

FLUSHING = "mell-flushing-traces"
"""The name of the thread that flushes the last spans."""


def batched(endpoint: str) -> SpanProcessor:
    """A processor that exports spans to a collector, in batches from its own thread; spans that fail are dropped.

    The protocol is gRPC or, by OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, HTTP: as in vLLM (tracing/otel.py).

    Raises:
        ValueError: that variable names another protocol.
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


class OpenTelemetryTracer:
    """Implements `Tracer`. `processor` gets the spans; `instance` is the ingress's id; `clock` gives ns since 1970.

    The caller's trace decides about sampling; without one every request is sampled, unless OTEL_TRACES_SAMPLER differs.
    """

    def __init__(self, processor: SpanProcessor, instance: str, clock: Callable[[], int] = time.time_ns) -> None:
        named = Resource.create({"service.name": "mell", "service.instance.id": instance})
        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME have precedence.
        resource = named.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("mell")
        self._clock = clock
        self._trackers: dict[RequestId, SegmentTracker] = {}

    def begin(self, endpoint: str) -> "RequestSpan":
        """See `Tracer.begin`."""
        scope = HTTP_SCOPE.get()
        name, caller, attributes = endpoint, Context(), {}
        if scope is not None:
            name, caller, attributes = f"{scope['method']} {scope['path']}", _caller(scope), _http(scope)
        if operation := _OPERATIONS.get(endpoint):
            attributes["gen_ai.operation.name"] = operation
            attributes["gen_ai.provider.name"] = "mell"
        began = self._clock()
        span = self._tracer.start_span(name, caller, SpanKind.SERVER, attributes, start_time=began)
        return RequestSpan(span, began, self._clock)

    def opened(self, id: RequestId) -> None:
        """See `Tracer.opened`."""
        request = _REQUEST.get()
        if request is not None:
            choice = request.next_choice()
            self._trackers[id] = SegmentTracker(lambda segment: self._export(request, id, choice, segment))

    def hosted(self, id: RequestId, reader: Reader, origin: SegmentOrigin, index: int) -> None:
        """See `Tracer.hosted`."""
        if tracker := self._trackers.get(id):
            now = self._clock()
            tracker.hosted(reader.host, reader.cursor.hop, origin, index, now)
            tracker.took(reader.cursor.next_index, now)

    def took(self, id: RequestId, reader: Reader) -> None:
        """See `Tracer.took`."""
        if tracker := self._trackers.get(id):
            tracker.took(reader.cursor.next_index, self._clock())

    def lost(self, id: RequestId, reason: str, had: bool) -> None:
        """See `Tracer.lost`."""
        if tracker := self._trackers.get(id):
            tracker.lost(reason, had, self._clock())

    def closed(self, id: RequestId, finish: str | None) -> None:
        """See `Tracer.closed`."""
        if tracker := self._trackers.pop(id, None):
            tracker.closed(finish, self._clock())

    async def close(self, within_s: float) -> None:
        """See `Tracer.close`."""
        # An unreachable collector blocks the shutdown for longer than `within_s`.
        flushing = threading.Thread(target=self._provider.shutdown, name=FLUSHING, daemon=True)
        flushing.start()
        await asyncio.to_thread(flushing.join, within_s)

    def _export(self, request: "RequestSpan", id: RequestId, choice: int, segment: AnswerSegment) -> None:
        at: dict[str, Any] = {"mell.request.id": id, "mell.choice": choice, "mell.replica": segment.replica}
        if segment.reason is not None:
            at["mell.reason"] = segment.reason
        if segment.end == SegmentEnd.REFUSED:
            request.span.add_event("refused", at, segment.ended)
            return
        at |= {
            "mell.hop": segment.hop,
            "mell.by": str(segment.by),
            "mell.tokens": segment.tokens,
            "mell.end": str(segment.end),
        }
        if segment.pause_s is not None:
            at["mell.pause_s"] = segment.pause_s
        span = self._tracer.start_span(
            "replica", set_span_in_context(request.span), attributes=at, start_time=segment.began
        )
        if segment.first is not None:
            span.add_event("first_token", timestamp=segment.first)
        if segment.end == SegmentEnd.LOST:
            span.set_status(StatusCode.ERROR, segment.reason)
        span.end(segment.ended)
        if segment.before is not None:
            request.span.add_event(str(segment.by), _arrival(at, segment.before), segment.began)


class RequestSpan:
    """Implements `RequestTrace`: a request's span, current in its context until the request ends."""

    def __init__(self, span: Span, began: int, clock: Callable[[], int]) -> None:
        self.span = span
        self._began = began
        self._clock = clock
        self._choices = 0
        self._token = _REQUEST.set(self)

    @property
    def id(self) -> str:
        """See `RequestTrace.id`."""
        return format_trace_id(self.span.get_span_context().trace_id)

    def next_choice(self) -> int:
        """The index of the next choice; choices begin in the order of their indices."""
        self._choices += 1
        return self._choices - 1

    def end(self, line: Mapping[str, Any]) -> None:
        """See `RequestTrace.end`."""
        _REQUEST.reset(self._token)
        span, status, outcome = self.span, line["status"], line["outcome"]
        span.set_attributes({name: line[key] for key, name in _ATTRIBUTES.items() if line[key] is not None})
        if line["model"] is not None and line["endpoint"] in _OPERATIONS:
            span.set_attribute("gen_ai.request.model", line["model"])
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
    """Attributes of the event of an arrival on another replica, taken from the new replica's span."""
    kept = ("mell.request.id", "mell.choice", "mell.hop", "mell.pause_s")
    return {"mell.source": before, "mell.target": at["mell.replica"], **{name: at[name] for name in kept if name in at}}


def _caller(scope: Scope) -> Context:
    """The caller's trace context from W3C's headers; an empty context without them."""
    headers = Headers(scope=scope)
    carrier = {name: headers.getlist(name) for name in ("traceparent", "tracestate")}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _http(scope: Scope) -> dict[str, Any]:
    """HTTP attributes of the span. Only routes without parameters are traced, so a path is its route."""
    return {
        "http.request.method": scope["method"],
        "http.route": scope["path"],
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
    }
