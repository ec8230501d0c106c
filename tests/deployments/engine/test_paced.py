"""The paced engine in virtual time: the loop's clock jumps to the next timer, so times are exact."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from deployments.engine.paced import PacedEngine
from deployments.engine.port import EngineDead, InvalidRequest
from deployments.engine.tokens import expected
from migration.kv.staging import HEADER, HostSegment
from migration.memory.run import EngineEnded
from migration.protocol.continuing import plain_spec, to_spec
from migration.protocol.core_messages import CoreRequest, Prefilled, decode_logprobs, encode_request
from migration.protocol.errors import BlocksGone, TransferFailed
from migration.protocol.messages import PathRequest, SlotRef, Tail
from migration.protocol.ports import Slot
from migration.protocol.record import Outcome
from migration.protocol.request import IngressId, RequestSpec, Trait
from migration.run.outputs import OutputQueue, running
from migration.transport.shared import SharedSlots
from policies.model import Blocks, ReplicaId, RequestId, Tokens
from policies.prefix.change import CacheChange, Tier
from policies.prefix.names import digests, name_of
from tests.deployments.engine.quick_engine import expected_logprobs, prompt_of
from tests.migration.world import LIMITS, Pair, Replica, spec
from tests.virtual_time import virtual_loop

PACE = {
    "num_gpu_blocks_override": 16,
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "decode_s": 0.010,
    "decode_s_per_seq": 0.001,
    "prefill_tokens_per_s": 1000.0,
}
SLOT_BYTES = 16 * 4 * 4

pytestmark = pytest.mark.virtual_time


@dataclass
class Answer:
    prefilled: Prefilled | None = None
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: str | None = None


class Desk:
    """An engine, and its answers."""

    def __init__(self, engine: PacedEngine) -> None:
        self.engine = engine
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.answers: dict[str, Answer] = {}

    @classmethod
    async def open(cls, **pace: Any) -> "Desk":
        return cls(await PacedEngine.start("model", PACE | pace))

    def ask(
        self,
        key: str,
        prompt: tuple[int, ...],
        tokens: int,
        outputs: tuple[int, ...] = (),
        tail: Tail | None = None,
        priority: int = 0,
    ) -> Answer:
        self.answers[key] = Answer()
        spec = replace(plain_spec(key, prompt, tokens), priority=priority)
        self.tasks[key] = asyncio.create_task(self._read(key, spec, outputs, tail))
        return self.answers[key]

    async def done(self, *keys: str) -> None:
        await asyncio.gather(*(self.tasks[key] for key in keys or self.tasks))

    async def _read(self, key: str, spec: RequestSpec, outputs: tuple[int, ...], tail: Tail | None) -> None:
        answer = self.answers[key]
        async with running(self.engine, key, spec, outputs, tail) as steps:
            async for generated in steps:
                answer.tokens += generated.tokens
                answer.times.append(virtual_loop().time())
                answer.finish = generated.finish
                answer.prefilled = answer.prefilled or generated.prefilled


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(3 + (seed * 97 + i * 31) % 400 for i in range(length))


# --- time ---------------------------------------------------------------------------------------------


async def test_step_time_is_the_sum_of_weights_decodes_and_prefill() -> None:
    desk = await Desk.open()
    answer = desk.ask("r", prompt(8), 3)
    await desk.done()
    assert answer.times == pytest.approx([0.018, 0.018 + 0.011, 0.018 + 0.022])


async def test_requests_share_a_step() -> None:
    desk = await Desk.open()
    one, two = desk.ask("1", prompt(8), 2), desk.ask("2", prompt(8, 1), 2)
    await desk.done()
    assert one.times == two.times == pytest.approx([0.026, 0.026 + 0.012])


async def test_long_prefill_takes_several_steps() -> None:
    desk = await Desk.open()
    answer = desk.ask("r", prompt(40), 1)
    await desk.done()
    assert answer.times == pytest.approx([3 * 0.010 + 0.040])


async def test_prefill_slows_the_decodes_of_its_step() -> None:
    desk = await Desk.open()
    answer = desk.ask("1", prompt(4), 3)
    await asyncio.sleep(0.020)
    desk.ask("2", prompt(10, 1), 1)
    await desk.done()
    gaps = [b - a for a, b in zip(answer.times, answer.times[1:], strict=False)]
    assert gaps == pytest.approx([0.011, 0.021])


async def test_context_and_attention_take_time() -> None:
    desk = await Desk.open(context_s=0.0001, attention_s=0.00001)
    answer = desk.ask("r", prompt(20), 3)
    await desk.done()
    # 16 tokens after none, 4 after 16; then 21 and 22 tokens of context
    first = 0.026 + 0.00001 * 16 * 8 + 0.014 + 0.00001 * 4 * 18
    gaps = [b - a for a, b in zip([0.0, *answer.times], answer.times, strict=False)]
    assert gaps == pytest.approx([first, 0.011 + 0.0021, 0.011 + 0.0022])


async def test_steps_are_added_up() -> None:
    desk = await Desk.open(context_s=0.0001, attention_s=0.00001)
    answer = desk.ask("r", prompt(20), 3)
    await desk.done()
    totals = desk.engine.stats().steps
    assert (totals.steps, totals.prefilled, totals.decodes, totals.context) == (4, 20, 2, 21 + 22)
    assert totals.attended == 16 * 8 + 4 * 18
    assert totals.seconds == pytest.approx(answer.times[-1])


async def test_late_steps_do_not_add_up() -> None:
    desk = await Desk.open()
    virtual_loop().late_s = 0.003
    answer = desk.ask("r", prompt(1), 60)
    await desk.done()
    assert answer.times[-1] - answer.times[0] == pytest.approx(59 * 0.011)


async def test_long_delayed_engine_does_not_catch_up() -> None:
    desk = await Desk.open()
    answer = desk.ask("r", prompt(1), 20)
    await asyncio.sleep(0.060)
    virtual_loop().now_s += 1.0
    await desk.done()
    late = [t for t in answer.times if t > 1.0]
    assert late[-1] - late[1] == pytest.approx((len(late) - 2) * 0.011)


async def test_step_has_one_timer_and_an_idle_engine_none() -> None:
    desk = await Desk.open()
    for i in range(4):
        desk.ask(f"{i}", prompt(4, i), 10)
    before = virtual_loop().timers
    await desk.done()
    assert virtual_loop().timers - before == 10
    await asyncio.sleep(100)
    assert virtual_loop().timers - before == 11


async def test_start_takes_the_startup_time() -> None:
    await Desk.open(startup_s=30.0)
    assert virtual_loop().time() == pytest.approx(30.0)


# --- memory -------------------------------------------------------------------------------------------


async def test_requests_wait_for_blocks_in_order_of_arrival() -> None:
    desk = await Desk.open()
    first, second, third = (desk.ask(f"{i}", prompt(n, i), 4) for i, n in enumerate((40, 40, 4)))
    await asyncio.sleep(0.035)
    stats = desk.engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (1, 2, 6)
    await desk.done()
    assert first.times[-1] < second.times[0] <= third.times[0]
    assert desk.engine.stats().preemptions == 0


async def test_number_of_running_requests_is_limited() -> None:
    desk = await Desk.open(max_num_seqs=2)
    for i in range(3):
        desk.ask(f"{i}", prompt(4, i), 5)
    await asyncio.sleep(0.020)
    assert (desk.engine.stats().running, desk.engine.stats().waiting) == (2, 1)
    await desk.done()


async def test_youngest_request_is_preempted_and_recomputed_without_free_blocks() -> None:
    desk = await Desk.open()
    old, young = desk.ask("old", prompt(28), 20), desk.ask("young", prompt(28, 1), 20)
    await asyncio.sleep(0.001)
    waiting = desk.ask("waiting", prompt(20, 2), 1)
    await desk.done()
    assert desk.engine.stats().preemptions == 1
    resumed = next(i for i, t in enumerate(young.times) if t > old.times[-1])
    assert 0 < resumed < 20
    assert young.times[resumed] < waiting.times[0]
    assert tuple(old.tokens) == expected(prompt(28), 20)
    assert tuple(young.tokens) == expected(prompt(28, 1), 20)


async def test_the_last_in_line_is_preempted_by_priority_though_it_came_first() -> None:
    desk = await Desk.open(scheduling_policy="priority")
    low = desk.ask("low", prompt(28), 20, priority=9)
    await asyncio.sleep(0.050)
    high = desk.ask("high", prompt(28, 1), 20, priority=-3)
    await desk.done()
    assert desk.engine.stats().preemptions == 1
    assert high.times[-1] < low.times[-1]
    assert max(b - a for a, b in zip(high.times, high.times[1:], strict=False)) < 0.030
    assert tuple(low.tokens) == expected(prompt(28), 20)


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abc"), ("priority", "cab")])
async def test_waiting_requests_are_admitted_in_the_order_of_the_policy(policy: str, order: str) -> None:
    desk = await Desk.open(max_num_seqs=1, scheduling_policy=policy)
    desk.ask("first", prompt(4), 5)
    await asyncio.sleep(0.001)
    priorities = {"a": 5, "b": 5, "c": 1}
    answers = {key: desk.ask(key, prompt(4, ord(key)), 2, priority=value) for key, value in priorities.items()}
    await desk.done()
    assert "".join(sorted(answers, key=lambda key: answers[key].times[0])) == order


async def test_free_blocks_fall_as_requests_grow_and_return_at_the_end() -> None:
    desk = await Desk.open()
    desk.ask("r", prompt(8), 6)
    used = []
    while not desk.tasks["r"].done():
        await asyncio.sleep(0.011)
        used.append(16 - desk.engine.stats().free_blocks)
    assert sorted(set(used)) == [0, 2, 3, 4]
    assert used[-1] == 0


async def test_a_smaller_engine_has_less_than_no_room_until_requests_end() -> None:
    desk = await Desk.open()
    desk.ask("r", prompt(30), 2)
    await asyncio.sleep(0.050)
    desk.engine.resize(Blocks(5))
    stats = desk.engine.stats()
    assert (stats.capacity_tokens, stats.nominal_tokens, stats.free_blocks) == (20, 64, -3)
    await desk.done("r")
    assert desk.engine.stats().free_blocks == 5


async def test_a_larger_engine_admits_what_waits() -> None:
    desk = await Desk.open()
    desk.engine.resize(Blocks(2))
    answer = desk.ask("r", prompt(30), 2)
    await asyncio.sleep(0.050)
    assert not answer.tokens and desk.engine.stats().waiting == 1
    desk.engine.resize(Blocks(16))
    await desk.done()


@pytest.mark.parametrize("seed", range(8))
async def test_answers_of_an_engine_whose_size_changes_at_random(seed: int) -> None:
    dice = Random(seed)
    steady, desk = await Desk.open(), await Desk.open()
    prompts = {f"r{n}": prompt(dice.randrange(1, 24), n) for n in range(12)}
    for key, tokens in prompts.items():
        steady.ask(key, tokens, 20)
        desk.ask(key, tokens, 20)

    async def resize() -> None:
        while True:
            desk.engine.resize(Blocks(dice.randrange(11, 40)))
            await asyncio.sleep(dice.random() / 20)

    resizing = asyncio.create_task(resize())
    await asyncio.gather(steady.done(), desk.done())
    resizing.cancel()
    assert {k: a.tokens for k, a in desk.answers.items()} == {k: a.tokens for k, a in steady.answers.items()}
    assert desk.engine.stats().free_blocks * 4 == desk.engine.stats().capacity_tokens
    assert desk.engine.stats().preemptions > 0


async def test_aborted_request_frees_its_blocks_at_once() -> None:
    desk = await Desk.open()
    desk.ask("long", prompt(40), 20)
    waiting = desk.ask("waiting", prompt(40, 1), 1)
    await asyncio.sleep(0.080)
    desk.tasks["long"].cancel()
    await asyncio.sleep(0)
    assert desk.engine.stats().free_blocks == 16
    await desk.done("waiting")
    assert waiting.finish == "length"


async def test_aborted_request_no_longer_waits() -> None:
    desk = await Desk.open()
    desk.ask("long", prompt(40), 20)
    desk.ask("waiting", prompt(40, 1), 1)
    await asyncio.sleep(0.080)
    desk.tasks["waiting"].cancel()
    await asyncio.sleep(0)
    assert desk.engine.stats().waiting == 0
    await desk.done("long")


# --- the prefix cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first_tokens", [1, 20], ids=["of a request that ended", "of a request that runs"])
async def test_cached_prefix_is_not_recomputed(first_tokens: int) -> None:
    desk = await Desk.open()
    first = desk.ask("1", prompt(16), first_tokens)
    await asyncio.sleep(0.030)
    second = desk.ask("2", prompt(16), 1)
    began = first.times[-1]
    await desk.done()
    alone = 0.030 + 0.010 + 0.004  # 12 of 16 tokens are cached; the last block gives the next token
    beside = began + 0.011 + 0.010 + 0.001 + 0.004  # after the step under way, which takes 0.011
    assert second.times == pytest.approx([alone if first_tokens == 1 else beside])
    assert second.tokens == first.tokens[:1]


async def test_least_recently_used_blocks_are_evicted_first() -> None:
    desk = await Desk.open()
    for key, seed in (("a", 0), ("b", 1), ("c", 2)):
        desk.ask(key, prompt(24, seed), 1)
        await desk.done()
    assert desk.engine.stats().free_blocks == 16
    took = {}
    for key, seed in (("c again", 2), ("a again", 0)):
        began = virtual_loop().time()
        desk.ask(key, prompt(24, seed), 1)
        await desk.done()
        took[key] = virtual_loop().time() - began
    assert took["c again"] == pytest.approx(0.010 + 0.004)
    assert took["a again"] == pytest.approx(0.010 + 0.012)  # of the oldest, the first half is left


async def test_reset_drops_the_blocks_of_ended_requests() -> None:
    desk = await Desk.open()
    took = []
    for key in ("1", "2"):
        began = virtual_loop().time()
        desk.ask(key, prompt(16), 1)
        await desk.done()
        took.append(virtual_loop().time() - began)
        await desk.engine.reset_prefix_cache()
    assert took[0] == pytest.approx(took[1])


async def test_reset_keeps_blocks_in_use() -> None:
    desk = await Desk.open()
    desk.ask("runs", prompt(16), 10)
    await asyncio.sleep(0.030)
    await desk.engine.reset_prefix_cache()
    second = desk.ask("same", prompt(16), 1)
    began = desk.answers["runs"].times[-1]
    await desk.done()
    assert second.times == pytest.approx([began + 0.011 + 0.010 + 0.001 + 0.004])
    for seed in (1, 2, 3):
        desk.ask(f"{seed}", prompt(32, seed), 1)
    await desk.done()
    assert desk.engine.stats().free_blocks == 16


async def test_deleted_blocks_are_not_found_and_running_requests_keep_theirs() -> None:
    desk = await Desk.open()
    names = [name_of(digest) for digest in digests(prompt(16), 4)]
    assert desk.engine.names(plain_spec("any", prompt(16)[:12], 1), prompt(16)[12:]) == names
    desk.ask("runs", prompt(16), 10)
    await asyncio.sleep(0.030)
    assert set(names) <= set(desk.engine.mirror.hbm.counts)
    assert await desk.engine.delete(names[:2]) == 2
    assert not set(names[:2]) & set(desk.engine.mirror.hbm.counts) and desk.engine.mirror.exact
    second = desk.ask("same", prompt(16), 1)
    await desk.done()
    assert second.prefilled == Prefilled(16, 0), "without its first blocks, a prefix is not found"
    assert desk.answers["runs"].tokens == list(expected(tuple(prompt(16)), 10))
    assert desk.engine.stats().free_blocks == 16
    left = len(desk.engine.mirror.hbm.counts)
    assert left and await desk.engine.delete(None) == left and not desk.engine.mirror.hbm.counts
    assert desk.engine.stats().free_blocks == 16
    for seed in (1, 2, 3):
        desk.ask(f"{seed}", prompt(32, seed), 1)
    await desk.done()
    assert desk.engine.stats().free_blocks == 16


# --- blocks that move -----------------------------------------------------------------------------------


@pytest.fixture
def segment() -> Iterator[HostSegment]:
    with HostSegment.create(2 * (HEADER + SLOT_BYTES)) as staging:
        yield staging


def slots(segment: HostSegment, offset: int = 0) -> list[Slot]:
    """The slot at `offset`, for the engine's only worker."""
    return [segment.slot(offset, HEADER + SLOT_BYTES)]


async def load(target: Desk, context: tuple[int, ...], first: int, last: int, chunks: Mapping[int, SlotRef]) -> None:
    """Load blocks [first, last) of a context from slots, which hold the blocks from these indexes on."""
    name = f"load-{first}-{last}"
    loading = asyncio.create_task(
        target.engine.load(name, plain_spec(name, context, 1), (), Blocks(first), Blocks(last))
    )
    await asyncio.sleep(0)
    ends = [*list(chunks)[1:], last]
    try:
        for (begin, slot), end in zip(chunks.items(), ends, strict=True):
            await target.engine.put(name, Blocks(begin), Blocks(end), [slot])
        await loading
    finally:
        loading.cancel()


async def moved(
    segment: HostSegment, source: Desk, target: Desk, context: tuple[int, ...], last: int, flip: int | None = None
) -> None:
    """Copy blocks [0, last) of "r" to another engine, in two chunks; byte `flip` of the second chunk is changed."""
    chunks: dict[int, SlotRef] = {}
    for number, (first, until) in enumerate(((0, last // 2), (last // 2, last))):
        offset = number * (HEADER + SLOT_BYTES)
        ((slot, size),) = await source.engine.gather("r", Blocks(first), Blocks(until), slots(segment, offset))
        assert size == HEADER + (until - first) * 16
        if flip is not None and number:
            segment.view(offset + HEADER, SLOT_BYTES)[flip] ^= 1
        chunks[first] = slot
    await load(target, context, 0, last, chunks)


async def half_done(source: Desk) -> tuple[int, ...]:
    """A request of 32 tokens with 8 tokens of output, on its way to 20; returns these."""
    answer = source.ask("r", prompt(32), 20)
    while len(answer.tokens) < 8:
        await asyncio.sleep(0.002)
    return tuple(answer.tokens)


async def test_moved_request_continues_without_prefill(segment: HostSegment) -> None:
    source, target = await Desk.open(), await Desk.open()
    outputs = await half_done(source)
    await moved(segment, source, target, prompt(32) + outputs, 9)
    began = virtual_loop().time()
    rest = target.ask("r", prompt(32), 20, outputs)
    await target.done()
    assert outputs + tuple(rest.tokens) == expected(prompt(32), 20)
    assert rest.times[0] - began == pytest.approx(0.010 + 0.004)
    assert target.engine.blocks_loaded == 9
    await source.done()


@pytest.mark.parametrize("flip", [None, 7], ids=["whole", "corrupted"])
async def test_tail_is_not_computed(segment: HostSegment, flip: int | None) -> None:
    source, target = await Desk.open(), await Desk.open()
    outputs = await half_done(source)
    await moved(segment, source, target, prompt(32) + outputs, 8)
    tail = Tail("tail", Blocks(8), 39)
    ((slot, _),) = await source.engine.gather_tail("r", tail, slots(segment))
    if flip is not None:
        segment.view(HEADER, SLOT_BYTES)[flip] ^= 1
    target.engine.expect("tail")
    await target.engine.hold(tail, [slot])
    began = virtual_loop().time()
    rest = target.ask("r", prompt(32), 20, outputs, tail)
    await target.done()
    assert rest.times[0] - began == pytest.approx(0.010 + 0.001), "one token is computed"
    assert (outputs + tuple(rest.tokens) == expected(prompt(32), 20)) is (flip is None)
    await source.done()


@pytest.mark.parametrize("first", [7, 9], ids=["some of it in the cache", "a gap before it"])
async def test_tail_that_does_not_begin_behind_the_cache(segment: HostSegment, first: int) -> None:
    source, target = await Desk.open(), await Desk.open()
    outputs = await half_done(source)
    await moved(segment, source, target, prompt(32) + outputs, 8)
    tail = Tail("tail", Blocks(first), 39)
    ((slot, _),) = await source.engine.gather_tail("r", tail, slots(segment))
    target.engine.expect("tail")
    await target.engine.hold(tail, [slot])
    began = virtual_loop().time()
    rest = target.ask("r", prompt(32), 20, outputs, tail)
    await target.done()
    assert rest.times[0] - began == pytest.approx(0.010 + (0.001 if first == 7 else 0.008))
    assert outputs + tuple(rest.tokens) == expected(prompt(32), 20)
    await source.done()


async def test_tail_beyond_the_computed_tokens_is_not_gathered(segment: HostSegment) -> None:
    source = await Desk.open()
    await half_done(source)
    with pytest.raises(TransferFailed, match="tokens are computed"):
        await source.engine.gather_tail("r", Tail("tail", Blocks(8), 50), slots(segment))
    await source.done()


async def test_corrupted_blocks_change_the_output(segment: HostSegment) -> None:
    source, target = await Desk.open(), await Desk.open()
    outputs = await half_done(source)
    await moved(segment, source, target, prompt(32) + outputs, 9, flip=7)
    rest = target.ask("r", prompt(32), 20, outputs)
    await target.done()
    assert len(rest.tokens) == 12
    assert outputs + tuple(rest.tokens) != expected(prompt(32), 20)
    await source.done()


async def test_content_of_a_corrupted_block_moves_on(segment: HostSegment) -> None:
    first, second, third = [await Desk.open() for _ in range(3)]
    outputs = await half_done(first)
    await moved(segment, first, second, prompt(32) + outputs, 9, flip=7)
    wrong = second.ask("r", prompt(32), 20, outputs)
    await asyncio.sleep(0.030)
    known = outputs + tuple(wrong.tokens)
    await moved(segment, second, third, prompt(32) + known, 9)
    rest = third.ask("r", prompt(32), 20, known)
    await asyncio.gather(first.done(), second.done(), third.done())
    assert wrong.tokens == [*known[8:], *rest.tokens]


async def test_blocks_after_a_gap_are_not_loaded(segment: HostSegment) -> None:
    source, target = await Desk.open(), await Desk.open()
    outputs = await half_done(source)
    ((slot, _),) = await source.engine.gather("r", Blocks(2), Blocks(4), slots(segment))
    await load(target, prompt(32) + outputs, 2, 4, {2: slot})
    assert target.engine.blocks_loaded == 0
    await source.done()


async def test_load_without_room_fails(segment: HostSegment) -> None:
    source, target = await Desk.open(), await Desk.open()
    outputs = await half_done(source)
    target.ask("other", prompt(60, 5), 4)
    await asyncio.sleep(0.020)
    with pytest.raises(TransferFailed, match="no room"):
        await moved(segment, source, target, prompt(32) + outputs, 9)
    await asyncio.gather(source.done(), target.done())


async def test_reused_slot_is_not_read(segment: HostSegment) -> None:
    source, target = await Desk.open(), await Desk.open()
    outputs = await half_done(source)
    ((slot, _),) = await source.engine.gather("r", Blocks(0), Blocks(4), slots(segment))
    await source.engine.gather("r", Blocks(4), Blocks(8), slots(segment))
    with pytest.raises(TransferFailed, match="reused"):
        await load(target, prompt(32) + outputs, 0, 4, {0: slot})
    await source.done()


async def test_only_computed_blocks_can_be_gathered(segment: HostSegment) -> None:
    desk = await Desk.open()
    desk.ask("r", prompt(40), 4)
    desk.ask("waiting", prompt(40, 1), 1)
    await asyncio.sleep(0.030)  # the first step computed 16 tokens
    await desk.engine.gather("r", Blocks(0), Blocks(4), slots(segment))
    with pytest.raises(TransferFailed, match="only 16 tokens"):
        await desk.engine.gather("r", Blocks(4), Blocks(5), slots(segment))
    with pytest.raises(BlocksGone):
        await desk.engine.gather("waiting", Blocks(0), Blocks(1), slots(segment))
    with pytest.raises(BlocksGone):
        await desk.engine.gather("unheard of", Blocks(0), Blocks(1), slots(segment))
    await desk.done()


async def test_wait_for_computed_tokens_ends_with_the_step_that_computes_them() -> None:
    desk = await Desk.open()
    desk.ask("r", prompt(40), 4)
    desk.ask("waiting", prompt(40, 1), 1)
    waits = [desk.engine.computed_beyond("r", Tokens(beyond)) for beyond in (0, 15, 16, 32)]
    given_up = asyncio.create_task(desk.engine.computed_beyond("unheard of", Tokens(0)))
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.sleep(0.030)  # the first step computed 16 tokens
    given_up.cancel()
    assert [task.done() for task in tasks] == [True, True, False, False]
    assert await desk.engine.computed("r") == 16 == await desk.engine.computed_beyond("r", Tokens(15))
    assert await desk.engine.computed("waiting") is None is await desk.engine.computed("unheard of")
    assert await asyncio.gather(*tasks) == [16, 16, 32, 40]
    await desk.done()
    assert not desk.engine._computing


@pytest.mark.parametrize("when", ["decoding", "prefilling"])
async def test_migration_protocol_moves_a_request_between_paced_engines(when: str) -> None:
    pace = PACE | {"num_gpu_blocks_override": 256, "max_model_len": 1024, "decode_s": 0.001, "decode_s_per_seq": 0.0}
    cluster: dict[ReplicaId, Replica] = {}
    for name in ("a", "b"):
        engine = await PacedEngine.start("model", pace)
        replica = Replica(name, cluster, engine, SharedSlots(), 1.0, LIMITS)
        cluster[replica.id] = replica
    pair = Pair(cluster[ReplicaId("a")], cluster[ReplicaId("b")])
    pair.readers = [asyncio.create_task(pair.read(replica)) for replica in cluster.values()]
    request = spec(prompt=80, tokens=200)
    cursor = pair.submit(request)
    if when == "decoding":
        await pair.until(cursor, 10)
    else:
        await asyncio.sleep(0.020)  # the first of five steps computed 16 tokens
    pair.move(request.id, path=PathRequest.KV)
    assert await pair.finished(cursor) == expected(prompt_of(request), 200)
    record = await pair.settled()
    assert (record.outcome, record.path) == (Outcome.COMMITTED, "kv")
    assert 0 < record.blocks == pair.b.engine.blocks_loaded
    assert (record.waited_s > 0) is (when == "prefilling") is (record.rounds > 3)


async def test_logprobs_follow_from_the_context() -> None:
    engine, request = await PacedEngine.start("model", PACE), prompt(8)
    async with running(engine, "r", plain_spec("r", request, 10, logprobs=2)) as run:
        steps = [step async for step in run]
    given = [decode_logprobs(step.rest or b"") for step in steps]
    assert given == expected_logprobs(request, 10, 2)
    async with running(engine, "s", plain_spec("s", request, 10)) as run:
        plain = [step async for step in run]
    assert [step.tokens for step in plain] == [step.tokens for step in steps]
    assert [step.rest is None for step in plain] == [False] + 9 * [True], "the first step has the prefill's figures"


# --- the prefix cache as it is seen from outside ---------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "salt", "cached"),
    [(prompt(21), None, 20), (prompt(20), None, 16), (prompt(20) + (9,) * 5, None, 20), (prompt(21), "other", 0)],
    ids=["the same", "without its last token", "longer", "of another salt"],
)
async def test_cached_tokens_are_those_of_whole_blocks(second: tuple[int, ...], salt: str | None, cached: int) -> None:
    engine = await PacedEngine.start("model", PACE)
    found = []
    for key, tokens, of in (("r", prompt(21), None), ("s", second, salt)):
        request = CoreRequest(key, list(tokens), sampling_params={"max_tokens": 3}, cache_salt=of)
        spec = to_spec(request, encode_request(request), RequestId(key), "", IngressId(""))
        async with running(engine, key, spec) as steps:
            found.append([step async for step in steps])
    cold, warm = ([step.prefilled for step in steps] for steps in found)
    assert cold == [Prefilled(21, 0), None, None] and warm == [Prefilled(len(second), cached), None, None]


@pytest.mark.parametrize("seed", range(8))
async def test_mirror_equals_the_pool_at_every_version(seed: int) -> None:
    draw, desk = Random(seed), await Desk.open(num_gpu_blocks_override=24)
    engine, all_changes = desk.engine, CacheChange({}, {}, True)
    for number in range(30):
        match draw.choice(["ask", "ask", "ask", "abort", "reset", "wait"]):
            case "ask":
                desk.ask(f"r{number}", prompt(draw.randrange(1, 40), draw.randrange(3)), draw.randrange(1, 20))
            case "abort" if desk.answers:
                engine.abort(draw.choice(sorted(desk.answers)))
            case "reset":
                await engine.reset_prefix_cache()
        for _ in range(draw.randrange(6)):
            await asyncio.sleep(0.01)
            assert engine.mirror.hbm.counts == dict.fromkeys(engine._batch.pool.named, 1)
        if (change := engine.mirror.change(False)) is not None:
            all_changes = all_changes.then(change)
    assert engine.mirror.exact and set(all_changes.stored.get(Tier.HBM, ())) == set(engine.mirror.hbm.counts)
    for task in desk.tasks.values():
        task.cancel()


# --- ends -----------------------------------------------------------------------------------------------


async def test_shutdown_fails_all_requests_and_loads() -> None:
    desk = await Desk.open()
    desk.ask("r", prompt(4), 10)
    loading = asyncio.create_task(_load_nothing(desk.engine))
    await asyncio.sleep(0.030)
    await loading
    loading = asyncio.create_task(_load_nothing(desk.engine))
    waiting = asyncio.create_task(desk.engine.computed_beyond("r", Tokens(1000)))
    await asyncio.sleep(0)
    desk.engine.shutdown()
    later = asyncio.create_task(desk.engine.computed_beyond("r", Tokens(1000)))
    for late in (loading, asyncio.create_task(_load_nothing(desk.engine)), waiting, later):
        with pytest.raises(TransferFailed, match="shut down"):
            await late
    with pytest.raises(EngineDead, match="shut down"):
        await desk.done("r")
    desk.ask("later", prompt(4), 10)
    with pytest.raises(EngineDead):
        await desk.done("later")
    with pytest.raises(EngineDead):
        await desk.engine.check_health()


async def _load_nothing(engine: PacedEngine) -> None:
    await engine.load("nothing", plain_spec("", prompt(5), 1), (), Blocks(0), Blocks(0))


async def test_exception_in_a_step_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = await Desk.open()
    await desk.engine.check_health()
    monkeypatch.setattr(desk.engine._batch, "begin", lambda: 1 / 0)
    desk.ask("r", prompt(4), 10)
    with pytest.raises(EngineDead, match="division"):
        await desk.done()
    with pytest.raises(EngineDead):
        await desk.engine.check_health()


async def test_pooled_requests_are_refused() -> None:
    desk, queue = await Desk.open(), OutputQueue()
    desk.engine.add("r", replace(plain_spec("r", prompt(4), 1), traits=frozenset({Trait.POOLED})), (), queue)
    with pytest.raises(InvalidRequest, match="no pooling model"):
        await queue.exhaust()


@pytest.mark.parametrize(
    ("length", "tokens", "outputs"),
    [(61, 4, ()), (4, 2, (5, 6))],
    ids=["beyond the context", "nothing left to do"],
)
async def test_invalid_requests_are_refused(length: int, tokens: int, outputs: tuple[int, ...]) -> None:
    desk = await Desk.open()
    desk.ask("r", prompt(length), tokens, outputs)
    with pytest.raises(InvalidRequest):
        await desk.done()
    assert desk.engine.stats().waiting == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enforce_eager": True}, r"engine_kwargs\.enforce_eager: a paced engine has no such argument"),
        ({"num_gpu_blocks_override": None}, r"engine_kwargs\.num_gpu_blocks_override"),
        ({"decode_s": 0}, r"engine_kwargs\.decode_s: .*greater than 0"),
        ({"decode_s": "0.1"}, r"engine_kwargs\.decode_s: .*number"),
        ({"block_size": 2.5}, r"engine_kwargs\.block_size: .*integer"),
        ({"max_model_len": 65}, r"do not hold max_model_len, 65 tokens"),
        ({"max_num_seqs": 17}, r"max_num_batched_tokens \(16\) is below max_num_seqs \(17\)"),
    ],
)
async def test_invalid_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await PacedEngine.start("model", PACE | change)


async def test_number_of_blocks_is_the_only_required_argument() -> None:
    with pytest.raises(ValueError, match=r"engine_kwargs\.num_gpu_blocks_override is required"):
        await PacedEngine.start("model", {})
    await PacedEngine.start("model", {"num_gpu_blocks_override": 256})


async def test_an_elastic_pool_shrinks_once_its_requests_fit() -> None:
    engine = await PacedEngine.start("model", PACE, declared=2.0)
    memory, desk = engine.memory, Desk(engine)
    assert memory is not None and (memory.size, memory.declared, memory.model.floor) == (16, 32, 16)
    await memory.grow(Blocks(32))
    memory.announce(Blocks(32))
    assert engine.stats().capacity_tokens == 32 * 4 and engine.stats().nominal_tokens == 16 * 4
    for key in "abcd":
        desk.ask(key, prompt(20, ord(key)), 5)
    await asyncio.sleep(0.1)
    used = memory.used
    assert used >= 20
    memory.announce(Blocks(16))
    assert (await memory.fit(Blocks(16))).over == used + 4 - 16 and memory.size == 32
    assert engine.stats().free_blocks == 16 - used < 0
    await desk.done()
    assert (await memory.fit(Blocks(16))).over == 0 and memory.size == 16
    assert engine.stats().preemptions == 0 and engine.stats().free_blocks == 16


async def test_an_elastic_pool_ends_with_its_engine() -> None:
    engine = await PacedEngine.start("model", PACE, declared=2.0)
    engine.shutdown()
    assert engine.memory is not None
    with pytest.raises(EngineEnded):
        await engine.memory.grow(Blocks(20))
