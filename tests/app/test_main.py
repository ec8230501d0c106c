"""From settings to an application: its deployments and their configurations. Ray is not started."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray._common.utils import load_class
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray.serve._private import constants
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import ServeApplicationSchema

from app.compatibility.contract import ContractPart, LostPart
from app.compatibility.facts import Fact
from app.ingress.access.keys import ApiKey, digest, entry
from app.ingress.config import IngressConfig, Tenancy
from app.main import build_app
from app.tinymodel import VERSION
from deployments.config import Caching, EngineConfig, MigrationSettings, SchedulerConfig
from deployments.replica.standby import HOOK, prepare
from deployments.serve.environment import MARK, check_environment
from tests.app.test_settings import shipped

SERVE_METRICS = "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS"


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model exists and the right build of vLLM is installed."""
    folder = tmp_path / f"tiny-llama-v{VERSION}"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("MELL_CACHE", str(tmp_path))
    monkeypatch.delenv("MELL_API_KEYS", raising=False)
    monkeypatch.delenv("MELL_ADMIN_KEY", raising=False)
    monkeypatch.setattr("app.main.check_installed", lambda settings: None)
    return folder


def deployments(args: dict[str, Any]) -> dict[str, Any]:
    """The application's deployments by name."""
    ingress = build_app(args)._bound_deployment
    return {ingress.name: ingress} | {a._bound_deployment.name: a._bound_deployment for a in ingress.init_args[2:]}


def test_processes_run_on_nodes_with_their_resources() -> None:
    placed = {"placement": {"resources": {"front": 0.5}}}
    found = deployments({**shipped(), "ingress": placed, "scheduler": placed, "deployment_config": placed})
    options = [found[name].ray_actor_options for name in ("Ingress", "Scheduler", "Engine")]
    assert [each["resources"] for each in options] == [{"front": 0.5}] * 3
    assert all(MARK.items() <= each["runtime_env"]["env_vars"].items() for each in options)


def test_processes_run_on_nodes_with_their_labels() -> None:
    placed = {"placement": {"labels": {"pool": "front", "ray.io/market-type": "!spot"}}}
    found = deployments({**shipped(), "ingress": placed, "scheduler": placed, "deployment_config": placed})
    options = [found[name].ray_actor_options for name in ("Ingress", "Scheduler", "Engine")]
    assert [each["label_selector"] for each in options] == [placed["placement"]["labels"]] * 3
    assert not any("fallback_strategy" in each for each in options)
    assert all(MARK.items() <= each["runtime_env"]["env_vars"].items() for each in options)
    with pytest.raises(ValueError, match="Invalid label selector value"):
        deployments({**shipped(), "ingress": {"placement": {"labels": {"pool": "in(a"}}}})


def test_ingress_and_scheduler_prefer_nodes_without_gpus() -> None:
    found = deployments(shipped())
    for name in ("Ingress", "Scheduler"):
        options = found[name].ray_actor_options
        wanted = options["label_selector"]["ray.io/accelerator-type"]
        assert wanted.startswith("!in(") and {"H100", "A100", "L4"} <= set(wanted[4:-1].split(","))
        assert options["fallback_strategy"] == [{"label_selector": {}}], "any node, if there is no other"
        assert MARK.items() <= options["runtime_env"]["env_vars"].items()
    assert "label_selector" not in found["Engine"].ray_actor_options
    by_resource = deployments({**shipped(), "ingress": {"placement": {"resources": {"front": 0.5}}}})
    assert "label_selector" not in by_resource["Ingress"].ray_actor_options


def test_the_keep_alive_time_is_the_settings_or_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
    monkeypatch.delenv(variable, raising=False)

    def keep_alive_s(**ingress: Any) -> float | None:
        config: IngressConfig = deployments({**shipped(), "ingress": ingress})["Ingress"].init_args[0]
        return config.keep_alive_s

    assert keep_alive_s() is None
    monkeypatch.setenv(variable, "75")
    assert (keep_alive_s(), keep_alive_s(keep_alive_s=9)) == (75, 9)
    monkeypatch.setenv(variable, "soon")
    with pytest.raises(ValueError, match=variable):
        keep_alive_s()


def test_the_shipped_configuration_has_three_deployments() -> None:
    assert list(deployments(shipped())) == ["Ingress", "Engine", "Scheduler"]


def test_every_deployment_gets_its_configuration(made: Path) -> None:
    built = deployments(shipped())
    ingress, topology = built["Ingress"].init_args[:2]
    engine, migration, _ = built["Engine"].init_args
    scheduler, _ = built["Scheduler"].init_args
    assert isinstance(ingress, IngressConfig) and isinstance(engine, EngineConfig)
    assert isinstance(migration, MigrationSettings) and isinstance(scheduler, SchedulerConfig)
    (model,) = ingress.models
    assert topology.pools == {model.model_id: "Engine"} and engine.model_id == model.model_id
    assert (topology.grace_s, ingress.models[0].initial_replicas) == (60.0, 2)
    assert model.model_source == engine.model_source == str(made)
    assert (migration.transport, migration.slot_mib, scheduler.epoch_s) == ("shared", "auto", 1.0)


def test_a_model_that_comes_along_is_chosen_by_its_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("app.main.SHIPPED", {"smollm2-135m": lambda: tmp_path / "made"})
    engine = deployments(shipped("serve_config.yaml"))["Engine"].init_args[0]
    assert engine.model_source == str(tmp_path / "made") and engine.kwargs["served_model_name"] == "smollm2-135m"


NAMED = {"served_model_name": "mell-tiny"}
"""The model's name in vLLM's metrics."""


def test_with_classes_engines_schedule_by_priority_unless_they_are_set_otherwise() -> None:
    classes: dict[str, Any] = {"scheduler": {"classes": {"batch": {"rank": -1}}}}
    built = deployments(classes)
    assert built["Engine"].init_args[0].kwargs["scheduling_policy"] == "priority"
    assert built["Ingress"].init_args[0].service_classes.names == ("default", "batch")
    assert not built["Ingress"].init_args[0].models[0].has_level
    assert built["Scheduler"].init_args[0].terms.classes.rank("batch") == -1
    fcfs = deployments({**classes, "engine_kwargs": {"scheduling_policy": "fcfs"}})
    assert fcfs["Engine"].init_args[0].kwargs["scheduling_policy"] == "fcfs"


@pytest.mark.parametrize("scheduler", [{"slo": {"ttft_p99_s": 2.0}}, {"classes": {"chat": {"itl_p99_ms": 90.0}}}])
def test_ingresses_keep_the_times_that_a_level_is_compared_with(scheduler: dict[str, Any]) -> None:
    assert deployments({"scheduler": scheduler})["Ingress"].init_args[0].models[0].has_level


def test_keys_in_the_environment_list_only_classes_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MELL_API_KEYS", entry("team", "key") + "  classes: [gold]\n")
    with pytest.raises(ValueError, match="MELL_API_KEYS: key 1 lists 'gold'; the classes are default"):
        build_app({})
    assert deployments({"scheduler": {"classes": {"gold": {}}}})["Ingress"].init_args[0].api_keys[0].classes == (
        "gold",
    )


def test_engine_defaults_without_gpus() -> None:
    engine = deployments({})["Engine"]
    assert engine.init_args[0].kwargs == {**NAMED, "dtype": "float32", "block_size": 32, "enforce_eager": True}
    assert "num_gpus" not in engine.ray_actor_options
    environment = engine.ray_actor_options["runtime_env"]["env_vars"]
    assert environment["OMP_NUM_THREADS"] == "1" and environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "512"


def test_compiled_functions_outlive_a_restart_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(args: dict[str, Any]) -> str | None:
        found: dict[str, str] = deployments(args)["Engine"].ray_actor_options["runtime_env"]["env_vars"]
        return found.get("TORCHINDUCTOR_CACHE_DIR")

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert folder({}) == str(tmp_path / "compiled")
    assert folder({"accelerator_type": "H100"}) is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert folder({}) == "/elsewhere"


def test_adapters_without_gpus_have_no_output_layer() -> None:
    engine = deployments({"engine_kwargs": {"enable_lora": True}})["Engine"].init_args[0]
    assert "q_proj" in engine.kwargs["lora_target_modules"] and "lm_head" not in engine.kwargs["lora_target_modules"]
    own = {"enable_lora": True, "lora_target_modules": ["lm_head"]}
    assert deployments({"engine_kwargs": own})["Engine"].init_args[0].kwargs["lora_target_modules"] == ["lm_head"]


def test_engine_defaults_with_gpus_are_vllms() -> None:
    engine = deployments({"accelerator_type": "H100"})["Engine"]
    assert engine.init_args[0].kwargs == NAMED
    assert engine.ray_actor_options["num_gpus"] == 1.0
    assert engine.ray_actor_options["accelerator_type"] == "H100"
    assert engine.ray_actor_options["runtime_env"]["env_vars"].keys() == {
        "VLLM_NO_USAGE_STATS",
        SERVE_METRICS,
        *MARK,
    }


def test_replica_of_several_workers_has_a_gpu_for_each() -> None:
    engine = deployments({"accelerator_type": "H100", "engine_kwargs": {"tensor_parallel_size": 4}})["Engine"]
    assert engine.ray_actor_options["num_gpus"] == 4.0
    assert engine.init_args[0].kwargs == NAMED | {"tensor_parallel_size": 4}


def _no_controller() -> None:
    raise ValueError("there is no actor of this name")


@dataclass
class Answer:
    """A method of an actor, with its answer."""

    value: Any

    def remote(self) -> Any:
        return self.value


@dataclass
class ServeController:
    """What the build asks Serve's controller."""

    config: ServeApplicationSchema
    location: ProxyLocation = ProxyLocation.Disabled

    @property
    def get_app_configs(self) -> Answer:
        return Answer({"llms": self.config})

    @property
    def get_proxy_location(self) -> Answer:
        return Answer(self.location)

    @property
    def get_http_config(self) -> Answer:
        return Answer(HTTPOptions(port=8000))


@pytest.fixture
def in_serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Builds the application as Serve does on a cluster with one node, from a configuration with more members."""

    def build(args: dict[str, Any], location: ProxyLocation = ProxyLocation.Disabled, **others: Any) -> None:
        config = ServeApplicationSchema(name="llms", import_path="app.main:build_app", args=args, **others)
        node = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0}}
        monkeypatch.setattr("app.main.ray.is_initialized", lambda: True)
        monkeypatch.setattr("app.main.ray.nodes", lambda: [node])
        monkeypatch.setattr("app.main.ray.get", lambda answer: answer)
        monkeypatch.setattr("app.main.controller", lambda: ServeController(config, location))
        build_app(args)

    return build


@pytest.mark.parametrize(
    ("args", "others", "refused"),
    [
        (
            {},
            {"deployments": [{"name": "Engine", "autoscaling_config": {"min_replicas": 2}}]},
            r"deployments, Engine.autoscaling_config: write args.deployment_config.autoscaling_config",
        ),
        ({}, {"deployments": [{"name": "Ingress", "num_replicas": 2}]}, r"args.ingress.num_replicas"),
        (
            {},
            {"deployments": [{"name": "Engine-chat", "num_replicas": 2}]},
            r"deployments, Engine-chat.num_replicas: write args.deployment_config.autoscaling_config",
        ),
        ({}, {"location": ProxyLocation.EveryNode}, "ingress.port 8000 is the port of Serve's proxy"),
        ({"ingress": {"port": None}}, {}, "ingress.port is null, and Serve has no proxy"),
        ({"model_loading_config": {"model_source": "/none"}}, {}, "model_source: there is no /none on this machine"),
        ({"accelerator_type": "H100"}, {}, "accelerator_type is H100, but the cluster's GPUs are A100"),
        ({"llm_configs": []}, {}, "llm_configs: write a list of models"),
    ],
)
def test_what_does_not_fit_around_the_settings_is_refused(
    args: dict[str, Any], others: dict[str, Any], refused: str, in_serve: Callable[..., None]
) -> None:
    with pytest.raises(ValueError, match=refused):
        in_serve(args, **others)


def test_what_fits_around_the_settings_is_built(in_serve: Callable[..., None]) -> None:
    in_serve({"accelerator_type": "A100"}, runtime_env={"env_vars": {"HF_TOKEN": "x"}})
    in_serve({"ingress": {"port": None}}, ProxyLocation.HeadOnly)


def test_one_entry_of_llm_configs_is_built() -> None:
    model = {"model_id": "mell-tiny"}
    built = deployments({"llm_configs": [{"model_loading_config": model, "engine_kwargs": {"max_num_seqs": 8}}]})
    assert built["Engine"].init_args[0].kwargs["max_num_seqs"] == 8 and built["Ingress"].init_args[0].port is None


@pytest.mark.parametrize(
    ("gpus", "workers", "refused"),
    [((), 4, False), ((0.0, 0.0), 4, False), ((4.0, 2.0), 4, False), ((2.0, 2.0), 4, True), ((1.0,), 2, True)],
    ids=["no cluster", "no GPUs yet", "enough on one node", "enough on two nodes together", "too few"],
)
def test_replica_that_fits_on_no_node_is_refused(
    gpus: tuple[float, ...], workers: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {"Alive": False, "Resources": {"GPU": 8.0}}
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": g}} for g in gpus]
    monkeypatch.setattr("app.main.ray.is_initialized", lambda: bool(gpus))
    monkeypatch.setattr("app.main.ray.nodes", lambda: [*nodes, gone])
    monkeypatch.setattr("app.main.controller", _no_controller)
    args = {"accelerator_type": "H100", "engine_kwargs": {"tensor_parallel_size": workers}}
    if refused:
        with pytest.raises(ValueError, match=rf"must fit on one node.*write tensor_parallel_size: {gpus[0]:g}"):
            build_app(args)
    else:
        build_app(args)


def test_only_with_a_standby_rays_workers_prepare_for_a_replica() -> None:
    without, with_it = (deployments({"deployment_config": {"standby": on}})["Engine"] for on in (False, True))
    assert not HOOK.keys() & without.ray_actor_options["runtime_env"]["env_vars"].keys()
    assert HOOK.items() <= with_it.ray_actor_options["runtime_env"]["env_vars"].items()
    assert [e.init_args[0].standby for e in (without, with_it)] == [False, True]


def test_rays_hook_has_the_name_that_ray_looks_for() -> None:
    (variable,), (name,) = HOOK.keys(), HOOK.values()
    assert variable == WORKER_PROCESS_SETUP_HOOK_ENV_VAR
    assert load_class(name) is prepare


def test_ingress_and_scheduler_have_one_event_loop_by_settings_that_ray_has() -> None:
    bound = deployments({})
    for name in ("Ingress", "Scheduler"):
        environment = _environment(bound[name])
        for other in (SERVE_METRICS, *MARK):
            del environment[other]
        assert set(environment.values()) == {"0"}
        assert all(getattr(constants, variable) is True for variable in environment), "their defaults"
    assert {v for v in _environment(bound["Engine"]) if v.startswith("RAY_SERVE")} == {SERVE_METRICS}


def test_serves_own_gauges_are_set_rarely_by_a_setting_that_ray_has() -> None:
    assert getattr(constants, SERVE_METRICS) == 100, "its default, in ms"
    assert {_environment(deployment)[SERVE_METRICS] for deployment in deployments({}).values()} == {"1000"}


def _environment(deployment: Any) -> dict[str, str]:
    return dict(deployment.ray_actor_options["runtime_env"]["env_vars"])


def test_engine_kwargs_override_defaults() -> None:
    kwargs = deployments({"engine_kwargs": {"block_size": 64, "max_model_len": 512}})["Engine"].init_args[0].kwargs
    assert (kwargs["block_size"], kwargs["max_model_len"], kwargs["dtype"]) == (64, 512, "float32")


def test_the_scheduler_keeps_the_number_of_replicas_within_bounds() -> None:
    """Serve's own bounds would keep an operator from changing them."""
    scaling = deployments(shipped())["Engine"]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (1, 2, 10_000)


@pytest.mark.parametrize("name", ["Ingress", "Engine", "Scheduler"])
def test_serve_never_rejects_a_call(name: str) -> None:
    assert deployments(shipped())[name].max_ongoing_requests == 1_000_000_000


def test_a_replica_without_the_environment_of_its_deployment_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for built in deployments({}).values():
        assert MARK.items() <= built.ray_actor_options["runtime_env"]["env_vars"].items()
    monkeypatch.delenv("MELL_DEPLOYMENT", raising=False)
    with pytest.raises(RuntimeError, match="ray_actor_options for this deployment"):
        check_environment()


def test_a_new_ingress_starts_before_the_old_one_stops() -> None:
    assert deployments({})["Ingress"]._deployment_config.max_surge_percent == 100


def test_there_is_one_scheduler() -> None:
    assert deployments({"ingress": {"num_replicas": 3}})["Scheduler"].num_replicas == 1


def ingress_config(**ingress: Any) -> IngressConfig:
    config = deployments({"ingress": ingress})["Ingress"].init_args[0]
    assert isinstance(config, IngressConfig)
    return config


def test_the_ingress_gets_its_limits() -> None:
    config = ingress_config(max_requests=7, max_prompt_tokens=8, request_timeout_s=9.0)
    assert (config.max_requests, config.max_prompt_tokens, config.request_timeout_s) == (7, 8, 9.0)
    assert (config.api_keys_file, config.api_keys) == (None, ())


def test_the_ingress_gets_its_log_and_trace_settings() -> None:
    collector = "http://127.0.0.1:4317"
    config = ingress_config(log_text=True, otlp_traces_endpoint=collector)
    assert (config.log_text, config.otlp_traces_endpoint) == (True, collector)
    config = ingress_config()
    assert (config.log_text, config.otlp_traces_endpoint) == (False, None)


def test_engines_and_ingresses_have_the_same_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path)
    modules = ["sql=sql", {"name": "b", "path": "org/b"}]
    built = deployments(
        {"ingress": {"frontend_kwargs": {"lora_modules": modules}}, "engine_kwargs": {"enable_lora": True}}
    )
    engine, ingress = built["Engine"].init_args[0], built["Ingress"].init_args[0]
    # Replicas have another working directory.
    assert [adapter.lora_path for adapter in engine.adapters] == [str(tmp_path / "sql"), "org/b"]
    assert engine.adapters == ingress.models[0].adapters and engine.kwargs["enable_lora"]
    assert ingress.models[0].names == {"mell-tiny"}


def test_the_ingress_itself_reads_the_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted ingress must not accept keys that were removed since the deployment."""
    (tmp_path / "keys.yaml").write_text(entry("a", "k"))
    monkeypatch.chdir(tmp_path)
    config = ingress_config(api_keys_file="keys.yaml")
    assert (config.api_keys_file, config.api_keys) == (str(tmp_path / "keys.yaml"), ())


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MELL_API_KEYS", entry("a", "k"))
    assert ingress_config().api_keys == (ApiKey("a", digest("k")),)


def test_the_admin_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ingress_config().admin_key is None
    monkeypatch.setenv("MELL_ADMIN_KEY", "of-the-environment\n")
    assert ingress_config().admin_key == "of-the-environment"
    assert ingress_config(admin_key="of-the-settings").admin_key == "of-the-settings"
    (tmp_path / "admin.key").write_text("of-the-file")
    config = ingress_config(admin_key_file=str(tmp_path / "admin.key"))
    assert (config.admin_key, config.admin_key_file) == (None, str(tmp_path / "admin.key"))
    monkeypatch.setenv("MELL_ADMIN_KEY", "")
    with pytest.raises(ValueError, match=r"^MELL_ADMIN_KEY: write a key of 8 or more"):
        build_app({})


def test_keys_are_isolated_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    isolating = {"cache": {"isolation": "key"}}
    with pytest.raises(ValueError, match=r"^cache.isolation is key: set ingress.api_keys_file or MELL_API_KEYS"):
        build_app(isolating)
    monkeypatch.setenv("MELL_API_KEYS", entry("a", "k"))
    assert deployments(isolating)["Ingress"].init_args[0].models[0].tenancy is Tenancy.KEY
    assert ingress_config().models[0].tenancy is Tenancy.ALL


@pytest.mark.parametrize("caching", Caching)
def test_caching_of_disaggregated_replicas(caching: Caching) -> None:
    scaling = {"deployment_config": {"autoscaling_config": {"min_replicas": 2, "max_replicas": 2}}}
    made = deployments(scaling | {"disaggregation": {"mode": "static", "caching": str(caching)}})
    assert (made["Ingress"].init_args[0].models[0].tenancy is Tenancy.CALL) is (caching is Caching.NONE)
    assert made["Engine"].init_args[0].hides_handed_over is (caching is Caching.PREFILL)
    without = deployments(scaling | {"disaggregation": {"caching": str(caching)}})
    assert without["Ingress"].init_args[0].models[0].tenancy is Tenancy.ALL, "all replicas do both"


@pytest.mark.parametrize("listed", ["", "[]", "sk-not-a-list"])
def test_an_invalid_list_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    monkeypatch.setenv("MELL_API_KEYS", listed)
    with pytest.raises(ValueError, match=r"^MELL_API_KEYS: (not a list|the list is empty)"):
        build_app({})


def test_keys_in_file_and_environment_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys.yaml").write_text(entry("a", "k"))
    monkeypatch.setenv("MELL_API_KEYS", entry("b", "l"))
    with pytest.raises(ValueError, match="remove one of them"):
        build_app({"ingress": {"api_keys_file": str(tmp_path / "keys.yaml")}})


def test_errors_are_raised_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match="no such setting"):
        build_app({"migraton": {}})


TIER = LostPart(ContractPart("Tier", (), (), "there is none", "cache.dram_gib"), (Fact(("vllm.a",), "Gone"),))
CORE = LostPart(ContractPart("Engine", (), (), None, None), (Fact(("vllm.b",), "Gone"),))


def install(monkeypatch: pytest.MonkeyPatch, vllm: str, *lost: LostPart) -> None:
    """Have another version of vLLM installed, with which parts are lost."""
    monkeypatch.setattr("app.main.installed_version", {"vllm": vllm, "ray": "2.60.0"}.__getitem__)
    monkeypatch.setattr("app.main.lost_here", lambda: lost)


def test_the_tested_versions_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "0.32.0", CORE)
    deployments(shipped())
    assert caplog.text == ""


def test_lost_parts_are_logged_and_refused_if_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "0.29.0", TIER)
    deployments(shipped())
    assert [record.message for record in caplog.records] == [
        "vLLM 0.29 with Ray 2.60: only their files were compared with Mell's needs, see docs/compatibility.md",
        "Tier: there is none",
    ]
    with pytest.raises(
        ValueError, match=r"cache\.dram_gib: the installed versions .* lack what this needs \(vllm\.a: Gone\)"
    ):
        deployments({**shipped(), "cache": {"dram_gib": 0.5}})


def test_without_a_needed_part_there_is_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.27.0", TIER, CORE)
    with pytest.raises(ValueError, match=r"Engine: the installed versions .* lack what this needs \(vllm\.b: Gone\)$"):
        deployments(shipped())
