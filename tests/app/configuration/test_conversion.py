"""Ray Serve LLM's configuration in any of its files, as Mell's own; what Mell lacks is left out and named."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.configuration.conversion import Conversion, NotConverted, checked_settings, convert_documents
from app.settings import Settings

MODEL = {"model_id": "q", "model_source": "Qwen/Qwen2.5-7B-Instruct"}
MANIFEST = Path(__file__).parents[3] / "deploy" / "kuberay" / "mell.yaml"


def entry(**members: Any) -> dict[str, Any]:
    return {"model_loading_config": MODEL, "accelerator_type": "H100", **members}


def serve(*entries: Any, beside: tuple[Any, ...] = (), **members: Any) -> dict[str, Any]:
    """A configuration of Serve with these models in an application of Ray Serve LLM."""
    application = {"name": "llms", "import_path": "ray.serve.llm:build_openai_app", "route_prefix": "/"}
    return {"applications": [{**application, "args": {"llm_configs": list(entries)}, **members}, *beside]}


def rayservice(whole: Any, **spec: Any) -> dict[str, Any]:
    text = yaml.safe_dump(whole)
    return {"kind": "RayService", "metadata": {"name": "s"}, "spec": {"serveConfigV2": text, **spec}}


def never(path: str) -> str:
    raise AssertionError(path)


def convert(*documents: Any) -> Conversion:
    """The conversion; its settings are valid."""
    made = convert_documents(list(documents), has_gpus=True, read=never)
    checked_settings(made.application["args"])
    assert made.application in made.whole["applications"]
    return made


def test_a_model_keeps_its_application_and_its_clients() -> None:
    proxy = {"http_options": {"host": "0.0.0.0"}}
    scaling = {"min_replicas": 1, "max_replicas": 4}
    made = convert(serve(entry(deployment_config={"autoscaling_config": scaling})) | proxy)
    assert made.whole["http_options"] == proxy["http_options"] and (made.notes, made.left_out) == ([], [])
    assert made.application == {
        "name": "llms",
        "import_path": "mell:build_app",
        "route_prefix": "/",
        "args": {
            "model_loading_config": MODEL,
            "accelerator_type": "H100",
            "deployment_config": {"autoscaling_config": scaling},
            "migration": {"transport": "cuda_ipc"},
            "ingress": {"port": None},
        },
    }
    assert made.comments.keys() == {"ingress.port", "migration.transport"}


def test_the_environment_of_a_model_becomes_that_of_its_application() -> None:
    environment = {"env_vars": {"A": "b"}}
    made = convert(serve(entry(runtime_env=environment)))
    assert made.application["runtime_env"] == environment and made.left_out == []
    both = convert(serve(entry(runtime_env=environment), runtime_env={"env_vars": {"C": "d"}}))
    assert both.application["runtime_env"] == {"env_vars": {"C": "d"}}
    assert [line.split(":")[0] for line in both.left_out] == ["runtime_env"]


@pytest.mark.parametrize(
    ("whole", "named"),
    [
        (serve(entry(lora_config={"max_num_adapters_per_replica": 2})), "lora_config"),
        (serve(entry(no_such=1)), "no_such"),
        (serve(entry(engine_kwargs={"pipeline_parallel_size": 2})), "engine_kwargs.pipeline_parallel_size"),
        (serve(entry(), deployments=[{"name": "LLMServer", "num_replicas": 2}]), "deployments"),
        (serve(entry(), autoscaling_policy={"name": "x:y"}), "autoscaling_policy"),
        (serve(entry()) | {"target_capacity": 50}, "target_capacity"),
    ],
)
def test_what_mell_lacks_is_left_out_and_named(whole: dict[str, Any], named: str) -> None:
    made = convert(whole)
    assert [line.split(":")[0] for line in made.left_out] == [named]
    assert made.whole == convert(serve(entry())).whole


def test_what_has_no_effect_is_noted() -> None:
    made = convert(serve(entry(log_engine_metrics=True)))
    assert [line.split(" ")[0] for line in made.notes] == ["log_engine_metrics"] and made.left_out == []


def test_other_applications_stay() -> None:
    other = {"name": "o", "import_path": "o:app", "route_prefix": "/o"}
    assert convert(serve(entry(), beside=(other,))).whole["applications"][1] == other


def test_a_rayservice_is_converted_and_the_rest_of_its_manifest_is_named() -> None:
    secret = {"kind": "Secret", "metadata": {"name": "keys"}}
    service = rayservice(serve(entry()), rayClusterConfig={})
    for documents in ([secret, service], [{"kind": "List", "items": [secret, service]}]):
        made = convert(*documents)
        assert made.whole == convert(serve(entry())).whole
        first, second = made.notes
        assert first == "Secret keys stays as it is" and second.startswith("spec.rayClusterConfig stays")


def test_mells_own_configuration_passes_without_the_files_of_its_pods() -> None:
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    made = convert(*documents)
    (service,) = (document for document in documents if document["kind"] == "RayService")
    assert made.whole == yaml.safe_load(service["spec"]["serveConfigV2"]) and made.left_out == []
    assert {"ingress.api_keys_file", "ingress.admin_key_file"} <= {note.split(":")[0] for note in made.notes}


def test_absent_files_are_not_read_and_present_ones_are(tmp_path: Path) -> None:
    absent = {"ssl_certfile": "/no/cert", "ssl_keyfile": "/no/key", "ssl_cert_reqs": 1, "admin_key_file": "/no/admin"}
    _, lines = checked_settings({"ingress": absent, "model_loading_config": {"chat_template": "/no/template"}})
    assert len(lines) == 4 and all("is not on this machine" in line for line in lines)
    (keys := tmp_path / "keys.yaml").write_text("no list")
    with pytest.raises(NotConverted, match="api_keys_file"):
        checked_settings({"ingress": {"api_keys_file": str(keys)}})


def test_a_file_in_the_place_of_a_model_is_read() -> None:
    made = convert_documents([serve("q.yaml")], True, lambda path: yaml.safe_dump(entry()) * (path == "q.yaml"))
    assert made.whole == convert(serve(entry())).whole


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([{"a": 1}], "applications: must be a list; mell convert takes"),
        (["text"], "applications: must be a list; mell convert takes"),
        ([{"kind": "Deployment"}], "mell convert takes"),
        ([{"applications": [{"import_path": "o:app"}]}], "but 0 have; mell convert takes"),
        ([rayservice("text")], "spec.serveConfigV2: must be the text"),
        ([serve()], "llm_configs: write a list of models"),
        ([serve(entry(), args={})], "args: there are no llm_configs"),
        ([serve(entry(), args=[1])], "args: must be a mapping"),
        ([serve(entry(), entry())], "llm_configs: several entries have the model_id q: give each its own"),
        ([serve(entry(), beside=(serve(entry())["applications"][0],))], "applications: there are 2 with a model"),
        ([serve(entry()), serve(entry())], "there are 2 configurations with a model"),
        ([serve({"accelerator_type": "H100"})], "model_loading_config.model_id: write"),
        (
            [serve(entry(engine_kwargs={"data_parallel_size": 2, "enable_expert_parallel": True}))],
            "one model on 2 GPUs",
        ),
        (
            [serve(entry(), args={"llm_configs": [entry()], "schedular": {"mode": "act"}})],
            "schedular: no such setting; did you mean",
        ),
        ([serve(entry()) | {"proxy_location": "Disabled"}], "proxy_location: ingress.port is null"),
        ([serve(entry(), import_path="ray.serve.llm:build_pd_openai_app")], "disaggregation.mode: static or auto$"),
    ],
)
def test_an_input_without_a_valid_model_is_refused_in_a_sentence(documents: list[Any], message: str) -> None:
    with pytest.raises(NotConverted, match=message) as refused:
        convert_documents(documents, has_gpus=True, read=never)
    assert len(refused.value.lines) == 1


def test_settings_that_are_refused_are_named_beside_what_was_left_out() -> None:
    with pytest.raises(NotConverted) as refused:
        convert(serve(entry(lora_config={"a": 1}, deployment_config={"autoscaling_config": {"max_replicas": "x"}})))
    assert [line.split(":")[0] for line in refused.value.lines] == [
        "lora_config",
        "deployment_config.autoscaling_config.max_replicas",
    ]


def test_the_settings_have_the_order_of_their_page() -> None:
    made = convert(serve(entry(engine_kwargs={"max_model_len": 8}), args={"ingress": {}, "llm_configs": [entry()]}))
    names = list(made.application["args"])
    assert names == [name for name in Settings.model_fields if name in names]


def test_several_models_stay_in_one_application() -> None:
    code = {"model_loading_config": {"model_id": "code", "model_source": "org/code-7b"}, "accelerator_type": "L4"}
    fixed = {"deployment_config": {"autoscaling_config": {"min_replicas": 2, "max_replicas": 2}}}
    refused = {"engine_kwargs": {"pipeline_parallel_size": 2, "max_model_len": 64}, "lora_config": {"x": 1}}
    two = {"deployment_config": {"num_replicas": 2}}
    made = convert(serve(entry(**two), {**code, **two, **refused}))
    assert made.application["args"] == {
        "migration": {"transport": "cuda_ipc"},
        "ingress": {"port": None},
        "llm_configs": [entry(**fixed), {**code, **fixed, "engine_kwargs": {"max_model_len": 64}}],
    }
    assert [line.split(":")[0] for line in made.left_out] == [
        "llm_configs.1.lora_config",
        "llm_configs.1.engine_kwargs.pipeline_parallel_size",
    ]
    again = convert({"applications": [made.application]})
    assert again.application == made.application and again.left_out == []


def test_absent_files_of_one_of_several_models_are_not_read() -> None:
    code = {"model_loading_config": {"model_id": "code", "model_source": "org/c", "chat_template": "/none.jinja"}}
    made = convert(serve(entry(), code))
    assert made.notes == [
        "llm_configs.1.model_loading_config.chat_template: /none.jinja is not on this machine, and was not read"
    ]
