"""Several of vLLM's applications in one process: templates, contexts, names and metrics of each are its own."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.types import ASGIApp

from app.frontend.guard.layers import body_limits, guarded
from app.frontend.guard.models import GuardedModels
from app.ingress.access.admission import Gate
from app.ingress.telemetry.requests import RequestTelemetry
from app.settings import IngressSettings
from app.tinymodel import ensure_tiny_model
from deployments.metrics.exposition import join_families
from tests.app.frontend.conftest import FrontendApi, config, serving
from tests.app.ingress.fakes import GuardedApp

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXTS = {"chat": 512, "code": 256}
CHAT = [{"role": "user", "content": "Where do blocks move?"}]


def other_template(folder: Path) -> Path:
    """The tiny model with a longer chat template."""
    shutil.copytree(ensure_tiny_model(), folder)
    template = "{% for m in messages %}<{{ m.role }} says> {{ m.content }} <and ends>\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = folder / "tokenizer_config.json"
    members = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps({name: value for name, value in members.items() if name != "chat_template"}))
    return folder


class Models:
    """Two models behind the guard, by their ids."""

    def __init__(self, apis: dict[str, FrontendApi]) -> None:
        settings = IngressSettings()
        self.apis = apis
        made = []
        for name, api in apis.items():
            model = GuardedApp(api.app, settings, name)
            model.limits = body_limits(settings, api.frontend.max_context)
            made.append(model)
        self.app: ASGIApp = guarded(GuardedModels(made), Gate(), RequestTelemetry(*apis), settings)

    async def send(self, method: str, path: str, **body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://mell", timeout=30) as client:
            return await client.request(method, path, json=body or None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Models]:
    folder = other_template(tmp_path_factory.mktemp("models") / "code")
    async with AsyncExitStack() as stack:
        apis = {}
        for name, context in CONTEXTS.items():
            source = str(folder) if name == "code" else str(ensure_tiny_model())
            made = config({"model_id": name, "model_source": source}, {"max_model_len": context})
            apis[name] = await stack.enter_async_context(serving(made))
        yield Models(apis)


async def test_each_model_has_its_own_template_and_context(models: Models) -> None:
    asked = [
        models.send("POST", "/v1/chat/completions", messages=CHAT, max_completion_tokens=3, model=name)
        for name in CONTEXTS
    ]
    chat, code = (answer.json() for answer in await asyncio.gather(*asked))
    assert (chat["model"], code["model"]) == ("chat", "code")
    assert chat["usage"]["prompt_tokens"] < code["usage"]["prompt_tokens"]
    long = {"prompt": [5] * 300, "max_tokens": 2}
    statuses = [(await models.send("POST", "/v1/completions", **long, model=name)).status_code for name in CONTEXTS]
    assert statuses == [200, 400]


async def test_an_unknown_model_is_refused_as_vllm_refuses_it(models: Models) -> None:
    alone = await models.apis["chat"].post("/v1/completions", model="third", prompt="x")
    among = await models.send("POST", "/v1/completions", model="third", prompt="x")
    assert alone.status_code == among.status_code == 404
    own, ours = (answer.json()["error"] for answer in (alone, among))
    assert {**own, "message": ""} == {**ours, "message": ""}
    assert ours["message"] == own["message"].replace("aliases: chat.", "aliases: chat, code.")


async def test_the_lists_of_both_are_one(models: Models) -> None:
    alone = [(await api.send("GET", "/v1/models")).json()["data"] for api in models.apis.values()]
    listed = (await models.send("GET", "/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["chat", "code"]
    assert [model["max_model_len"] for model in listed["data"]] == [512, 256]
    made = {"created", "permission"}  # with the time, and a random id
    shown = [
        [{k: v for k, v in model.items() if k not in made} for model in some]
        for some in ([*alone[0], *alone[1]], listed["data"])
    ]
    assert shown[0] == shown[1]


async def test_vllm_counts_the_requests_of_each_model(models: Models) -> None:
    async def counts() -> dict[str, float]:
        exposed = join_families([await api.frontend.metrics("i") for api in models.apis.values()])
        (family,) = [family for family in exposed if family.name == "vllm:request_success"]
        lines = [line for line in family.samples.splitlines() if 'finished_reason="length"' in line]
        return {line.split('model_name="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}

    before = await counts()
    for name, number in (("chat", 1), ("code", 3), ("chat", 1)):
        for _ in range(number):
            assert (await models.send("POST", "/v1/completions", prompt=[5, 6], max_tokens=2, model=name)).is_success
    after = await counts()
    assert {name: after[name] - before[name] for name in CONTEXTS} == {"chat": 2.0, "code": 3.0}
