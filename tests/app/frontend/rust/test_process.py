"""The process of the Rust frontend: found, refused, logged, and ended with its ingress."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.frontend.rust.process import VARIABLE, FrontendProcess, Listeners, find_binary
from app.main import build_app
from tests.app.frontend.rust.conftest import REAL, ROOT, real_binary

ARGUMENTS = {"model_tag": "m"}

INGRESS = """
import asyncio, sys
from app.frontend.rust.process import FrontendProcess, Listeners
from deployments.processes.guard import start_guard

async def main():
    process = FrontendProcess(sys.argv[1], {"model_tag": "m"}, Listeners())
    print(process.pid, flush=True)
    await asyncio.Event().wait()

start_guard()
asyncio.run(main())
"""


@pytest.fixture
def without_binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))


@pytest.mark.usefixtures("without_binary")
def test_without_a_binary_the_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="only the CUDA build of vLLM has it; write vllm, or its path in MELL_VLLM_RS"):
        build_app({"ingress": {"frontend": "rust"}})


def test_the_variable_names_the_binary(monkeypatch: pytest.MonkeyPatch, fake_binary: str) -> None:
    monkeypatch.setenv(VARIABLE, fake_binary)
    assert find_binary() == fake_binary


async def test_refused_arguments_are_an_error_with_their_reason(fake_binary: str) -> None:
    listeners = Listeners()
    with pytest.raises(ValueError, match="ended with status 1: error: nonsense is not implemented"):
        await FrontendProcess.start(fake_binary, {**ARGUMENTS, "nonsense": 1}, listeners)
    listeners.forget()
    assert not listeners.folder.exists()


@REAL
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"response_role": "robot"}, "response_role"), ({"tool_call_parser": "no"}, "tool parser `no` is not registered")],
    ids=["not in Rust", "unknown parser"],
)
async def test_vllm_rs_refuses_what_it_lacks_with_its_name(arguments: dict[str, str], reason: str) -> None:
    listeners = Listeners()
    with pytest.raises(ValueError, match=reason):
        await FrontendProcess.start(real_binary() or "", {**ARGUMENTS, **arguments}, listeners)
    listeners.forget()


async def test_its_lines_are_in_the_log_with_their_levels(fake_binary: str, caplog: pytest.LogCaptureFixture) -> None:
    listeners = Listeners()
    process = FrontendProcess(fake_binary, ARGUMENTS, listeners)
    process._take("(RustFrontend pid=1) ERROR 11-23 06:38:54 [main.rs:1] it fails")
    process._take("thread panicked")
    assert await process.end() in (-signal.SIGTERM, 128 + signal.SIGTERM)
    listeners.forget()
    told = [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "ray.serve"]
    assert (logging.ERROR, "vllm-rs: [main.rs:1] it fails") in told
    assert (logging.WARNING, "vllm-rs: thread panicked") in told
    assert process.last_lines.endswith("thread panicked")


def test_it_ends_with_an_ingress_that_is_killed(fake_binary: str) -> None:
    ingress = subprocess.Popen(
        [sys.executable, "-c", INGRESS, fake_binary], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    with ingress:
        assert ingress.stdout is not None
        child = int(ingress.stdout.readline())
        os.kill(child, 0)
        ingress.kill()
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the process has outlived its ingress")
