"""A pair of two real engines, formed and undone under running streams: their tokens are those of whole engines."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from app.tinymodel import ensure_tiny_model
from deployments.engine.pairing import VllmHalf
from deployments.engine.vllm_engine import VllmEngine
from migration.memory.pair_run import PairProposal, PairShell
from migration.memory.pair_tables import HalfState
from migration.memory.run import Resizer
from migration.memory.tables import PoolState
from policies.memory.ledger import MemoryOrder, OrderNumber
from policies.memory.plan import MemoryPlan
from policies.model import Blocks, ReplicaId
from tests.counts import LONG, LONG_ONLY
from tests.integration.models.pair import EnginePair, pair_of_engines, prompt_of

SIZES: Mapping[str, Any] = {
    "max_model_len": 1024,
    "num_gpu_blocks_override": 161,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
}
LAYERS, BOUNDARY = 4, 2
SAMPLING: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0.9, "seed": 7},
    {"repetition_penalty": 1.3},
    {"logprobs": 2},
    {"structured_outputs": {"regex": "(ab|cd|ef){300}", "_backend": "xgrammar"}},
)
STREAMS = 10


@dataclass
class Member:
    """A replica of a pair, and the buddy that it is for the other one."""

    name: ReplicaId
    engine: VllmEngine
    resizer: Resizer
    pairing: PairShell | None = None
    other: "Member | None" = None
    given_up: list[str] = field(default_factory=list)
    states: list[HalfState] = field(default_factory=list)

    @property
    def half(self) -> VllmHalf:
        assert self.engine.half is not None
        return self.engine.half

    async def propose_pair(self, proposal: PairProposal) -> str:
        self.resizer.reserve()
        address = await self.half.listen(proposal.epoch)
        self.begin(proposal, proposal.address)
        return address

    async def pair_state(self, epoch: int) -> str | None:
        pairing = self.pairing
        return None if pairing is None or pairing.proposal.epoch != epoch else pairing.state

    def begin(self, proposal: PairProposal, theirs: str | None = None) -> None:
        assert self.other is not None
        self.pairing = PairShell(
            proposal,
            self.name,
            self.half,
            self.resizer,
            self.other,
            self.given_up.append,
            lambda: None,
            theirs,
        )
        self.pairing.begin()

    async def reaches(self, *states: HalfState) -> None:
        async with asyncio.timeout(60):
            while self.pairing is not None and self.pairing.state not in states:
                await asyncio.sleep(0.01)


class Kept:
    """Implements `HostedRequests`: nothing leaves."""

    is_empty = True

    def close(self) -> None:
        raise AssertionError("a paired replica does not sleep")

    def open(self) -> None:
        """It has not closed."""

    def give_back(self, blocks: Blocks) -> None:
        raise AssertionError("all requests fit")

    def give_up(self, reason: str) -> None:
        raise AssertionError(reason)


class Two:
    """Two engines whose replicas can be paired."""

    def __init__(self, streams: EnginePair) -> None:
        self.streams = streams
        self.a, self.b = (self._member(name, streams[name].engine) for name in "ab")
        self.a.other, self.b.other = self.b, self.a
        self._epoch = 0

    def _member(self, name: str, engine: VllmEngine) -> Member:
        assert engine.memory is not None
        resizer = Resizer(ReplicaId(name), engine.memory, time.monotonic, Kept())
        return Member(ReplicaId(name), engine, resizer)

    @property
    def both(self) -> tuple[Member, Member]:
        return self.a, self.b

    async def pair(self) -> None:
        """Begin to form a pair, which a leads."""
        self._epoch += 1
        self.a.resizer.reserve()
        address = await self.a.half.listen(self._epoch)
        proposal = PairProposal(
            self._epoch, self.a.name, self.b.name, BOUNDARY, LAYERS, self.a.engine.fingerprint.model, address, 60.0
        )
        self.a.begin(proposal)

    async def paired(self) -> None:
        await self.pair()
        for member in self.both:
            await member.reaches(HalfState.PAIRED)
        for member in self.both:
            await member.resizer.settled()

    async def apart(self) -> None:
        for member in self.both:
            await member.reaches(HalfState.OVER)
            await member.resizer.settled()

    async def answers(self, name: str, rounds: int = 1) -> list[tuple[int, ...]]:
        """The outputs of all streams, every other one on b."""

        async def stream(number: int) -> list[tuple[int, ...]]:
            found = []
            for turn in range(rounds):
                work, more = prompt_of(60 + 37 * number, f"work {number}"), SAMPLING[number % len(SAMPLING)]
                run = f"{name} {number} {turn}"
                output, _ = await self.streams.run(run, work, 150, on="ab"[number % 2], ignore_eos=True, **more)
                found.append(output)
            return found

        return [output for each in await asyncio.gather(*map(stream, range(STREAMS))) for output in each]

    async def forget(self) -> None:
        """Have both compute everything anew."""
        for member in self.both:
            await member.engine.delete(None)


async def running(two: Two, name: str) -> None:
    """Wait until some streams have tokens."""
    async with asyncio.timeout(60):
        while sum(bool(c.tokens) for id, c in two.streams.cursors.items() if id.startswith(name)) < STREAMS // 2:
            await asyncio.sleep(0.01)


@pytest.mark.asyncio(loop_scope="package")
async def test_streams_across_a_pair_that_forms_and_is_undone_have_the_tokens_of_whole_engines(
    two_engines: EnginePair,
) -> None:
    pair = Two(two_engines)
    await pair.forget()
    want = await pair.answers("whole")
    assert len({token for output in want for token in output}) > 200, "the outputs are diverse"
    await pair.forget()
    model = pair.a.resizer.memory.model
    before = model.need(pair.a.resizer.report.ordered)

    # A pair forms under streams, and others begin in it.
    streams = asyncio.create_task(pair.answers("forming"))
    await running(pair, "forming")
    await pair.paired()
    assert await streams == want
    for member in pair.both:
        assert member.pairing is not None
        assert (await member.half.look()).remote == LAYERS - BOUNDARY
        report = member.resizer.report
        assert report.held == report.ordered
        assert report.held.remote == LAYERS - BOUNDARY
        assert before - model.block < model.need(report.held) <= before
        assert member.engine.memory is not None
        assert member.engine.memory.size == report.held.blocks, "the pool has grown"
    await pair.forget()
    assert await pair.answers("paired") == want
    look = await pair.a.half.look()
    assert min(look.hops, look.served) > 100
    if LONG:
        await pool_changes_its_size(pair, want)

    # It is undone under streams.
    streams = asyncio.create_task(pair.answers("undone"))
    await running(pair, "undone")
    assert pair.b.pairing is not None
    pair.b.pairing.undo("by hand")
    await pair.apart()
    assert await streams == want
    for member in pair.both:
        assert member.resizer.report.held.remote == 0
    if LONG:
        assert await pair.answers("cached") == want, "the KV that has come back"
        await pair.forget()
        assert await pair.answers("whole again") == want

    # Once more, with a bit that flips in each hop of a.
    await pair.forget()
    await pair.paired()
    await pair.a.engine._core.collective_rpc_async(flip)
    got = await pair.answers("flipped")
    assert got[0::2] != want[0::2]
    assert got[1::2] == want[1::2], "hops of b are sound"
    await pair.a.engine._core.collective_rpc_async(flip_no_more)
    assert pair.b.pairing is not None
    pair.b.pairing.undo("by hand")
    await pair.apart()
    await pair.forget()
    assert not pair.a.given_up
    assert not pair.b.given_up


async def pool_changes_its_size(pair: Two, want: list[tuple[int, ...]]) -> None:
    """In the pair: blocks change their places in both workers."""
    for number, blocks in enumerate((90, 120), start=1):
        streams = asyncio.create_task(pair.answers(f"resized {number}"))
        await running(pair, f"resized {number}")
        plan = MemoryPlan(Blocks(blocks), LAYERS - BOUNDARY)
        pair.a.resizer.obey(MemoryOrder(ReplicaId("a"), OrderNumber(1, number), plan), 60.0)
        await pair.a.resizer.settled()
        assert pair.a.resizer.state is PoolState.SETTLED
        assert pair.a.resizer.report.held == plan
        assert await streams == want
    assert pair.a.resizer.counts.renumbered


def flip(worker: Any) -> None:
    """In a worker: one bit of the hidden states of each hop to the buddy is another."""
    half = worker._half
    worker.sound = packed = half._packed

    def spoiled(*args: Any) -> Any:
        call, tensors = packed(*args)
        tensors.hidden.view(torch.int32)[0, 0] ^= 1 << 30
        return call, tensors

    half._packed = spoiled


def flip_no_more(worker: Any) -> None:
    """In a worker: hops are sound again."""
    worker._half._packed = worker.sound


@LONG_ONLY
@pytest.mark.parametrize("when", ["paired", "giving"])
async def test_a_buddy_that_dies_costs_no_token_of_the_other(when: str) -> None:
    async with pair_of_engines(str(ensure_tiny_model()), declared=3.0, **SIZES) as engines:
        pair = Two(engines)
        want = await pair.answers("whole")
        await pair.forget()
        if when == "paired":
            await pair.paired()
        streams = asyncio.create_task(asyncio.wait_for(pair.answers("dead"), 120))
        await running(pair, "dead")
        if when == "giving":
            await pair.pair()
            await pair.a.reaches(HalfState.GIVING, HalfState.PAIRED)
        (worker,) = pair.b.engine.processes.workers
        os.kill(worker, signal.SIGKILL)
        await pair.a.reaches(HalfState.OVER)
        await pair.a.resizer.settled()
        with pytest.raises(AssertionError, match="was lost: the engine died"):
            await streams
        assert not pair.a.given_up
        assert pair.a.resizer.report.held.remote == 0
        mine = [id for id in pair.streams.cursors if id.startswith("dead") and int(id.split()[1]) % 2 == 0]
        async with asyncio.timeout(60):
            while any(pair.streams.cursors[id].finish is None for id in mine):
                await asyncio.sleep(0.01)
        assert [tuple(pair.streams.cursors[id].tokens) for id in sorted(mine)] == want[0::2]
