"""Several models in the settings, and the application that they become."""

from pathlib import Path
from typing import Any

import pytest

from app.ingress.access.keys import entry
from app.main import build_app, read_settings
from deployments.config import SchedulerConfig
from policies.cost.service import ServiceLevel
from policies.model import PoolId
from tests.app.test_main import deployments, made
from tests.app.test_settings import refused, shipped

__all__ = ["made"]


PACED = {"num_gpu_blocks_override": 64, "max_model_len": 512}


def model(name: str, **members: Any) -> dict[str, Any]:
    """An entry that needs no files: a paced engine has none."""
    kwargs = {**PACED, **members.pop("engine_kwargs", {})}
    return {"model_loading_config": {"model_id": name}, "engine": "paced", "engine_kwargs": kwargs, **members}


def settings(*models: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {"llm_configs": list(models), **beside}


ADAPTERS = {"engine_kwargs": {"enable_lora": True}, "frontend_kwargs": {"lora_modules": ["sql=/sql"]}}


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (settings(model("a"), model("a")), "llm_configs: several entries have the model_id a: give each its own"),
        (
            settings(model("a"), model("b", engine_kwargs={"served_model_name": ["c", "a"]})),
            "llm_configs: a is a name of a and of b: change one",
        ),
        (
            settings(model("a", **ADAPTERS), model("b", **ADAPTERS)),
            "llm_configs: sql is a name of a and of b: change one",
        ),
        (settings(model("a", **ADAPTERS), model("sql")), "llm_configs: sql is a name of a and of sql: change one"),
        (
            settings(model("a"), model("b"), cache={"audit_s": 5.0}, engine_kwargs={}),
            "engine_kwargs, cache: with llm_configs, write it into the entry of its model",
        ),
        (
            settings(model("a"), model("b"), scheduler={"slo": {"ttft_p99_s": 1.0}}),
            "scheduler.slo: with llm_configs, write slo into the entry of its model",
        ),
        (
            settings(model("a"), model("b"), ingress={"frontend_kwargs": {}}),
            "ingress.frontend_kwargs: with llm_configs, write frontend_kwargs into the entry of its model",
        ),
        (
            settings(model("a"), model("b"), ingress={"max_requests": 1}),
            "ingress.max_requests is below the number of models, 2: raise it",
        ),
        (settings(model("a/b"), model("a-b")), "llm_configs: the model_ids a-b, a/b differ in signs only: change one"),
        (
            settings(model("mell-tiny", engine="vllm", frontend_kwargs={"tool_call_parser": "x"}), model("b")),
            "llm_configs.0: frontend_kwargs.tool_call_parser: vLLM has no parser 'x'",
        ),
        (settings(model("a"), model("b", cach={})), "llm_configs.1.cach: no such setting; did you mean cache"),
        (settings(model("a"), model("b", cache={"audit": 1})), "llm_configs.1.cache.audit: no such setting"),
        (
            settings(model("a"), model("b", cache={"dram_gib": 1.0})),
            "llm_configs.1: cache.dram_gib: a paced engine has no tier",
        ),
        (
            settings(model("a"), model("b", disaggregation={"mode": "static"}), scheduler={"mode": "off"}),
            "llm_configs.1: disaggregation.mode: the scheduler moves",
        ),
        (
            settings(model("a"), model("b", slo={"itl_p99_ms": 0.1})),
            "llm_configs.1: slo cannot be met: ",
        ),
        (
            settings(model("a", slo={"ttft_p99_s": 9.0}), model("b"), ingress={"refuse_late": 2.0}),
            "llm_configs.1: ingress.refuse_late: set ttft_p99_s in slo or in a class",
        ),
    ],
)
def test_what_several_models_cannot_have_is_refused_with_its_correction(args: dict[str, Any], advice: str) -> None:
    assert advice in refused(args)


def test_keys_list_only_models_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = entry("team", "key") + "  models: [b, c]\n"
    (tmp_path / "keys.yaml").write_text(listed)
    file = {"ingress": {"api_keys_file": str(tmp_path / "keys.yaml")}}
    assert "key 1 lists 'c'; the models are a, b" in refused(settings(model("a"), model("b"), **file))
    read_settings(settings(model("a"), model("b"), model("c"), **file))
    monkeypatch.setenv("MELL_API_KEYS", listed)
    with pytest.raises(ValueError, match=r"MELL_API_KEYS: key 1 lists 'c'; the models are a, b"):
        build_app(settings(model("a"), model("b")))
    built = deployments(settings(model("a"), model("b"), model("c")))
    assert built["Ingress"].init_args[0].api_keys[0].models == ("b", "c")


def test_the_sections_of_the_sole_model_are_those_at_the_top() -> None:
    made = read_settings(
        {
            "engine": "paced",
            "engine_kwargs": PACED,
            "cache": {"audit_s": 5.0},
            "scheduler": {"slo": {"ttft_p99_s": 2.0}},
            "ingress": {"frontend_kwargs": {"response_role": "bot"}},
        }
    )
    (sole,) = made.models
    assert (sole.engine, sole.cache, sole.slo) == ("paced", made.cache, made.scheduler.slo)
    assert (sole.frontend_kwargs, sole.model_id) == ({"response_role": "bot"}, "mell-tiny")


def test_each_model_has_a_deployment_and_a_pool_of_its_own() -> None:
    scaling = {"autoscaling_config": {"min_replicas": 2, "max_replicas": 4}, "graceful_shutdown_timeout_s": 90.0}
    built = deployments(
        settings(
            model("chat", deployment_config=scaling, slo={"itl_p99_ms": 900.0}),
            model("org/code", deployment_config={"engine_silence_s": 7.0}, cache={"copies": "off"}),
        )
    )
    assert list(built) == ["Ingress", "Engine-chat", "Engine-org-code", "Scheduler"]
    chat, code = (built[name].init_args for name in ("Engine-chat", "Engine-org-code"))
    assert (chat[0].model_id, code[0].model_id) == ("chat", "org/code")
    assert (chat[2].grace_s, code[2].grace_s, code[2].engine_silence_s) == (90.0, 60.0, 7.0)
    ingress, topology = built["Ingress"].init_args[:2]
    assert topology.pools == {"chat": "Engine-chat", "org/code": "Engine-org-code"}
    assert [each.model_id for each in ingress.models] == ["chat", "org/code"]
    assert ([each.initial_replicas for each in ingress.models], ingress.grace_s) == ([2, 1], 90.0)
    assert [each.has_level for each in ingress.models] == [True, False]
    scheduler: SchedulerConfig = built["Scheduler"].init_args[0]
    own = [scheduler.of(PoolId(pool)) for pool in topology.pools.values()]
    assert [config.bounds for config in own] == [(2, 4), (1, 1)]
    terms = [scheduler.terms.of(PoolId(pool)) for pool in topology.pools.values()]
    assert [each.service for each in terms] == [ServiceLevel(None, 0.9), None]
    assert [each.copies for each in terms] == [True, False]


@pytest.mark.slow
def test_the_shipped_models_are_valid() -> None:
    built = deployments(shipped("examples/models.yaml"))
    assert {"Engine-smollm2-135m", "Engine-mell-tiny"} <= built.keys()
    assert built["Ingress"].init_args[0].port == 8000
