"""One running application for all integration tests: real Serve, two real engines, real HTTP."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.integration import faults
from tests.integration.application import Application

ROOT = Path(__file__).parent.parent.parent
BLOCKS = 512
START_LIMIT_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is an integration test."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """Mell by `serve run`, as a user starts it, on a free port."""
    folder = tmp_path_factory.mktemp("mell")
    port = _free_port()
    switches = folder / "faults.json"
    faults.write(switches, "collective")
    config = folder / "serve_config.yaml"
    config.write_text(yaml.safe_dump(_config(port)))
    log = (folder / "serve.log").open("w")
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "serve"), "run", str(config)],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=_environment(switches),
        cwd=ROOT,
        process_group=0,
    )
    app = Application(f"http://127.0.0.1:{port}", switches, (BLOCKS - 1) * 32)
    try:
        _wait_until_healthy(process, app.url, folder / "serve.log")
        yield app
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        log.close()


def _config(port: int) -> dict[str, object]:
    """The shipped configuration, with short times and the transport that can be made to fail."""
    config: dict[str, object] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    args = config["applications"][0]["args"]  # type: ignore[index]
    args["ingress"]["port"] = port
    args["engine_kwargs"]["num_gpu_blocks_override"] = BLOCKS
    args["scheduler"]["epoch_s"] = 0.5
    args["migration"] = {
        "transport": "tests.integration.faults:make",
        "slot_mib": 2,
        "transfer_timeout_s": 1.0,
        "copy_timeout_s": 2.0,
        "lease_s": 3.0,
    }
    return config


def _environment(switches: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        faults.VARIABLE: str(switches),
        "PYTHONPATH": str(ROOT),
        "PATH": path,
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"the application did not start:\n{log.read_text()[-4000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(autouse=True)
def no_faults(application: Application) -> Iterator[None]:
    """Every test begins and ends without faults."""
    faults.write(application.faults, "collective")
    yield
    faults.write(application.faults, "collective")
