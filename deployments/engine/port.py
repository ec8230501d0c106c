"""The port between a replica and its inference engine."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from deployments.cache.mirror import Mirror
from migration.memory.pair_run import EngineHalf
from migration.memory.run import EngineMemory
from migration.protocol.core_messages import Adapter
from migration.protocol.messages import Tail
from migration.protocol.ports import BlockStore, OutputSink, PrefixHolds
from migration.protocol.request import RequestSpec, Trait
from policies.cost.fit import NO_STEPS, StepTotals
from policies.model import Blocks, Tokens
from policies.prefix.names import Naming


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's capacity and work by its own count; `preemptions` and `steps` since its start.

    `capacity_tokens` may change at any time: below what is used, `free_blocks` are below zero.
    """

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
    nominal_tokens: Tokens = Tokens(0)
    """The capacity of a new engine; 0: it is the present one."""


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """The process ids of one engine; those of the workers in the order of their ranks."""

    core: int
    workers: tuple[int, ...]

    @property
    def all(self) -> frozenset[int]:
        """All of them; a core may be its own worker."""
        return frozenset((self.core, *self.workers))


class Tie(StrEnum):
    """The reason why an engine of this kind cannot continue a request with output exactly (`immovable_reason`)."""

    SEEDED = "seeded sampling: the generator of vLLM's older model runner cannot be restored"
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


class Engine(BlockStore, PrefixHolds, Protocol):
    """One inference engine, with the interface of vLLM's core: requests are added and aborted, and outputs come.

    `key` is the caller's name for one run of one request; it is never reused.
    """

    processes: EngineProcesses
    max_context: Tokens
    tasks: tuple[str, ...]
    """The tasks of the model, with vLLM's names: `generate`, or those of a pooling model."""
    blocks_loaded: int
    """The number of KV blocks loaded from staging slots since the start."""
    host_blocks: Blocks
    """The number of blocks for which the tier of host memory has room; 0: there is none."""
    naming: Naming | None
    """The engine's naming of blocks; None if there is no mirror."""

    @property
    def memory(self) -> EngineMemory | None:
        """The engine's elastic KV pool; None if the pool keeps its size."""
        ...

    @property
    def half(self) -> EngineHalf | None:
        """The engine's side of pairs; None if its pool keeps its size."""
        ...

    @property
    def mirror(self) -> Mirror:
        """The names of the blocks in the prefix cache, with all changes that the engine has published."""
        ...

    @property
    def profiling(self) -> bool:
        """True during a session of the profiler, which may halt the engine for minutes."""
        ...

    @property
    def death(self) -> str | None:
        """The reason why the engine has ended, once that was noticed; None before."""
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

    async def check_grammar(self, spec: RequestSpec, outputs: tuple[int, ...]) -> None:
        """Compile the grammar of a request, if it has one, and have it accept `outputs`, as `add` would.

        Raises:
            Refused: that fails, so that the request could not be continued here.
        """
        ...

    def add(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None
    ) -> None:
        """Continue a request after `outputs`. Returns at once.

        `sink` gets the output, or one of this module's errors, once this call has returned. The first step reads a held
        `tail` if the prefix cache has the blocks before it; the tail is freed in any case, also of a request that is
        aborted.
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

    def names(self, spec: RequestSpec, outputs: tuple[int, ...]) -> Sequence[int]:
        """The names of the full blocks of a request's prompt and outputs; none if there is no mirror."""
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
