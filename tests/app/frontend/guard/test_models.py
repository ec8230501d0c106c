"""Several models behind the guard: each call reaches the application of the model that it names."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.frontend.guard.layers import guarded
from app.frontend.guard.models import GuardedModels
from app.ingress.access.admission import FirstTokenDeadlines, Gate
from app.ingress.access.keys import ApiKey, digest
from app.ingress.errors import ApiError
from app.ingress.telemetry.requests import RequestTelemetry
from app.settings import IngressSettings
from deployments.metrics.exposition import merge
from tests.app.ingress.fakes import GuardedApp
from tests.deployments.metrics.test_exposition import parsed

COMPLETIONS = "/v1/completions"
NAMES = {"chat": ["chat", "assistant"], "code": ["code", "sql"]}


class Applications:
    """The applications of two models behind the layers; each answers with its name, once `open` is set."""

    def __init__(self, *keys: ApiKey, max_requests: int | None = None, **settings: Any) -> None:
        self.open = {name: asyncio.Event() for name in NAMES}
        self.telemetry = RequestTelemetry(*NAMES)
        self.gate = Gate(keys, max_requests, models=list(NAMES))
        made = IngressSettings(**settings)
        self.models = {name: GuardedApp(self._application(name), made, name, context=8) for name in NAMES}
        for name, model in self.models.items():
            model.names = NAMES[name]
            self.open[name].set()
        self.app = guarded(GuardedModels(list(self.models.values())), self.gate, self.telemetry, made)

    def _application(self, name: str) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            http = Request(scope, receive)
            if scope["path"] == "/v1/models":
                body: Any = {"object": "list", "data": [{"id": each} for each in NAMES[name]]}
            else:
                body = {"from": name, "body": json.loads(await http.body() or b"null")}
                await self.open[name].wait()
            await JSONResponse(body)(scope, receive, send)

        return answer

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://mell", trust_env=False) as client:
            yield client

    async def post(self, headers: Mapping[str, str] | None = None, **body: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post(COMPLETIONS, json={"prompt": "x", **body}, headers=headers)

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path, headers=headers)


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["message"], error["param"]


@pytest.mark.parametrize(("name", "model"), [(name, model) for model, names in NAMES.items() for name in names])
async def test_a_call_reaches_the_model_that_it_names(name: str, model: str) -> None:
    answer = (await Applications().post(model=name)).json()
    assert answer == {"from": model, "body": {"prompt": "x", "model": name}}


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("third", 404, "The model `third` does not exist. Valid aliases: assistant, chat, code, sql."),
        (None, 400, "model: name one of the models assistant, chat, code, sql"),
        (5, 400, "model: must be a text"),
    ],
)
async def test_a_call_without_a_model_is_refused(name: Any, status: int, message: str) -> None:
    applications = Applications()
    assert refusal(await applications.post(model=name)) == (status, message, "model")
    assert {labels[2] for labels in parsed(merge([applications.telemetry.expose("i")]))["mell_requests_total"]} == {""}


async def test_a_missing_name_is_as_none() -> None:
    assert refusal(await Applications().post())[:1] == (400,)


async def test_each_model_has_its_own_limits() -> None:
    applications = Applications()
    long: dict[str, Any] = {"prompt": [1] * 9}
    applications.models["code"].limits = GuardedApp(applications.app, IngressSettings(), context=9).limits
    assert (await applications.post(model="code", **long)).status_code == 200
    status, message, _ = refusal(await applications.post(model="chat", **long))
    assert status == 400 and "the limit is 8" in message


async def test_each_model_has_its_own_deadlines() -> None:
    applications = Applications()
    applications.models["chat"].deadlines = FirstTokenDeadlines(1.0, {"default": 1.0}.copy, lambda: 5.0)
    late = await applications.post(model="chat")
    assert late.status_code == 503 and "later than 1 s" in late.json()["error"]["message"]
    assert (await applications.post(model="code")).status_code == 200


async def test_the_models_of_all_applications_are_listed() -> None:
    body = (await Applications().get("/v1/models")).json()
    assert body == {"object": "list", "data": [{"id": name} for names in NAMES.values() for name in names]}


async def test_a_model_that_has_not_started_is_not_listed() -> None:
    applications = Applications()

    async def starting(scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(503, "no replica of the model has run yet")

    applications.models["chat"].app = starting
    body = (await applications.get("/v1/models")).json()
    assert [model["id"] for model in body["data"]] == NAMES["code"]
    assert (await applications.post(model="code")).status_code == 200
    assert refusal(await applications.post(model="chat"))[:2] == (503, "no replica of the model has run yet")


async def test_calls_without_a_body_name_their_model_in_the_query() -> None:
    applications = Applications()
    assert refusal(await applications.get("/tokenizer_info"))[0] == 400
    assert (await applications.get("/tokenizer_info?model=assistant")).json()["from"] == "chat"


KEY = {"authorization": "Bearer of-chat"}


async def test_a_key_has_the_models_that_it_lists() -> None:
    applications = Applications(ApiKey("a", digest("of-chat"), models=("chat",)), ApiKey("b", digest("of-all")))
    assert (await applications.post(KEY, model="assistant")).status_code == 200
    assert refusal(await applications.post(KEY, model="sql")) == (
        403,
        "model: this API key may not use 'code', only chat",
        "model",
    )
    assert (await applications.post({"authorization": "Bearer of-all"}, model="sql")).status_code == 200
    listed = (await applications.get("/v1/models", KEY)).json()
    assert [model["id"] for model in listed["data"]] == NAMES["chat"]
    assert (await applications.get("/v1/models")).status_code == 401


async def test_a_key_sees_no_other_models_by_calls_without_a_body() -> None:
    applications = Applications(ApiKey("a", digest("of-chat"), models=("chat",)))
    assert (await applications.get("/tokenizer_info?model=assistant", KEY)).json()["from"] == "chat"
    refused = refusal(await applications.get("/tokenizer_info?model=sql", KEY))
    assert refused == (403, "model: this API key may not use 'code', only chat", "model")


async def test_refusals_name_only_the_models_of_the_key() -> None:
    applications = Applications(ApiKey("a", digest("of-chat"), models=("chat",)))
    for name, named in ((None, "name one of the models assistant, chat"), ("x", "Valid aliases: assistant, chat.")):
        assert refusal(await applications.post(KEY, model=name))[1].endswith(named)
    assert refusal(await applications.get("/tokenizer_info", KEY))[1].endswith("assistant, chat")


async def test_metrics_and_log_lines_have_the_model() -> None:
    applications = Applications()
    for name in ("assistant", "chat", "sql"):
        await applications.post(model=name)
    counted = parsed(merge([applications.telemetry.expose("i")]))["mell_requests_total"]
    assert {(labels[2], value) for labels, value in counted.items()} == {("chat", 2.0), ("code", 1.0)}


async def test_a_model_that_does_not_answer_leaves_the_others_their_seats() -> None:
    applications = Applications(max_requests=10)
    applications.open["chat"].clear()
    waiting = [asyncio.create_task(applications.post(model="chat")) for _ in range(9)]
    while applications.gate.running < 9:
        await asyncio.sleep(0)
    full = await asyncio.wait_for(applications.post(model="chat"), 5)
    assert full.status_code == 503 and "too many for this class or model" in full.json()["error"]["message"]
    assert (await applications.post(model="code")).json()["from"] == "code"
    applications.open["chat"].set()
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
    assert (await applications.post(model="chat")).status_code == 200
