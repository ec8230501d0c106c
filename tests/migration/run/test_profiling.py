"""A replica's profile before it serves, on an engine whose clock advances only by the measured work."""

import contextlib
from collections.abc import AsyncGenerator, Sequence

import pytest

from deployments.engine.port import EngineDead
from migration.kv.staging import HostSegment
from migration.protocol.errors import TransferFailed
from migration.protocol.messages import Shard, Tail
from migration.protocol.ports import Generated, Slot
from migration.protocol.request import RequestSpec
from migration.run.profiling import GATHERS, LONG, SECONDS, SHORT, measure
from migration.run.slots import Slots
from policies.model import Blocks
from policies.paths.beliefs import Profile
from tests.deployments.engine.fake_engine import FakeEngine, prompt_of

SLOT_BLOCKS = 64


class Timed(FakeEngine):
    """Prefills `rate` tokens per second after `latency_s`, and stages `staging` bytes per second after a millisecond.

    `delays` come on top, one at each request.
    """

    def __init__(
        self,
        rate: float = 10_000.0,
        latency_s: float = 0.005,
        staging: float = 1e9,
        delays: tuple[float, ...] = (),
        num_blocks: int = 1024,
        cache: str = "cache",
        workers: int = 1,
    ) -> None:
        super().__init__(step_s=0.0, num_blocks=num_blocks, cache=cache, workers=workers)
        self.rate, self.latency_s, self.staging = rate, latency_s, staging
        self.now = 0.0
        self.prompts: list[tuple[int, ...]] = []
        self.gathered: list[int] = []
        self.reset_after: list[int] = []
        self.broken = False
        self._delays = iter(delays)

    async def drawn(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], tail: Tail | None = None
    ) -> AsyncGenerator[Generated]:
        """See `FakeEngine`."""
        prompt = prompt_of(spec)
        assert len(prompt) + spec.max_tokens <= self.max_context and spec.max_tokens > 0
        self.prompts.append(prompt)
        self.now += self.latency_s + len(prompt) / self.rate + next(self._delays, 0.0)
        async with contextlib.aclosing(super().drawn(key, spec, outputs, tail)) as steps:
            async for step in steps:
                yield step

    async def gather(self, key: str, first: Blocks, last: Blocks, slots: Sequence[Slot]) -> Sequence[Shard]:
        """See `FakeEngine`."""
        if self.broken:
            raise TransferFailed("broken by a test")
        self.gathered.append(last - first)
        self.now += 0.001 + (last - first) * self.fingerprint.block_bytes / self.staging
        return await super().gather(key, first, last, slots)

    async def reset_prefix_cache(self) -> None:
        """See `FakeEngine`."""
        self.reset_after.append(len(self.prompts))
        await super().reset_prefix_cache()


async def measured(engine: Timed) -> Profile:
    """The engine's profile. The measurement must leave nothing behind, with any end."""
    marks = engine.fingerprint
    slots = Slots(2, SLOT_BLOCKS * marks.shard_bytes, [HostSegment.create] * marks.workers)
    try:
        return await measure(engine, slots, "node", lambda: engine.now)
    finally:
        assert not engine._contexts and slots.in_use == 0
        slots.close()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rate", [2_000.0, 10_000.0, 1e6])
async def test_profile_equals_the_engines_speed(rate: float, workers: int) -> None:
    engine = Timed(rate, workers=workers)
    profile = await measured(engine)
    assert profile.prefill.rate == pytest.approx(rate) and profile.prefill.latency_s == pytest.approx(0.005)
    assert profile.staging_bytes_per_s == pytest.approx(1e9)
    marks = engine.fingerprint
    assert (profile.node, profile.cache) == ("node", marks.cache)
    assert profile.token_bytes * marks.block_size == marks.block_bytes == 16, "a token's KV, over all workers"


async def test_extra_time_of_the_first_request_does_not_count() -> None:
    profile = await measured(Timed(delays=(5.0,)))
    assert profile.prefill.rate == pytest.approx(10_000.0) and profile.prefill.latency_s == pytest.approx(0.005)


async def test_one_disturbance_per_measurement_does_not_count() -> None:
    profile = await measured(Timed(delays=(0.0, 0.3, 0.0, 0.0, 0.4)))
    assert profile.prefill.rate == pytest.approx(10_000.0)


async def test_prompts_share_no_prefix() -> None:
    engine = Timed()
    await measured(engine)
    assert len({prompt[0] for prompt in engine.prompts}) == len(engine.prompts) == 5
    assert {len(prompt) for prompt in engine.prompts} == {SHORT, LONG}


async def test_prefix_cache_is_cleared_once_at_the_end() -> None:
    engine = Timed()
    await measured(engine)
    assert engine.reset_after == [len(engine.prompts)] and not engine._cache


async def test_slow_engine_gets_a_shorter_prompt() -> None:
    engine = Timed(rate=1000.0)
    profile = await measured(engine)
    longest = max(map(len, engine.prompts))
    assert 2 * SHORT <= longest <= 2 * SHORT + SECONDS * 1000
    assert profile.prefill.rate == pytest.approx(1000.0)


async def test_fast_engine_is_measured_within_a_second() -> None:
    engine = Timed()
    await measured(engine)
    assert engine.now < 1.0


@pytest.mark.parametrize("num_blocks", [1, 2, 40])
async def test_short_context_suffices(num_blocks: int) -> None:
    engine = Timed(num_blocks=num_blocks)
    profile = await measured(engine)
    assert profile.prefill.rate == pytest.approx(10_000.0)
    assert (profile.staging_bytes_per_s is None) == (num_blocks < 3)


async def test_cache_without_movable_blocks_is_not_staged() -> None:
    engine = Timed(cache="")
    assert (await measured(engine)).staging_bytes_per_s is None
    assert not engine.gathered


async def test_staging_is_limited_to_the_size_of_a_slot() -> None:
    engine = Timed()
    await measured(engine)
    assert engine.gathered == [1] * GATHERS + [64] * GATHERS


async def test_failed_staging_is_left_out() -> None:
    engine = Timed()
    engine.broken = True
    profile = await measured(engine)
    assert profile.staging_bytes_per_s is None and profile.prefill.rate == pytest.approx(10_000.0)


async def test_clock_without_progress_still_gives_a_line() -> None:
    engine = Timed(rate=float("inf"), latency_s=0.0, staging=float("inf"))
    profile = await measured(engine)
    assert 0 < profile.prefill.rate < float("inf") and profile.staging_bytes_per_s


async def test_dead_engine_raises() -> None:
    engine = Timed()
    engine.dead = True
    with pytest.raises(EngineDead):
        await measured(engine)
