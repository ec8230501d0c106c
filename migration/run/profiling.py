"""Measures a replica's KV cache before it serves: the speed at which its blocks are staged.

The engine runs nothing else at that time, and the prompt does not stay in its prefix cache. Links are not measured: a
probe would cost about as much as a small migration, for every pair of replicas. The first migration over a link is the
better measurement, since it covers the whole path, and it outweighs the first guess (`policies.cost.lines`).
"""

import contextlib
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
from policies.paths.prices import Profile

log = logging.getLogger(__name__)

PROMPT = 512
"""The largest length of the prompt whose blocks are staged, in tokens."""
GATHERS = 5
"""Repetitions of a staging measurement. The shortest time counts, since disturbances only add time."""
SLOT_LIMIT_S = 1.0

_TOKEN_IDS = range(8, 200)
"""Token ids that exist in every vocabulary and are valid in a prompt."""
_ENDLESS = 1 << 10
"""Output tokens of a request that has to run until it is aborted."""
_KEY = "profile"


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
    """Measure the replica's profile; takes less than a second.

    Raises:
        EngineDead, InvalidRequest, RequestFailed: the engine does not run a request.
    """
    marks = engine.fingerprint
    tokens = Tokens(max(1, min(PROMPT, engine.max_context // 2)))
    many = Blocks(min(full_blocks(tokens, marks.block_size), slots.blocks(marks.shard_bytes)))
    staging: float | None = None
    if marks.cache and many >= 2:
        staging = await _staging(engine, slots, tokens, many, clock)
        await _clean(engine)
    return Profile(node, marks.cache, marks.block_bytes / marks.block_size, staging)


async def _staging(engine: Profiled, slots: Slots, tokens: Tokens, many: Blocks, clock: Clock) -> float | None:
    """Bytes per second, from the difference between one block and many, which excludes the fixed cost of a call.

    None if blocks cannot be moved.
    """
    size = engine.fingerprint.block_bytes
    try:
        async with _running(engine, tokens) as key:
            with await slots.lease(SLOT_LIMIT_S) as leased:
                one_s = min([await _gather_s(engine, key, Blocks(1), leased, clock) for _ in range(GATHERS)])
                many_s = min([await _gather_s(engine, key, many, leased, clock) for _ in range(GATHERS)])
    except TransferFailed as error:
        log.warning("staging KV blocks could not be measured: %s", error)
        return None
    return Line.through(size, one_s, many * size, many_s).rate


async def _gather_s(engine: Profiled, key: str, blocks: Blocks, slots: Sequence[Slot], clock: Clock) -> float:
    began = clock()
    await engine.gather(key, Blocks(0), blocks, slots)
    return clock() - began


@contextlib.asynccontextmanager
async def _running(engine: Profiled, tokens: Tokens) -> AsyncGenerator[str]:
    """A running request with a prompt of that length after its first token, aborted at the end of the context."""
    draw = random.Random(0)
    prompt = tuple(draw.choice(_TOKEN_IDS) for _ in range(tokens))
    spec = plain_spec(_KEY, prompt, min(_ENDLESS, engine.max_context - tokens), ignore_eos=True)
    async with running(engine, _KEY, spec) as steps:
        await anext(steps)
        yield _KEY


async def _clean(engine: Profiled) -> None:
    try:
        await engine.reset_prefix_cache()
    except TransferFailed as error:
        log.warning("the prefix cache still holds the measurement's prompt: %s", error)
