"""`mell convert` as a program: its input, output, messages and status. vLLM's parser is replaced."""

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from app import convert as program
from app.configuration.conversion import convert_documents
from app.ingress.access.keys import VARIABLE, digest
from app.settings import Settings
from tests.app.configuration.test_conversion import entry, serve

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The flags as they come from vLLM's parser, whatever the command line is."""
    given: dict[str, Any] = {"model_tag": "m"}
    own = argparse.Namespace(min_replicas=None, max_replicas=None)
    parser = ModuleType("app.vllm_cli.command_line")
    parser.parse = lambda arguments: (given, own)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "app.vllm_cli.command_line", parser)
    for name in (VARIABLE, "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return given


def run(*arguments: object) -> int:
    """The exit status."""
    try:
        program.main([str(argument) for argument in arguments])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def args_of(text: str) -> dict[str, Any]:
    (application,) = yaml.safe_load(text)["applications"]
    Settings.model_validate(args := application["args"])
    return dict(args)


def written(folder: Path, held: Any) -> Path:
    (file := folder / "in.yaml").write_text(held if isinstance(held, str) else yaml.safe_dump(held))
    return file


def test_a_configuration_is_printed_with_its_comments(tmp_path: Path, capsys: Capture) -> None:
    assert run("--device", "cuda", written(tmp_path, serve(entry(log_engine_metrics=True)))) == 0
    shown = capsys.readouterr()
    assert args_of(shown.out)["accelerator_type"] == "H100"
    assert shown.out.startswith("# Mell's configuration, made by `mell convert` from in.yaml.\n# Notes:\n")
    assert "port: null  # clients connect to Serve's proxy" in shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith("mell convert: log_engine_metrics has no effect") and line[14:] in shown.out


def test_the_text_is_the_configuration_that_was_made(tmp_path: Path, capsys: Capture) -> None:
    other = {"name": "o", "import_path": "o:app", "args": {"a": [1, {"b": "# no comment"}]}}
    whole = serve(entry(runtime_env={"env_vars": {"A": "yes"}}), beside=(other,))
    whole |= {"http_options": {"port": 9000}, "proxy_location": "HeadOnly"}
    assert run("--device", "cuda", written(tmp_path, whole)) == 0
    made = convert_documents([whole], True, str)
    assert yaml.safe_load(capsys.readouterr().out) == made.whole


def test_what_is_left_out_is_in_the_file_and_in_the_status(tmp_path: Path, capsys: Capture) -> None:
    file = written(tmp_path, serve(entry(lora_config={"a": 1})))
    assert run(file, "--output", tmp_path / "out.yaml") == 1
    shown = capsys.readouterr()
    text = (tmp_path / "out.yaml").read_text()
    args_of(text)
    assert shown.out == "" and shown.err.startswith("mell convert: not carried over: lora_config: write ")
    assert "# Not carried over:\n#   lora_config: write " in text


def test_a_device_is_that_of_replicas_without_an_accelerator(tmp_path: Path, capsys: Capture) -> None:
    file = written(tmp_path, serve(entry(accelerator_type=None)))
    for device, gpus in (("cuda", {"num_gpus": 1}), ("cpu", {})):
        assert run("--device", device, file) == 0
        held = args_of(capsys.readouterr().out).get("deployment_config", {})
        assert {name: value for name, value in held.items() if name == "num_gpus"} == gpus


def test_no_file_is_replaced(tmp_path: Path, capsys: Capture) -> None:
    file = written(tmp_path, serve(entry()))
    assert run(file, "--output", file) == 1
    assert "in.yaml exists: remove it" in capsys.readouterr().err and yaml.safe_load(file.read_text())["applications"]
    assert run(file, "--output", tmp_path / "no" / "out.yaml") == 1
    assert "out.yaml cannot be written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file"),
        ("", "the file is empty"),
        ("a: [", "cannot be read: line 1"),
        ("a: 1", "applications: must be a list; mell convert takes"),
    ],
)
def test_a_bad_input_is_one_sentence(text: str | None, message: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "in.yaml"
    if text is not None:
        file.write_text(text)
    assert run(file) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(f"mell convert: {file}: {message}")
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize("words", [[], ["a.yaml", "b.yaml"], ["--device", "tpu", "a.yaml"]])
def test_wrong_usage(words: list[str], capsys: Capture) -> None:
    assert run(*words) == 2 and "usage: mell convert" in capsys.readouterr().err


def test_flags_become_the_configuration_of_mell_serve(flags: dict[str, Any], capsys: Capture) -> None:
    flags |= {"max_model_len": 512, "uvicorn_log_level": "debug", "api_key": ["secret"]}
    assert run("--device", "cuda", "--", "vllm", "serve", "m", "--output", "x") == 0
    shown = capsys.readouterr()
    args = args_of(shown.out)
    assert args["engine_kwargs"] == {"max_model_len": 512} and args["ingress"]["port"] == 8000
    assert yaml.safe_load(shown.out)["proxy_location"] == "Disabled"
    ignored, key = shown.err.splitlines()
    assert "--uvicorn-log-level has no effect" in ignored and VARIABLE in key and digest("secret") in key
    assert "secret" not in shown.out + shown.err


def test_refused_flags_are_left_out_and_named(flags: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    flags |= {"uds": "/x", "hf_token": "hf_secret", "max_model_len": 512}
    assert run("--device", "cpu", "--output", tmp_path / "out.yaml", "vllm", "serve", "m") == 1
    text, shown = (tmp_path / "out.yaml").read_text(), capsys.readouterr().err
    assert args_of(text)["engine_kwargs"] == {"max_model_len": 512}
    assert [line.split(": ")[2] for line in shown.splitlines()] == ["--uds", "--hf-token"]
    assert "hf_secret" not in text + shown


@pytest.mark.parametrize(
    ("given", "message"),
    [({"model_tag": None, "uds": "/x"}, "name a model"), ({"port": 0}, "ingress.port: ")],
)
def test_flags_without_a_valid_configuration(
    flags: dict[str, Any], given: dict[str, Any], message: str, capsys: Capture
) -> None:
    flags |= given
    assert run("--", "vllm", "serve") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(f"mell convert: {message}")


def test_removed_flags_are_named_before_vllm_is_imported(capsys: Capture) -> None:
    assert run("--", "vllm", "serve", "m", "--swap-space", "4") == 1
    assert capsys.readouterr().err.startswith("mell convert: --swap-space: vLLM removed it in 0.18")


def test_flags_need_vllm(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.delitem(sys.modules, "app.vllm_cli.command_line", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert run("--", "vllm", "serve", "m") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not installed, and vLLM's own parser reads the flags" in line
