"""The engine core that vLLM's frontend sees: its messages against vLLM's own decoders, and requests as raw ADDs."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
import zmq
from vllm import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder

from app.frontend.calls import CURRENT, ApiCall
from app.frontend.core import OutputWire, core_outputs
from app.vllm_cli.arguments import FrontendArgs
from app.vllm_cli.flags import FRONTEND_ARGUMENTS
from deployments.engine.core import RestEncoder
from migration.protocol.continuing import continued
from migration.protocol.core_messages import decode_request
from migration.protocol.reading import Output
from policies.precedence import Precedence, ServiceClass, ServiceClasses
from tests.app.frontend.conftest import FrontendApi
from tests.app.ingress.fakes import eventually

on_the_modules_loop = pytest.mark.asyncio(loop_scope="module")


class RecordingSocket:
    """Implements the part of a ZMQ socket that an output wire uses."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []

    def setsockopt(self, option: int, value: int) -> None:
        assert (option, value) == (zmq.SNDHWM, 0)

    def send_multipart(self, frames: list[bytes]) -> None:
        self.messages.append(frames)

    def decoded(self) -> list[EngineCoreOutputs]:
        decoder = MsgpackDecoder(EngineCoreOutputs)
        return [decoder.decode([bytearray(frame) for frame in frames]) for frames in self.messages]


async def decoded(output: Output, name: str = "cmpl-1") -> list[EngineCoreOutput]:
    """The outputs as vLLM's frontend reads them."""
    socket, began = RecordingSocket(), time.monotonic()
    wire = OutputWire(socket)  # type: ignore[arg-type]
    wire.put(core_outputs(name, output))
    await asyncio.sleep(0)
    (message,) = socket.decoded()
    assert (message.engine_index, message.scheduler_stats) == (0, None)
    assert began <= message.timestamp <= time.monotonic()
    return list(message.outputs)


def rest(**members: Any) -> bytes:
    """The rest of a step, as a replica sends it."""
    encoded = RestEncoder().encode(EngineCoreOutput("replica's", [1], **members), now=time.monotonic())
    assert encoded is not None
    return encoded


def fields(output: EngineCoreOutput) -> dict[str, Any]:
    """The members that have another value than in an output of tokens alone."""
    plain = EngineCoreOutput("", [])
    names = EngineCoreOutput.__struct_fields__
    return {name: value for name in names if (value := getattr(output, name)) != getattr(plain, name)}


async def test_steps_of_tokens_alone_are_one_output() -> None:
    (output,) = await decoded(Output(3, (7, 8)))
    assert fields(output) == {"request_id": "cmpl-1", "new_token_ids": [7, 8]}


@pytest.mark.parametrize("reason", list(FinishReason))
async def test_the_last_output_has_the_finish_reason(reason: FinishReason) -> None:
    (output,) = await decoded(Output(3, (7,), (), str(reason)))
    assert (output.new_token_ids, output.finish_reason) == ([7], reason)


async def test_every_rest_stays_with_its_tokens() -> None:
    ends = rest(stop_reason=9, finish_reason=FinishReason.STOP)
    outputs = await decoded(Output(4, (1, 2, 3, 4), ((5, rest(stop_reason=5)), (7, ends)), "stop"))
    assert [o.new_token_ids for o in outputs] == [[1], [2, 3], [4]]
    assert [o.stop_reason for o in outputs] == [None, 5, 9]
    assert [o.finish_reason for o in outputs] == [None, None, FinishReason.STOP]
    assert {o.request_id for o in outputs} == {"cmpl-1"}


async def test_a_finish_reason_comes_only_with_the_end() -> None:
    """vLLM's frontend would forget the request."""
    aborted = rest(stop_reason=5, finish_reason=FinishReason.ABORT)
    outputs = await decoded(Output(0, (1, 2), ((0, aborted), (1, aborted))))
    assert [(output.stop_reason, output.finish_reason) for output in outputs] == [(5, None)] * 2


def statistics() -> dict[str, Any]:
    now = time.monotonic()
    kinds = (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED, EngineCoreEventType.PREEMPTED)
    return {
        "events": [EngineCoreEvent(kind, now - ago) for kind, ago in zip(kinds, (3.0, 2.0, 1.0), strict=True)],
        "prefill_stats": PrefillStats(num_prompt_tokens=8, num_computed_tokens=8),
    }


async def test_the_first_token_has_the_statistics_of_its_prefill_in_this_processs_time() -> None:
    (output,) = await decoded(Output(0, (1,), ((0, rest(**statistics())),)))
    assert output.prefill_stats is not None and output.prefill_stats.num_prompt_tokens == 8
    ages = [time.monotonic() - event.timestamp for event in output.events or ()]
    assert ages == [pytest.approx(ago, abs=0.5) for ago in (3.0, 2.0, 1.0)]


async def test_later_replicas_only_add_preemptions() -> None:
    (output,) = await decoded(Output(6, (1,), ((6, rest(**statistics())),)))
    assert output.prefill_stats is None
    assert [event.type for event in output.events or ()] == [EngineCoreEventType.PREEMPTED]


async def test_outputs_that_come_together_are_one_message() -> None:
    socket = RecordingSocket()
    wire = OutputWire(socket)  # type: ignore[arg-type]
    wire.put(core_outputs("a", Output(0, (1,))))
    wire.put(core_outputs("b", Output(5, (2,), (), "length")))
    wire.fail("c")
    await asyncio.sleep(0)
    wire.put(core_outputs("a", Output(1, (3,))))
    await asyncio.sleep(0)
    first, second = socket.decoded()
    assert [(o.request_id, o.finish_reason) for o in first.outputs] == [
        ("a", None),
        ("b", FinishReason.LENGTH),
        ("c", FinishReason.ERROR),
    ]
    assert [o.request_id for o in second.outputs] == ["a"]


def test_arguments_of_texts_and_answers_are_vllms() -> None:
    """A new version of vLLM that adds an argument has to be looked at: who may set it."""
    assert FrontendArgs.__dataclass_fields__.keys() >= FRONTEND_ARGUMENTS
    others = FrontendArgs.__dataclass_fields__.keys() - FRONTEND_ARGUMENTS
    assert {name for name in others if "tool" in name or "template" in name or "reasoning" in name} == {"tool_server"}


PRIVATE = {
    "kv_transfer_params": {"mell_load": {"load": "/etc/passwd", "first": 0, "last": 1}, "mell_key": "another's"},
    "other": "text",
}


def raw(name: str, **members: Any) -> EngineCoreRequest:
    sampling = SamplingParams(max_tokens=200, extra_args=PRIVATE)
    ask: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": [5, 6, 7],
        "mm_features": None,
        "sampling_params": sampling,
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": 7,
        "priority": 3,
        "session_id": "another's",
    }
    return EngineCoreRequest(**ask | members)


def for_the_engine(api: FrontendApi) -> dict[str, Any]:
    """The sampling parameters and other members of the one running request, as its engine would get it."""
    (run,) = api.service.streams._live.values()
    request = decode_request(continued(run.spec, "name", "key", (1, 2)))
    private = {name: getattr(request, name) for name in ("data_parallel_rank", "session_id", "priority")}
    return {"extra_args": request.sampling["extra_args"], "hints": bytes(request.kv_hints), **private}


OURS = {
    "extra_args": {"kv_transfer_params": {"mell_key": "key", "mell_output": 2}},
    "hints": b"\xc0",
    "data_parallel_rank": None,
    "session_id": None,
    "priority": 3,
}


@on_the_modules_loop
async def test_private_members_of_a_raw_request_reach_no_engine(api: FrontendApi) -> None:
    client = api.frontend._client.engine_core
    await client.add_request_async(raw("raw-1"))
    await eventually(lambda: api.service.streams.count == 1)
    assert for_the_engine(api) == OURS
    await client.abort_requests_async(["raw-1"])
    await api.service.idle()


CLASSES = ServiceClasses({"batch": ServiceClass(-1), "chat": ServiceClass(2)}, overtake_s=10.0)


@on_the_modules_loop
async def test_with_classes_a_raw_request_has_the_default_class_and_no_priority_of_its_own(
    api: FrontendApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.frontend._client.core, "_classes", CLASSES)
    client = api.frontend._client.engine_core
    await client.add_request_async(raw("raw-3", arrival_time=1000.5))
    await eventually(lambda: api.service.streams.count == 1)
    (run,) = api.service.streams._live.values()
    assert run.spec.precedence == Precedence("default", 1000.5)
    assert for_the_engine(api)["priority"] == 1_000_500
    await client.abort_requests_async(["raw-3"])
    await api.service.idle()


@on_the_modules_loop
async def test_a_request_has_the_class_of_its_call_and_its_turn_as_priority(
    api: FrontendApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.frontend._client.core, "_classes", CLASSES)
    began = time.time()
    token = CURRENT.set(ApiCall(service_class="chat"))
    asking = asyncio.create_task(api.post("/v1/completions", prompt=[5, 6, 7], max_tokens=200, priority=-9))
    CURRENT.reset(token)
    await eventually(lambda: api.service.streams.count == 1)
    (run,) = api.service.streams._live.values()
    precedence = run.spec.precedence
    assert precedence.service_class == "chat" and began <= precedence.arrived_s <= time.time()
    assert for_the_engine(api)["priority"] == round(1e3 * (precedence.arrived_s - 20.0))
    await eventually(lambda: any(True for replica in api.service.replicas.values() for _ in replica.host.loads()))
    (load,) = (load for replica in api.service.replicas.values() for load in replica.host.loads())
    assert load.precedence == precedence
    assert (await asking).status_code == 200


@on_the_modules_loop
async def test_calls_of_tenants_have_salts_of_their_own(api: FrontendApi) -> None:
    salts = []
    for tenant, salt in [("", None), ("", "mine"), ("alice", None), ("alice", "mine"), ("bob", "mine")]:
        token = CURRENT.set(ApiCall(tenant=tenant))
        members = {"cache_salt": salt} if salt else {}
        asking = asyncio.create_task(api.post("/v1/completions", prompt=[5, 6, 7], max_tokens=200, **members))
        CURRENT.reset(token)
        await eventually(lambda: api.service.streams.count == 1)
        (run,) = api.service.streams._live.values()
        salts.append(decode_request(continued(run.spec, "name", "key", (1, 2))).cache_salt)
        assert (await asking).status_code == 200
        await api.service.idle()
    assert salts == [None, "mine", "alice:", "alice:mine", "bob:mine"]


@on_the_modules_loop
@pytest.mark.parametrize(
    "private",
    [
        {"kv_transfer_params": {"mell_load": {"segment": "/etc/passwd"}}},
        {"vllm_xargs": {"kv_transfer_params": '{"mell_load": {}}', "mell_key": "x"}},
        {"vllm_xargs": {"session_id": "another's", "data_parallel_rank": 7}},
        {"kv_hints": {"a": 1}, "session_id": "0"},
    ],
    ids=str,
)
async def test_private_members_of_a_call_reach_no_engine(api: FrontendApi, private: dict[str, Any]) -> None:
    headers = {"X-data-parallel-rank": "7", "X-Session-ID": "0"}
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "priority": 3, **private}
    asking = asyncio.create_task(api.send("POST", "/v1/completions", json=body, headers=headers))
    await eventually(lambda: asking.done() or api.service.streams.count == 1)
    if not asking.done():
        assert for_the_engine(api) == OURS
        await asking
    assert asking.result().status_code in (200, 400)


@on_the_modules_loop
@pytest.mark.parametrize(
    "unplaceable",
    [{"prompt_token_ids": None}, {"prompt_token_ids": []}, {"sampling_params": None}],
    ids=["no tokens", "empty", "pooling"],
)
async def test_a_request_that_cannot_be_placed_ends_with_an_error(
    api: FrontendApi, unplaceable: dict[str, Any]
) -> None:
    """Its core is asked without a frontend that waits."""
    ended: list[EngineCoreOutput] = []
    core, client = api.frontend._client.core, api.frontend._client.engine_core
    put = core._wire.put

    def recorded(outputs: Sequence[EngineCoreOutput]) -> None:
        ended.extend(outputs)
        put(outputs)

    core._wire.put = recorded
    await client.add_request_async(raw("raw-2", **unplaceable))
    await eventually(lambda: bool(ended))
    core._wire.put = put
    assert ended[0].finish_reason is FinishReason.ERROR


@on_the_modules_loop
async def test_outputs_bypass_the_socket_of_a_frontend_in_the_same_process(
    api: FrontendApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.frontend._client.core._wire, "socket", None)
    assert (await api.post("/v1/completions", prompt=[5], max_tokens=3)).json()["usage"]["completion_tokens"] == 3


@on_the_modules_loop
async def test_so_do_its_requests(api: FrontendApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.frontend._client.engine_core, "input_socket", None)
    assert (await api.post("/v1/completions", prompt=[5], max_tokens=3)).json()["usage"]["completion_tokens"] == 3


@on_the_modules_loop
async def test_the_application_has_no_layers_beside_those_around_it(api: FrontendApi) -> None:
    """vLLM's own one for origins adds the header `Vary`."""
    answer = await api.post("/v1/completions", prompt=[5], max_tokens=1)
    assert answer.status_code == 200 and "vary" not in answer.headers


@on_the_modules_loop
async def test_utility_calls_are_answered_or_refused(api: FrontendApi) -> None:
    client = api.frontend._client
    assert not await client.is_sleeping() and not await client.is_paused()
    assert list(await client.engine_core.list_loras_async()) == []
    for call in (
        client.sleep(1),
        client.collective_rpc("anything"),
        client.reset_prefix_cache(),
        client.start_profile(),
        client.add_lora(None),
    ):
        with pytest.raises(Exception, match="is not available: Mell moves requests"):
            await call


@on_the_modules_loop
async def test_a_message_that_cannot_be_read_is_dropped(api: FrontendApi, caplog: pytest.LogCaptureFixture) -> None:
    client = api.frontend._client.engine_core
    await client._send_input_message((b"\x00", b"no message"), client.core_engine)
    await eventually(lambda: "could not be taken" in caplog.text)
    assert (await api.post("/v1/completions", prompt=[5], max_tokens=1)).status_code == 200
