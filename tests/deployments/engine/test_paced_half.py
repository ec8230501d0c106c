"""Two paced engines of one process in a pair, in virtual time: what their sockets have is there at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import uvloop

from deployments.engine.paced import PacedEngine
from deployments.engine.paced_half import BuddyGone, BuddyLine, LayerCall, PacedGuests, PacedHalf, SharedTurns
from deployments.engine.tokens import expected
from migration.protocol.continuing import plain_spec
from migration.protocol.errors import TransferFailed
from policies.cost.steps import HopCosts, WholeStep, cycle_s
from policies.model import Blocks
from tests.deployments.engine.test_paced import PACE, Answer, Desk, prompt
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time

PAIRED = PACE | {
    "overhead_s": 0.004,
    "num_layers": 4,
    "layer_mib": 2.0,
    "hop_s": 0.001,
    "hop_s_per_token": 0.0,
    "load_mib_per_s": 100.0,
}
HOP = HopCosts(0.001)
A, B = prompt(8), prompt(8, 1)


class Member(Desk):
    """An engine that can be in a pair."""

    @classmethod
    async def open(cls, **pace: Any) -> "Member":
        return cls(await PacedEngine.start("model", PAIRED | pace, declared=2.0))

    @property
    def half(self) -> PacedHalf:
        assert self.engine.half is not None
        return self.engine.half

    async def give(self, *layers: int) -> None:
        for layer in layers:
            await self.half.copy(layer, back=False)
            while (await self.half.look()).is_copying:
                await asyncio.sleep(0.001)
            assert await self.half.give(layer) is None

    async def take_back(self, *layers: int) -> None:
        assert await self.half.load() is None
        for layer in layers:
            await self.half.copy(layer, back=True)
            assert await self.half.take_back(layer) is None


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Member, Member]]:
    a, b = await Member.open(), await Member.open()
    try:
        yield a, b
    finally:
        for member in (a, b):
            member.engine.shutdown()
            await asyncio.gather(*member.tasks.values(), return_exceptions=True)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Member, Member]]:
    async with two() as (a, b):
        addresses = await a.half.listen(1), await b.half.listen(1)
        assert (await a.half.link(addresses[1], 1), await b.half.link(addresses[0], 1)) == (None, None)
        yield a, b


@asynccontextmanager
async def paired() -> AsyncIterator[tuple[Member, Member]]:
    async with linked() as (a, b):
        await a.give(3, 2)
        await b.give(0, 1)
        yield a, b


def gaps(answer: Answer) -> list[float]:
    return [after - before for before, after in pairwise(answer.times)]


async def test_parts_of_steps_take_turns() -> None:
    turns, began = SharedTurns(now), now()
    ends = await asyncio.gather(*(turns.run(seconds, began) for seconds in (0.010, 0.020, 0.005)))
    assert [end - began for end in ends] == pytest.approx([0.010, 0.030, 0.035])
    assert now() == pytest.approx(ends[-1])
    await asyncio.sleep(1)
    assert await turns.run(0.010, now() - 0.004) == pytest.approx(now()), "a step may have begun before it asks"


async def test_two_engines_run_each_others_steps_in_lockstep() -> None:
    async with paired() as (a, b):
        answers = a.ask("a", A, 30), b.ask("b", B, 30)
        await a.done()
        await b.done()
        for answer, asked in zip(answers, (A, B), strict=True):
            assert answer.tokens == list(expected(asked, 30))
        step = WholeStep(0.011, 1)
        cycle = cycle_s([step, step], 2, PAIRED["overhead_s"], HOP)
        found = sorted(gaps(answers[0])[5:-5])
        assert found[len(found) // 2] == pytest.approx(cycle, rel=0.1)
        for member in (a, b):
            look = await member.half.look()
            assert (look.remote, look.guest_layers, look.lost) == (2, 2, None)
            assert look.hops == look.served == 30 and look.lost_steps == 0


async def test_one_engine_alone_pays_the_hop_and_the_overhead_of_a_second_part() -> None:
    async with paired() as (a, _):
        answer = a.ask("a", A, 10)
        await a.done()
        assert gaps(answer) == pytest.approx([0.011 + 0.004 + 0.001] * 9)


async def test_layers_come_and_go_between_the_steps_of_requests() -> None:
    async with linked() as (a, b):
        answers = a.ask("a", A, 40), b.ask("b", B, 40)
        await a.give(3, 2)
        await b.give(0, 1)
        await a.take_back(2, 3)
        await b.take_back(1, 0)
        await a.half.close()
        await b.half.close()
        hops = (await a.half.look()).hops
        assert hops and not a.half.is_shared and not b.half.is_shared
        await a.done()
        await b.done()
        assert [answer.tokens for answer in answers] == [list(expected(A, 40)), list(expected(B, 40))]
        assert (await a.half.look()).hops == hops
        assert gaps(answers[0])[-1] == pytest.approx(0.011)


async def test_a_half_whose_buddy_ends_is_whole_again_and_computes_its_requests_anew() -> None:
    async with paired() as (a, b):
        answer = a.ask("a", A, 20)
        while len(answer.tokens) < 5:
            await asyncio.sleep(0.001)
        loading = asyncio.create_task(a.engine.load("l", plain_spec("l", prompt(16, 2), 1), (), Blocks(0), Blocks(4)))
        b.engine.shutdown()
        while (await a.half.look()).lost is None or not (await a.half.look()).lost_steps:
            await asyncio.sleep(0.001)
        had = len(answer.tokens)
        await asyncio.sleep(1)
        assert len(answer.tokens) == had, "no step yields a token"
        await a.half.abandon()
        assert await a.half.forget_kv(1.0) is None
        assert (a.engine.used, a.engine.running) == (0, 0)
        began = now()
        assert await a.half.load() is None
        assert now() - began == pytest.approx(2 * 2.0 / 100.0), "parameters of two layers"
        await a.half.be_whole()
        await a.done()
        assert answer.tokens == list(expected(A, 20))
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


async def test_loads_that_wait_for_a_step_fail_with_the_buddy() -> None:
    async with paired() as (a, b):
        b.engine.shutdown()
        waiting = asyncio.get_running_loop().create_future()
        a.engine._loads.append(waiting)
        assert a.engine.forget() is None
        with pytest.raises(TransferFailed, match="lost"):
            await waiting


async def test_a_buddy_that_hangs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with paired() as (a, b):
        b.half._guests._run = lambda seconds: asyncio.sleep(3600)  # type: ignore[union-attr]
        a.ask("a", A, 5)
        await asyncio.sleep(11)
        look = await a.half.look()
        assert look.lost == "the buddy has not answered within 10 s" and look.lost_steps == 1
        a.engine.shutdown()


async def test_a_pair_of_another_epoch_is_refused() -> None:
    async with two() as (a, b):
        assert "no pair of epoch 2" in (await b.half.link(await a.half.listen(1), 2) or "")
        assert await b.half.link("\0nobody", 1)


async def test_an_engine_without_layers_is_in_no_pair() -> None:
    engine = await PacedEngine.start("model", PACE, declared=2.0)
    assert engine.half is not None and engine.half.unable
    assert (await PacedEngine.start("model", PACE)).half is None


async def test_memory_is_that_of_parameters_and_blocks() -> None:
    a = await Member.open(block_mib=0.5)
    assert a.engine.memory is not None
    model = a.engine.memory.model
    assert (model.parameters, model.layer, model.block, model.layers) == (8 << 20, 2 << 20, 1 << 19, 4)


def test_guests_are_served_in_a_loop_of_uvloop() -> None:
    """Ray Serve's replicas run in one."""

    async def call() -> None:
        guests = PacedGuests(1, asyncio.sleep)
        try:
            line = await BuddyLine.open(await guests.listen(), 1)
            assert await line.call(LayerCall(guests=2)) >= 0.0
            assert guests.layers == 2
            line.close()
        finally:
            guests.close()
        with pytest.raises(BuddyGone):
            await BuddyLine.open("\0mell-paced-nobody", 1)

    uvloop.run(call())
