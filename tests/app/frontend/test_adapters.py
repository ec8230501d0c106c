"""Adapters in vLLM's application: listed as models, chosen by the model's name, and by nothing else."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from app.service.api import ENVIRONMENT
from migration.protocol.core_messages import Adapter
from tests.app.frontend.conftest import FrontendApi, config, serving

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

MODULES = ["a=/adapters/a", {"name": "b", "path": "org/b", "base_model_name": "mell-tiny"}]
MESSAGES = [{"role": "user", "content": "Where do blocks move?"}]
GENERATING = [
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", {"input": "Where do blocks move?", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
]
ENDPOINTS = pytest.mark.parametrize(("path", "body"), GENERATING, ids=[path for path, _ in GENERATING])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapted() -> AsyncIterator[FrontendApi]:
    """With the adapters `a` and `b`."""
    engine = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    async with serving(config(engine=engine, lora_modules=MODULES)) as api:
        yield api


@pytest.fixture
def adapters(adapted: FrontendApi, monkeypatch: pytest.MonkeyPatch) -> list[Adapter | None]:
    """The adapters of the requests that replicas get."""
    seen: list[Adapter | None] = []
    run = adapted.service.streams.run

    def watched(spec: Any, *others: Any) -> Any:
        seen.append(spec.adapter)
        return run(spec, *others)

    monkeypatch.setattr(adapted.service.streams, "run", watched)
    return seen


@ENDPOINTS
@pytest.mark.parametrize("name", ["a", "b", "mell-tiny"])
async def test_the_models_name_chooses_an_adapter(
    adapted: FrontendApi, adapters: list[Adapter | None], path: str, body: dict[str, Any], name: str
) -> None:
    answer = await adapted.post(path, **body, model=name)
    assert (answer.status_code, answer.json()["model"]) == (200, name)
    (adapter,) = adapters
    assert (adapter and adapter.lora_path) == {"a": "/adapters/a", "b": "org/b"}.get(name)


@ENDPOINTS
async def test_a_client_names_no_path(
    adapted: FrontendApi, adapters: list[Adapter | None], path: str, body: dict[str, Any]
) -> None:
    named = ["evil", 1, "/etc"]
    given = {"lora_name": "evil", "lora_int_id": 1, "lora_path": "/etc"}
    others = {"lora_request": named, "adapter": given, "vllm_xargs": {"lora_path": "/etc", "lora_request": "/etc"}}
    for model in ("mell-tiny", "a"):
        await adapted.post(path, **body, **given, **others, model=model)
    assert all(adapter is None or adapter.lora_path == "/adapters/a" for adapter in adapters)


@ENDPOINTS
@pytest.mark.parametrize("name", ["/adapters/a", "org/b", "c", "a/../b"])
async def test_a_path_is_no_name_of_a_model(adapted: FrontendApi, path: str, body: dict[str, Any], name: str) -> None:
    assert (await adapted.post(path, **body, model=name)).status_code == 404


async def test_vllms_resolvers_of_names_are_off() -> None:
    """They would look for an adapter of any name in a folder, or on a hub."""
    assert ENVIRONMENT["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"


async def test_adapters_are_listed_as_models(adapted: FrontendApi) -> None:
    models = (await adapted.send("GET", "/v1/models")).json()["data"]
    assert [(model["id"], model["parent"]) for model in models] == [
        ("mell-tiny", None),
        ("a", "mell-tiny"),
        ("b", "mell-tiny"),
    ]


async def test_adapters_come_and_go_while_the_application_runs(
    adapted: FrontendApi, adapters: list[Adapter | None]
) -> None:
    ask = {"prompt": [5, 6], "max_tokens": 2}
    adapted.frontend.serve_adapters([Adapter("c", 3, "/c", is_3d_lora_weight=True)])
    try:
        assert (await adapted.post("/v1/completions", **ask, model="c")).status_code == 200
        assert (await adapted.post("/v1/completions", **ask, model="a")).status_code == 404
        assert adapters == [Adapter("c", 3, "/c", is_3d_lora_weight=True)]
    finally:
        adapted.frontend.serve_adapters(config(engine={"enable_lora": True}, lora_modules=MODULES).models[0].adapters)
