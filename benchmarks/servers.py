"""The compared servers: Mell, started as by `make serve`, and vLLM's own OpenAI server, with equal settings.

A `Rig` is the device, the model and the engine settings of both. On a CPU, an engine has the settings of
`examples/tiny.yaml`, in float32 and eager mode, and stock vLLM has the same. On GPUs everything is vLLM's default (CUDA
graphs, its own server's batch sizes) but the context, the number of requests and the size of the KV cache. Engines that
share a GPU take turns on it, and each gets an equal part of its memory.
"""

import argparse
import contextlib
import copy
import json
import math
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml

from app.settings import CPU_ENGINE, CPU_ENV
from benchmarks.instruments.models import MODELS, ModelShape
from deployments.processes.keeper import keep

MODEL = "mell-tiny"
"""The name under which every server serves its model."""

ENGINE: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 64, "num_gpu_blocks_override": 1024}
"""The engine settings on a CPU, those of `examples/tiny.yaml`."""

ENV: dict[str, str] = {
    **CPU_ENV,
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""The environment of servers on a CPU."""

PACED: dict[str, Any] = {
    "num_gpu_blocks_override": 256,
    "block_size": 16,
    "max_model_len": 4000,
    "decode_s": 0.02,
    "startup_s": 1.0,
}
"""The settings of paced engines."""

VLLM_SERVER = "vllm.entrypoints.openai.api_server"
CONTROL = "benchmarks.instruments.control"
"""The modules of vLLM's own server, and of the same server over an engine core that it has not started."""
RELAY = "benchmarks.instruments.relay"
"""The module of the process between engine and server, with `--relayed`."""

ROOT = Path(__file__).parent.parent

_OF_MODEL = ("model_loading_config", "engine_kwargs", "deployment_config")
"""The sections of the settings that each of several models has for itself."""

Device = Literal["cpu", "cuda"]


class StartLimit:
    """The longest start of servers, and a way for another thread to give it up.

    On an H100 a start took 100 s, most of it imports and compilation; on a CPU that others use it takes as long.
    """

    def __init__(self, seconds: float = 300.0) -> None:
        self.seconds = seconds
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """End the starts that have not ended."""
        self._given_up.set()

    def wait(self, began: float) -> None:
        """Wait a moment. Raises RuntimeError once a start that `began` then (monotonic, seconds) is over."""
        if self._given_up.wait(0.5):
            raise RuntimeError("it was given up")
        if time.monotonic() - began > self.seconds:
            raise RuntimeError(f"not within {self.seconds:.0f} s")


@dataclass(frozen=True, slots=True)
class Rig:
    """The conditions of compared servers. `engines` share `gpus` GPUs; `kv_gib` is the KV cache of each engine.

    Each engine splits the model over `workers`, which have GPUs of their own if there are several.
    `invariant` switches vLLM's batch-invariant kernels on, and `extra` has further engine settings, in Mell and stock
    vLLM alike.
    """

    device: Device = "cpu"
    model: str = "tiny"
    dtype: str = "float32"
    eager: bool = True
    gpus: int = 0
    engines: int = 2
    workers: int = 1
    kv_gib: float = 8.0
    invariant: bool = False
    extra: Mapping[str, Any] = field(default_factory=lambda: ENGINE)

    @classmethod
    def on_gpus(
        cls, gpus: int, model: str = "8b", dtype: str = "bfloat16", eager: bool = False, workers: int = 1
    ) -> Self:
        """The usual conditions on GPUs."""
        return cls("cuda", model, dtype, eager, gpus, workers=workers, extra={})

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """The conditions of parsed options; see `add_rig_options`."""
        if options.device == "cpu":
            return cls(workers=options.workers)
        return cls.on_gpus(options.gpus, options.model, options.dtype, options.eager, options.workers)

    def sharing(self, engines: int) -> Self:
        """The same with another number of engines at a time."""
        return replace(self, engines=engines)

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return MODELS[self.model]

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache per token."""
        return self.shape.kv_bytes(self.dtype)

    @property
    def context(self) -> int:
        """The longest context of a request, in tokens."""
        return int(self.extra.get("max_model_len", self.shape.context))

    @property
    def environment(self) -> dict[str, str]:
        """The environment of servers."""
        chosen = ENV if self.device == "cpu" else {n: v for n, v in ENV.items() if n not in CPU_ENV}
        return chosen | ({"VLLM_BATCH_INVARIANT": "1"} if self.invariant else {})

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """The engine settings that Mell and stock vLLM share, without those of `examples/tiny.yaml` on a CPU."""
        if self.device == "cpu":
            return {**self._layout, **self.extra}
        return {
            "max_model_len": self.shape.context,
            "max_num_seqs": 256,
            "dtype": self.dtype,
            "kv_cache_memory_bytes": round(self.kv_gib * (1 << 30) / self.workers),
            "gpu_memory_utilization": round(0.8 / self._per_gpu, 2),
            **({"enforce_eager": True} if self.eager else {}),
            **({"load_format": "dummy"} if self.shape.spread is None else {}),
            **self._layout,
            **self.extra,
        }

    @property
    def _layout(self) -> dict[str, Any]:
        return {"tensor_parallel_size": self.workers} if self.workers > 1 else {}

    @property
    def _per_gpu(self) -> int:
        return math.ceil(self.engines * self.workers / self.gpus)

    def mell_settings(self) -> dict[str, dict[str, Any]]:
        """Settings of the application that differ from those of `examples/tiny.yaml`, section by section."""
        if self.device == "cpu":
            return {"engine_kwargs": self._layout} if self._layout else {}
        share = float(self.workers) if self._per_gpu == 1 else round(0.9 / self._per_gpu, 2)
        return {
            "model_loading_config": {"model_source": str(self.shape.folder())},
            "engine_kwargs": self.engine_kwargs,
            "deployment_config": {"num_gpus": share},
            "migration": {"transport": "cuda_ipc"},
        }

    def vllm_command(self, port: int, module: str = VLLM_SERVER) -> list[str]:
        """The command of vLLM's own server, or of another module with its options."""
        command = [sys.executable, "-m", module, "--model", str(self.shape.folder())]
        command += ["--served-model-name", MODEL, "--port", str(port), "--host", "127.0.0.1"]
        command += ["--disable-uvicorn-access-log"]
        kwargs = self.engine_kwargs if self.device == "cuda" else {**CPU_ENGINE, **self.engine_kwargs}
        for name, value in kwargs.items():
            command += _option(name, value)
        return command

    @property
    def vllm_environment(self) -> dict[str, str]:
        """The environment of vLLM's own server: beside Mell's engines, it takes the last GPUs."""
        last = ",".join(str(gpu) for gpu in range(self.gpus - self.workers, self.gpus))
        return self.environment | ({"CUDA_VISIBLE_DEVICES": last} if self.gpus > self.workers else {})

    def __str__(self) -> str:
        """The conditions, for a caption."""
        weights = "" if self.shape.spread is not None else ", dummy weights"
        graphs = "eager mode" if self.eager else "CUDA graphs"
        counts = [f"{n} {name}" + "s" * (n != 1) for n, name in ((self.engines, "engine"), (self.gpus, "GPU"))]
        where = "on the CPU" if self.device == "cpu" else " on ".join(counts)
        where += f", {self.workers} workers per engine" if self.workers > 1 else ""
        invariant = ", batch-invariant" if self.invariant else ""
        return f"{self.model} model, {self.dtype}{weights}, {graphs}{invariant}; {where}"


def _option(name: str, value: Any) -> list[str]:
    """An engine setting as options of vLLM's command."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else [f"--no-{flag[2:]}"]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def add_rig_options(parser: argparse.ArgumentParser, models: Sequence[str] = tuple(MODELS)) -> None:
    """Add the options of the device and the model; `Rig.of` reads them."""
    parser.add_argument("--device", choices=get_args(Device), default="cpu")
    parser.add_argument("--gpus", type=int, default=1, help="with cuda: the GPUs that all engines share")
    parser.add_argument("--workers", type=int, default=1, help="workers of each engine (tensor_parallel_size)")
    parser.add_argument("--model", choices=models, default=models[-1], help="with cuda (default: %(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="with cuda")
    parser.add_argument("--eager", action="store_true", help="with cuda: without CUDA graphs and compilation")


def transports_of(device: str) -> list[str]:
    """The transports that work on a device."""
    return ["shared", "collective", *(("cuda_ipc", "nccl") if device == "cuda" else ())]


@contextlib.contextmanager
def bare_vllm(
    port: int,
    rig: Rig = Rig(),
    log: Path | None = None,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] = {},
    limit: StartLimit | None = None,
) -> Iterator[int]:
    """Run vLLM's OpenAI server, with further flags and variables. See `mell` for `log`."""
    command, variables = [*rig.vllm_command(port), *flags], {**rig.vllm_environment, **environment}
    with _process(command, port, "bare vLLM", variables, log, limit):
        yield port


@contextlib.contextmanager
def control(port: int, rig: Rig = Rig(), log: Path | None = None, relayed: bool = False) -> Iterator[int]:
    """Run vLLM's server over an engine core that it has not started. See `mell` for `log`.

    With `relayed`, the engine's outputs pass through one more process.
    """
    command = [*rig.vllm_command(port, CONTROL), *(["--relayed"] if relayed else [])]
    with _process(command, port, "control", rig.vllm_environment, log):
        yield port


@contextlib.contextmanager
def mell(
    port: int,
    replicas: int,
    rig: Rig = Rig(),
    log: Path | None = None,
    limit: StartLimit | None = None,
    models: Sequence[Mapping[str, Any]] = (),
    **args: Any,
) -> Iterator[int]:
    """Run Mell with a fixed number of engine replicas, and with migrations by order only.

    `models` and `args` are those of `mell_config`. The server's output goes to the file `log`, if given.
    """
    config = mell_config(port, replicas, rig, models, args)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        # Not the script `serve`, which need not be installed.
        command = [sys.executable, "-m", "ray.serve.scripts", "run", file.name]
        name = f"Mell, {replicas} replica(s)"
        with _process(command, port, name, rig.environment, log, limit):
            yield port


def mell_config(
    port: int, replicas: int, rig: Rig, models: Sequence[Mapping[str, Any]], args: Mapping[str, Any]
) -> dict[str, Any]:
    """The configuration of `mell`.

    `args` are merged into the application's settings, and those of each of several `models` into settings of its own.
    """
    config: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    settings = config["applications"][0]["args"]
    settings["ingress"]["port"] = port
    settings["scheduler"] = {"policy": "best_fit", "mode": "off"}
    if rig.device == "cuda":
        settings["engine_kwargs"] = {}
    _merge(settings, rig.mell_settings())
    settings["deployment_config"]["autoscaling_config"] = {"min_replicas": replicas, "max_replicas": replicas}
    _merge(settings, args)
    if models:
        own = {section: settings.pop(section) for section in _OF_MODEL}
        settings["llm_configs"] = [_merged(own, model) for model in models]
    return config


def _merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the settings with more."""
    found = copy.deepcopy(dict(settings))
    _merge(found, more)
    return found


def _merge(settings: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping):
            settings.setdefault(name, {}).update(value)
        else:
            settings[name] = value


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
def _process(
    command: list[str],
    port: int,
    name: str,
    environment: Mapping[str, str],
    log: Path | None,
    limit: StartLimit | None = None,
) -> Iterator[None]:
    """Start a server, wait until it is healthy, and end it with the block.

    Raises:
        RuntimeError: the server does not become healthy, or another server already answers at `port`.
    """
    health = f"http://127.0.0.1:{port}/health"
    if _healthy(health):
        raise RuntimeError(f"{name} cannot start: something answers at {health}")
    started, limit = time.monotonic(), limit or StartLimit()
    with tempfile.TemporaryDirectory() as folder:
        written = log or Path(folder) / "server.log"
        with written.open("w") as output:
            process = keep(command, environment=os.environ | environment, output=output)
        try:
            while not _healthy(health):
                if (status := process.poll()) is not None:
                    raise RuntimeError(f"it ended with status {status}")
                limit.wait(started)
            print(f"{name}: up after {time.monotonic() - started:.0f} s", flush=True)
        except RuntimeError as error:
            raise RuntimeError(f"{name} did not start: {error}\n{written.read_text()[-3000:]}") from None
        else:
            yield
        finally:
            process.terminate()
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
