"""Mell's replicas as one engine core of vLLM, for a frontend that connects to cores started elsewhere.

    core -> frontend    READY                  once, before the frontend exists: it blocks until it has read READY
    frontend -> core    ADD, ABORT, UTILITY    on the socket on which READY came (vllm/v1/engine/core_client.py)
    core -> frontend    EngineCoreOutputs      on a socket of its own

A frontend in this process sends (`ClusterCore.take`) and gets outputs past the sockets.

An ADD is a request as vLLM's input processor has made it. It is placed, read, continued and moved like any other
request of the ingress; vLLM sees one core that never dies. A request that cannot go on ends with vLLM's finish reason
`error`. The outputs of all requests that arrive together, as those of one engine step do, are one message.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from app.frontend.calls import ApiCall, EngineRequest
from app.frontend.names import PromptNamer
from app.ingress.asgi import read_label
from app.ingress.errors import ApiError
from app.ingress.streams.placing import PromptContent
from app.ingress.streams.streams import Streams
from app.ingress.telemetry.requests import StepTimer
from deployments.engine.vllm_messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequestType,
    FinishReason,
    MsgpackDecoder,
    MsgpackEncoder,
    UtilityOutput,
    UtilityResult,
)
from migration.protocol.continuing import isolated, to_spec
from migration.protocol.core_messages import CoreRequest, Frames, decode_request, encode_request
from migration.protocol.ports import Loss, LossKind
from migration.protocol.reading import Output, Reader
from migration.protocol.request import IngressId
from migration.run.reader import NotServed
from policies.model import RequestId
from policies.precedence import DEFAULT_CLASS, NO_CLASSES, Precedence, ServiceClasses

log = logging.getLogger("ray.serve")

_RANK_0 = bytes(2)
"""The identity of vLLM's first engine core."""

_FINISHES = {str(reason): reason for reason in FinishReason}

GENERATION = ("generate",)
"""The tasks of a model that generates text."""

_ANSWERS: Mapping[str, Any] = {
    "is_scheduler_paused": False,
    "is_sleeping": False,
    "list_loras": [],
}
"""The utility calls that Mell answers, beside that for the model's tasks. It refuses all others, which change an engine
behind its back."""

MAX_TENSOR_BYTES = 512 << 20
"""The largest tensors of one request: a call to a replica carries them, and has a time limit."""

_rests = MsgpackDecoder(EngineCoreOutput)


class AddCall:
    """One request of vLLM's frontend as its caller sees it: one ADD, or `n` for a request of several choices.

    `id` is the session id of these ADDs, which Mell's client of vLLM sets. `api_call` is the HTTP call that it
    belongs to.
    """

    def __init__(self, id: str, adds: int, api_call: ApiCall | None) -> None:
        self.id = id
        self.api_call = api_call
        self._missing = adds
        self._tensors: Frames = ()
        self._placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def placed(self) -> None:
        """Wait until replicas have taken all ADDs.

        Raises:
            NotServed: no replica takes one of them.
        """
        await self._placed

    def share(self, frames: Frames) -> Frames:
        """The frames of an ADD, with the tensors of the ADD before if they are equal: those of choices are."""
        if frames[1:] != self._tensors:
            self._tensors = frames[1:]
        return (frames[0], *self._tensors)

    def take(self, request: EngineRequest) -> None:
        """A replica has taken one."""
        if self.api_call is not None:
            self.api_call.add(request)
        self._missing -= 1
        if not self._missing and not self._placed.done():
            self._placed.set_result(None)

    def refuse(self, error: NotServed) -> bool:
        """No replica takes one. Returns False if nobody waits for that any more."""
        if self._placed.done():
            return False
        self._placed.set_exception(error)
        return True


class ClusterCore:
    """The core. It exists before its frontend: `serve` once that exists, and `unlink` once it has had an answer."""

    def __init__(
        self,
        streams: Streams,
        ingress: IngressId,
        ready: EngineCoreReadyResponse,
        max_tensor_bytes: int,
        tasks: Sequence[str] = GENERATION,
        classes: ServiceClasses = NO_CLASSES,
        namer: PromptNamer | None = None,
    ) -> None:
        """`ready` describes the replicas' engines to the frontend.

        `max_tensor_bytes`: see `TensorRoom`. `tasks` are those of the replicas' model. With `classes`, a request's
        priority is that of its call's class; a request without a call has the default class. `namer` names the blocks
        of prompts; None: they have no names.
        """
        self._streams = streams
        self._classes = classes
        self._namer = namer
        self._room = TensorRoom(max_tensor_bytes)
        self._ingress = ingress
        self._calls: dict[str, AddCall] = {}
        self._numbers = itertools.count()
        self._random = random.Random()
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="mell-"))
        self.addresses = {
            "input_address": f"ipc://{self._folder}/in",
            "output_address": f"ipc://{self._folder}/out",
        }
        self._context = zmq.Context()
        self._input = zmq.asyncio.Context(self._context).socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, _RANK_0)
        answers = {**_ANSWERS, "get_supported_tasks": list(tasks)}
        self._wire = OutputWire(self._context.socket(zmq.PUSH), answers)
        self._input.connect(self.addresses["input_address"])
        self._wire.socket.connect(self.addresses["output_address"])
        zmq.Socket.shadow(self._input).send(msgspec.msgpack.encode(ready))
        self._reading: asyncio.Task[None] | None = None
        self.on_loss: Callable[[str, Loss], None] = lambda name, loss: None
        """Called with vLLM's name of each request that replicas have taken and cannot continue."""

    def serve(self, deliver: Callable[[EngineCoreOutputs], None] | None = None) -> None:
        """Take requests from now on. A frontend in this process gets outputs by `deliver`, and not on the socket."""
        if deliver is not None:
            self._wire.deliver = deliver
        self._reading = asyncio.create_task(self._read())

    def unlink(self) -> None:
        """Remove the addresses, once both ends are connected: they would outlive a process that is killed."""
        shutil.rmtree(self._folder)

    @property
    def reading(self) -> bool:
        """True while the core takes requests."""
        return self._reading is not None and not self._reading.done()

    def expect(self, adds: int, api_call: ApiCall | None) -> AddCall:
        """Expect that many ADDs under the id of the returned call, until `forget`."""
        call = AddCall(str(next(self._numbers)), adds, api_call)
        self._calls[call.id] = call
        return call

    def forget(self, call: AddCall) -> None:
        """Nobody waits for a call any more."""
        del self._calls[call.id]

    @property
    def serving(self) -> bool:
        """True if a replica accepts requests."""
        return self._streams.serving

    async def wait_until_serving(self, within_s: float) -> None:
        """Return once a replica accepts requests, or after `within_s` seconds."""
        await self._streams.wait_until_serving(within_s)

    def names(self, request: CoreRequest, frames: Frames) -> tuple[int, ...]:
        """The names of the full KV blocks of a request's prompt; none if they are not known."""
        return () if self._namer is None else self._namer.names(request, frames, self._streams.naming)

    def why_unnamed(self, request: CoreRequest) -> str:
        """The one reason why `names` gives none for a request."""
        if self._namer is None:
            return "this ingress names no blocks"
        return self._namer.why_unnamed(request, self._streams.naming)

    async def close(self) -> None:
        """End all requests, and the connection."""
        tasks = [*self._requests.values(), *((self._reading,) if self._reading is not None else ())]
        for ending in tasks:
            ending.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._input.close(linger=0)
        self._wire.socket.close(linger=0)
        self._context.term()

    # --- from the frontend ----------------------------------------------------------------------------

    async def take(self, message: Sequence[bytes | bytearray | memoryview], engine: bytes) -> None:
        """Take a message of a frontend in this process, in place of the method of vLLM's client that sends it."""
        kind, *frames = map(bytes, message)
        self._take(kind, tuple(frames))

    async def _read(self) -> None:
        while True:
            kind, *frames = await self._input.recv_multipart()
            self._take(kind, tuple(frames))

    def _take(self, kind: bytes, frames: Frames) -> None:
        try:
            self._execute(EngineCoreRequestType(kind), frames)
        except Exception:
            log.exception("a message of vLLM's frontend could not be taken")

    def _execute(self, kind: EngineCoreRequestType, frames: Frames) -> None:
        match kind:
            case EngineCoreRequestType.ADD:
                request = decode_request(frames)
                call = self._calls.get(request.session_id or "")
                if call is not None:
                    frames = call.share(frames)
                    if call.api_call is not None:
                        call.api_call.prepared()
                context = call.api_call.context if call is not None and call.api_call is not None else None
                running = asyncio.create_task(self._run(request, frames, call), context=context)
                self._requests[request.request_id] = running
                running.add_done_callback(lambda _: self._requests.pop(request.request_id))
            case EngineCoreRequestType.ABORT:
                for name in msgspec.msgpack.decode(frames[0], type=list[str]):
                    if task := self._requests.get(name):
                        task.cancel()
            case EngineCoreRequestType.UTILITY:
                _, number, method, _ = msgspec.msgpack.decode(frames[0])
                self._wire.answer(number, method)

    async def _run(self, request: CoreRequest, frames: Frames, call: AddCall | None) -> None:
        """Have a request served, to its end."""
        try:
            with self._room.held(sum(map(len, frames[1:]))):
                await self._run_placed(request, frames, call)
        except NotServed as error:
            refusal = error
        except Exception:
            log.exception("request %s failed", read_label(request.request_id))
            refusal = NotServed(Loss(LossKind.INTERNAL, "internal error"))
        else:
            return
        if call is None or not call.refuse(refusal):
            self._wire.fail(request.request_id)

    def _new_id(self) -> RequestId:
        """A random id, without a system call for each."""
        return RequestId(f"{self._random.getrandbits(128):032x}")

    async def _run_placed(self, request: CoreRequest, frames: Frames, call: AddCall | None) -> None:
        name = request.external_req_id or request.request_id
        api_call = call.api_call if call is not None else None
        label = api_call.label if api_call is not None else ""
        try:
            if api_call is not None and api_call.tenant:
                request = isolated(request, api_call.tenant)
                frames = encode_request(request, frames[1:])
            service_class = api_call.service_class if api_call is not None else DEFAULT_CLASS
            precedence = Precedence(service_class, request.arrival_time or time.time())
            # A client chooses a part of vLLM's name, of any length.
            label = read_label(label or name) or ""
            priority = self._classes.priority(precedence)
            spec = to_spec(request, frames, self._new_id(), label, self._ingress, precedence, priority)
        except ValueError as error:
            raise NotServed(Loss(LossKind.INVALID, str(error))) from error
        timer = api_call.timer() if api_call is not None and api_call.timer is not None else None
        lost = partial(self._lose, request.request_id, api_call)
        reader, outlet = Reader(), Outlet(spec.id, request.request_id, self._wire, timer, lost)
        content = PromptContent(self.names(request, frames), api_call.session if api_call is not None else "")
        async with self._streams.run(spec, reader, outlet, content):
            if call is not None:
                call.take(EngineRequest(name, spec, reader))
            await outlet.ended.wait()

    def _lose(self, name: str, api_call: ApiCall | None, loss: Loss) -> None:
        """End a request that cannot be continued."""
        if api_call is not None:
            api_call.failure = ApiError.of(loss)
        self.on_loss(name, loss)
        self._wire.fail(name)


class TensorRoom:
    """Bounds the tensors of running requests, such as the pixels of images: `limit` bytes in all.

    The ingress keeps them to the end of their request, and so does every replica that it is on.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Hold `size` bytes within the block.

        Raises:
            NotServed: they are too many for any request, or for now.
        """
        if size > min(MAX_TENSOR_BYTES, self._limit):
            raise NotServed(Loss(LossKind.INVALID, f"the request's media are {size >> 20} MiB of tensors: too many"))
        if self._used + size > self._limit:
            raise NotServed(Loss(LossKind.UNAVAILABLE, "the media of running requests take all the memory for them"))
        self._used += size
        try:
            yield
        finally:
            self._used -= size


class Outlet:
    """Implements `Listener`: the output of request `id` goes to vLLM's frontend, which calls it `name`.

    `lose` is called if it cannot be completed.
    """

    def __init__(
        self, id: RequestId, name: str, wire: "OutputWire", timer: StepTimer | None, lose: Callable[[Loss], None]
    ) -> None:
        self.ended = asyncio.Event()
        self._id = id
        self._name = name
        self._wire = wire
        self._timer = timer
        self._lose = lose

    def deliver(self, output: Output) -> None:
        """See `Listener.deliver`."""
        self._wire.put(core_outputs(self._name, output))
        if self._timer is not None and output.tokens:
            self._timer.step()
        if output.finish is not None:
            self.ended.set()

    def lost(self, loss: Loss) -> None:
        """See `Listener.lost`."""
        log.error("request %s cannot be completed: %s", self._id, loss.text)
        self._lose(loss)
        self.ended.set()


class OutputWire:
    """The messages to vLLM's frontend. Outputs that are put before the event loop's next turn are one message."""

    def __init__(self, socket: "zmq.Socket[bytes]", answers: Mapping[str, Any] = _ANSWERS) -> None:
        """`answers` are those to utility calls, by their names."""
        # The frontend's end has no limit either: as with a core of vLLM, what it has not read is in its memory.
        socket.setsockopt(zmq.SNDHWM, 0)
        self.socket = socket
        self.deliver: Callable[[EngineCoreOutputs], None] = self._send
        """Takes messages with outputs."""
        self._outputs: list[EngineCoreOutput] = []
        self._encoder = MsgpackEncoder()
        self._answers = answers

    def put(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Send outputs, with everything that is put meanwhile."""
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.extend(outputs)

    def fail(self, name: str) -> None:
        """The request cannot go on."""
        self.put((EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR),))

    def answer(self, call: int, method: str) -> None:
        """Answer a utility call, or refuse it."""
        output = UtilityOutput(call)
        if method in self._answers:
            output.result = UtilityResult(self._answers[method])
        else:
            output.failure_message = f"{method} is not available: Mell moves requests between several engines"
        self._send(EngineCoreOutputs(utility_output=output))

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        self.deliver(EngineCoreOutputs(outputs=outputs))

    def _send(self, message: EngineCoreOutputs) -> None:
        self.socket.send_multipart(self._encoder.encode(message))


def core_outputs(name: str, output: Output) -> list[EngineCoreOutput]:
    """A request's next output as vLLM's frontend takes it: one part, or one for each step with extras.

    Statistics of a prefill, and events but preemptions, count once: with the first token of the whole output.
    """
    finish = None if output.finish is None else _FINISHES[output.finish]
    if not output.extras:
        return [EngineCoreOutput(name, list(output.tokens), finish_reason=finish)]
    starts = [index for index, _ in output.extras]
    outputs: list[EngineCoreOutput] = []
    if starts[0] > output.index:
        outputs.append(EngineCoreOutput(name, list(output.tokens[: starts[0] - output.index])))
    for (start, rest), end in zip(output.extras, [*starts[1:], None], strict=True):
        tokens = output.tokens[start - output.index : end if end is None else end - output.index]
        outputs.append(_step(name, tokens, rest, first=start == 0))
    outputs[-1].finish_reason = finish
    return outputs


def _step(name: str, tokens: Sequence[int], rest: bytes, first: bool) -> EngineCoreOutput:
    """The output of a step with tokens and rest (`migration.protocol.request.Extras`), which does not end."""
    step: EngineCoreOutput = _rests.decode(bytearray(rest))  # torch warns of tensors that cannot be written to
    step.request_id, step.new_token_ids, step.finish_reason = name, list(tokens), None
    step.events = _rebased(step.events or (), first)
    if not first:
        step.prefill_stats = None
    return step


def _rebased(events: Sequence[EngineCoreEvent], first: bool) -> list[EngineCoreEvent] | None:
    """Events whose times were relative to their replica's sending, relative to this process's start of time."""
    now = time.monotonic()
    kept = [event for event in events if first or event.type == EngineCoreEventType.PREEMPTED]
    for event in kept:
        event.timestamp += now
    return kept or None
