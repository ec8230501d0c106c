"""The common part of engines that run each other's layers: one account of KV, and cycles in lockstep.

A member's step takes a cycle (`policies.cost.steps`): all members wait for the slowest. What they compute is known at
the beginning of each step, so a step under way keeps its end if another member begins a longer one.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from policies.cost.steps import HopCosts, WholeStep, cycle_s
from policies.model import Tokens
from simulator.world.batch import Batch


class LockstepMember(Protocol):
    """An engine as its group sees it. `whole_step` is its step under way as on a whole replica; None without one."""

    @property
    def batch(self) -> Batch: ...

    @property
    def whole_step(self) -> WholeStep | None: ...

    @property
    def still(self) -> float:
        """Tokens of KV that are used or promised, and do not grow."""
        ...

    def used(self, now: float) -> float:
        """Tokens of KV that are used or promised."""
        ...


M = TypeVar("M", bound=LockstepMember)


class Lockstep(Generic[M]):
    """A group of engines. With an `account` its tokens are for all members, else each has its own capacity."""

    def __init__(self, members: Sequence[M], overhead_s: float, hop: HopCosts) -> None:
        self.account: Tokens | None = None
        self._members = members
        self._overhead_s = overhead_s
        self._hop = hop
        self._seen: dict[M, tuple[object, ...]] = {}

    @property
    def batch_size(self) -> int:
        """The decoding requests of all members."""
        return sum(member.batch.size for member in self._members)

    def used(self, now: float) -> float:
        """Tokens of KV that the members use or have promised."""
        return sum(member.used(now) for member in self._members)

    def cycle_s(self) -> float:
        """Seconds of a cycle with the members' present steps."""
        steps = [member.whole_step for member in self._members if member.whole_step is not None]
        return cycle_s(steps, len(self._members), self._overhead_s, self._hop)

    def affected(self, member: M) -> list[M]:
        """The other members, if this one has changed since the last call by more than the growth of its requests."""
        step = member.whole_step
        state = (step and step.tokens, member.batch.size, member.still, self.account)
        if self._seen.get(member) == state:
            return []
        self._seen[member] = state
        return [other for other in self._members if other is not member]
