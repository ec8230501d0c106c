"""One trace per request: its outcome, and one span per replica that generated part of its answer."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from app.ingress.streams.streams import Streams
from app.ingress.telemetry.requests import RequestTelemetry
from app.ingress.telemetry.spans import OpenTelemetryTracer
from app.ingress.telemetry.tracing import KeepHttpScope
from migration.protocol.messages import PathRequest
from migration.run.reader import ReaderRun
from tests.app.ingress import fakes
from tests.app.ingress.fakes import Api, Backend, Exchange, Service, body, eventually, make_app, make_service, text_of

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SLOW_S = 0.01

pytestmark = pytest.mark.virtual_time


@dataclass
class Traced:
    """A traced service. `ended` are the ended spans, in the order of their ends."""

    service: Service
    api: Api
    tracer: OpenTelemetryTracer
    exporter: InMemorySpanExporter

    @property
    def ended(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    @property
    def root(self) -> ReadableSpan:
        (root,) = (span for span in self.ended if span.kind is SpanKind.SERVER)
        return root

    @property
    def replicas(self) -> list[ReadableSpan]:
        """The spans of replicas, from the first to the last."""
        spans = [span for span in self.ended if span.kind is not SpanKind.SERVER]
        return sorted(spans, key=lambda span: span.start_time or 0)

    async def request(self, tokens: int) -> ReaderRun:
        """The running conversation, once it has `tokens` output tokens."""
        await eventually(lambda: self.service.streams.count == 1)
        (conversation,) = self.service.streams._live.values()
        await self.service.reading(conversation, tokens)
        return conversation


def make_traced(patch: pytest.MonkeyPatch, processor: SpanProcessor | None = None, **options: Any) -> Traced:
    exporter = InMemorySpanExporter()
    tracer = OpenTelemetryTracer(processor or SimpleSpanProcessor(exporter), "i")
    patch.setattr(fakes, "Streams", partial(Streams, tracer=tracer))
    service = make_service(**options)
    backend = Backend(service)
    backend.telemetry = RequestTelemetry("tiny", decode=lambda model, tokens: text_of(tokens), tracer=tracer)
    app = make_app(backend)
    app.add_middleware(KeepHttpScope)
    return Traced(service, Api(backend, app), tracer, exporter)


@pytest.fixture
async def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    return make_traced(monkeypatch)


async def hosted(conversation: ReaderRun, replica: str) -> None:
    await eventually(lambda: conversation.reader.host == replica)


def at(span: ReadableSpan, *names: str) -> tuple[Any, ...]:
    return tuple((span.attributes or {}).get(name) for name in names)


def segments(traced: Traced) -> list[tuple[Any, ...]]:
    return [at(span, "mell.replica", "mell.by", "mell.end") for span in traced.replicas]


def tokens(traced: Traced) -> list[Any]:
    return [at(span, "mell.tokens")[0] for span in traced.replicas]


def events(span: ReadableSpan, name: str) -> list[dict[str, Any]]:
    return [dict(event.attributes or {}) for event in span.events if event.name == name]


# --- a trace ------------------------------------------------------------------------------------------


async def test_the_trace_of_an_answer(traced: Traced) -> None:
    answer = (await traced.api.chat(max_tokens=7, headers={"X-Request-Id": "mine"})).json()
    root, (replica,) = traced.root, traced.replicas
    assert root.name == "POST /v1/chat/completions" and root.parent is None
    assert dict(root.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mell",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 7,
        "mell.label": "mine",
        "mell.class": "default",
        "mell.moves": 0,
        "mell.resubmissions": 0,
        "mell.outcome": "length",
    }
    assert [event.name for event in root.events] == ["first_token"]
    assert replica.name == "replica"
    assert dict(replica.attributes or {}) == {
        "mell.request.id": answer["id"],
        "mell.choice": 0,
        "mell.replica": "a",
        "mell.hop": 0,
        "mell.by": "first",
        "mell.tokens": 7,
        "mell.end": "length",
    }
    assert replica.parent is not None and replica.parent.span_id == root.context.span_id
    times = [root.start_time, replica.start_time, replica.events[0].timestamp, replica.end_time, root.end_time]
    assert times == sorted(times)  # type: ignore[type-var]


async def test_a_trace_has_no_text(traced: Traced) -> None:
    """Even if the log does."""
    answer = (await traced.api.complete(prompt="Where do blocks move?", max_tokens=9)).json()
    written = "".join(span.to_json() for span in traced.ended)
    assert answer["id"] in written
    assert "Where do blocks" not in written and answer["choices"][0]["text"] not in written


async def test_a_trace_names_its_service_instance(traced: Traced) -> None:
    await traced.api.complete(max_tokens=1)
    assert dict(traced.root.resource.attributes).items() >= {"service.name": "mell", "service.instance.id": "i"}.items()


async def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
    traced = make_traced(monkeypatch)
    await traced.api.complete(max_tokens=1)
    assert traced.root.resource.attributes["service.name"] == "chat-eu"


async def test_every_choice_has_its_replica(traced: Traced) -> None:
    await traced.api.complete(max_tokens=5, n=3, seed=1)
    assert sorted(at(span, "mell.choice", "mell.tokens") for span in traced.replicas) == [(0, 5), (1, 5), (2, 5)]
    by_choice = {at(span, "mell.choice")[0]: at(span, "mell.request.id")[0] for span in traced.replicas}
    assert all(id.endswith(f"-{choice}") for choice, id in by_choice.items())
    assert at(traced.root, "gen_ai.usage.output_tokens") == (15,)


async def test_requests_at_one_time_are_traces_of_their_own(traced: Traced) -> None:
    await asyncio.gather(*(traced.api.complete(max_tokens=5) for _ in range(4)))
    roots = {span.context.span_id: span for span in traced.ended if span.kind is SpanKind.SERVER}
    assert len({root.context.trace_id for root in roots.values()}) == 4
    assert len(traced.replicas) == 4
    for span in traced.replicas:
        assert span.parent is not None
        assert at(span, "mell.request.id") == at(roots[span.parent.span_id], "gen_ai.response.id")
    assert traced.tracer._trackers == {}


async def test_a_request_without_generation_is_a_trace_without_replicas(traced: Traced) -> None:
    await traced.api.post("/tokenize", json={"prompt": "Hi"})
    assert traced.replicas == []
    assert traced.root.name == "POST /tokenize"
    assert at(traced.root, "http.response.status_code", "mell.outcome", "gen_ai.request.model") == (200, "ok", None)


async def test_health_and_admin_calls_are_no_traces(traced: Traced) -> None:
    await traced.api.get("/health")
    await traced.api.get("/mell/state")
    assert traced.ended == ()


async def test_a_log_line_names_its_trace(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ray.serve.mell.request"):
        await traced.api.complete(max_tokens=1)
    (line,) = (record.__dict__["request"] for record in caplog.records if "request" in record.__dict__)
    assert line["trace_id"] == f"{traced.root.context.trace_id:032x}"


# --- the caller's trace -------------------------------------------------------------------------------


async def test_a_request_is_a_part_of_its_callers_trace(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
    await traced.api.complete(max_tokens=2, headers=headers)
    root, (replica,) = traced.root, traced.replicas
    assert root.parent is not None and f"{root.parent.span_id:016x}" == CALLER
    assert {f"{span.context.trace_id:032x}" for span in (root, replica)} == {TRACE}
    assert root.context.trace_state.get("vendor") == "1"


async def test_a_caller_that_does_not_sample_is_heeded(traced: Traced) -> None:
    answer = await traced.api.complete(max_tokens=2, headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})
    assert answer.status_code == 200 and traced.ended == ()


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{CALLER}-01", f"ff-{TRACE}-{CALLER}-01"])
async def test_a_bad_traceparent_is_none(traced: Traced, header: str) -> None:
    answer = await traced.api.complete(max_tokens=2, headers={"traceparent": header})
    assert answer.status_code == 200 and traced.root.parent is None


# --- replicas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [PathRequest.KV, PathRequest.TOKENS])
async def test_a_moved_request_has_two_segments(traced: Traced, path: PathRequest) -> None:
    answering = asyncio.create_task(traced.api.complete(max_tokens=60))
    conversation = await traced.request(20)
    traced.service.move(conversation.spec.id, "b", path)
    assert (await answering).json()["usage"]["completion_tokens"] == 60
    assert segments(traced) == [("a", "first", "moved"), ("b", "migration", "length")]
    first, second = traced.replicas
    assert at(second, "mell.hop") == (1,)
    assert tokens(traced)[0] >= 20 and tokens(traced)[1] > 0 and sum(tokens(traced)) == 60
    assert first.end_time == second.start_time
    (pause_s,) = at(second, "mell.pause_s")
    # The pause includes the time from the start of the second segment to its first token.
    assert second.start_time is not None
    assert pause_s > 0 and second.events[0].timestamp - second.start_time <= pause_s * 1e9
    (migration,) = events(traced.root, "migration")
    assert migration == {
        "mell.request.id": conversation.spec.id,
        "mell.choice": 0,
        "mell.hop": 1,
        "mell.source": "a",
        "mell.target": "b",
        "mell.pause_s": pause_s,
    }
    assert at(traced.root, "mell.moves") == (1,)


async def test_a_request_moved_often_has_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = make_traced(monkeypatch, names="abc")
    answering = asyncio.create_task(traced.api.complete(max_tokens=300))
    conversation = await traced.request(0)
    for turn, to in enumerate("bcab", start=1):
        await traced.service.reading(conversation, 40 * turn)
        traced.service.move(conversation.spec.id, to)
        await hosted(conversation, to)
    await answering
    assert [where for where, _, _ in segments(traced)] == list("abcab")
    assert [at(span, "mell.hop")[0] for span in traced.replicas] == [0, 1, 2, 3, 4]
    assert sum(tokens(traced)) == 300
    ends = [span.end_time for span in traced.replicas]
    assert ends[:-1] == [span.start_time for span in traced.replicas[1:]]


async def test_a_request_of_a_lost_replica_continues_on_another(traced: Traced) -> None:
    answering = asyncio.create_task(traced.api.complete(max_tokens=60))
    await traced.request(20)
    traced.service.kill("a")
    assert (await answering).json()["usage"]["completion_tokens"] == 60
    assert segments(traced) == [("a", "first", "lost"), ("b", "resubmission", "length")]
    first, second = traced.replicas
    assert sum(tokens(traced)) == 60
    assert first.status.status_code is StatusCode.ERROR and at(first, "mell.reason")[0]
    assert first.end_time is not None and second.start_time is not None and first.end_time <= second.start_time
    (resubmission,) = events(traced.root, "resubmission")
    assert (resubmission["mell.source"], resubmission["mell.target"]) == ("a", "b")
    assert (at(traced.root, "mell.resubmissions"), traced.root.status.status_code) == ((1,), StatusCode.UNSET)


async def test_a_request_whose_source_dies_is_found_on_the_target(traced: Traced) -> None:
    """The source dies after the target has taken the request and before the reader gets `Moved`."""
    service = traced.service
    answering = asyncio.create_task(traced.api.complete(max_tokens=60))
    conversation = await traced.request(20)
    service.wires.lose = lambda batch: any(type(event).__name__ == "Moved" for event in batch)
    service.move(conversation.spec.id, "b")
    await eventually(lambda: "b" in service.hosts(conversation.spec.id))
    service.kill("a")
    await answering
    assert [segment[:2] for segment in segments(traced)] == [("a", "first"), ("b", "migration")]
    assert sum(tokens(traced)) == 60


async def test_a_refusal_is_an_event(traced: Traced) -> None:
    traced.service.replica("a").host.stopping = True
    await traced.api.complete(max_tokens=3)
    assert segments(traced) == [("b", "first", "length")]
    (refused,) = events(traced.root, "refused")
    assert refused["mell.replica"] == "a" and refused["mell.reason"]


# --- ends ---------------------------------------------------------------------------------------------


async def test_a_request_without_a_replica(traced: Traced) -> None:
    traced.service.members.become()
    await traced.api.complete(max_tokens=3)
    assert (traced.replicas, traced.root.status.status_code) == ([], StatusCode.ERROR)
    assert at(traced.root, "http.response.status_code", "error.type") == (503, "unavailable")


async def test_a_request_that_fails_during_its_answer(traced: Traced) -> None:
    answering = asyncio.create_task(traced.api.complete(max_tokens=60, stream=True))
    await traced.request(20)
    traced.service.kill("a")
    traced.service.kill("b")
    await answering
    assert traced.root.status.status_code is StatusCode.ERROR
    assert at(traced.root, "http.response.status_code")[0] == 503
    assert segments(traced)[0] == ("a", "first", "lost")
    assert sum(tokens(traced)) == at(traced.root, "gen_ai.usage.output_tokens")[0] >= 20


async def test_a_bad_request_is_not_a_server_error(traced: Traced) -> None:
    await traced.api.complete(stop=5 * ["x"] * 5)
    assert at(traced.root, "http.response.status_code")[0] == 400
    assert traced.root.status.status_code is StatusCode.UNSET and at(traced.root, "error.type")[0]


async def test_a_client_that_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = make_traced(monkeypatch, step_s=SLOW_S)
    exchange = Exchange(traced.api, body(max_tokens=300, stream=True))
    await exchange.chunks(3)
    exchange.disconnect()
    await exchange.ended()
    assert segments(traced) == [("a", "first", "closed")]
    assert at(traced.root, "mell.outcome", "error.type") == ("client_closed", "client_closed")
    assert traced.root.status.status_code is StatusCode.UNSET
    assert traced.tracer._trackers == {}
