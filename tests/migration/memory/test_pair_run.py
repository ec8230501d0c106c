"""Both halves of a pair on engines that a test drives, in virtual time."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from migration.memory.pair_run import PairLook, PairProposal, PairShell
from migration.memory.pair_tables import HalfState
from migration.memory.run import EngineEnded, Resizer
from migration.protocol.errors import PeerLost, Refused
from policies.memory.ledger import MemoryOrder, OrderNumber
from policies.memory.plan import MemoryPlan, ModelMemory
from policies.model import Blocks, Bytes, ReplicaId
from tests.migration.memory.test_memory_run import FakePool
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time

LAYERS, BOUNDARY = 5, 3
MODEL = ModelMemory(Bytes(1000), Bytes(0), Bytes(0), Bytes(50), Blocks(4), LAYERS, Bytes(180))
START = 40


@dataclass
class FakeHalf:
    """Implements `EngineHalf`. A call takes 10 ms, a copy 100."""

    member: "Member"
    layers: int = LAYERS
    unable: str | None = None
    remote: int = 0
    copies: float = 0.0
    lost: str | None = None
    fails: str | None = None
    serves: bool = False
    is_linked: bool = False
    calls: list[str] = field(default_factory=list)

    @property
    def other(self) -> "FakeHalf":
        assert self.member.other is not None
        return self.member.other.half

    async def listen(self, epoch: int) -> str:
        await self._call("listen")
        self.serves, self.lost = True, None
        return f"{self.member.name} {epoch}"

    async def link(self, address: str, epoch: int) -> str | None:
        await self._call("link")
        self.is_linked = self._reaches()
        return None if self.is_linked else "nobody is there"

    async def copy(self, layer: int, back: bool) -> None:
        await self._call(f"copy {layer}")
        self.copies = now() + 0.1

    async def give(self, layer: int) -> str | None:
        await self._call(f"give {layer}")
        if not self._reaches():
            self.lost = "gone"
            return self.lost
        self.remote += 1
        self.member.check()
        return None

    async def take_back(self, layer: int) -> str | None:
        await self._call(f"take back {layer}")
        if not self._reaches():
            self.lost = "gone"
            return self.lost
        self.remote -= 1
        return None

    async def forget(self, layer: int, back: bool) -> None:
        await self._call(f"forget {layer}")

    async def load(self) -> str | None:
        await self._call("load")
        self.member.check(whole=True)
        return self.member.cannot_load

    async def look(self) -> PairLook:
        await self._call("look")
        if self.is_linked and not self._reaches():
            self.lost = self.lost or "gone"
        at = now()
        return PairLook(self.remote, is_copying=at < self.copies, lost=self.lost)

    async def abandon(self) -> None:
        await self._call("abandon")
        self.serves, self.is_linked = False, False

    async def forget_kv(self, within_s: float) -> str | None:
        await self._call("forget kv")
        self.member.pool.used = Blocks(0)
        return None

    async def be_whole(self) -> None:
        await self._call("be whole")
        self.remote = 0

    async def close(self) -> None:
        await self._call("close")
        assert not self.remote, "all layers are here"
        self.serves, self.is_linked = False, False

    def _reaches(self) -> bool:
        return not self.other.member.pool.dead and self.other.serves

    async def _call(self, what: str) -> None:
        self.calls.append(what)
        await asyncio.sleep(0.01)
        if what == self.fails:
            raise RuntimeError("unforeseen")
        if self.member.pool.dead:
            raise EngineEnded("it is dead")


class Member:
    """A replica with its requests, and the buddy that it is for the other one."""

    is_empty = True

    def __init__(self, name: str) -> None:
        self.name = ReplicaId(name)
        self.pool = FakePool(START, 200)
        self.pool.model = MODEL
        self.resizer = Resizer(self.name, self.pool, now, self)
        self.half = FakeHalf(self)
        self.other: Member | None = None
        self.pairing: PairShell | None = None
        self.is_away = self.hangs = self.stay = False
        self.given_up: list[str] = []
        self.cannot_load: str | None = None
        self.budget = MODEL.need(MemoryPlan(Blocks(START)))

    def close(self) -> None:
        raise AssertionError("a paired replica does not sleep")

    def open(self) -> None:
        """It has not closed."""

    def give_back(self, blocks: Blocks) -> None:
        if not self.stay:
            self.pool.used = Blocks(max(0, self.pool.used - blocks))

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)

    def check(self, whole: bool = False) -> None:
        """The replica holds no more than before, with the KV of a layer in two places."""
        remote = 0 if whole else self.half.remote
        copied = self.pool.pages * MODEL.block // LAYERS
        exchanging = self.half.lost is None
        assert MODEL.need(MemoryPlan(self.pool.pages, remote)) + exchanging * copied <= self.budget

    async def propose_pair(self, proposal: PairProposal) -> str:
        await self._answer()
        self.resizer.reserve()
        address = await self.half.listen(proposal.epoch)
        self.begin(proposal, proposal.address)
        return address

    async def pair_state(self, epoch: int) -> str | None:
        await self._answer()
        return None if self.pairing is None else self.pairing.state

    async def _answer(self) -> None:
        await asyncio.sleep(1e9 if self.hangs else 0.01)
        if self.is_away or self.pool.dead:
            raise PeerLost("it is away")

    def begin(self, proposal: PairProposal, theirs: str | None = None) -> None:
        assert self.other is not None
        self.pairing = PairShell(
            proposal, self.name, self.half, self.resizer, self.other, self.give_up, lambda: None, theirs
        )
        self.pairing.begin()

    @property
    def state(self) -> HalfState | None:
        return None if self.pairing is None else self.pairing.state


async def lead(a: Member, b: Member) -> None:
    a.resizer.reserve()
    address = await a.half.listen(1)
    a.begin(PairProposal(1, a.name, b.name, BOUNDARY, LAYERS, "model", address, 60.0))


def two() -> tuple[Member, Member]:
    a, b = Member("a"), Member("b")
    a.other, b.other = b, a
    return a, b


async def paired() -> tuple[Member, Member]:
    a, b = two()
    await lead(a, b)
    await asyncio.sleep(10)
    assert (a.state, b.state) == (HalfState.PAIRED, HalfState.PAIRED)
    return a, b


async def test_a_pair_forms_grows_and_is_undone() -> None:
    a, b = await paired()
    assert (a.half.remote, b.half.remote) == (LAYERS - BOUNDARY, BOUNDARY)
    assert [call for call in a.half.calls if call.startswith("give")] == ["give 4", "give 3"]
    assert [call for call in b.half.calls if call.startswith("give")] == ["give 0", "give 1", "give 2"]
    for member in (a, b):
        assert member.resizer.report.held == MemoryPlan(member.pool.size, member.half.remote)
        assert member.pool.size == START + member.half.remote * MODEL.layer // MODEL.block
    order = MemoryOrder(b.name, OrderNumber(1, 1), MemoryPlan(Blocks(30), BOUNDARY))
    assert b.resizer.obey(order, 1.0).ordered == order.plan
    assert b.pairing is not None
    b.pairing.undo("by hand")
    await asyncio.sleep(10)
    assert (a.state, b.state) == (HalfState.OVER, HalfState.OVER)
    assert a.pool.size == START - 1, "what is left over is less than a block"
    assert [call for call in a.half.calls if call.startswith("take")] == ["take back 3", "take back 4"]
    for member in (a, b):
        assert member.half.remote == 0
        assert member.resizer.report.held == MemoryPlan(member.pool.size)
        assert not member.given_up


async def test_orders_that_come_while_layers_are_on_their_way_are_answered_by_what_is_held() -> None:
    a, b = two()
    await lead(a, b)
    before = a.resizer.report.ordered
    for number, plan in enumerate((MemoryPlan(Blocks(10)), MemoryPlan(None)), start=1):
        report = a.resizer.obey(MemoryOrder(a.name, OrderNumber(1, number), plan, by_hand=True), 1.0)
        assert (report.at, report.ordered, report.held) == (OrderNumber(1, number), before, before)
        assert not report.by_hand
    with pytest.raises(Refused):
        a.resizer.reserve()
    await asyncio.sleep(10)
    assert a.state is HalfState.PAIRED
    report = a.resizer.obey(MemoryOrder(a.name, OrderNumber(1, 3), MemoryPlan(Blocks(10))), 1.0)
    assert report.ordered.remote == LAYERS - BOUNDARY, "that of a whole replica is late"


@pytest.mark.parametrize("after_s", [0.05, 0.2, 0.4, 0.7, 1.0, 10.0])
async def test_a_half_whose_buddy_dies_is_whole_again(after_s: float) -> None:
    a, b = two()
    await lead(a, b)
    await asyncio.sleep(after_s)
    b.pool.dead = True
    await asyncio.sleep(20)
    assert a.state is HalfState.OVER
    assert a.half.remote == 0
    assert a.pool.size in (START - 1, START)
    assert a.resizer.report.held == MemoryPlan(a.pool.size)
    assert not a.given_up


async def test_a_half_whose_buddy_hangs_is_whole_again() -> None:
    a, b = await paired()
    b.hangs = True
    await asyncio.sleep(1)
    b.half.serves = False
    await asyncio.sleep(20)
    assert (a.state, a.half.remote) == (HalfState.OVER, 0)


async def test_requests_that_cannot_leave_do_not_keep_a_half_from_being_whole_once_its_buddy_is_lost() -> None:
    a, b = await paired()
    a.stay, a.pool.used = True, a.pool.size
    assert a.pairing is not None
    a.pairing.undo("by hand")
    await asyncio.sleep(70)
    assert a.state is HalfState.SHRINKING
    b.pool.dead = True
    await asyncio.sleep(5)
    assert (a.state, a.half.remote, a.given_up) == (HalfState.OVER, 0, [])


async def test_a_half_whose_proposal_is_not_answered_ends_once_the_buddy_is_dead() -> None:
    a, b = two()
    b.hangs = True
    await lead(a, b)
    await asyncio.sleep(20)
    assert (a.state, a.given_up) == (HalfState.HOME, [])
    b.hangs, b.is_away = False, True
    await asyncio.sleep(20)
    assert a.state is HalfState.OVER


async def test_a_half_that_cannot_load_is_given_up() -> None:
    a, b = await paired()
    a.cannot_load = "the files are gone"
    assert a.pairing is not None
    a.pairing.undo("by hand")
    await asyncio.sleep(5)
    assert len(a.given_up) == 1
    assert "the files are gone" in a.given_up[0]
    a.pool.dead = True
    await asyncio.sleep(20)
    assert (b.state, b.half.remote) == (HalfState.OVER, 0)


async def test_a_pool_that_does_not_shrink_is_not_paired() -> None:
    a, b = two()
    a.pool.refuses = True
    await lead(a, b)
    await asyncio.sleep(10)
    assert (a.state, b.state) == (HalfState.OVER, HalfState.OVER)
    assert not [call for call in a.half.calls if call.startswith("give")]
    assert a.resizer.report.held == MemoryPlan(Blocks(START))


async def test_no_parameter_comes_back_before_the_pool_has_shrunk() -> None:
    a, _ = await paired()
    a.pool.refuses = True
    assert a.pairing is not None
    a.pairing.undo("by hand")
    await asyncio.sleep(10)
    assert (a.state, "load" in a.half.calls) == (HalfState.SHRINKING, False)
    a.pool.refuses = False
    await asyncio.sleep(10)
    assert a.state is HalfState.OVER
    assert not a.given_up


@pytest.mark.parametrize("call", ["link", "copy 4", "give 3", "look", "load", "take back 3", "close"])
async def test_a_half_is_given_up_if_a_call_to_its_engine_fails(call: str) -> None:
    a, b = two()
    a.half.fails = call
    await lead(a, b)
    await asyncio.sleep(10)
    assert a.pairing is not None
    a.pairing.undo("by hand")
    await asyncio.sleep(5)
    assert a.state is HalfState.OVER
    assert len(a.given_up) == 1
    assert "unforeseen" in a.given_up[0]
    a.pool.dead = True
    await asyncio.sleep(20)
    assert (b.state, b.half.remote, b.given_up) == (HalfState.OVER, 0, [])


@pytest.mark.parametrize("seed", range(30))
async def test_random_undoing_silence_and_deaths_leave_whole_replicas_that_live(seed: int) -> None:
    draw = random.Random(seed)
    a, b = two()
    await lead(a, b)
    for _ in range(draw.randrange(4)):
        await asyncio.sleep(draw.uniform(0.0, 1.5))
        member = draw.choice((a, b))
        match draw.choice(("undo", "away", "die")):
            case "undo" if member.pairing is not None:
                member.pairing.undo("by chance")
            case "away":
                member.is_away = not member.is_away
            case "die":
                member.pool.dead = True
    a.is_away = b.is_away = False
    await asyncio.sleep(30)
    for member in (a, b):
        if not member.pool.dead:
            assert member.state in (None, HalfState.PAIRED, HalfState.OVER)
            assert (member.half.remote > 0) == (member.state is HalfState.PAIRED)
            assert not member.given_up
