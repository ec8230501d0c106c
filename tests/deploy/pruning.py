"""Makes `tests/data/kubernetes/schemas.json`: the schemas of the kinds in `deploy/`, strict and without descriptions.

`python -m tests.deploy.pruning CRD_FOLDER... KUBERNETES_FOLDER`: folders with custom resource definitions, and the
folder of a version in kubernetes-json-schema (`v1.33.0-local-strict`). tests/data/kubernetes/README.md has the sources.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parents[1] / "data" / "kubernetes" / "schemas.json"

CUSTOM = ("RayService", "ServiceMonitor", "PodMonitor")
NATIVE = (
    "namespace-v1",
    "secret-v1",
    "persistentvolumeclaim-v1",
    "service-v1",
    "poddisruptionbudget-policy-v1",
    "networkpolicy-networking-v1",
)
_KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")
_NESTED = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "not")
_FREE: dict[str, Any] = {}
_SHARED_CHARACTERS = 200


class Pruner:
    """Strict JSON schemas of Kubernetes' own; equal parts become one of the `definitions`.

    `referred` are the definitions of the given schemas, to which these refer by name.
    """

    def __init__(self, referred: dict[str, Any]) -> None:
        self.definitions: dict[str, Any] = {}
        self._referred = referred

    def strict(self, node: Any) -> Any:
        """The schema of a node: unknown members are refused, as by `kubectl --validate=strict`."""
        if isinstance(node, list):
            return [self.strict(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return self.strict(self._referred[node["$ref"].rpartition("/")[2]])
        if node.get("x-kubernetes-int-or-string"):
            return {"type": ["integer", "string"]}
        made = {name: node[name] for name in _KEPT if name in node}
        if node.get("nullable") and isinstance(made.get("type"), str):
            made["type"] = [made["type"], "null"]
        made |= {name: self.strict(node[name]) for name in _NESTED if name in node}
        if "properties" in node:
            made["properties"] = {name: self.strict(schema) for name, schema in node["properties"].items()}
            if not node.get("x-kubernetes-preserve-unknown-fields"):
                made.setdefault("additionalProperties", False)
        return self._shared(made)

    def _shared(self, schema: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(schema, sort_keys=True)
        if len(text) < _SHARED_CHARACTERS:
            return schema
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.definitions[name] = schema
        return {"$ref": f"#/definitions/{name}"}

    def whole(self, schema: dict[str, Any]) -> Any:
        """The schema of an object, whose metadata Kubernetes itself checks."""
        members = schema["properties"] | {"metadata": _FREE, "apiVersion": _FREE, "kind": _FREE, "status": _FREE}
        return self.strict({**schema, "properties": members})


def main(folders: list[str]) -> None:
    """Write the file."""
    *crds, kubernetes = map(Path, folders)
    pruner, kinds = Pruner(json.loads((kubernetes / "_definitions.json").read_text())["$defs"]), {}
    for crd in (document for folder in crds for path in folder.glob("*.yaml") for document in _documents(path)):
        if (kind := crd["spec"]["names"]["kind"]) in CUSTOM:
            for version in crd["spec"]["versions"]:
                name = f"{crd['spec']['group']}/{version['name']}/{kind}"
                kinds[name] = pruner.whole(version["schema"]["openAPIV3Schema"])
    for file in NATIVE:
        schema = json.loads((kubernetes / f"{file}.json").read_text())
        (kind,) = schema["properties"]["kind"]["enum"]
        (version,) = schema["properties"]["apiVersion"]["enum"]
        kinds[f"{version}/{kind}"] = pruner.whole(schema)
    SCHEMAS.write_text(json.dumps({"kinds": kinds, "definitions": pruner.definitions}, sort_keys=True) + "\n")


def _documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


if __name__ == "__main__":
    main(sys.argv[1:])
