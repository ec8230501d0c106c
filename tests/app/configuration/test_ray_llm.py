"""Ray Serve LLM's members: each becomes a setting, has no effect and a note, or is refused with what to write."""

from typing import Any

import pytest

from app.configuration.ray_llm import LlmConfigsRefused, as_settings
from app.settings import Settings

MODEL = {"model_id": "q", "model_source": "Qwen/Qwen2.5-7B-Instruct"}


def entry(**members: Any) -> dict[str, Any]:
    return {"model_loading_config": MODEL, **members}


def mapped(members: dict[str, Any], has_gpus: bool = False, **beside: Any) -> dict[str, Any]:
    """The settings of an entry; they are valid."""
    made = as_settings({"llm_configs": [entry(**members)], **beside}, has_gpus).settings
    Settings.model_validate(made)
    return made


def at(settings: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        settings = settings[part]
    return settings


SCALING = "deployment_config.autoscaling_config"


@pytest.mark.parametrize(
    ("members", "path", "value"),
    [
        ({}, "model_loading_config", MODEL),
        ({}, "ingress.port", None),
        ({"engine_kwargs": {"max_model_len": 1024}}, "engine_kwargs", {"max_model_len": 1024}),
        ({"engine_kwargs": {"response_role": "a"}}, "ingress.frontend_kwargs", {"response_role": "a"}),
        (
            {"engine_kwargs": {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}},
            "model_loading_config.tool_call_parser",
            "hermes",
        ),
        ({"accelerator_type": "A10"}, "accelerator_type", "A10G"),
        ({"accelerator_type": "H100"}, "migration.transport", "cuda_ipc"),
        ({"accelerator_config": {"kind": "gpu"}}, "deployment_config.num_gpus", 1),
        ({"deployment_config": {"autoscaling_config": {"max_replicas": 4}}}, SCALING, {"max_replicas": 4}),
        ({"deployment_config": {"autoscaling_config": {"min_replicas": 0}}}, SCALING, {"min_replicas": 1}),
        ({"deployment_config": {"num_replicas": 3}}, SCALING, {"min_replicas": 3, "max_replicas": 3}),
        ({"deployment_config": {"num_replicas": "auto"}}, SCALING, {"max_replicas": 100}),
        ({"deployment_config": {"health_check_period_s": 5}}, "deployment_config.health_check_period_s", 5.0),
        ({"deployment_config": {"ray_actor_options": {"num_cpus": 2}}}, "deployment_config.num_cpus", 2),
        ({"experimental_configs": {"num_ingress_replicas": 2}}, "ingress.num_replicas", 2),
        ({"placement_group_config": {"bundle_per_worker": {"CPU": 3}}}, "deployment_config.num_cpus", 3),
        (
            {
                "placement_group_config": {"bundles": [{"GPU": 1}, {"GPU": 1}]},
                "engine_kwargs": {"tensor_parallel_size": 2},
            },
            "deployment_config.num_gpus",
            2,
        ),
    ],
)
def test_a_member_becomes_a_setting(members: dict[str, Any], path: str, value: Any) -> None:
    assert at(mapped(members), path) == value


def test_a_model_may_have_no_replica_awake_where_replicas_sleep() -> None:
    bounds = {"min_replicas": 0, "initial_replicas": 0, "max_replicas": 2}
    members = {"deployment_config": {"autoscaling_config": bounds}}
    assert at(mapped(members, memory={"budget_mib": 4096}), SCALING) == {**bounds, "initial_replicas": 1}
    assert at(mapped(members, memory={"budget_mib": None}), SCALING)["min_replicas"] == 1


def test_a_model_runs_on_gpus_unless_the_entry_or_the_build_says_otherwise() -> None:
    parallel = {"engine_kwargs": {"tensor_parallel_size": 2}}
    assert mapped(parallel, has_gpus=True)["deployment_config"]["num_gpus"] == 2
    assert (
        "num_gpus" not in mapped(parallel | {"accelerator_config": {"kind": "cpu"}}, has_gpus=True)["deployment_config"]
    )
    assert "num_gpus" not in mapped(parallel)["deployment_config"]


def test_mells_own_sections_stand_beside_the_entry() -> None:
    made = mapped({}, ingress={"port": 9000}, scheduler={"mode": "observe"})
    assert made["ingress"] == {"port": 9000} and made["scheduler"] == {"mode": "observe"}


def test_the_tokenizer_has_a_source_of_its_own() -> None:
    model = {"model_id": "mell-tiny", "tokenizer_source": "a/b"}
    assert as_settings({"llm_configs": [{"model_loading_config": model}]}, False).settings["engine_kwargs"] == {
        "tokenizer": "a/b"
    }


def test_an_entry_may_be_a_file() -> None:
    made = as_settings(
        {"llm_configs": ["m.yaml"]}, False, {"m.yaml": "model_loading_config: {model_id: a/b}"}.__getitem__
    )
    assert made.settings["model_loading_config"] == {"model_id": "a/b"}


@pytest.mark.parametrize(
    ("members", "note"),
    [
        ({"log_engine_metrics": True}, "log_engine_metrics has no effect: the metrics"),
        ({"deployment_config": {"max_ongoing_requests": 8}}, "deployment_config.max_ongoing_requests has no effect"),
        (
            {"deployment_config": {"autoscaling_config": {"target_ongoing_requests": 64}}},
            "deployment_config.autoscaling_config.target_ongoing_requests has no effect: the scheduler decides",
        ),
        (
            {"engine_kwargs": {"distributed_executor_backend": "ray"}},
            "engine_kwargs.distributed_executor_backend has no",
        ),
        ({"engine_kwargs": {"enable_log_requests": True}}, "engine_kwargs.enable_log_requests has no effect"),
        (
            {"experimental_configs": {"stream_batching_interval_ms": 0}},
            "experimental_configs.stream_batching_interval_ms",
        ),
    ],
)
def test_a_member_without_effect_has_a_note(members: dict[str, Any], note: str) -> None:
    (found,) = as_settings({"llm_configs": [entry(**members)]}, False).notes
    assert found.startswith(note)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"llm_configs": {}}, "llm_configs: write a list"),
        ({"llm_configs": [1]}, "llm_configs.0: write a mapping"),
        ({"llm_configs": [entry(modle=1)]}, "modle: Ray Serve LLM has no such member"),
        ({"llm_configs": [{}]}, "model_loading_config.model_id: write"),
        ({"llm_configs": [entry(engine_kwargs=[1])]}, "engine_kwargs: write a mapping"),
        ({"llm_configs": [entry(llm_engine="SGLang")]}, "llm_engine: "),
        ({"llm_configs": [entry(server_cls="a:B")]}, "server_cls: "),
        ({"llm_configs": [entry(runtime_env={"env_vars": {"A": "b"}})]}, "runtime_env: write it beside args"),
        ({"llm_configs": [entry(lora_config={"max_num_adapters_per_replica": 4})]}, "lora_config: write engine_kwargs"),
        ({"llm_configs": [entry(callback_config={"callback_class": "a:B"})]}, "callback_config: "),
        ({"llm_configs": [entry(accelerator_config={"kind": "tpu"})]}, "accelerator_config: "),
        ({"llm_configs": [entry(accelerator_config={"kind": "cpu"}, accelerator_type="H100")]}, "accelerator_type: "),
        ({"llm_configs": [entry(placement_group_config={"bundles": [{"GPU": 0.5}]})]}, "placement_group_config: write"),
        (
            {"llm_configs": [entry(placement_group_config={"bundles": [{"GPU": 1}] * 2})]},
            "placement_group_config.bundles",
        ),
        (
            {"llm_configs": [entry(placement_group_config={"bundles": [{"GPU": 1, "CPU": "1"}]})]},
            "placement_group_config, CPU: is '1'",
        ),
        ({"llm_configs": [entry(placement_group_config={"bundles": {"GPU": 1}})]}, "placement_group_config.bundles: "),
        *(
            ({"llm_configs": [entry(deployment_config={"num_replicas": count})]}, "deployment_config.num_replicas: is")
            for count in ("2", 0, -1, 1.5, True, [2])
        ),
        (
            {"llm_configs": [entry(deployment_config={"max_replicas_per_node": 1})]},
            "deployment_config.max_replicas_per",
        ),
        (
            {"llm_configs": [entry(deployment_config={"replicas": 1})]},
            "deployment_config.replicas: Ray Serve LLM has no",
        ),
        (
            {"llm_configs": [entry(deployment_config={"ray_actor_options": {"num_gpus": 1}})]},
            "deployment_config.ray_actor_options.num_gpus: write accelerator_type",
        ),
        (
            {"llm_configs": [entry(deployment_config={"autoscaling_config": {"max": 2}})]},
            "deployment_config.autoscaling_",
        ),
        (
            {"llm_configs": [{"model_loading_config": {**MODEL, "model_source": {"bucket_uri": "s3://b"}}}]},
            "model_loading",
        ),
        (
            {"llm_configs": [{"model_loading_config": {**MODEL, "model_source": "s3://b/m"}}]},
            "model_loading_config.model_",
        ),
        ({"llm_configs": [entry()], "ingress_cls_config": {"ingress_cls": "a:B"}}, "ingress_cls_config: "),
        ({"llm_configs": [entry()], "engine_kwargs": {}}, "engine_kwargs: write it into llm_configs"),
    ],
)
def test_a_member_is_refused_with_what_to_write(args: dict[str, Any], line: str) -> None:
    with pytest.raises(LlmConfigsRefused) as refused:
        as_settings(args, False)
    (found,) = refused.value.lines
    assert found.startswith(line)


def test_every_member_of_rays_classes_is_known() -> None:
    """The classes' names come from their source: to import Ray Serve LLM takes seconds, and needs more packages."""
    from app.configuration import ray_llm
    from app.configuration.vllm_source import members_of

    package = "ray", "llm/_internal/serve/core"
    assert members_of(*package, "configs/llm_config.py", "LLMConfig") == ray_llm.OF_ENTRY
    assert members_of(*package, "ingress/builder.py", "LLMServingArgs") == ray_llm.OF_SERVING_ARGS


def several(*entries: dict[str, Any], **beside: Any) -> dict[str, Any]:
    """The settings of several entries; they are valid."""
    made = as_settings({"llm_configs": list(entries), **beside}, False).settings
    Settings.model_validate(made)
    return made


CODE = {"model_id": "code", "model_source": "org/code-7b"}


def test_several_entries_stay_entries() -> None:
    made = several(
        entry(engine_kwargs={"max_model_len": 64, "response_role": "a"}, slo={"ttft_p99_s": 2.0}),
        {
            "model_loading_config": CODE,
            "cache": {"audit_s": 5.0},
            "frontend_kwargs": {"response_role": "b"},
            "experimental_configs": {"num_ingress_replicas": 3},
        },
        scheduler={"mode": "observe"},
    )
    chat, code = made["llm_configs"]
    assert (chat["model_loading_config"], chat["engine_kwargs"]) == (MODEL, {"max_model_len": 64})
    assert (chat["frontend_kwargs"], chat["slo"]) == ({"response_role": "a"}, {"ttft_p99_s": 2.0})
    assert (code["cache"], code["frontend_kwargs"]) == ({"audit_s": 5.0}, {"response_role": "b"})
    assert made["ingress"] == {"port": None, "num_replicas": 3} and made["scheduler"] == {"mode": "observe"}
    assert made.keys() == {"llm_configs", "ingress", "scheduler"}


def test_what_mell_makes_of_several_entries_it_reads_again() -> None:
    made = several(entry(accelerator_type="A10"), {"model_loading_config": CODE}, migration={"transport": "shared"})
    assert as_settings(made, False).settings == made


def test_mells_own_members_of_a_sole_entry_have_their_usual_places() -> None:
    made = mapped({"slo": {"ttft_p99_s": 2.0}, "frontend_kwargs": {"response_role": "a"}, "cache": {"audit_s": 5.0}})
    assert made["scheduler"] == {"slo": {"ttft_p99_s": 2.0}} and made["cache"] == {"audit_s": 5.0}
    assert made["ingress"] == {"port": None, "frontend_kwargs": {"response_role": "a"}}


def test_the_transport_is_that_of_gpus_if_all_models_have_some() -> None:
    code = {"model_loading_config": CODE}
    made = as_settings({"llm_configs": [entry(accelerator_type="L4"), code]}, has_gpus=True)
    assert made.settings["migration"] == {"transport": "cuda_ipc"}
    made = as_settings({"llm_configs": [entry(accelerator_type="L4"), code | {"engine": "paced"}]}, has_gpus=True)
    paced = Settings.model_validate(made.settings).models[1]
    assert "migration" not in made.settings and paced.gpus == 0


@pytest.mark.parametrize(
    ("entries", "beside", "lines"),
    [
        ([entry(), {"model_loading_config": CODE, "modle": 1}], {}, ["llm_configs.1.modle: Ray Serve LLM has no"]),
        (
            [entry(server_cls="a:B"), {"model_loading_config": CODE, "llm_engine": "SGLang"}],
            {},
            ["llm_configs.0.server_cls: ", "llm_configs.1.llm_engine: "],
        ),
        ([entry(), {}], {}, ["llm_configs.1.model_loading_config.model_id: write"]),
        (
            [entry(), {"model_loading_config": CODE}],
            {"cache": {}, "engine_kwargs": {}},
            ["cache: write it into llm_configs", "engine_kwargs: write it into llm_configs"],
        ),
    ],
)
def test_a_member_of_one_of_several_entries_is_refused(
    entries: list[Any], beside: dict[str, Any], lines: list[str]
) -> None:
    with pytest.raises(LlmConfigsRefused) as refused:
        as_settings({"llm_configs": entries, **beside}, False)
    found = refused.value.lines
    assert len(found) == len(lines) and all(one.startswith(line) for one, line in zip(found, lines, strict=True))


def test_a_member_without_effect_has_a_note_with_its_entry() -> None:
    made = as_settings({"llm_configs": [entry(), {"model_loading_config": CODE, "log_engine_metrics": True}]}, False)
    assert [note.split(" ")[0] for note in made.notes] == ["llm_configs.1.log_engine_metrics"]
