"""The compared servers: Mell, started as by `make serve`, and vLLM's own OpenAI server, with equal settings."""

import contextlib
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from app.tinymodel import ensure_tiny_model
from deployments.processes.keeper import keep

MODEL = "mell-tiny"
ENGINE = {"max_model_len": 4096, "max_num_seqs": 64, "num_gpu_blocks_override": 1024}
PACED = {"num_gpu_blocks_override": 256, "block_size": 16, "max_model_len": 4000, "decode_s": 0.02, "startup_s": 1.0}
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
ROOT = Path(__file__).parent.parent


@contextlib.contextmanager
def bare_vllm(port: int) -> Iterator[int]:
    """Run vLLM's OpenAI server."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(ensure_tiny_model())]
    command += ["--served-model-name", MODEL, "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    command += ["--block-size", "32", "--enforce-eager", "--disable-uvicorn-access-log"]
    for name, value in ENGINE.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with _process(command, f"http://127.0.0.1:{port}/health", "bare vLLM"):
        yield port


@contextlib.contextmanager
def mell(port: int, replicas: int, **args: Any) -> Iterator[int]:
    """Run Mell with a fixed number of engine replicas, and with migrations by order only.

    `args` are merged into the application's settings.
    """
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    settings = config["applications"][0]["args"]
    settings["ingress"]["port"] = port
    settings["deployment_config"]["autoscaling_config"] = {"min_replicas": replicas, "max_replicas": replicas}
    settings["scheduler"] = {"policy": "best_fit", "mode": "off"}
    for name, value in args.items():
        if isinstance(value, dict):
            settings.setdefault(name, {}).update(value)
        else:
            settings[name] = value
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        with _process(["serve", "run", file.name], f"http://127.0.0.1:{port}/health", f"Mell, {replicas} replica(s)"):
            yield port


@contextlib.contextmanager
def paced(port: int, replicas: tuple[int, int], **args: Any) -> Iterator[int]:
    """Run Mell with paced engines (`PACED`), opened and closed by `pack` within these bounds.

    `args` replace these settings, and are merged into the application's.
    """
    low, high = replicas
    deployment = {
        "num_cpus": 0.05,
        "graceful_shutdown_timeout_s": 30.0,
        "health_check_period_s": 1.0,
        "autoscaling_config": {"min_replicas": low, "max_replicas": high},
    }
    scheduler = {"policy": "pack", "mode": "act", "epoch_s": 0.5} | {"linger_s": 3.0, "foresight_s": 0.0}
    settings = {"engine_kwargs": PACED, "deployment_config": deployment, "scheduler": scheduler}
    with mell(port, low, engine="paced", **(settings | args)):
        yield port


@contextlib.contextmanager
def _process(command: list[str], health: str, name: str) -> Iterator[None]:
    """Start a server, wait until it is healthy, and end it with the block.

    Raises:
        RuntimeError: the server does not become healthy, or another server already answers at `health`.
    """
    if _healthy(health):
        raise RuntimeError(f"{name} cannot start: something answers at {health}")
    log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - closed below, with the process
    started = time.monotonic()
    process = keep(command, environment=os.environ | ENV, output=log)
    try:
        while not _healthy(health):
            if process.poll() is not None or time.monotonic() - started > 150:
                raise RuntimeError(f"{name} did not start:\n{Path(log.name).read_text()[-3000:]}")
            time.sleep(0.5)
        print(f"{name}: up after {time.monotonic() - started:.0f} s", flush=True)
        yield
    finally:
        process.terminate()
        process.wait()
        log.close()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
