"""The configurations in docs/coming-from.md are those of the command lines above them."""

from itertools import pairwise
from typing import Any

import pytest
import yaml
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from app.settings import Settings
from app.vllm_cli.translation import Host, translate
from tests.docs import markdown, shell
from tests.docs.markdown import ROOT

BLOCKS = list(markdown.blocks(ROOT / "docs" / "coming-from.md"))
SHOWN = [(command.text, held.text) for command, held in pairwise(BLOCKS) if command.text.startswith("mell serve ")]


YAML = [block.text for block in BLOCKS if block.language == "yaml"]


def application(text: str) -> dict[str, Any]:
    (found,) = yaml.safe_load(text)["applications"]
    return {**found}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "text"), SHOWN)
def test_a_configuration_is_that_of_its_command(command: str, text: str) -> None:
    from app.vllm_cli.command_line import parse

    (words,) = shell.commands(command)
    flags, own = parse(words[2:])
    found = translate(flags, Host(True, lambda name: None), own.min_replicas, own.max_replicas)
    assert application(text)["args"] == found.args


def test_there_are_such_commands_each_with_the_flags_of_vllm() -> None:
    assert len(SHOWN) == 3
    theirs = [block.text.removeprefix("vllm") for block in BLOCKS if block.text.startswith("vllm serve ")]
    assert theirs == [SHOWN[0][0].removeprefix("mell"), SHOWN[2][0].removeprefix("mell")]


@pytest.mark.parametrize("text", YAML)
def test_serve_reads_every_configuration(text: str) -> None:
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.args


def test_serve_has_the_scaling_of_ray_serve_llm() -> None:
    (theirs,) = [text for text in YAML if "ray.serve.llm" in text]
    (model,) = application(theirs)["args"]["llm_configs"]
    AutoscalingConfig.model_validate(model["deployment_config"]["autoscaling_config"])


def test_members_of_ray_serve_llm_keep_their_names_and_values() -> None:
    (theirs,) = [place for place, text in enumerate(YAML) if "ray.serve.llm" in text]
    (model,) = application(YAML[theirs])["args"]["llm_configs"]
    ours = application(YAML[theirs + 1])["args"]
    del model["deployment_config"]["autoscaling_config"]["target_ongoing_requests"]
    assert {name: ours[name] for name in model} == model
    Settings.model_validate(ours)
