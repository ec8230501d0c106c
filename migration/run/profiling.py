"""Measures a replica before it serves: its prefill speed, and the speed at which its KV blocks are staged.

The engine runs nothing else at that time, and the prompts do not stay in its prefix cache. Links are not measured: a
probe would cost about as much as a small migration, for every pair of replicas. The first migration over a link is the
better measurement, since it covers the whole path, and it outweighs the prior estimate (`lines`).
"""

import contextlib
import itertools
import logging
import random
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from migration.protocol.continuing import plain_spec
from migration.protocol.errors import TransferFailed
from migration.protocol.messages import Fingerprint, Shard
from migration.protocol.ports import Clock, Slot
from migration.protocol.rounds import full_blocks
from migration.run.outputs import Runner, running
from migration.run.slots import Slots
from policies.cost.lines import Line
from policies.model import Blocks, Tokens
from policies.paths.beliefs import Profile

log = logging.getLogger(__name__)

SHORT, LONG = 128, 1024
"""The largest lengths of the two prompts, in tokens."""
SECONDS = 0.25
"""The largest prefill time of the long prompt; a slow engine gets a shorter one."""
GATHERS = 5
"""Repetitions of a staging measurement. The shortest time counts, since disturbances only add time."""
SLOT_LIMIT_S = 1.0

_TOKEN_IDS = range(8, 200)
"""Token ids that exist in every vocabulary and are valid in a prompt."""
_ENDLESS = 1 << 10
"""Output tokens of a request that has to run until it is aborted."""


class Profiled(Runner, Protocol):
    """The part of `deployments.engine.port.Engine` that profiling uses."""

    fingerprint: Fingerprint
    max_context: Tokens

    async def gather(self, key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        """Copy blocks of a running request into a slot of each worker."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        ...


async def measure(engine: Profiled, slots: Slots, node: str, clock: Clock) -> Profile:
    """Measure the replica's profile; takes about a second.

    Raises:
        EngineDead, InvalidRequest, RequestFailed: the engine does not run a request.
    """
    prompts = _Prompts()
    most = max(1, engine.max_context // 2)
    short = max(1, min(SHORT, most // 2))
    await _prefill_s(engine, prompts(short), clock)
    short_s = min([await _prefill_s(engine, prompts(short), clock) for _ in range(2)])
    affordable = int(short * SECONDS / short_s) if short_s > 0 else LONG
    long = min(max(2 * short, min(LONG, affordable)), most)
    once_s = await _prefill_s(engine, prompts(long), clock)
    again_s, staging = await _prefill_and_staging(engine, slots, prompts(long), clock)
    await _clean(engine)
    marks = engine.fingerprint
    prefill = Line.through(short, short_s, long, min(once_s, again_s))
    return Profile(node, marks.cache, marks.block_bytes / marks.block_size, prefill, staging)


class _Prompts:
    """Prompts with different first tokens, so that the prefix cache holds no part of a new one."""

    def __init__(self) -> None:
        self._seeds = itertools.count()

    def __call__(self, tokens: int) -> tuple[int, ...]:
        seed = next(self._seeds)
        draw = random.Random(seed)
        return (_TOKEN_IDS[seed % len(_TOKEN_IDS)], *(draw.choice(_TOKEN_IDS) for _ in range(tokens - 1)))


async def _prefill_s(engine: Profiled, prompt: tuple[int, ...], clock: Clock) -> float:
    """Seconds from a prompt to its first output token."""
    began = clock()
    async with _running(engine, prompt, max_tokens=1):
        return clock() - began


async def _prefill_and_staging(
    engine: Profiled, slots: Slots, prompt: tuple[int, ...], clock: Clock
) -> tuple[float, float | None]:
    """Seconds to the first token, and staged bytes per second; None instead of these if blocks cannot be moved."""
    began = clock()
    async with _running(engine, prompt, min(_ENDLESS, engine.max_context - len(prompt))) as key:
        first_s = clock() - began
        try:
            return first_s, await _staging(engine, slots, key, Tokens(len(prompt)), clock)
        except TransferFailed as error:
            log.warning("staging KV blocks could not be measured: %s", error)
            return first_s, None


async def _staging(engine: Profiled, slots: Slots, key: str, context: Tokens, clock: Clock) -> float | None:
    """Bytes per second, from the difference between one block and many, which excludes the fixed cost of a call."""
    marks = engine.fingerprint
    if not marks.cache:
        return None
    many = Blocks(min(full_blocks(context, marks.block_size), slots.blocks(marks.shard_bytes)))
    if many < 2:
        return None
    with await slots.lease(SLOT_LIMIT_S) as leased:
        one_s = min([await _gather_s(engine, key, Blocks(1), leased, clock) for _ in range(GATHERS)])
        many_s = min([await _gather_s(engine, key, many, leased, clock) for _ in range(GATHERS)])
    return Line.through(marks.block_bytes, one_s, many * marks.block_bytes, many_s).rate


async def _gather_s(engine: Profiled, key: str, blocks: Blocks, slots: Sequence[Slot], clock: Clock) -> float:
    began = clock()
    await engine.gather(key, Blocks(0), blocks, slots)
    return clock() - began


@contextlib.asynccontextmanager
async def _running(engine: Profiled, prompt: tuple[int, ...], max_tokens: int) -> AsyncGenerator[str]:
    """A running request after its first token, aborted at the end of the context."""
    key = f"profile-{prompt[0]}"
    spec = plain_spec(key, prompt, max_tokens, ignore_eos=True)
    async with running(engine, key, spec) as steps:
        await anext(steps)
        yield key


async def _clean(engine: Profiled) -> None:
    try:
        await engine.reset_prefix_cache()
    except TransferFailed as error:
        log.warning("the prefix cache still holds the measurement's prompts: %s", error)
