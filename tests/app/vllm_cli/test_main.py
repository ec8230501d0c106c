"""The program around the translation: files, keys, and the start. vLLM's parser is replaced."""

import argparse
import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from app.configuration.ray_llm import as_settings
from app.ingress.access.keys import VARIABLE, digest, parse_keys
from app.settings import Settings
from app.vllm_cli import __main__ as program

Run = Callable[..., None]


class Started(Exception):
    """A process was to replace this one: `command` and its `environment`."""

    def __init__(self, program: str, command: list[str], environment: dict[str, str]) -> None:
        super().__init__(program)
        self.command = command
        self.environment = environment


def _execute(program: str, command: list[str], environment: dict[str, str]) -> None:
    raise Started(program, command, environment)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the program in an empty folder with flags as they come from vLLM's parser, on a machine without GPUs."""
    flags: dict[str, Any] = {}
    own = argparse.Namespace(min_replicas=None, max_replicas=None, dry_run=False, write=None)
    parser = ModuleType("app.vllm_cli.command_line")
    parser.parse = lambda arguments: ({**flags, **of_model(arguments)}, own)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "app.vllm_cli.command_line", parser)
    monkeypatch.setattr(program, "check_installed", lambda settings: None)
    monkeypatch.setattr(program, "is_installed", lambda name: True)
    monkeypatch.setattr(os, "execve", _execute)
    monkeypatch.setattr(os, "chdir", lambda folder: None)
    monkeypatch.setenv("MELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    def run(given: dict[str, Any], arguments: Sequence[str] = (), **options: Any) -> None:
        flags.update({"model_tag": "m", **given})
        vars(own).update(options)
        program.main(list(arguments))

    return run


def of_model(arguments: Sequence[str]) -> dict[str, Any]:
    """The flags in `MODEL [name=value]...`, in place of vLLM's parser; none without arguments."""
    if not arguments:
        return {}
    name, *others = arguments
    return {"model_tag": name} | {
        key: json.loads(value) for key, _, value in (other.partition("=") for other in others)
    }


def args_of(text: str) -> dict[str, Any]:
    (application,) = yaml.safe_load(text)["applications"]
    args: dict[str, Any] = application["args"]
    return args


def test_a_dry_run_prints_the_configuration(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run({"max_model_len": 512, "uvicorn_log_level": "debug", "api_key": ["secret"]}, dry_run=True)
    shown = capsys.readouterr()
    assert args_of(shown.out)["engine_kwargs"] == {"max_model_len": 512}
    assert "--uvicorn-log-level has no effect" in shown.err and digest("secret") in shown.err
    assert "secret" not in shown.out + shown.err


def test_a_start_leaves_the_configuration_in_the_cache(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Started) as started:
        run({"port": 9000})
    file = tmp_path / "cache" / "serve" / "9000.yaml"
    assert started.value.command == [sys.executable, "-P", "-m", "app.serve", str(file)]
    assert args_of(file.read_text())["ingress"]["port"] == 9000
    assert str(file) in (shown := capsys.readouterr().err) and file.read_text() in shown
    environment = started.value.environment
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0" and VARIABLE not in environment


@pytest.mark.parametrize(
    ("flags", "environment", "keys"),
    [
        ({"api_key": ["a", "b"]}, {"VLLM_API_KEY": "c"}, ["a", "b"]),
        ({}, {"VLLM_API_KEY": "c"}, ["c"]),
        ({"api_key": ["", "a"]}, {}, ["a"]),
    ],
)
def test_a_start_has_the_digests_of_the_keys(
    run: Run, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], environment: dict[str, str], keys: list[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Started) as started:
        run(flags)
    found = parse_keys(started.value.environment[VARIABLE], "environment")
    assert [key.sha256 for key in found] == [digest(key) for key in keys]


def test_keys_of_mell_remain(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "c")
    monkeypatch.setenv(VARIABLE, "[]")
    with pytest.raises(Started) as started:
        run({})
    assert started.value.environment[VARIABLE] == "[]"
    with pytest.raises(SystemExit, match="--api-key"):
        run({"api_key": ["a"]})


def test_files_are_written_once(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, keys = tmp_path / "llama.yaml", tmp_path / "llama.keys.yaml"
    run({"api_key": ["secret"]}, write=str(file))
    args = args_of(file.read_text())
    Settings.model_validate(args)
    assert args["ingress"]["api_keys_file"] == str(keys)
    assert [key.sha256 for key in parse_keys(keys.read_text(), "file")] == [digest("secret")]
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert f"make serve CONFIG={file}" in capsys.readouterr().err
    keys.unlink()
    with pytest.raises(SystemExit, match=r"llama\.yaml exists"):
        run({"api_key": ["other"]}, write=str(file))
    assert not keys.exists()


@pytest.mark.parametrize(
    ("flags", "options", "named"),
    [
        ({"uds": "x"}, {}, "--uds"),
        ({"model_tag": None}, {}, "mell serve MODEL"),
        ({"port": 0}, {}, "ingress.port"),
        ({}, {"min_replicas": 3, "max_replicas": 2}, "min_replicas"),
        ({"max_model_len": -1}, {}, "max_model_len"),
    ],
)
@pytest.mark.parametrize("shown", [{}, {"dry_run": True}, {"write": "never.yaml"}], ids=["start", "dry run", "write"])
def test_nothing_starts_that_cannot(
    run: Run, flags: dict[str, Any], options: dict[str, Any], named: str, shown: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=named) as failed:
        run(flags, **options, **shown)
    assert str(failed.value.code).startswith("mell serve: ")
    assert list(tmp_path.iterdir()) == [] and not Path("never.yaml").exists()


def test_the_installed_build_is_checked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: Settings) -> None:
        raise ValueError("another build")

    monkeypatch.setattr(program, "check_installed", refuse)
    with pytest.raises(SystemExit, match="another build"):
        run({})


def test_paths_of_what_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert [program.locate(name) for name in ("model", "org/model", "")] == [str(tmp_path / "model"), None, None]


def test_keys_are_a_list_in_json() -> None:
    assert json.loads(program.variables([{"name": "a", "sha256": "b"}])[VARIABLE]) == [{"name": "a", "sha256": "b"}]
    assert program.variables([]) == {}


def test_removed_flags_end_the_command_before_vllm_is_imported(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "app.vllm_cli.command_line")
    file = tmp_path / "vllm.yaml"
    file.write_text("model: m\nswap-space: 4\n")
    with pytest.raises(SystemExit, match=r"--task: vLLM removed it in 0.13: .*\n.*--swap-space: ") as ended:
        program.main(["m", "--task", "embed", "--config", str(file)])
    assert "app.vllm_cli.command_line" not in sys.modules and ended.value.code != 0


def test_several_models_become_one_configuration(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    arguments = ["org/chat", "port=9000", 'response_role="bot"', "--", "org/code", "max_model_len=64"]
    run({}, arguments, write=str(file))
    text = file.read_text()
    assert text.startswith("# Mell's configuration for `mell serve org/chat -- org/code`")
    args = args_of(text)
    chat, code = args["llm_configs"]
    assert chat["model_loading_config"] == {"model_id": "org/chat", "model_source": "org/chat"}
    assert chat["frontend_kwargs"] == {"response_role": "bot"} and "frontend_kwargs" not in code
    assert code["engine_kwargs"] == {"max_model_len": 64} and "engine_kwargs" not in chat
    assert args["ingress"] == {"host": "0.0.0.0", "port": 9000} and args.keys() == {"llm_configs", "ingress"}
    read = as_settings(args, has_gpus=False)
    assert read.notes == () and [model.model_id for model in Settings.model_validate(read.settings).models] == [
        "org/chat",
        "org/code",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a/b", "--", "a/c", "port=9000"], "--port: write it with the first model, before --, and not with a/c"),
        (["a/b", "--", "a/c", "api_server_count=2"], "--api-server-count: write it with the first model"),
        (["a/b", "--", "a/c", 'api_key=["x"]'], "--api-key: write it with the first model"),
        (["a/b", "--", "a/b"], "several entries have the model_id a/b"),
    ],
)
def test_flags_of_the_server_stand_with_the_first_model(run: Run, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run({}, arguments, dry_run=False)


def test_models_are_separated_by_two_dashes() -> None:
    split = program.split_models(["a", "--x", "--", "b", "--", "c", "--y=1"])
    assert split == [["a", "--x"], ["b"], ["c", "--y=1"]] and program.split_models([]) == [[]]
