"""Disabled tracing imports nothing, and prompts are logged only if enabled."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from app.ingress.telemetry.tracing import NO_TRACER
from app.service.deployment import _make_telemetry, _make_tracer
from deployments.engine.tokens import expected
from tests.app.ingress.configs import ingress_config
from tests.app.ingress.fakes import Api, Backend, make_app, make_service, text_of

ROOT = Path(__file__).parents[4]
OFF = """
import sys
from tests.app.ingress.configs import ingress_config
from app.service.deployment import _make_tracer
_make_tracer(ingress_config(otlp_traces_endpoint=%r), "i")
print(*sorted(name for name in sys.modules if name == "app.ingress.telemetry.spans" or "exporter.otlp" in name))
"""
"""Ray always imports OpenTelemetry's SDK; only these modules show that Mell does."""


def imported(endpoint: str | None) -> list[str]:
    run = subprocess.run([sys.executable, "-c", OFF % endpoint], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.split()


@pytest.mark.slow
def test_disabled_tracing_imports_nothing() -> None:
    assert imported(None) == []


@pytest.mark.slow
def test_enabled_tracing_imports_the_exporter() -> None:
    assert {"app.ingress.telemetry.spans", "opentelemetry.exporter.otlp"} <= set(imported("http://127.0.0.1:4317"))


async def test_disabled_tracing_has_no_trace_id() -> None:
    tracer = _make_tracer(ingress_config(), "i")
    assert tracer is NO_TRACER and tracer.begin("chat").id is None
    await tracer.close(within_s=0)


@pytest.mark.parametrize("log_text", [False, True])
async def test_text_is_logged_only_with_log_text(log_text: bool, caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend(make_service())
    backend.telemetry = _make_telemetry(
        ingress_config(log_text=log_text), lambda model, tokens: text_of(tokens), NO_TRACER
    )
    with caplog.at_level(logging.INFO, "ray.serve.mell.request"):
        await Api(backend, make_app(backend)).complete(prompt=[7, 8, 9], max_tokens=3)
    (line,) = (record.__dict__["request"] for record in caplog.records if "request" in record.__dict__)
    assert ("prompts" in line, "texts" in line, "trace_id" in line) == (log_text, log_text, False)
    if log_text:
        assert (line["prompts"], line["texts"]) == (["7 8 9 "], [text_of(expected((7, 8, 9), 3))])
