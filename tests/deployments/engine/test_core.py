"""The client of vLLM's core, over real sockets: messages come as an engine's process sends them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, UtilityOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from deployments.engine import core
from deployments.engine.core import CoreClient


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
