"""Spans reach the collector, and no request waits for it."""

import asyncio
import logging
import threading
from concurrent import futures
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from app.ingress.telemetry.spans import FLUSHING, batched
from tests.app.ingress.telemetry.test_spans import make_traced


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the names of received spans."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.names += [s.name for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_close_flushes_spans_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    server, collector = grpc.server(futures.ThreadPoolExecutor(1)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    traced = make_traced(monkeypatch, batched(f"http://127.0.0.1:{port}"))
    await traced.api.complete(max_tokens=3)
    await traced.tracer.close(within_s=30)
    server.stop(None)
    assert collector.names == ["replica", "POST /v1/completions"]


@pytest.mark.slow
async def test_an_unreachable_collector_disturbs_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "3")
    requests = 60
    with caplog.at_level(logging.INFO):
        traced = make_traced(monkeypatch, batched("http://127.0.0.1:1"))
        answers = await asyncio.gather(*(traced.api.complete(max_tokens=5) for _ in range(requests)))
        await traced.tracer.close(within_s=0.01)
    (flushing,) = [thread for thread in threading.enumerate() if thread.name == FLUSHING]
    await asyncio.to_thread(flushing.join)  # It runs on for seconds: close did not wait for it.
    assert [answer.status_code for answer in answers] == [200] * requests
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {5}
    assert sum(record.name.startswith("opentelemetry") for record in caplog.records) < requests / 4


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier pigeon")
    with pytest.raises(ValueError, match="write grpc or http/protobuf"):
        batched("http://127.0.0.1:4317")
