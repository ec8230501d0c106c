"""Measures a replica before it serves: how fast it prefills, and how fast its KV blocks are staged.

Nothing else runs on the engine yet, and nothing of it stays in the prefix cache. Links are not measured. A link could
only be tried with its other end, which takes what a small migration takes, for every pair; the first migration over a
link tells more, since it goes the whole way, and it outweighs what was believed before (`lines`).
"""

import contextlib
import itertools
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol, cast

from migration.beliefs import Profile
from migration.errors import TransferFailed
from migration.lines import Line
from migration.messages import Fingerprint, SlotRef
from migration.ports import Clock, Slot
from migration.request import Sampling
from migration.rounds import full_blocks
from migration.slots import Slots
from policies.model import Blocks, Bytes, Tokens

log = logging.getLogger(__name__)

SHORT, LONG = 128, 1024
"""Tokens of the prompts, at most."""
SECONDS = 0.25
"""The long prompt is shorter where it would take longer than that."""
GATHERS = 5
"""Blocks are staged so often. Of each measurement the shortest counts: what comes in between only makes it longer."""
SLOT_LIMIT_S = 1.0

_TOKEN_IDS = range(8, 200)
"""Every vocabulary has these, and a prompt may hold any of them."""
_GOES_ON = 1 << 10


class Profiled(Protocol):
    """What is used of an engine; see `deployments.engine.port.Engine`."""

    fingerprint: Fingerprint
    max_context: Tokens

    def generate(
        self, key: str, prompt: tuple[int, ...], outputs: tuple[int, ...], sampling: Sampling
    ) -> AsyncIterator[Any]:
        """Yields once per step; closing the iterator aborts the request."""
        ...

    async def gather(self, key: str, first: Blocks, last: Blocks, segment: str, offset: int) -> tuple[SlotRef, Bytes]:
        """Copy blocks of a running request into a slot."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget cached blocks of ended requests."""
        ...


async def measure(engine: Profiled, slots: Slots, node: str, clock: Clock) -> Profile:
    """The replica's profile, within about a second.

    Raises:
        EngineDead, InvalidRequest: as the engine's `generate` does.
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
    return Profile(node, engine.fingerprint, _through(short, short_s, long, min(once_s, again_s)), staging)


class _Prompts:
    """Prompts that share no first token, so that no prefix cache has any part of them."""

    def __init__(self) -> None:
        self._seeds = itertools.count()

    def __call__(self, tokens: int) -> tuple[int, ...]:
        seed = next(self._seeds)
        draw = random.Random(seed)
        return (_TOKEN_IDS[seed % len(_TOKEN_IDS)], *(draw.choice(_TOKEN_IDS) for _ in range(tokens - 1)))


async def _prefill_s(engine: Profiled, prompt: tuple[int, ...], clock: Clock) -> float:
    """Seconds to the first token after a prompt."""
    began = clock()
    async with _running(engine, prompt, max_tokens=1):
        return clock() - began


async def _prefill_and_staging(
    engine: Profiled, slots: Slots, prompt: tuple[int, ...], clock: Clock
) -> tuple[float, float | None]:
    """Seconds to the first token, and bytes per second into a slot; None for these where blocks cannot be moved."""
    began = clock()
    async with _running(engine, prompt, min(_GOES_ON, engine.max_context - len(prompt))) as key:
        first_s = clock() - began
        try:
            return first_s, await _staging(engine, slots, key, Tokens(len(prompt)), clock)
        except TransferFailed as error:
            log.warning("staging KV blocks could not be measured: %s", error)
            return first_s, None


async def _staging(engine: Profiled, slots: Slots, key: str, context: Tokens, clock: Clock) -> float | None:
    """The difference between one block and many: what every call takes is not the memory's fault."""
    marks = engine.fingerprint
    many = Blocks(min(full_blocks(context, marks.block_size), marks.blocks_per_slot)) if marks.cache else Blocks(0)
    if many < 2:
        return None
    with await slots.lease(SLOT_LIMIT_S) as slot:
        one_s = min([await _gather_s(engine, key, Blocks(1), slot, clock) for _ in range(GATHERS)])
        many_s = min([await _gather_s(engine, key, many, slot, clock) for _ in range(GATHERS)])
    return _through(marks.block_bytes, one_s, many * marks.block_bytes, many_s).rate


async def _gather_s(engine: Profiled, key: str, blocks: Blocks, slot: Slot, clock: Clock) -> float:
    began = clock()
    await engine.gather(key, Blocks(0), blocks, slot.segment, slot.offset)
    return clock() - began


@contextlib.asynccontextmanager
async def _running(engine: Profiled, prompt: tuple[int, ...], max_tokens: int) -> AsyncGenerator[str]:
    """A request that has got its first token, and is aborted in the end."""
    key = f"profile-{prompt[0]}"
    sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True)
    steps = cast("AsyncGenerator[Any]", engine.generate(key, prompt, (), sampling))
    async with contextlib.aclosing(steps):
        await anext(steps)
        yield key


async def _clean(engine: Profiled) -> None:
    try:
        await engine.reset_prefix_cache()
    except TransferFailed as error:
        log.warning("the prefix cache still holds prompts that were measured: %s", error)


def _through(small: float, small_s: float, large: float, large_s: float) -> Line:
    """The line through two sizes; where the larger one did not take longer, the one through it and nothing."""
    if large > small and large_s > small_s:
        per_unit_s = (large_s - small_s) / (large - small)
        return Line(max(0.0, small_s - small * per_unit_s), per_unit_s)
    return Line(0.0, max(large_s, 1e-9) / large)
