"""vLLM's engine core over vLLM's own client, without the frontend half of vLLM: outputs come as the core sends them."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import zmq
import zmq.asyncio
from vllm.config import VllmConfig
from vllm.v1.engine.core_client import AsyncMPClient, _process_utility_output
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from deployments.engine.port import EngineDead, InvalidRequest, RequestFailed
from deployments.engine.stat_logger import PrometheusStatLogger
from deployments.engine.vllm_messages import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    EngineDeadError,
    FinishReason,
    MsgpackEncoder,
)
from migration.protocol.core_messages import Frames, Prefilled
from migration.protocol.ports import HALTED, Generated, OutputSink
from policies.cost.fit import NO_STEPS
from policies.cost.steps import PrefillChunk

log = logging.getLogger(__name__)

_WITHOUT_REST = ("request_id", "new_token_ids", "finish_reason", "trace_headers", "num_nans_in_logits")
"""Members of an output that do not make up a rest by themselves."""
_rest = attrgetter(*(name for name in EngineCoreOutput.__struct_fields__ if name not in _WITHOUT_REST))
_ADDED_UP = ("spec_decoding_stats", "kv_connector_stats", "ec_connector_stats", "perf_stats")
_KEPT = ("kv_cache_eviction_events", "running_lora_adapters", "waiting_lora_adapters")
# vLLM 0.29 has none of `ec_connector_stats`.
_further_statistics = attrgetter(
    *(name for name in (*_ADDED_UP, *_KEPT) if name in SchedulerStats.__dataclass_fields__)
)
"""Those that vLLM's logger adds up or keeps by step."""
_INLINE = 1 << 62
"""The size in bytes from which an array is a frame of its own: none is, so that a rest is one text of bytes."""

_MESSAGES_AT_ONCE = 8
"""The number of messages of a core that are read before the event loop does something else."""

_DECODES_S = 0.25
"""The longest time for which steps of decoding alone are added up before they are in vLLM's metrics."""

Take = Callable[[EngineCoreOutputs], None]
"""Takes the outputs of one step."""


class CoreClient(AsyncMPClient):
    """Starts the engine's processes, and speaks with EngineCore.

    A callback of the event loop reads the core's messages and hands their outputs on. With vLLM's own task and queue,
    and pyzmq's coroutines, each message takes three turns of the loop.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._early: list[EngineCoreOutputs] = []
        self._take: Take = self._early.append
        super().__init__(config, Executor.get_class(config), log_stats=True)

    def _ensure_output_queue_task(self) -> None:
        # In the place of vLLM's method. vLLM cancels the task when the core's process has ended, and at a shutdown.
        if self.resources.output_queue_task is None:
            messages = _Messages(self.resources.output_socket, self._read)
            self.resources.output_queue_task = asyncio.create_task(messages.hand_on())

    async def deliver(self, take: Take) -> None:
        """See `Core.deliver`."""
        self._ensure_output_queue_task()
        for outputs in self._early:
            take(outputs)
        self._early.clear()
        self._take = take
        receiving = self.resources.output_queue_task
        await asyncio.wait((receiving,))
        error = EngineDeadError() if receiving.cancelled() else receiving.exception()
        raise self._format_exception(error)

    def _read(self, frames: list[zmq.Frame]) -> None:
        self.resources.validate_alive(frames)
        outputs: EngineCoreOutputs = self.decoder.decode(frames)
        if outputs.utility_output is not None:
            _process_utility_output(outputs.utility_output, self.utility_results)
        elif outputs.outputs or outputs.scheduler_stats:
            self._take(outputs)

    def send_request(self, frames: Frames) -> None:
        """Add a request. Raises EngineDeadError."""
        # The socket takes the message now or keeps it until it can: nobody has to wait for that.
        self._send_input_message((EngineCoreRequestType.ADD.value, *frames), self.core_engine)

    def send_abort(self, request_id: str) -> None:
        """End a request that may have ended already. Does nothing if the engine is dead."""
        if not self.resources.engine_dead:
            self._send_input(EngineCoreRequestType.ABORT, [request_id])


class _Messages:
    """The messages of a socket, for a callback of the event loop: a few at a time, since others have their turn."""

    def __init__(self, socket: zmq.asyncio.Socket, take: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._goes_on = False
        """True if the next messages are read without a signal."""

    async def hand_on(self) -> None:
        """Hand messages on for ever. Raises what `take` raises."""
        # Of its own: vLLM closes the socket before it cancels the task.
        signal = os.dup(self._plain.FD)
        self._loop.add_reader(signal, self._signalled)
        try:
            self._read()  # There is no signal for the messages that have come.
            await self._failed
        finally:
            self._loop.remove_reader(signal)
            os.close(signal)

    def _signalled(self) -> None:
        if not self._goes_on:
            self._read()

    def _read(self) -> None:
        self._goes_on = False
        try:
            for _ in range(_MESSAGES_AT_ONCE):
                if self._failed.done() or self._socket.closed:
                    return
                self._take(receive_frames(self._plain))
        except zmq.Again:
            return
        except Exception as error:
            self._failed.set_exception(error)
        else:
            self._goes_on = True
            self._loop.call_soon(self._read)


def receive_frames(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """The next message. Raises zmq.Again if there is none."""
    frames = [socket.recv(zmq.NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(copy=False))
    return frames


class Core(Protocol):
    """The part of `CoreClient` that runs requests."""

    def send_request(self, frames: Frames) -> None:
        """Add a request. Raises EngineDeadError."""
        ...

    def send_abort(self, request_id: str) -> None:
        """End a request that may have ended already."""
        ...

    async def deliver(self, take: Take) -> None:
        """Hand the outputs of each step on. Raises EngineDeadError once the core has ended, and what `take` raises."""
        ...


@dataclass(frozen=True, slots=True)
class CoreRun:
    """One request in a core: its key, vLLM's request id, and its sink; `structured` if its output follows a grammar.

    `prompt_tokens` is the length of its prompt. `reply` gets the connector's reply at the end of the run. The run
    `continues` if it begins after output of another engine.
    """

    key: str
    name: str
    sink: OutputSink
    structured: bool = False
    prompt_tokens: int = 0
    reply: Callable[[Mapping[str, Any]], None] | None = None
    continues: bool = False


class CoreRuns:
    """The requests in one core. `record` is called with the outputs of each step."""

    def __init__(self, core: Core, record: Callable[[EngineCoreOutputs], None]) -> None:
        self.death: str | None = None
        """The reason why the core has ended; None while it runs."""
        self._core = core
        self._record = record
        self._rests = RestEncoder()
        self._runs: dict[str, CoreRun] = {}
        self._names: dict[str, str] = {}
        self._left: dict[str, int] = {}
        """The tokens to their limits of runs that will be halted."""
        self.idle = asyncio.Event()
        """Set while there is no request."""
        self.idle.set()

    @property
    def prompt_tokens(self) -> int:
        """The length of all prompts."""
        return sum(run.prompt_tokens for run in self._runs.values())

    def start(self, run: CoreRun, request: Frames) -> None:
        """Add a request."""
        self._runs[run.name], self._names[run.key] = run, run.name
        self.idle.clear()
        try:
            self._core.send_request(request)
        except EngineDeadError as error:
            # The caller takes no calls before this one has returned.
            asyncio.get_running_loop().call_soon(self._fail, run.name, EngineDead(str(error)))

    def abort(self, key: str) -> None:
        """End a run, if it has not ended."""
        name = self._names.get(key)
        if name is not None:
            self._forget(name)
            self._core.send_abort(name)

    def halt(self, key: str, left: int) -> None:
        """Expect the core to end a run before its limit, to which it has `left` tokens."""
        if key in self._names:
            self._left[self._names[key]] = left

    async def read(self) -> None:
        """Take the core's outputs until it ends; then every run fails."""
        reason = "it was shut down"
        try:
            await self._core.deliver(self._take)
        except EngineDeadError as error:
            reason = str(error)
        except Exception as error:
            log.exception("the engine's outputs cannot be read any more")
            reason = repr(error)
        finally:
            self.death = reason
            for name in list(self._runs):
                self._fail(name, EngineDead(reason))

    def _take(self, outputs: EngineCoreOutputs) -> None:
        now = time.monotonic()
        self._record(outputs)
        for output in outputs.outputs:
            if (run := self._runs.get(output.request_id)) is None:
                continue  # It was aborted meanwhile.
            try:
                self._pass_on(run, output, now)
            except Exception as error:
                log.exception("the output of request %s could not be taken", run.key)
                self._forget(run.name)
                self._report(run, RequestFailed(repr(error)))

    def _pass_on(self, run: CoreRun, output: EngineCoreOutput, now: float) -> None:
        tokens, halted = tuple(output.new_token_ids), run.name in self._left and self._halted(run.name, output)
        finish = output.finish_reason
        if run.reply is not None and output.kv_transfer_params:
            run.reply(output.kv_transfer_params)
        if finish is not None or halted:
            self._forget(run.name)
        if finish is FinishReason.ERROR:
            run.sink.fail(_aborted(run, tokens))
        else:
            stats = output.prefill_stats
            prefilled = None
            if stats is not None:
                prefilled = Prefilled(
                    stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_external_cached_tokens
                )
            reason = HALTED if halted else None if finish is None else str(finish)
            run.sink.take(Generated(tokens, reason, self._rests.encode(output, now), prefilled))

    def _halted(self, name: str, output: EngineCoreOutput) -> bool:
        """True if the run ends with this output since it was halted. It then has no finish reason of vLLM's."""
        self._left[name] -= len(output.new_token_ids)
        if output.finish_reason is not FinishReason.LENGTH or self._left[name] <= 0:
            return False
        output.finish_reason = None
        return True

    def _fail(self, name: str, error: Exception) -> None:
        if run := self._forget(name):
            self._report(run, error)

    def _report(self, run: CoreRun, error: Exception) -> None:
        """Pass a failure on to a run's sink. If the sink fails, too, the other runs still get theirs."""
        try:
            run.sink.fail(error)
        except Exception:
            log.exception("the failure of request %s could not be taken", run.key)

    def _forget(self, name: str) -> CoreRun | None:
        run = self._runs.pop(name, None)
        self._left.pop(name, None)
        if run is not None:
            del self._names[run.key]
        if not self._runs:
            self.idle.set()
        return run


def _aborted(run: CoreRun, tokens: Sequence[int]) -> InvalidRequest | RequestFailed:
    """The error of a run that the core has ended with one, in a step with `tokens`.

    A grammar that cannot be compiled, or that refuses a new token, does so on every engine. A run that continues on
    this one, and fails without a new token, may do better on another.
    """
    invalid = run.structured and (bool(tokens) or not run.continues)
    return (InvalidRequest if invalid else RequestFailed)("the engine aborted the request")


class RestEncoder:
    """Encodes what outputs hold beside their tokens."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder(size_threshold=_INLINE)

    def encode(self, output: EngineCoreOutput, now: float) -> bytes | None:
        """The rest of an output (see `migration.protocol.ports.Generated`); None if there is nothing. Changes `output`.

        Times in it are from now on relative to `now`, since every node has a monotonic clock of its own.
        """
        for member in _rest(output):
            if member is not None:
                break
        else:
            return None
        output.request_id, output.new_token_ids, output.kv_transfer_params = "", [], None
        for event in output.events or ():
            event.timestamp -= now
        (rest,) = self._encoder.encode(output)
        return bytes(rest)


class StepMeter:
    """Adds up an engine's steps from its outputs: a message follows each step, also one without output.

    A step lasts from the message of the step before it, or from the first request of an idle engine. A prefill over
    several steps counts in the last one; messages without output before it are steps, too. The second computation of
    preempted requests does not count.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is that of the KV cache, in tokens."""
        self.totals = NO_STEPS
        self.capacity = capacity
        self._began: float | None = None
        """The end of the last step with output, None while nothing runs; the time is that of the node."""
        self._context = 0.0
        self._silent = 0
        """The number of steps without output since then."""

    def begin(self, now: float) -> None:
        """A request arrives: if the engine was idle, a step begins."""
        if self._began is None:
            self._began, self._context, self._silent = now, 0.0, 0

    def record(self, outputs: EngineCoreOutputs) -> None:
        """Add the step before this message, if there was one."""
        stats = outputs.scheduler_stats
        if stats is None:
            return
        prefills = [output.prefill_stats for output in outputs.outputs if output.prefill_stats is not None]
        decodes = max(0, sum(bool(output.new_token_ids) for output in outputs.outputs) - len(prefills))
        if stats.num_running_reqs and not (prefills or decodes):
            self._silent += 1
            return
        if self._began is not None and (prefills or decodes):
            chunks = [PrefillChunk(each.num_computed_tokens, each.num_cached_tokens) for each in prefills]
            self.totals = self.totals.add(outputs.timestamp - self._began, decodes, self._context, chunks)
            if self._silent:
                self.totals = self.totals.add(0.0, 0, 0.0, steps=self._silent)
        self._began = outputs.timestamp if stats.num_running_reqs else None
        self._context, self._silent = stats.kv_cache_usage * self.capacity, 0


class EngineMetrics:
    """vLLM's metrics of one engine's work, and its newest scheduler statistics.

    Metrics of requests are not among them: a request may have been on several engines (`app.ingress.telemetry`). vLLM's
    logger has some thirty counters to go through in every step. Most steps only decode and change few of them, so these
    steps are added up, for `_DECODES_S` at most.
    """

    def __init__(self, config: Any, capacity: int) -> None:
        """`capacity` is that of the KV cache, in tokens."""
        self._logger = PrometheusStatLogger(config, [0])
        self.steps = StepMeter(capacity)
        self._logger.log_engine_initialized()
        self.scheduler = SchedulerStats()
        self.preemptions = 0
        self._decoded: list[int] = []
        """The tokens of each step that is not in vLLM's metrics yet."""
        self._decoded_since = 0.0

    def record(self, outputs: EngineCoreOutputs) -> None:
        """Record one engine step."""
        self.steps.record(outputs)
        stats = outputs.scheduler_stats
        if stats is not None and _only_decodes(stats, outputs):
            if not self._decoded:
                self._decoded_since = outputs.timestamp
            self._decoded.append(sum([len(output.new_token_ids) for output in outputs.outputs]))
            self.scheduler = stats
            if outputs.timestamp - self._decoded_since >= _DECODES_S:
                self._record_decodes()
            return
        self._record_decodes()
        if stats is not None:
            self.scheduler = stats
        self._logger.record(stats, self._work(outputs) if outputs.outputs else None)

    def resize(self, capacity: int) -> None:
        """The KV cache has `capacity` tokens from now on. The newest statistics become those of its new size.

        A cache of no tokens has no usage.
        """
        self.scheduler.kv_cache_usage *= self.steps.capacity / capacity if capacity else 0.0
        self.steps.capacity = capacity

    def _record_decodes(self) -> None:
        """Add the steps of decoding alone to vLLM's metrics; `scheduler` is of the last one."""
        if not self._decoded:
            return
        self._logger.record(self.scheduler, None)
        self._logger.counter_generation_tokens[0].inc(sum(self._decoded))
        for tokens in self._decoded:
            self._logger.histogram_iteration_tokens[0].observe(tokens)
        self._decoded.clear()

    def _work(self, outputs: EngineCoreOutputs) -> IterationStats:
        work = IterationStats()
        for output in outputs.outputs:
            work.num_generation_tokens += len(output.new_token_ids)
            if output.prefill_stats is not None:
                work.prompt_token_stats.update_from_output(output.prefill_stats)
            for event in output.events or ():
                work.num_preempted_reqs += event.type == EngineCoreEventType.PREEMPTED
        self.preemptions += work.num_preempted_reqs
        return work


def _only_decodes(stats: SchedulerStats, outputs: EngineCoreOutputs) -> bool:
    """True if vLLM's metrics get from a step its tokens and the state after it, which the next step replaces.

    The step after which nothing runs is none: it may be the last one for long.
    """
    if not (stats.num_running_reqs and outputs.outputs):
        return False
    connector = stats.connector_prefix_cache_stats
    if stats.prefix_cache_stats.requests or stats.prefix_cache_stats.preempted_requests:
        return False
    if connector is not None and (connector.requests or connector.preempted_requests):
        return False
    if any(_further_statistics(stats)):
        return False
    return not any([output.prefill_stats or output.events for output in outputs.outputs])
