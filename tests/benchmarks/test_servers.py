"""The conditions of compared servers: on CPUs those that are shipped, on GPUs vLLM's own, equal on both sides."""

import argparse
from pathlib import Path

import pytest
import yaml

from app.settings import CPU_ENV, Settings
from benchmarks import servers
from benchmarks.instruments.models import MODELS
from benchmarks.servers import ENGINE, Rig, add_rig_options, transports_of
from benchmarks.transfer.ports import BLOCK_BYTES, BLOCK_SIZE


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of every model, which is not generated."""
    monkeypatch.setattr("benchmarks.instruments.models.tinymodel.ensure_generated", lambda name, make: tmp_path / name)
    return tmp_path


def parsed(*arguments: str) -> Rig:
    parser = argparse.ArgumentParser()
    add_rig_options(parser)
    return Rig.of(parser.parse_args(arguments))


def values(command: list[str]) -> dict[str, str]:
    """The options of a command with their values, "" for switches."""
    names = [i for i, word in enumerate(command) if word.startswith("--")]
    return {command[i]: "" if i + 1 in names or i + 1 == len(command) else command[i + 1] for i in names}


def test_engine_on_a_cpu_is_the_shipped_one() -> None:
    shipped = yaml.safe_load((servers.ROOT / "examples" / "tiny.yaml").read_text())["applications"][0]["args"]
    assert shipped["engine_kwargs"] == ENGINE
    assert parsed() == Rig() and Rig().mell_settings() == {}


def test_stock_vllm_on_a_cpu_has_mells_settings() -> None:
    options = values(Rig().vllm_command(7))
    assert options["--dtype"] == "float32" and options["--block-size"] == "32" and "--enforce-eager" in options
    assert {options[f"--{name.replace('_', '-')}"] for name in ENGINE} == {str(value) for value in ENGINE.values()}


@pytest.mark.parametrize("arguments", [[], ["--eager"], ["--model", "small", "--dtype", "float16"]], ids=" ".join)
def test_both_servers_on_gpus_have_the_same_settings(arguments: list[str]) -> None:
    rig = parsed("--device", "cuda", *arguments)
    settings, options = rig.mell_settings(), values(rig.vllm_command(7))
    assert Settings.model_validate(settings).gpus == 0.45
    assert options["--model"] == settings["model_loading_config"]["model_source"]
    for name, value in settings["engine_kwargs"].items():
        assert options[f"--{name.replace('_', '-')}"] == ("" if value is True else str(value))
    assert ("--enforce-eager" in options) == ("--eager" in arguments)
    assert options["--dtype"] == (arguments[-1] if "--dtype" in arguments else "bfloat16")


def test_dummy_weights_are_for_models_without_weights_only() -> None:
    assert parsed("--device", "cuda").engine_kwargs["load_format"] == "dummy"
    assert "load_format" not in parsed("--device", "cuda", "--model", "small").engine_kwargs


@pytest.mark.parametrize(
    ("gpus", "engines", "share", "memory"), [(1, 1, 1.0, 0.8), (1, 2, 0.45, 0.4), (1, 3, 0.3, 0.27), (2, 2, 1.0, 0.8)]
)
def test_engines_share_gpus_equally(gpus: int, engines: int, share: float, memory: float) -> None:
    rig = Rig.on_gpus(gpus).sharing(engines)
    assert rig.mell_settings()["deployment_config"]["num_gpus"] == share
    assert rig.engine_kwargs["gpu_memory_utilization"] == memory


def test_both_servers_split_the_model_over_as_many_workers() -> None:
    for rig in (parsed("--workers", "2"), parsed("--device", "cuda", "--gpus", "4", "--workers", "2")):
        assert rig.mell_settings()["engine_kwargs"]["tensor_parallel_size"] == 2
        assert values(rig.vllm_command(7))["--tensor-parallel-size"] == "2"
        assert Settings.model_validate(rig.mell_settings()).gpus == (2 if rig.device == "cuda" else 0)
    assert rig.vllm_environment["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_stock_vllm_takes_the_last_of_several_gpus() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in Rig.on_gpus(1).vllm_environment
    assert Rig.on_gpus(2).vllm_environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in Rig.on_gpus(2).environment


def test_environment_has_the_cpus_settings_on_cpus_only() -> None:
    assert CPU_ENV.items() <= Rig().environment.items() and not CPU_ENV.keys() & Rig.on_gpus(1).environment.keys()
    assert "VLLM_BATCH_INVARIANT" not in Rig.on_gpus(1).environment
    assert Rig(invariant=True).environment["VLLM_BATCH_INVARIANT"] == "1"


def test_kv_bytes_are_those_of_the_caches() -> None:
    assert Rig().kv_bytes * BLOCK_SIZE == BLOCK_BYTES
    assert MODELS["8b"].kv_bytes("bfloat16") * 16 == 2 << 20


def test_gpu_transports_need_gpus() -> None:
    assert set(transports_of("cuda")) - set(transports_of("cpu")) == {"cuda_ipc", "nccl"}


def test_conditions_are_named_in_full() -> None:
    rig = Rig.on_gpus(1)
    assert str(rig) == "8b model, bfloat16, dummy weights, CUDA graphs; 2 engines on 1 GPU"
    assert "on the CPU" in str(Rig()) and "batch-invariant" in str(Rig(invariant=True))


def test_settings_of_a_benchmark_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def started(command: list[str], *_: object) -> None:
        seen.update(yaml.safe_load(Path(command[-1]).read_text())["applications"][0]["args"])
        raise InterruptedError

    monkeypatch.setattr(servers, "_process", started)
    with pytest.raises(InterruptedError), servers.mell(7, 2, Rig.on_gpus(1), migration={"transport": "shared"}):
        pass
    assert seen["engine_kwargs"] == Rig.on_gpus(1).engine_kwargs, "the shipped number of blocks is for CPUs"
    assert seen["migration"] == {"transport": "shared"}
    assert seen["deployment_config"]["autoscaling_config"] == {"min_replicas": 2, "max_replicas": 2}
