"""One running application for all integration tests: real Serve, two real engines, real HTTP."""

import contextlib
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.tinymodel import ensure_tiny_model
from benchmarks.instruments.models import MODELS
from deployments.processes.keeper import keep
from tests.adapters import ADAPTERS, RANK, TARGETS, make_adapter
from tests.counts import LONG
from tests.integration import faults
from tests.integration.application import Application
from tests.integration.two_models import ensure_other_model
from tests.tinyvision import ensure_tiny_vision

ROOT = Path(__file__).parent.parent.parent
BLOCKS = 512
ELASTIC_BLOCKS, ELASTIC_TIMES = 400, 3.0
"""KV blocks of an elastic pool at its start, and how many times as many it can have."""
SHARED_MIB = 3520
"""The memory of two models: some 1,530 MiB of either for parameters and processes, which may grow by 130 MiB with the
first requests, and the KV of 40 to 90 requests.
"""
CROWDED_MIB = 4200
"""The memory of two models, one of them with parameters of 276 MiB: some 700 MiB are for KV."""
SLEEPS_AFTER_S = 3.0
"""The time without a request after which a model falls asleep, in seconds."""
START_LIMIT_S = 240

THINKING_KWARGS: dict[str, Any] = {
    "reasoning_parser": "deepseek_v3",
    "reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
}
"""Engine settings: reasoning is parsed if a chat asks for it (`enable_thinking`), and can be given a budget."""

FRONTEND_KWARGS: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
"""Settings of vLLM's frontend."""

CACHED_KWARGS: dict[str, Any] = {**FRONTEND_KWARGS, "enable_prompt_tokens_details": True}
"""With the cached tokens of prompts in the usage, which depend on the requests before."""

SPLIT_KWARGS: dict[str, Any] = {"tensor_parallel_size": 2, "max_model_len": 1024}
"""Engine settings of the split application."""

ADAPTER_KWARGS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": len(ADAPTERS) + 1,
    "max_lora_rank": RANK,
    "lora_target_modules": [*TARGETS],
}
"""Engine settings: one place more than adapters, since vLLM's CPU build takes the last one for requests without any."""

CLASSES: dict[str, Any] = {"flex": {"rank": -1}, "priority": {"rank": 1}}
"""Service classes with the names of OpenAI's service tiers."""

TURNS = {
    "application": 1,
    "updating": 2,
    "split": 2,
    "encoder_run": 3,
    "two_models_run": 3,
    "paced_models_run": 4,
    "mixed_models_run": 4,
    "without_copies": 4,
    "to_its_end": 6,
    "disaggregated": 4,
    "paced": 5,
    "elastic": 7,
    "pairing": 7,
    "sharing": 7,
    "crowded": 7,
    "sleeping": 8,
    "bare": 0,
}
"""When the tests with a fixture run, by the first that they have. Those of one application follow one another: it takes
a minute to start. vLLM's own server comes first, and has ended when an application starts.
"""


os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # on a busy machine, 30 s are too short

VLLM_ENVIRONMENT = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
"""The variables of vLLM that the tests were started with."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Servers start with the user's environment: what tests import from unit tests has set that of an ingress."""
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        del os.environ[name]
    os.environ.update(VLLM_ENVIRONMENT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is an integration test, and runs when it is its application's turn."""
    here = [Path(__file__).parent in item.path.parents for item in items]
    in_turn = iter(sorted(compress(items, here), key=_turn))
    for place in compress(range(len(items)), here):
        items[place] = next(in_turn)
        items[place].add_marker(pytest.mark.integration)


def _turn(item: pytest.Item) -> int:
    names: list[str] = getattr(item, "fixturenames", [])
    return next((turn for fixture, turn in TURNS.items() if fixture in names), len(TURNS))


class Stage:
    """Shows one application at a time: two on one machine would be in each other's way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shown: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._application: Application | None = None

    @cached_property
    def lora_modules(self) -> list[str]:
        """The adapters of the tiny model, as `--lora-modules` has them."""
        folders = {name: make_adapter(self.folder / name, seed) for seed, name in enumerate(ADAPTERS)}
        return [f"{name}={folder}" for name, folder in folders.items()]

    def show(self, name: str, config: dict[str, Any]) -> Application:
        """The application of that name, started as by `make serve` unless it is there already."""
        if self._shown != name or self._application is None:
            self.clear()
            self._application, self._shown = self._start(name, config), name
        return self._application

    def _start(self, name: str, config: dict[str, Any]) -> Application:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        port = free_port()
        ingress = config["applications"][0]["args"]["ingress"]
        ingress["port"] = port
        switches, path, log = folder / "faults.json", folder / "serve_config.yaml", folder / "serve.log"
        faults.write(switches, "collective")
        path.write_text(yaml.safe_dump(config))
        with log.open("w") as output:
            environment = os.environ | {faults.VARIABLE: str(switches), "RAY_USAGE_STATS_ENABLED": "0"}
            self._process = keep(["serve", "run", str(path)], environment=environment, output=output)
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(self._process, url, log)
        return Application(url, switches, (BLOCKS - 1) * 32, folder, ingress.get("admin_key"))

    def clear(self) -> None:
        """Stop what is shown."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._process = self._application = self._shown = None


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Where applications are shown."""
    made = Stage(tmp_path_factory.mktemp("mell"))
    yield made
    made.clear()


@pytest.fixture
def application(stage: Stage) -> Iterator[Application]:
    """Two replicas with real engines that stay as they are: requests move only by order. Without faults.

    Adapters double the time that its engines take to start: it has them in a long run only.
    """
    shown = stage.show("real", _adapted(stage.lora_modules) if LONG else _real())
    faults.write(shown.faults, "collective")
    yield shown
    faults.write(shown.faults, "collective")


@pytest.fixture
def updating(stage: Stage) -> Application:
    """As `application`, with adapters that operators load and unload."""
    config = _adapted(stage.lora_modules)
    config["applications"][0]["args"]["ingress"] |= {"admin_key": "admin-key", "allow_runtime_lora_updating": True}
    return stage.show("updating", config)


@pytest.fixture
def split(stage: Stage) -> Iterator[Application]:
    """As `application`, with two workers per replica, short contexts, and a model that takes images."""
    shown = stage.show("split", _split())
    faults.write(shown.faults, "collective")
    yield shown
    faults.write(shown.faults, "collective")


@pytest.fixture
def elastic(stage: Stage) -> Application:
    """Two replicas with real engines whose KV pools change their sizes; the scheduler moves requests."""
    return stage.show("elastic", _elastic())


@pytest.fixture
def pairing(stage: Stage) -> Application:
    """Two replicas with real engines that the scheduler pairs in a burst."""
    return stage.show("pairing", _pairing())


@pytest.fixture
def sharing(stage: Stage) -> Application:
    """A replica of each of two models with real engines, which share a budget of memory by demand."""
    return stage.show("sharing", _sharing())


@pytest.fixture
def crowded(stage: Stage) -> Application:
    """Models `tiny` and `middle` on one budget, of which the KV pool of `tiny` can take all that is left."""
    return stage.show("crowded", _crowded())


@pytest.fixture
def sleeping(stage: Stage) -> Application:
    """A model with one replica that sleeps while there is no request."""
    return stage.show("sleeping", _sleeping())


@pytest.fixture
def paced(stage: Stage) -> Application:
    """One to four replicas that keep the pace of a GPU, packed, opened and closed by the scheduler."""
    return stage.show("paced", _paced(stage.folder / "paced" / "epochs"))


@pytest.fixture
def disaggregated(stage: Stage) -> Application:
    """Three replicas that keep the pace of a GPU, one of them for prefills."""
    return stage.show("disaggregated", _disaggregated())


@pytest.fixture
def disaggregated_as_it_pays(stage: Stage) -> Application:
    """Three replicas that keep the pace of a GPU, of which as many are for prefills as pay."""
    return stage.show("disaggregated_as_it_pays", _disaggregated_as_it_pays())


@pytest.fixture
def without_copies(stage: Stage) -> Application:
    """Two replicas that keep the pace of a GPU, without copies between replicas."""
    return stage.show("without_copies", _without_copies())


@pytest.fixture
def to_its_end(stage: Stage, paced: Application) -> Callable[[], None]:
    """Ends the paced application, as Ctrl-C does. The test that takes this is its last."""
    return stage.clear


def _shipped() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    return config


def _real() -> dict[str, Any]:
    """The shipped configuration, with short times and the transport that can be made to fail."""
    config = _shipped()
    args = config["applications"][0]["args"]
    args["engine_kwargs"] |= {"num_gpu_blocks_override": BLOCKS, **THINKING_KWARGS}
    args["scheduler"] = {"policy": "best_fit", "mode": "off", "epoch_s": 0.5}
    args["ingress"]["place_timeout_s"] = 10.0  # a busy machine is no reason to place without the scheduler
    args["ingress"] |= {"replica_silence_s": 4.0, "lease_s": 6.0, "frontend_kwargs": CACHED_KWARGS}
    args["cache"] = {"audit_s": 1.0}
    args["deployment_config"] |= {"engine_silence_s": 15.0, "health_check_timeout_s": 60.0}
    args["migration"] = {
        "transport": "tests.integration.faults:make",
        "slot_mib": 2,
        "transfer_timeout_s": 1.0,
        "copy_timeout_s": 2.0,
        "adopt_timeout_s": 3.0,
        "lease_s": 6.0,
    }
    return config


def _adapted(lora_modules: list[str]) -> dict[str, Any]:
    """With adapters that requests choose by their names."""
    config = _real()
    args = config["applications"][0]["args"]
    args["engine_kwargs"] |= ADAPTER_KWARGS
    args["ingress"]["frontend_kwargs"] = {**CACHED_KWARGS, "lora_modules": lora_modules}
    return config


def _split() -> dict[str, Any]:
    config = _real()
    args = config["applications"][0]["args"]
    args["model_loading_config"] = {"model_source": str(ensure_tiny_vision())}
    args["engine_kwargs"] |= SPLIT_KWARGS
    return config


def _elastic() -> dict[str, Any]:
    config = _real()
    args = config["applications"][0]["args"]
    args["engine_kwargs"] |= {"num_gpu_blocks_override": ELASTIC_BLOCKS + 1, "max_model_len": 1024, "max_num_seqs": 32}
    args["scheduler"] = {"mode": "act", "epoch_s": 0.5, "cooldown_s": 1.0}
    args["deployment_config"]["autoscaling_config"] = {"min_replicas": 2, "max_replicas": 2}
    args["memory"] = {"budget_mib": 8000, "declared": ELASTIC_TIMES, "shrink_s": 5.0}
    return config


def _pairing() -> dict[str, Any]:
    config = _elastic()
    config["applications"][0]["args"]["pairing"] = {"mode": "act", "restore_after_s": 2.0}
    return config


def _sharing() -> dict[str, Any]:
    config = _elastic()
    args = config["applications"][0]["args"]
    del args["ingress"]["frontend_kwargs"]
    args["engine_kwargs"] |= {"num_gpu_blocks_override": 1025, "max_num_seqs": 40}
    args["deployment_config"]["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 1}
    own = {name: args.pop(name) for name in ("engine_kwargs", "deployment_config", "cache")}
    del args["model_loading_config"]
    args["llm_configs"] = [
        {"model_loading_config": {"model_id": name, "model_source": str(source)}, **own}
        for name, source in (("tiny", ensure_tiny_model()), ("other", ensure_other_model()))
    ]
    args["memory"] |= {"budget_mib": SHARED_MIB}
    return config


def _crowded() -> dict[str, Any]:
    config = _sharing()
    args = config["applications"][0]["args"]
    middle = args["llm_configs"][1]
    middle["model_loading_config"] = {"model_id": "middle", "model_source": str(MODELS["middle"].folder())}
    middle["engine_kwargs"] = middle["engine_kwargs"] | {"num_gpu_blocks_override": 129}
    args["memory"] |= {"budget_mib": CROWDED_MIB, "declared": 4 * ELASTIC_TIMES}
    return config


def _sleeping() -> dict[str, Any]:
    config = _elastic()
    args = config["applications"][0]["args"]
    args["model_loading_config"]["model_source"] = str(MODELS["middle"].folder())
    args["scheduler"] |= {"linger_s": SLEEPS_AFTER_S}
    args["deployment_config"]["autoscaling_config"] = {"min_replicas": 0, "max_replicas": 1}
    args["ingress"]["no_replica_timeout_s"] = 60.0
    return config


def pooling(model: Path, **engine_kwargs: Any) -> dict[str, Any]:
    """The configuration of a pooling model, with short times."""
    config = _real()
    args = config["applications"][0]["args"]
    args["model_loading_config"]["model_source"] = str(model)
    args["engine_kwargs"] = engine_kwargs
    del args["ingress"]["frontend_kwargs"]
    args["migration"] = {"transport": "shared"}
    return config


def _paced(recordings: Path) -> dict[str, Any]:
    config = _shipped()
    args = config["applications"][0]["args"]
    args["engine"] = "paced"
    args["engine_kwargs"] = {
        "num_gpu_blocks_override": 256,
        "block_size": 16,
        "max_model_len": 4000,
        "decode_s": 0.02,
        "decode_s_per_seq": 0.001,
        "startup_s": 1.0,
    }
    args["deployment_config"] = {
        "num_cpus": 0.05,
        "graceful_shutdown_timeout_s": 30.0,
        "health_check_period_s": 1.0,
        "autoscaling_config": {"min_replicas": 1, "initial_replicas": 2, "max_replicas": 4},
    }
    args["ingress"] |= {"replica_silence_s": 4.0, "lease_s": 6.0, "max_engine_losses": 100}
    args["scheduler"] = {
        "epoch_s": 0.5,
        "linger_s": 3.0,
        "foresight_s": 0.0,
        "cooldown_s": 1.0,
        "slo": {"ttft_p99_s": 30.0, "itl_p99_ms": 1000.0},  # a busy machine meets it, too
        # A step of two requests takes 22 ms: too long, however exactly steps are measured.
        "classes": {**CLASSES, "swift": {"itl_p99_ms": 21.5}},
        "record": str(recordings),
    }
    return config


def _without_copies() -> dict[str, Any]:
    config = _shipped()
    args = config["applications"][0]["args"]
    args["engine"] = "paced"
    args["engine_kwargs"] = {"num_gpu_blocks_override": BLOCKS, "block_size": 32, "max_model_len": 4000}
    scaling = {"min_replicas": 1, "initial_replicas": 2, "max_replicas": 2}
    args["deployment_config"] = {"num_cpus": 0.05, "autoscaling_config": scaling}
    args["scheduler"] = {"mode": "off", "epoch_s": 0.5}
    args["ingress"] |= {"place_timeout_s": 10.0, "frontend_kwargs": CACHED_KWARGS}
    args["cache"] = {"copies": "off"}
    return config


def _disaggregated() -> dict[str, Any]:
    config = _without_copies()
    args = config["applications"][0]["args"]
    args["engine_kwargs"] |= {"max_num_batched_tokens": 256, "prefill_tokens_per_s": 1000.0}
    args["deployment_config"]["autoscaling_config"] = {"min_replicas": 3, "max_replicas": 3}
    args["scheduler"] = {"policy": "pack", "mode": "act", "epoch_s": 0.5, "cooldown_s": 1.0}
    args["disaggregation"] = {"mode": "static", "prefill_replicas": 1}
    return config


def _disaggregated_as_it_pays() -> dict[str, Any]:
    config = _disaggregated()
    config["applications"][0]["args"]["disaggregation"] = {"mode": "auto"}
    return config


def wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"the application did not start:\n{log.read_text()[-4000:]}")


def free_port() -> int:
    """A port below those that Linux gives to processes which ask for any: Ray's, which start before the server, do."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")
