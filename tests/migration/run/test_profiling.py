"""A replica's profile before it serves, on an engine whose clock advances only by the measured work."""

from collections.abc import Sequence

import pytest

from deployments.engine.port import EngineDead
from migration.kv.staging import HostSegment
from migration.protocol.errors import TransferFailed
from migration.protocol.messages import Shard, Tail
from migration.protocol.ports import OutputSink, Slot
from migration.protocol.request import RequestSpec
from migration.run.profiling import GATHERS, PROMPT, measure
from migration.run.slots import Slots
from policies.model import Blocks
from policies.paths.prices import Profile
from tests.deployments.engine.quick_engine import BLOCK, QuickEngine, blocks_of, is_unused, prompt_of

SLOT_BLOCKS = 64


class Timed(QuickEngine):
    """Stages `staging` bytes per second after a millisecond, and `delays` come on top, one at each call."""

    def __init__(
        self,
        staging: float = 1e9,
        delays: tuple[float, ...] = (),
        context: int = 4096,
        cache: str = "cache",
        workers: int = 1,
    ) -> None:
        super().__init__(0.0, context, cache=cache, workers=workers)
        self.staging = staging
        self.now = 0.0
        self.prompts: list[tuple[int, ...]] = []
        self.gathered: list[int] = []
        self.reset_after: list[int] = []
        self.broken = False
        self._delays = iter(delays)

    def add(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None
    ) -> None:
        """See `Engine.add`."""
        self.prompts.append(prompt_of(spec))
        super().add(key, spec, outputs, sink, tail)

    async def gather(self, key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        """See `PacedEngine`."""
        if self.broken:
            raise TransferFailed("broken by a test")
        self.gathered.append(last - first)
        self.now += 0.001 + (last - first) * self.fingerprint.block_bytes / self.staging + next(self._delays, 0.0)
        return await super().gather(key, first, last, slots)

    async def reset_prefix_cache(self) -> None:
        """See `PacedEngine`."""
        self.reset_after.append(len(self.prompts))
        await super().reset_prefix_cache()


async def measured(engine: Timed) -> Profile:
    """The engine's profile. The measurement must leave nothing behind, with any end."""
    marks = engine.fingerprint
    slots = Slots(2, SLOT_BLOCKS * marks.shard_bytes, [HostSegment.create] * marks.workers)
    try:
        return await measure(engine, slots, "node", lambda: engine.now)
    finally:
        assert is_unused(engine) and slots.in_use == 0
        slots.close()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("staging", [1e6, 1e9])
async def test_profile_equals_the_engines_speed(staging: float, workers: int) -> None:
    engine = Timed(staging, workers=workers)
    profile = await measured(engine)
    assert profile.staging_bytes_per_s == pytest.approx(staging)
    marks = engine.fingerprint
    assert (profile.node, profile.cache) == ("node", marks.cache)
    assert profile.token_bytes * marks.block_size == marks.block_bytes == 16, "a token's KV, over all workers"


async def test_disturbances_of_the_measurement_do_not_count() -> None:
    delays = (5.0, *[0.0] * GATHERS, 0.3)
    assert (await measured(Timed(delays=delays))).staging_bytes_per_s == pytest.approx(1e9)


async def test_prefix_cache_is_cleared_once_at_the_end() -> None:
    engine = Timed()
    await measured(engine)
    assert [len(prompt) for prompt in engine.prompts] == [PROMPT]
    assert engine.reset_after == [len(engine.prompts)] and not blocks_of(engine)


@pytest.mark.parametrize("blocks", [1, 2, 40])
async def test_short_context_suffices(blocks: int) -> None:
    engine = Timed(context=blocks * BLOCK)
    assert ((await measured(engine)).staging_bytes_per_s is None) == (blocks < 3)


async def test_cache_without_movable_blocks_is_not_staged() -> None:
    engine = Timed(cache="")
    assert (await measured(engine)).staging_bytes_per_s is None
    assert not engine.gathered and not engine.prompts


async def test_staging_is_limited_to_the_size_of_a_slot() -> None:
    engine = Timed()
    await measured(engine)
    assert engine.gathered == [1] * GATHERS + [SLOT_BLOCKS] * GATHERS


async def test_failed_staging_is_left_out() -> None:
    engine = Timed()
    engine.broken = True
    assert (await measured(engine)).staging_bytes_per_s is None and len(engine.reset_after) == 1


async def test_clock_without_progress_still_gives_a_rate() -> None:
    assert 0 < ((await measured(Timed(float("inf")))).staging_bytes_per_s or 0.0) < float("inf")


async def test_dead_engine_raises() -> None:
    engine = Timed()
    engine.shutdown()
    with pytest.raises(EngineDead):
        await measured(engine)
