"""Mell's application is found in Serve's files and in Kubernetes manifests, and the parts around it are compared."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.configuration.documents import DocumentError, read_documents, serve_configs, unusable
from app.configuration.surroundings import refused_entries, refused_proxy, refused_whole

MELL: dict[str, Any] = {"name": "llms", "import_path": "mell:build_app", "args": {"engine": "paced"}}
OTHER = {"name": "other", "import_path": "other:app"}


def service(whole: Any, kind: str = "RayService") -> dict[str, Any]:
    return {"apiVersion": "ray.io/v1", "kind": kind, "spec": {"serveConfigV2": whole}}


TEXT = yaml.safe_dump({"applications": [MELL]})


@pytest.mark.parametrize(
    "documents",
    [
        [{"applications": [OTHER, MELL]}],
        [service(TEXT)],
        [{"kind": "ConfigMap", "data": {}}, service(TEXT), {"kind": "Service", "spec": {}}],
        [{"kind": "List", "items": [{"kind": "Secret"}, service(TEXT)]}],
        [{"applications": [{**MELL, "import_path": "mell.build_app"}]}],
        [{"applications": [{**MELL, "import_path": "app.main:build_app"}]}],
    ],
    ids=["Serve", "RayService", "several documents", "list", "dotted", "of the source tree"],
)
def test_the_application_is_found(documents: list[Any]) -> None:
    found, errors = serve_configs(documents)
    assert errors == [] and [(each.application["args"], each.where) for each in found] == [(MELL["args"], "")]


@pytest.mark.parametrize(
    ("documents", "error"),
    [
        ([1], "applications: must be a list"),
        ([{"kind": "Service"}], "applications: must be a list"),
        (
            [{"applications": [OTHER]}],
            "applications: exactly one must have import_path: mell:build_app, but 0 have",
        ),
        (
            [{"applications": [MELL, MELL]}],
            "applications: exactly one must have import_path: mell:build_app, but 2",
        ),
        ([service("a: [")], "spec.serveConfigV2: cannot be read: line 1"),
        ([{"kind": "RayService", "spec": [1]}], "spec.serveConfigV2: must be the text of a Serve configuration"),
        ([service(None)], "spec.serveConfigV2: must be the text of a Serve configuration"),
        ([service(TEXT), {"applications": [OTHER]}], "document 2, applications: exactly one"),
        (
            [{"applications": [{"import_path": "ray.serve.llm:build_pd_openai_app"}]}],
            "import_path is ray.serve.llm:build",
        ),
        (
            [{"applications": [{"import_path": "ray.serve.llm.build_openai_app"}]}],
            "import_path is ray.serve.llm.build_openai_app: write import_path",
        ),
    ],
)
def test_the_place_of_an_error_is_named(documents: list[Any], error: str) -> None:
    _, (found,) = serve_configs(documents)
    assert found.startswith(error)


def test_a_configuration_of_ray_serve_llm_is_read_on() -> None:
    theirs = {**MELL, "import_path": "ray.serve.llm:build_openai_app"}
    (found,), (error,) = serve_configs([{"applications": [theirs]}])
    assert found.application == theirs and "write import_path: mell:build_app" in error


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "the file is empty"),
        (b"# a\n---\n---\n", "the file is empty"),
        (b"a: [\n", "cannot be read: line 2"),
        (b"\xff\xfe\xff", "cannot be read"),
    ],
)
def test_an_unreadable_file_has_one_line(content: bytes, error: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with pytest.raises(DocumentError, match=f"^{error}") as refused:
        read_documents(file)
    assert "\n" not in str(refused.value)
    with pytest.raises(DocumentError, match=r"^there is no such file$"):
        read_documents(tmp_path / "none.yaml")
    with pytest.raises(DocumentError, match=r"^cannot be read: Is a directory$"):
        read_documents(tmp_path)


def test_a_start_needs_a_file_with_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    assert unusable(str(file)) == f"{file}: there is no such file"
    file.write_text("")
    assert unusable(str(file)) == f"{file}: the file is empty"
    file.write_text("applications: []")
    assert unusable(str(file)) is None and unusable("app.main:app") is None


@pytest.mark.parametrize(
    ("members", "line"),
    [
        ({"deployments": [{"name": "Engine", "num_replicas": 2}]}, "deployments, Engine.num_replicas: write args"),
        (
            {"deployments": [{"name": "Engine", "ray_actor_options": {}}]},
            "deployments, Engine.ray_actor_options: write",
        ),
        ({"deployments": [{"name": "Engine", "user_config": {}}]}, "deployments, Engine.user_config: Mell sets it"),
        (
            {"deployments": [{"name": "Scheduler", "num_replicas": 2}]},
            "deployments, Scheduler.num_replicas: Mell sets it",
        ),
        ({"deployments": [{"name": "Ingress"}]}, "deployments, Ingress: remove the entry"),
        ({"deployments": [{"name": "LLMServer"}]}, "deployments: Mell has no deployment 'LLMServer'"),
        ({"deployments": [{"name": ["Engine"]}]}, "deployments: Mell has no deployment ['Engine']"),
        ({"deployments": ["Engine"]}, "deployments: Mell has no deployment None"),
        ({"deployments": {"name": "Engine", "num_replicas": 4}}, "deployments: Serve takes a list"),
        ({"autoscaling_policy": {"policy_function": "a:b"}}, "autoscaling_policy: Mell sets it"),
        ({"external_scaler_enabled": True}, "external_scaler_enabled: Mell's scheduler decides"),
    ],
)
def test_entries_that_would_replace_mells(members: dict[str, Any], line: str) -> None:
    (found,) = refused_entries({**MELL, **members})
    assert found.startswith(line)


def test_other_members_of_an_application_stay() -> None:
    assert (
        list(refused_entries({**MELL, "runtime_env": {"env_vars": {}}, "route_prefix": "/", "deployments": []})) == []
    )


def test_the_port_fits_serves_proxy() -> None:
    assert refused_proxy(8000, True, 8000) is None and refused_proxy(8001, False, 8000) is None
    assert refused_proxy(None, False, 8000) is None
    assert "write proxy_location: Disabled" in str(refused_proxy(8000, False, 8000))
    assert "write a port" in str(refused_proxy(None, True, 8000))
    assert list(refused_whole({"proxy_location": "Disabled"}, 8000)) == []
    assert list(refused_whole({"http_options": {"port": 8100}}, 8000)) == []
    assert [line.partition(":")[0] for line in refused_whole({"target_capacity": 50}, 8000)] == [
        "proxy_location",
        "target_capacity",
    ]
