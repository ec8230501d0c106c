"""The manifest in `deploy/kuberay/`, and the check of objects against their schemas."""

import json
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator  # type: ignore[import-untyped, unused-ignore]

from tests.deploy.pruning import SCHEMAS

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFEST = DEPLOY / "kuberay" / "mell.yaml"
Object = dict[str, Any]


def objects() -> list[Object]:
    """The objects of the manifest."""
    return [found for found in yaml.safe_load_all(MANIFEST.read_text()) if found]


def of_kind(found: list[Object], kind: str) -> Object:
    """The only object of a kind."""
    (only,) = [each for each in found if each["kind"] == kind]
    return only


def errors(found: Object) -> list[str]:
    """The violations of an object's schema. Raises KeyError for a kind without one."""
    schemas = json.loads(SCHEMAS.read_text())
    kind = schemas["kinds"][f"{found['apiVersion']}/{found['kind']}"]
    validator = Draft7Validator({"allOf": [kind], "definitions": schemas["definitions"]})
    return ["/".join(map(str, each.absolute_path)) + ": " + each.message for each in validator.iter_errors(found)]
