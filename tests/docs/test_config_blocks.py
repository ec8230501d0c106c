"""Settings in the documentation are ones that are accepted; no block is in a language that nothing checks."""

import ast
import configparser
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from app.configuration.documents import IMPORT_PATHS
from app.ingress.access.keys import parse_keys
from app.settings import Settings
from simulator.models.files import ModelsFile
from tests.docs import markdown
from tests.docs.markdown import PAGES, Block
from tests.docs.test_shell_blocks import SHELL

BLOCKS = [block for page in PAGES for block in markdown.blocks(page) if block.language not in SHELL]

MODELS = TypeAdapter(ModelsFile)

OTHERS = {
    "": "diagrams",
    "mermaid": "made from the tables, see tests/migration/protocol/test_diagrams.py",
    "nginx": "another program's",
    "caddyfile": "another program's",
}
"""Languages that nothing here can check, and why."""

THEIRS = {
    "groups": "rules of Prometheus",
    "scrape_configs": "settings of Prometheus",
    "services": "containers",
    "apiVersion": "Kubernetes",
    "containers": "a part of Kubernetes' pods",
}
"""Members by which YAML of other programs is known."""


def check_yaml(held: Any) -> None:
    """Fail unless these are settings that are accepted, or another program's."""
    if isinstance(held, list):
        # A digest may be shortened on a page.
        parse_keys(json.dumps([{**key, "sha256": key["sha256"].rstrip("…").ljust(64, "0")} for key in held]), "page")
    elif "applications" in held:
        for application in held["applications"]:
            if application["import_path"] in IMPORT_PATHS:
                Settings.model_validate(application["args"])
            else:
                assert application["import_path"].startswith("ray.serve.llm:")
    elif "models" in held:
        MODELS.validate_json(json.dumps(held))
    elif held.keys() <= Settings.model_fields.keys():
        # A part of a configuration need not be complete: each section is checked by itself.
        for name, section in held.items():
            kind: Any = Settings.model_fields[name].annotation
            TypeAdapter(kind).validate_python(section)
    else:
        assert held.keys() & THEIRS.keys(), f"nothing checks {sorted(held)}"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_valid_for_its_page(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    # The files that are named are on the reader's machine.
    monkeypatch.setattr("app.settings.KeyFile.read", lambda file: ())
    match block.language:
        case "yaml" | "yml":
            for held in yaml.safe_load_all(block.text):
                check_yaml(held)
        case "json":
            json.loads(block.text)
        case "python":
            ast.parse(block.text)
        case "ini":
            configparser.ConfigParser(interpolation=None).read_string(block.text)
        case language:
            assert language in OTHERS, f"nothing checks blocks in {language}"


@pytest.mark.parametrize(
    "text",
    [
        "applications: [{import_path: 'mell:build_app', args: {no_such: 1}}]",
        "ingress: {port: 0}",
        "scheduler: {no_such: 1}",
        "- {name: a, no_such: 1, sha256: 5f0c}",
        "no_such: 1",
    ],
)
def test_a_wrong_setting_is_found(text: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_yaml(yaml.safe_load(text))


@pytest.mark.parametrize("file", ["serve_config.yaml", "examples/tiny.yaml"])
def test_a_shipped_configuration_is_accepted(file: str) -> None:
    check_yaml(yaml.safe_load(Path(markdown.ROOT / file).read_text()))
