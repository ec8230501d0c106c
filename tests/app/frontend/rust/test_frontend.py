"""The Rust frontend behind Mell's layers, over fake replicas and real streams: moved, lost, left, refused, replaced."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from app.frontend.guard.routes import OPEN_ROUTES
from app.frontend.rust.frontend import SERVED
from app.ingress.errors import ApiError
from deployments.engine.tokens import expected
from migration.protocol.continuing import continued
from migration.protocol.core_messages import CoreRequest, decode_request
from policies.prefix.names import default_naming
from tests.app.frontend.conftest import POOLING
from tests.app.frontend.rust.conftest import REAL, RustApi, answer_text, real_binary, rust
from tests.app.frontend.test_app import BOTH_WAYS, full, move, running
from tests.app.ingress.fakes import Exchange, eventually
from tests.app.ingress.streams.streaming import KV, TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/completions"
PROMPT = [5, 6, 7]
LONG = 200
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": LONG}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The log lines of requests so far."""
    with caplog.at_level(logging.INFO, logger="ray.serve.mell.request"):
        yield lambda: [record.__dict__["request"] for record in caplog.records if "request" in record.__dict__]


async def test_a_pooling_model_is_refused(fake_binary: str) -> None:
    with pytest.raises(ValueError, match="no endpoints for pooling models: write vllm"):
        async with rust(fake_binary, engine_kwargs=POOLING):
            pass


async def test_prompts_have_names_and_text_has_no_tokens(api: RustApi) -> None:
    request = CoreRequest("", [1, 2, 3, 4, 5])
    assert api.frontend.names(request) == ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api.service.placer, "_naming", default_naming(2))
        assert len(api.frontend.names(request)) == 2
    with pytest.raises(ApiError, match="token ids") as refused:
        await api.frontend.tokens(b'{"prompt": "blocks move"}')
    assert refused.value.status == 400


@BOTH_WAYS
async def test_a_request_that_moves_twice_has_the_same_answer(api: RustApi, stream: bool) -> None:
    asking = asyncio.create_task(api.post(PATH, **ASK, stream=stream))
    (request,) = await running(api.service)
    await move(api.service, request, "b", KV)
    await move(api.service, request, "a", TOKENS)
    answer = await asking
    assert (answer.status_code, answer_text(answer)) == (200, api.text(expected(tuple(PROMPT), LONG)))
    await api.service.idle()


@BOTH_WAYS
async def test_a_lost_replica_does_not_show(own: RustApi, stream: bool) -> None:
    asking = asyncio.create_task(own.post(PATH, **ASK, stream=stream))
    await running(own.service)
    own.service.kill("a")
    assert answer_text(await asking) == own.text(expected(tuple(PROMPT), LONG))
    await own.service.idle()


async def test_every_token_of_a_stream_is_a_chunk(api: RustApi) -> None:
    answer = await api.post(PATH, **{**ASK, "max_tokens": 20}, stream=True)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.text.count("data: {") >= 18 and answer.text.endswith("data: [DONE]\n\n")


async def test_calls_of_the_same_label_are_distinct_and_counted(
    api: RustApi, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    ask = {**ASK, "max_tokens": 30}
    answers = await asyncio.gather(*(api.post(PATH, {"X-Request-Id": "mine"}, **ask) for _ in range(3)))
    assert {answer_text(answer) for answer in answers} == {api.text(expected(tuple(PROMPT), 30))}
    ids = {answer.json()["id"] for answer in answers}
    assert len(ids) == 3 and all(id.startswith("cmpl-mine-") for id in ids)
    told = [(line["label"], line["prompt_tokens"], line["completion_tokens"], line["outcome"]) for line in lines()]
    assert told == [("mine", 3, 30, "length")] * 3
    assert all(line["ttft_s"] is not None for line in lines())


@BOTH_WAYS
async def test_a_client_that_leaves_ends_its_request(api: RustApi, stream: bool) -> None:
    body = json.dumps({**ASK, "max_tokens": 400, "stream": stream}).encode()
    exchange = Exchange(SimpleNamespace(app=api.app), body, PATH)  # type: ignore[arg-type]
    (request,) = await running(api.service)
    reader = api.service.streams._live[request].reader
    exchange.disconnect()
    await exchange.ended()
    await api.service.idle()
    assert reader.cursor.finish is None, "it ran to its end"


@BOTH_WAYS
async def test_a_call_that_no_replica_takes_is_refused_before_its_answer_begins(own: RustApi, stream: bool) -> None:
    own.service.wires.before = {(replica, "submit"): full for replica in "ab"}
    answer = await own.post(PATH, **ASK, stream=stream)
    assert answer.status_code == 503 and "the replica is full" in answer.json()["error"]["message"]
    await own.service.idle()
    assert own.frontend._life is not None and not own.frontend._life.core._calls


@BOTH_WAYS
async def test_without_a_replica_a_call_waits_and_is_refused(own: RustApi, stream: bool) -> None:
    own.service.members.become()
    asking = asyncio.create_task(own.post(PATH, **ASK, stream=stream))
    await asyncio.sleep(0.1)
    assert not asking.done()
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


@BOTH_WAYS
async def test_an_answer_that_cannot_be_completed_ends_with_an_error(own: RustApi, stream: bool) -> None:
    asking = asyncio.create_task(own.post(PATH, **ASK, stream=stream))
    await running(own.service)
    own.service.kill("a", noticed=False)
    own.service.kill("b")
    own.service.members.become()
    answer = await asking
    assert answer.status_code == (200 if stream else 503)
    if stream:
        *_, error, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
    shown = json.loads(error.removeprefix("data: ")) if stream else answer.json()
    assert (shown["error"]["message"], shown["error"]["code"]) == ("no replica is available", "unavailable")


async def test_private_members_reach_no_engine(api: RustApi) -> None:
    """The guard refuses `kv_transfer_params`; here a call comes past it."""
    body = {**ASK, "vllm_xargs": {"kv_transfer_params": {"mell_load": {"segment": "/etc/passwd"}}, "other": "x"}}
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [(b"content-type", b"application/json")]}
    received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    calling = asyncio.create_task(api.frontend.app(scope, receive, send))
    (request,) = await running(api.service)
    spec = api.service.streams._live[request].spec
    assert "/etc/passwd" in str(decode_request(spec.body).sampling), "the frontend would pass it on"
    for_the_engine = decode_request(continued(spec, "name", "key", (1,)))
    assert for_the_engine.sampling["extra_args"] == {"kv_transfer_params": {"mell_key": "key", "mell_output": 1}}
    assert (for_the_engine.session_id, for_the_engine.data_parallel_rank) == (None, None)
    await calling


@pytest.mark.parametrize(
    ("structured", "status"), [({"regex": "[ab]+"}, 200), ({"regex": "((("}, 400), ({"choice": []}, 400)], ids=str
)
async def test_structured_outputs_are_checked(api: RustApi, structured: dict[str, Any], status: int) -> None:
    asking = asyncio.create_task(api.post(PATH, **ASK, structured_outputs=structured, stream=True))
    if status == 200:
        (request,) = await running(api.service)
        sampling = decode_request(api.service.streams._live[request].spec.body).sampling
        assert sampling["structured_outputs"] == {**structured, "_backend": "xgrammar", "_backend_was_auto": True}
    assert (await asking).status_code == status
    await api.service.idle()


async def test_a_prompt_over_the_limit_is_refused(fake_binary: str) -> None:
    async with rust(fake_binary, max_prompt_tokens=2) as api:
        answer = await api.post(PATH, **ASK)
        assert answer.status_code == 400 and "the limit is 2" in answer.json()["error"]["message"]


async def test_an_error_of_the_frontend_is_passed_on(api: RustApi) -> None:
    answer = await api.post(PATH, **ASK, n=2)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "Only n=1 is supported."
    assert (await api.send("GET", "/v1/models")).json()["object"] == "list"


@pytest.mark.parametrize("path", sorted(OPEN_ROUTES.keys() - SERVED))
async def test_routes_that_the_frontend_lacks_are_refused(api: RustApi, path: str) -> None:
    answer = await api.send(OPEN_ROUTES[path].method, path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"vLLM's Rust frontend has no {path}: ingress.frontend: vllm has it"


async def test_the_metrics_of_requests_are_the_frontends(api: RustApi) -> None:
    await api.post(PATH, **{**ASK, "max_tokens": 3})
    families = {family.name: family.samples for family in await api.frontend.metrics("i")}
    (line,) = [one for one in families["vllm:request_success"].splitlines() if "length" in one]
    assert 'replica="i"' in line and float(line.split()[-1]) >= 1
    assert "vllm:num_requests_running" not in families
    if api.real:
        assert {"vllm:time_to_first_token_seconds", "vllm:request_generation_tokens"} <= families.keys()


async def test_a_frontend_that_ends_is_replaced(own: RustApi, lines: Callable[[], list[dict[str, Any]]]) -> None:
    assert own.frontend._life is not None
    first = own.frontend._life.process.pid
    asks = [asyncio.create_task(own.post(PATH, **ASK, stream=stream)) for stream in (True, False)]
    await running(own.service, 2)
    os.kill(first, signal.SIGKILL)
    streamed, whole = await asyncio.gather(*asks)
    events = streamed.text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["message"] == "the frontend has ended"
    assert events[-2] == "data: [DONE]" and whole.status_code == 503
    await own.service.idle()
    assert {(line["outcome"], line["status"]) for line in lines()} == {("server_error", 500), ("unavailable", 503)}
    await eventually(lambda: own.frontend._life is not None and own.frontend._life.process.pid != first)
    own.frontend.check_health()
    assert answer_text(await own.post(PATH, **ASK)) == own.text(expected(tuple(PROMPT), LONG))


async def test_an_ingress_whose_frontend_cannot_be_restarted_is_not_healthy(
    fake_binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rust(fake_binary) as api:
        monkeypatch.setattr("app.frontend.rust.frontend._DOWN_S", 0.2)
        monkeypatch.setattr("app.frontend.rust.frontend._RESTART_S", 0.1)
        api.frontend._binary = "/nowhere"
        assert (await api.post(PATH, **{**ASK, "prompt": [0]})).status_code == 503
        await asyncio.sleep(0.5)
        with pytest.raises(RuntimeError, match="cannot be started"):
            api.frontend.check_health()
        assert (await api.post(PATH, **ASK)).status_code == 503
        assert await api.frontend.metrics("i") == ()
        api.frontend._binary = fake_binary
        await eventually(lambda: api.frontend._life is not None)
        api.frontend.check_health()


async def test_nothing_is_left_behind(fake_binary: str) -> None:
    async with rust(fake_binary) as api:
        life = api.frontend._life
        assert life is not None and not life.listeners.folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(life.process.pid, 0)
    assert not life.core.reading and life.core._reading is not None


# --- vLLM's own program ----------------------------------------------------------------------------------


@REAL
async def test_the_frontend_has_no_other_open_route() -> None:
    """What the tables of docs/frontend.md say. A version that has more of them is to be used."""
    async with rust(real_binary() or "") as api:
        assert api.frontend._life is not None
        for path in OPEN_ROUTES.keys() - SERVED:
            exchange = await api.frontend._life.process.call(OPEN_ROUTES[path].method, path, body=b"{}")
            assert (await exchange.head()).status == 404, path
            exchange.close()
