"""The client of vLLM's core, over real sockets, and vLLM's metrics of its steps."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client import REGISTRY
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from app.tinymodel import ensure_tiny_model
from deployments.engine import core
from deployments.engine.arguments import USAGE, engine_args
from deployments.engine.core import CoreClient, CoreRun, CoreRuns, EngineMetrics, Take
from deployments.engine.port import EngineDead, RequestFailed
from migration.protocol.core_messages import Frames
from migration.protocol.ports import Generated


def step(*tokens: int) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput("r", list(tokens))])


class Sender:
    """The end of an engine's process."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self._socket = self.context.socket(zmq.PUSH)
        self._socket.connect(address)
        self._encoder = MsgpackEncoder()

    def send(self, outputs: EngineCoreOutputs) -> None:
        self._socket.send_multipart(self._encoder.encode(outputs))

    def send_bytes(self, message: bytes) -> None:
        self._socket.send(message)

    def close(self) -> None:
        self._socket.close(linger=0)
        self.context.term()


@contextlib.asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[CoreClient, Sender]]:
    """A client without processes, and their end of its socket for outputs."""
    client, address = object.__new__(CoreClient), f"ipc://{folder}/out"
    context = zmq.asyncio.Context()
    client.resources = BackgroundResources(ctx=context)
    client.resources.output_socket = context.socket(zmq.PULL)
    client.resources.output_socket.bind(address)
    client.decoder, client.utility_results = MsgpackDecoder(EngineCoreOutputs), {}
    client._early = []
    client._take = client._early.append
    client._ensure_output_queue_task()
    sender = Sender(address)
    try:
        yield client, sender
    finally:
        client.resources()
        await asyncio.wait((client.resources.output_queue_task,))
        sender.close()
        context.term()


class Taken:
    """The tokens of each step that a client hands on, and how that ended."""

    def __init__(self, client: CoreClient) -> None:
        self.steps: list[list[int]] = []
        self._arrived = asyncio.Event()
        self.delivering = asyncio.create_task(client.deliver(self._take))
        self.delivering.add_done_callback(lambda ended: ended.exception())

    def _take(self, outputs: EngineCoreOutputs) -> None:
        self.steps.append([token for output in outputs.outputs for token in output.new_token_ids])
        self._arrived.set()

    async def until(self, count: int) -> list[list[int]]:
        async with asyncio.timeout(5):
            while len(self.steps) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.steps

    async def end(self) -> BaseException | None:
        async with asyncio.timeout(5):
            await asyncio.wait((self.delivering,))
        return self.delivering.exception()


async def test_steps_are_handed_on_in_their_order_also_those_before_anybody_takes_them(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, sender):
        for token in range(3):
            sender.send(step(token))
        async with asyncio.timeout(5):
            while len(client._early) < 3:
                await asyncio.sleep(0.001)
        taken = Taken(client)
        assert await taken.until(3) == [[0], [1], [2]]
        for token in range(3, 200):
            sender.send(step(token, token))
        assert await taken.until(200) == [[0], [1], [2], *([token, token] for token in range(3, 200))]


async def test_a_core_that_is_faster_than_its_replica_leaves_the_event_loop_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (encoded,), left, at_once = MsgpackEncoder().encode(step(1)), 500, 0

    def receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
        nonlocal left, at_once
        if not left:
            raise zmq.Again
        left, at_once = left - 1, at_once + 1
        assert at_once < 50
        return [zmq.Frame(encoded)]

    async def run_beside() -> None:
        nonlocal at_once
        while True:
            at_once = 0
            await asyncio.sleep(0)

    beside = asyncio.create_task(run_beside())
    monkeypatch.setattr(core, "receive_frames", receive)
    async with connected(tmp_path) as (client, _):
        assert await Taken(client).until(500) == [[1]] * 500
    beside.cancel()


async def test_results_of_utility_calls_come_between_steps(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, sender):
        taken = Taken(client)
        result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        client.utility_results[7] = result
        sender.send(step(1))
        sender.send(EngineCoreOutputs(utility_output=UtilityOutput(7, result=UtilityResult("done"))))
        sender.send(EngineCoreOutputs())
        sender.send(step(2))
        async with asyncio.timeout(5):
            assert await result == "done"
        assert await taken.until(2) == [[1], [2]], "a message without outputs is no step"


@pytest.mark.parametrize("message", [EngineCoreProc.ENGINE_CORE_DEAD, b"\xc1"], ids=["dead", "unreadable"])
async def test_nothing_is_handed_on_behind_a_message_that_cannot_be_read(tmp_path: Path, message: bytes) -> None:
    async with connected(tmp_path) as (client, sender):
        taken = Taken(client)
        sender.send(step(1))
        sender.send_bytes(message)
        sender.send(step(2))
        error = await taken.end()
        assert type(error) is (EngineDeadError if message != b"\xc1" else msgspec.DecodeError)
        assert taken.steps == [[1]]


async def test_a_core_whose_process_has_ended_is_dead(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, sender):
        taken = Taken(client)
        sender.send(step(1))
        await taken.until(1)
        client.resources()  # vLLM's monitor of the process does that
        assert type(await taken.end()) is EngineDeadError


async def test_a_failure_of_the_taker_ends_the_delivery(tmp_path: Path) -> None:
    def fail(outputs: EngineCoreOutputs) -> None:
        raise ZeroDivisionError

    async with connected(tmp_path) as (client, sender):
        sender.send(step(1))
        async with asyncio.timeout(5):
            with pytest.raises(ZeroDivisionError):
                await client.deliver(fail)


PREFILL = PrefillStats(num_prompt_tokens=20, num_computed_tokens=16, num_cached_tokens=4)
MESSAGES: tuple[tuple[SchedulerStats, tuple[EngineCoreOutput, ...]], ...] = (
    (
        SchedulerStats(1, prefix_cache_stats=PrefixCacheStats(requests=1, queries=20, hits=4)),
        (EngineCoreOutput("a", [1], prefill_stats=PREFILL),),
    ),
    (SchedulerStats(1, kv_cache_usage=0.1), (EngineCoreOutput("a", [2]),)),
    (SchedulerStats(2, kv_cache_usage=0.2), (EngineCoreOutput("a", [3, 4]), EngineCoreOutput("b", [5]))),
    (SchedulerStats(2, 1), ()),
    (
        SchedulerStats(1, 1, kv_cache_usage=0.3),
        (EngineCoreOutput("a", [6], events=[EngineCoreEvent(EngineCoreEventType.PREEMPTED, 0.0)]),),
    ),
    (SchedulerStats(1, connector_prefix_cache_stats=PrefixCacheStats()), (EngineCoreOutput("a", [7]),)),
    (
        SchedulerStats(1, connector_prefix_cache_stats=PrefixCacheStats(requests=1, queries=8, hits=8)),
        (EngineCoreOutput("a", [8]),),
    ),
    (
        SchedulerStats(2, prefix_cache_stats=PrefixCacheStats(requests=1, queries=90, hits=32)),
        (EngineCoreOutput("a", [4]),),
    ),
    (SchedulerStats(1, kv_cache_usage=0.4), (EngineCoreOutput("a", [9]),)),
    (SchedulerStats(0), (EngineCoreOutput("a", [1], finish_reason=FinishReason.LENGTH),)),
)
"""The statistics and outputs of steps of all kinds."""


def exposed(metrics: EngineMetrics) -> dict[tuple[str, str], float]:
    """vLLM's metrics after steps of all kinds, by name and labels."""
    for at, (stats, outputs) in enumerate(MESSAGES * 3):
        metrics.record(EngineCoreOutputs(outputs=list(outputs), scheduler_stats=stats, timestamp=at / 100))
    samples = [sample for family in REGISTRY.collect() if family.name.startswith("vllm:") for sample in family.samples]
    return {(each.name, str(each.labels)): each.value for each in samples if not each.name.endswith("_created")}


def test_steps_of_decoding_are_in_the_metrics_as_if_each_were_recorded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_args(str(ensure_tiny_model()), {"dtype": "float32"}).create_engine_config(USAGE)
    records = Mock(wraps=PrometheusStatLogger.record)
    monkeypatch.setattr(PrometheusStatLogger, "record", lambda *args: records(*args))
    together, calls = exposed(EngineMetrics(config, 100)), records.call_count
    monkeypatch.setattr(core, "_only_decodes", lambda stats, outputs: False)
    alone = exposed(EngineMetrics(config, 100))
    assert together == alone
    assert calls < records.call_count - calls


def test_steps_of_decoding_are_in_the_metrics_soon() -> None:
    config = engine_args(str(ensure_tiny_model()), {"dtype": "float32"}).create_engine_config(USAGE)
    metrics = EngineMetrics(config, 100)
    tokens = metrics._logger.counter_generation_tokens[0]._value
    for at in range(100):
        message = step(1)
        message.scheduler_stats, message.timestamp = SchedulerStats(1), at / 100
        metrics.record(message)
        assert 0 <= at + 1 - tokens.get() <= 26
    assert metrics.scheduler is message.scheduler_stats


def test_the_newest_usage_is_that_of_the_same_blocks_after_a_resize() -> None:
    config = engine_args(str(ensure_tiny_model()), {"dtype": "float32"}).create_engine_config(USAGE)
    metrics, message = EngineMetrics(config, 1600), step(1)
    message.scheduler_stats = SchedulerStats(1, kv_cache_usage=0.25)
    metrics.record(message)
    metrics.resize(800)
    assert (metrics.scheduler.kv_cache_usage, metrics.steps.capacity) == (0.5, 800)
    for capacity in (0, 800):
        metrics.resize(capacity)
        assert (metrics.scheduler.kv_cache_usage, metrics.steps.capacity) == (0.0, capacity), (
            "as asleep, and awake again"
        )


class Sink:
    """Takes what a run makes; broken ones raise."""

    def __init__(self, breaks_at: str = "") -> None:
        self._breaks_at = breaks_at
        self.errors: list[Exception] = []

    def take(self, step: Generated) -> None:
        if self._breaks_at == "take":
            raise ZeroDivisionError

    def fail(self, error: Exception) -> None:
        self.errors.append(error)
        if self._breaks_at == "fail":
            raise ZeroDivisionError


class SteppingCore:
    """Makes the given step, and dies."""

    def __init__(self, outputs: EngineCoreOutputs) -> None:
        self._outputs = outputs

    def send_request(self, frames: Frames) -> None: ...

    def send_abort(self, request_id: str) -> None: ...

    async def deliver(self, take: Take) -> None:
        take(self._outputs)
        raise EngineDeadError


async def test_a_sink_that_raises_costs_no_other_run_its_end() -> None:
    ended = EngineCoreOutput("takes", [5], finish_reason=FinishReason.LENGTH)
    runs = CoreRuns(SteppingCore(EngineCoreOutputs(outputs=[ended])), lambda outputs: None)
    sinks = {"takes": Sink("take"), "fails": Sink("fail"), "other": Sink()}
    for name, sink in sinks.items():
        runs.start(CoreRun(name, name, sink), ())
    await runs.read()
    found = {name: [type(error) for error in sink.errors] for name, sink in sinks.items()}
    assert found == {"takes": [RequestFailed], "fails": [EngineDead], "other": [EngineDead]}
