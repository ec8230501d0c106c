"""The port between a replica and its inference engine."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from deployments.cache.mirror import Mirror
from migration.protocol.core_messages import Adapter
from migration.protocol.messages import Fingerprint, Shard, SlotRef, Tail
from migration.protocol.ports import OutputSink, Slot, WorkerLinks
from migration.protocol.request import RequestSpec, Trait
from policies.cost.fit import NO_STEPS, StepTotals
from policies.model import Blocks, Tokens
from policies.prefix.names import Naming
from policies.prefix.tree import HeldPrefix


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's capacity and work by its own count; `preemptions` and `steps` since its start."""

    capacity_tokens: Tokens
    free_blocks: Blocks
    block_size: int
    max_requests: int
    running: int
    waiting: int
    preemptions: int
    steps: StepTotals = NO_STEPS
    step_tokens: int = 0
    """The most tokens of a step; 0: unknown."""
    max_adapters: int = 0
    """The most LoRA adapters of a step."""


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """The process ids of one engine; those of the workers in the order of their ranks."""

    core: int
    workers: tuple[int, ...]


class Tie(StrEnum):
    """The reason why an engine of this kind cannot continue a request with output exactly (`immovable_reason`)."""

    SEEDED = "seeded sampling: on a GPU, model runner V1's generator cannot be restored"
    DRAFTED = "seeded sampling with speculative decoding: the draws depend on the draft tokens of each step"
    POOLED = "a pooling model's request: it has no output to continue after, and ends with its prompt"


class EngineDead(Exception):
    """The engine ended; every request on it is lost with it."""


class InvalidRequest(Exception):
    """The engine rejects the request; the text is the reason."""


class ProfilerUnavailable(Exception):
    """The engine has no profiler, or it is not in the state that a call needs; the text is the reason."""


class RequestFailed(Exception):
    """The engine ended a valid request without its output, for a reason of its own."""


@dataclass(frozen=True, slots=True)
class ProfileSession:
    """One session of an engine's profiler: the beginning of its files' names, and its bounds in steps of the engine."""

    prefix: str = ""
    delay_iterations: int | None = None
    max_iterations: int | None = None


class Engine(Protocol):
    """One inference engine, with the interface of vLLM's core: requests are added and aborted, and outputs come.

    `key` is the caller's name for one run of one request; it is never reused.
    """

    fingerprint: Fingerprint
    processes: EngineProcesses
    max_context: Tokens
    tasks: tuple[str, ...]
    """The tasks of the model, with vLLM's names: `generate`, or those of a pooling model."""
    blocks_loaded: int
    """The number of KV blocks loaded from staging slots since the start."""
    mirror: Mirror
    """The names of the blocks in the prefix cache."""
    host_blocks: Blocks
    """The number of blocks for which the tier of host memory has room; 0: there is none."""
    naming: Naming | None
    """The engine's naming of blocks; None if there is no mirror."""

    @property
    def profiling(self) -> bool:
        """True during a session of the profiler, which may halt the engine for minutes."""
        ...

    @property
    def links(self) -> WorkerLinks | None:
        """The workers' connections; None if only the replica exchanges blocks."""
        ...

    def tied(self, traits: frozenset[Trait]) -> Tie | None:
        """The reason why another engine of this kind cannot continue such a request exactly; None if it can."""
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter, which `add` and `load` require for the requests that name it.

        Raises:
            Refused: the engine cannot load it, or its files are gone.
        """
        ...

    def add(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None
    ) -> None:
        """Continue a request after `outputs`. Returns at once.

        `sink` gets the output, or one of this module's errors. The first step reads a held `tail` if the prefix cache
        has the blocks before it; the tail is freed in any case.
        """
        ...

    def abort(self, key: str) -> None:
        """End a run, if it has not ended: its sink gets nothing more."""
        ...

    def halt(self, key: str, left: int) -> None:
        """End a run with one of its next tokens, with the finish reason HALTED, unless it ends by itself.

        `left` is the number of tokens to its limit.
        """
        ...

    async def gather(self, key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        """Copy blocks [first, last) of the running request `key`: each worker's shard into its staging slot.

        `slots` are in the order of the workers' ranks.

        Raises:
            TransferFailed: a block is not full, or the request holds no blocks.
        """
        ...

    async def computed(self, key: str) -> Tokens | None:
        """The number of first tokens of the running request `key` whose KV its blocks have; None: it has no blocks.

        Raises:
            TransferFailed: the engine does not answer.
        """
        ...

    async def computed_beyond(self, key: str, tokens: Tokens) -> Tokens:
        """Wait until the blocks of the running request `key` have the KV of more than `tokens` tokens; their number.

        Waits on for a request that waits, is preempted, or is not known yet or any more.

        Raises:
            TransferFailed: the engine does not answer.
        """
        ...

    async def load(self, load: str, spec: RequestSpec, outputs: tuple[int, ...], first: Blocks, last: Blocks) -> None:
        """Allocate blocks [first, last) of the request's prompt and outputs; return once `put` has filled them all.

        Requests that are added from then on find them in the prefix cache. Cancelled, it frees them. A name of a load
        is never reused.

        Raises:
            TransferFailed: the engine could not load them.
        """
        ...

    async def put(self, load: str, first: Blocks, last: Blocks, slots: Sequence[SlotRef]) -> None:
        """Copy staged blocks [first, last) of the context into the load `load`, which has been called and not ended.

        Raises:
            TransferFailed: a slot has another ticket, or the load ended.
        """
        ...

    async def gather_tail(self, key: str, tail: Tail, slots: Sequence[Slot]) -> Sequence[Shard]:
        """Copy the tail of the running request `key`, which has output behind its tokens, as `gather` does.

        Raises:
            TransferFailed: as `gather`, or the engine computes the request's known tokens anew.
        """
        ...

    def names(self, spec: RequestSpec, outputs: tuple[int, ...]) -> Sequence[int]:
        """The names of the full blocks of a request's prompt and outputs; none if there is no mirror."""
        ...

    def present(self, spec: RequestSpec, outputs: tuple[int, ...]) -> HeldPrefix:
        """The number of the first full blocks of prompt and outputs that the prefix cache has, by the mirror."""
        ...

    async def hold_prefix(self, hold: str, spec: RequestSpec, outputs: tuple[int, ...]) -> Blocks:
        """Keep the first full blocks of a context that the prefix cache has, until `release_prefix`; their number.

        They can be gathered and sent as those of a running request of the key `hold`, a name that is never reused.
        Cancelled, it releases them.

        Raises:
            TransferFailed: the engine could not hold them.
        """
        ...

    def release_prefix(self, hold: str) -> None:
        """End a hold. An unknown one is no error."""
        ...

    def expect(self, tail: str) -> None:
        """Let the workers hold the tail of this name, until `discard` or the first step of its run."""
        ...

    async def hold(self, tail: Tail, slots: Sequence[SlotRef]) -> None:
        """Copy a staged tail into the workers' memory, for `add`.

        Raises:
            TransferFailed: a slot has another ticket, or the tail is not expected.
        """
        ...

    def discard(self, tail: str) -> None:
        """Free the tail of this name, which no run will get. A tail that is not held is no error."""
        ...

    def stats(self) -> EngineStats:
        """Capacity and work as of the newest step."""
        ...

    async def check_health(self) -> None:
        """Raise EngineDead if the engine has ended."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Drop the cached blocks of ended requests.

        Raises:
            TransferFailed: a request holds blocks.
        """
        ...

    async def delete(self, names: Collection[int] | None) -> Blocks:
        """Delete the blocks of these names from the prefix cache, None: all; return their number.

        No later request finds them. The requests that use some of them keep those, and go on. The mirror follows.

        Raises:
            TransferFailed: there is no mirror, and so no names, or the engine could not.
        """
        ...

    async def pin(self, pin: str, names: Sequence[int]) -> Blocks:
        """Keep the first of these blocks that the tier of host memory has from eviction; return their number.

        An earlier pin of that name ends. A reset of the prefix cache ends all pins.

        Raises:
            TransferFailed: there is no tier, or the engine could not.
        """
        ...

    async def unpin(self, pin: str) -> Blocks:
        """End a pin; return the number of its blocks, 0 for an unknown one. Raises TransferFailed as `pin`."""
        ...

    async def swap_out(self, count: Blocks) -> Blocks:
        """Have free blocks leave the accelerator's memory, the oldest of those that the tier of host memory has.

        Returns their number. Raises TransferFailed as `pin`.
        """
        ...

    async def start_profile(self, session: ProfileSession) -> None:
        """Start the engine's profiler.

        Raises:
            ProfilerUnavailable: the engine has none, or a session is under way.
        """
        ...

    async def stop_profile(self) -> None:
        """Stop the engine's profiler; returns once its files are written.

        Raises:
            ProfilerUnavailable: no session is under way.
        """
        ...

    def shutdown(self) -> None:
        """End the engine's processes."""
        ...
